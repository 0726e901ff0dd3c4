"""Engines small enough to test with: a random Llama of two layers, and a decoder that recites the alphabet.

Both have a real byte-level tokenizer and run on the reference backend, with the page audit after every step.
"""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from octavo.config import EngineConfig, ModelConfig
from octavo.engine.llm import LLM, assemble
from octavo.models import tokenizer as tokenizers
from octavo.models.llama import Decoder

END, OTHER_END = "<|im_end|>", "<|endoftext|>"
MERGES = ["t h", "th e", "Ġ the", "i n", "D E", "F G"]
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}a:"


def byte_tokenizer(add_bos=False):
    """All bytes, a few pieces of two and more, and two control tokens that end a text."""
    bytes_ = sorted(tokenizers._byte_level_alphabet(), key=tokenizers._byte_level_alphabet().__getitem__)
    tokens = [*bytes_, *(merge.replace(" ", "") for merge in MERGES), END, OTHER_END]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [1] * (256 + len(MERGES)) + [3, 3],
        "tokenizer.ggml.eos_token_id": tokens.index(END),
        "tokenizer.ggml.bos_token_id": tokens.index(OTHER_END),
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.chat_template": TEMPLATE,
    }
    return tokenizers.from_gguf(meta, Path("tiny"))


class Matrix:
    """A `Weight` in memory."""

    bits, group = 32, 0

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def float32(self, start, stop):
        return self.values[start:stop]


class TinyCheckpoint:
    """Random weights that are large enough for attention to matter and for logits to differ."""

    stored_bytes = 0

    def __init__(self, seed=0, add_bos=False, context_length=256):
        self._tokenizer = byte_tokenizer(add_bos)
        vocab = self._tokenizer.vocab_size
        self.config = ModelConfig("llama", 2, 32, 48, 4, 2, 8, vocab, context_length, 1e-5, 1e4, tie_embeddings=True)
        noise = np.random.default_rng(seed)
        shapes = {"embed": (vocab, 32), "norm": (32,)}
        for i in range(2):
            shapes |= {
                f"layers.{i}.{name}": shape
                for name, shape in {
                    "attention_norm": (32,), "ffn_norm": (32,), "q_proj": (32, 32), "k_proj": (16, 32),
                    "v_proj": (16, 32), "o_proj": (32, 32), "gate_proj": (48, 32), "up_proj": (48, 32),
                    "down_proj": (32, 48),
                }.items()
            }  # fmt: skip
        self._tensors = {
            name: np.float32(noise.standard_normal(shape) * 0.3 if len(shape) > 1 else noise.uniform(0.8, 1.2, shape))
            for name, shape in shapes.items()
        }

    def has(self, name):
        return name in self._tensors

    def weight(self, name):
        return Matrix(self._tensors[name])

    def vector(self, name):
        return self._tensors[name]

    def digest(self):
        return b"".join(sha256(values).digest() for values in self._tensors.values())

    def tokenizer(self):
        return self._tokenizer


class Alphabet:
    """A decoder whose every answer is the next token id, and END after "Z"."""

    def __init__(self, checkpoint, ops, max_model_len):
        self.vocab = checkpoint.config.vocab_size
        self.end = checkpoint.tokenizer().encode(END)[0]
        self.de = checkpoint.tokenizer().encode("DE")[0]

    def forward(self, step, pool):
        return step.token_ids.copy()

    def logits(self, x, rows):
        logits = np.zeros((len(rows), self.vocab), np.float32)
        for row, token in zip(logits, x[rows].tolist(), strict=True):
            follower = {ord("C"): self.de, self.de: ord("F"), ord("Z"): self.end}.get(token, (token + 1) % self.vocab)
            row[follower] = 30.0
        return logits


@pytest.fixture
def make_llm(monkeypatch):
    """Makes an LLM from (checkpoint=None, decoder=Decoder, **options); it is closed, and so audited, after the test."""
    made = []

    def make(checkpoint=None, decoder=Decoder, **options):
        monkeypatch.setattr("octavo.engine.llm.ARCHITECTURES", {"llama": decoder})
        options = {"kv_cache_memory_bytes": 1 << 20, **options}
        config = EngineConfig(backend="reference", **options)
        made.append(LLM.from_engine(assemble(checkpoint or TinyCheckpoint(), config, audit=True)))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def llm(make_llm):
    """The random model."""
    return make_llm()


@pytest.fixture
def alphabet(make_llm):
    """The one that recites: "C" is followed by one token "DE", then "F", "G", …, "Z" and the end."""
    return make_llm(decoder=Alphabet)
