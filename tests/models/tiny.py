"""Tiny random models, written as a safetensors folder and as GGUF, for the loaders to read back."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l", "Ġworl d", "Ġ Ġ", "í ķ")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokens() -> list[str]:
    """A byte-level vocabulary: the 256 bytes, then what the merges make, then the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [*(alphabet[byte] for byte in range(256)), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json: three query heads a KV head, and for qwen3 heads that are not hidden_size / num_heads."""
    shape: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": len(tokens()),
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    if model_type == "qwen3":
        shape["head_dim"] = 32
    if model_type == "mistral":
        shape["sliding_window"] = 5
    return shape | changes


def tensors(shape: dict[str, Any], *, seed: int = 0, bias: bool | None = None) -> dict[str, np.ndarray]:
    """Random float32 tensors under Hugging Face's names; bfloat16 holds their values exactly."""
    random = np.random.default_rng(seed)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_dim = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    found: dict[str, np.ndarray] = {}

    def add(name: str, *dims: int, around: float = 0.0) -> None:
        values = (around + random.standard_normal(dims) * (0.3 if len(dims) == 1 else 1.5 / dims[-1] ** 0.5)).astype(
            "<f4"
        )
        found[name] = (values.view("<u4") & np.uint32(0xFFFF0000)).view("<f4")

    add("model.embed_tokens.weight", shape["vocab_size"], hidden)
    add("model.norm.weight", hidden, around=1.0)
    if not shape["tie_word_embeddings"]:
        add("lm_head.weight", shape["vocab_size"], hidden)
    for i in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        add(layer + "input_layernorm.weight", hidden, around=1.0)
        add(layer + "post_attention_layernorm.weight", hidden, around=1.0)
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            add(layer + name + ".weight", rows, columns)
            if name.endswith(("q_proj", "k_proj", "v_proj")) and (
                shape["model_type"] == "qwen2" if bias is None else bias
            ):
                add(layer + name + ".bias", rows)
        if shape["model_type"] == "qwen3":
            add(layer + "self_attn.q_norm.weight", head_dim, around=1.0)
            add(layer + "self_attn.k_norm.weight", head_dim, around=1.0)
    return found


# ── as a folder ──────────────────────────────────────────────────────────────────────────────────────────────────


def encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_safetensors(path: Path, found: dict[str, np.ndarray], dtype: str = "F32") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in found.items():
        raw = encode(values, dtype)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json as Transformers writes a byte-level one, and tokenizer_config.json with a chat template."""
    vocabulary = {token: i for i, token in enumerate(tokens())}
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": vocabulary[token], "content": token, **added} for token in SPECIAL],
                "normalizer": None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
                "post_processor": None,
                "decoder": level,
                "model": {"type": "BPE", "vocab": vocabulary, "merges": list(MERGES)},
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )


def write_folder(
    folder: Path, shape: dict[str, Any], found: dict[str, np.ndarray], *, dtype: str = "F32", shards: int = 1
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    write_tokenizer(folder)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", found, dtype)
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    place = {name: names[i % shards] for i, name in enumerate(found)}
    for file in names:
        write_safetensors(folder / file, {name: found[name] for name in found if place[name] == file}, dtype)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


# ── as GGUF, the way llama.cpp's convert_hf_to_gguf.py does it ───────────────────────────────────────────────────

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(
    path: Path,
    shape: dict[str, Any],
    found: dict[str, np.ndarray],
    *,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_divisors: np.ndarray | None = None,
    keys: dict[str, Any] | None = None,
) -> Path:
    """`matrices` is the type of the tensors of two dimensions; `keys` are further metadata (texts, or None to omit)."""
    kind = shape["model_type"]
    arch = "llama" if kind == "mistral" else kind
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    if "head_dim" in shape:
        writer.add_key_length(shape["head_dim"])
        writer.add_value_length(shape["head_dim"])
    if "sliding_window" in shape:
        writer.add_sliding_window(shape["sliding_window"])
    vocabulary = tokens()
    text: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.chat_template": TEMPLATE,
    } | (keys or {})
    for key, value in text.items():
        if value is not None:
            writer.add_string(key, value)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(vocabulary.index("<|im_start|>"))
    writer.add_eos_token_id(vocabulary.index("<|im_end|>"))
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", rope_divisors.astype("<f4"))
    for name, values in found.items():
        if arch == "llama" and ".q_proj." in name:
            values = permute(values, heads)
        if arch == "llama" and ".k_proj." in name:
            values = permute(values, kv_heads)
        kind_of = matrices if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind_of), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
