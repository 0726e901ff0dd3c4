"""Shapes of models that are well known, so that a plan needs no download.

A shape is that of the config.json of the repository named beside it, on the Hugging Face hub; its number of parameters,
which the tests compare with the hub's, is a check on every figure. Settings that memory does not depend on are left at
Llama's. Plain values: nothing here reads a file.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.config import Architecture, ModelConfig


class Shape(NamedTuple):
    """What decides a model's memory, and where that is said. `weight_bytes` is known where the weights are at hand.

    `experts` gated networks lie in each layer; all of them are in memory, however few a token uses. `feed_forward` are
    the parameters of all layers' networks where they are not just that.
    """

    source: str
    model: ModelConfig
    experts: int = 1
    weight_bytes: int | None = None
    feed_forward: int | None = None

    @property
    def num_parameters(self) -> int:
        """Of a decoder of Llama's kind: projections, norms, embedding and, unless it is the same, the vocabulary's."""
        c = self.model
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention = c.hidden_size * (2 * q + 2 * kv) + c.qkv_bias * (q + 2 * kv) + c.qk_norm * 2 * c.head_dim
        feed_forward = self.feed_forward
        if feed_forward is None:
            router = self.experts * c.hidden_size if self.experts > 1 else 0
            feed_forward = c.num_layers * (self.experts * 3 * c.hidden_size * c.intermediate_size + router)
        layers = c.num_layers * (attention + 2 * c.hidden_size) + feed_forward
        return layers + (2 - c.tie_embeddings) * c.vocab_size * c.hidden_size + c.hidden_size


def _shape(
    repository: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: tuple[int, int, int],
    vocab: int,
    context: int,
    *,
    kind: Architecture = "llama",
    tied: bool = False,
    experts: int = 1,
) -> Shape:
    """`heads`: of queries, of keys and values, and their size."""
    config = ModelConfig(
        kind, layers, hidden, inner, *heads, vocab, context, 1e-5, 1e4,
        tie_embeddings=tied, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3",
    )  # fmt: skip
    return Shape(f"config.json of {repository}", config, experts)


MODELS = {
    "llama-2-7b": _shape("meta-llama/Llama-2-7b-hf", 32, 4096, 11008, (32, 32, 128), 32000, 4096),
    "llama-3.1-8b": _shape("meta-llama/Llama-3.1-8B", 32, 4096, 14336, (32, 8, 128), 128256, 131072),
    "llama-3.1-70b": _shape("meta-llama/Llama-3.1-70B", 80, 8192, 28672, (64, 8, 128), 128256, 131072),
    "llama-3.1-405b": _shape("meta-llama/Llama-3.1-405B", 126, 16384, 53248, (128, 8, 128), 128256, 131072),
    "llama-3.2-1b": _shape("meta-llama/Llama-3.2-1B", 16, 2048, 8192, (32, 8, 64), 128256, 131072, tied=True),
    "llama-3.2-3b": _shape("meta-llama/Llama-3.2-3B", 28, 3072, 8192, (24, 8, 128), 128256, 131072, tied=True),
    "mistral-7b": _shape("mistralai/Mistral-7B-v0.3", 32, 4096, 14336, (32, 8, 128), 32768, 32768, kind="mistral"),
    "mixtral-8x7b": _shape("mistralai/Mixtral-8x7B-v0.1", 32, 4096, 14336, (32, 8, 128), 32000, 32768, experts=8),
    **{
        f"qwen2.5-{size}": _shape(
            f"Qwen/Qwen2.5-{size.upper()}-Instruct", layers, hidden, inner, heads, vocab, 32768, kind="qwen2", tied=tied
        )
        for size, layers, hidden, inner, heads, vocab, tied in (
            ("0.5b", 24, 896, 4864, (14, 2, 64), 151936, True),
            ("1.5b", 28, 1536, 8960, (12, 2, 128), 151936, True),
            ("3b", 36, 2048, 11008, (16, 2, 128), 151936, True),
            ("7b", 28, 3584, 18944, (28, 4, 128), 152064, False),
            ("14b", 48, 5120, 13824, (40, 8, 128), 152064, False),
            ("32b", 64, 5120, 27648, (40, 8, 128), 152064, False),
            ("72b", 80, 8192, 29568, (64, 8, 128), 152064, False),
        )
    },
    **{
        f"qwen3-{size}": _shape(
            f"Qwen/Qwen3-{size.upper()}", layers, hidden, inner, (heads, 8, 128), 151936, 40960, kind="qwen3", tied=tied
        )
        for size, layers, hidden, inner, heads, tied in (
            ("0.6b", 28, 1024, 3072, 16, True),
            ("1.7b", 28, 2048, 6144, 16, True),
            ("4b", 36, 2560, 9728, 32, True),
            ("8b", 36, 4096, 12288, 32, False),
            ("14b", 40, 5120, 17408, 40, False),
            ("32b", 64, 5120, 25600, 64, False),
        )
    },
    "smollm2-135m": _shape("HuggingFaceTB/SmolLM2-135M", 30, 576, 1536, (9, 3, 64), 49152, 8192, tied=True),
    "smollm2-360m": _shape("HuggingFaceTB/SmolLM2-360M", 32, 960, 2560, (15, 5, 64), 49152, 8192, tied=True),
    "smollm2-1.7b": _shape("HuggingFaceTB/SmolLM2-1.7B", 24, 2048, 8192, (32, 32, 64), 49152, 8192, tied=True),
    "tinyllama-1.1b": _shape("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 22, 2048, 5632, (32, 4, 64), 32000, 2048),
}
