"""The shape of a model from its config.json, whatever family names what how.

Owns the names that families give to the same thing, and what a file leaves to be understood. Models whose keys and
values are not kept for every layer and token are refused: no sum of the planner would be right for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.config import MAX_LAYERS, ModelConfig
from octavo.errors import ModelError
from octavo.planner.known import Shape

NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "intermediate_size": ("ffn_hidden_size", "ffn_dim", "n_inner"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
}
"""What most families say, and others' words for it."""
PARTS = ("text_config", "llm_config", "language_config")
"""Where a model that also sees or hears has its decoder."""
NOT_KEPT = (
    *("kv_lora_rank", "num_kv_shared_layers", "cla_share_factor", "cross_attention_layers"),
    *("attn_layer_period", "attn_layer_indices", "attn_type_list", "full_attn_idxs", "full_attention_interval"),
    *("hybrid_override_pattern", "hybrid_layer_ids", "layers_block_type", "block_types", "linear_attn_config"),
    *("linear_num_key_heads", "mamba_d_state", "mamba_d_ssm", "state_size"),
)
"""Settings of models with latent or linear attention, state spaces, or layers that share keys and values."""
PLAIN = {
    *("arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron"),
    *("opt", "persimmon", "phi", "starcoder2", "xglm"),
}
"""Families whose feed-forward networks have two matrices, no gate."""
TIED = {
    *("bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode"),
    *("gpt_neo", "mpt", "opt", "starcoder2", "xglm"),
}
"""Families that take the embedding for the output too, unless their file says otherwise."""


def read_shape(path: Path) -> Shape:
    """The shape of a config.json, or of a folder with one; the sizes of its safetensors files count as the weights'.

    Raises ModelError for models whose keys and values are not kept for every layer and token.
    """
    file = path / "config.json" if path.is_dir() else path
    weights = _weight_bytes(path) if path.is_dir() else 0
    return shape_of(file, read_object(file))._replace(weight_bytes=weights or None)


def read_object(file: Path) -> dict[str, Any]:
    """What a JSON file holds. Raises ModelError where that is no object."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(file, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(file, f"cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(file, "must hold a JSON object")
    return raw


def _weight_bytes(folder: Path) -> int:
    """Of the files that its index names, or of its one file: others beside them hold the same once more."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        whole = folder / "model.safetensors"
        return sum(map(_data_bytes, [whole] if whole.exists() else folder.glob("*.safetensors")))
    raw = read_object(index)
    try:
        parts = [folder / str(name) for name in set(raw["weight_map"].values())]
        there = all(part.is_file() for part in parts)
        return sum(map(_data_bytes, parts)) if there else int(raw["metadata"]["total_size"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(index, f"tells neither all files nor their size: {error!r}") from error


def shape_of(path: Path, raw: dict[str, Any]) -> Shape:
    """The shape that a config.json describes; see `read_shape`."""
    said, source = raw, str(path)
    if not any(key in raw for key in ("hidden_size", *NAMES["hidden_size"])):
        part = next((part for part in PARTS if isinstance(raw.get(part), dict)), None)
        if part is not None:
            said, source = raw[part], f"{path}, its {part}"
    for part in ("attn_config", "ffn_config"):
        said = said | (said[part] if isinstance(said.get(part), dict) else {})
    for key in NOT_KEPT:
        if said.get(key) and not (key == "cla_share_factor" and said.get("use_cla") is False):
            what = repr(said[key])[:60]
            raise ModelError(path, f"has {key} = {what}: these sums are for models that keep all keys and values")

    def listed(key: str) -> list[Any]:
        value = said.get(key) or []
        if not isinstance(value, list):
            raise ModelError(path, f"has {key} = {str(value)[:60]}, which is no list")
        return value

    if others := set(map(str, listed("layer_types"))) - {"full_attention", "sliding_attention"}:
        raise ModelError(path, f"has layers of {', '.join(sorted(others))}: these sums are for layers of attention")

    def whole(key: str, default: int | None = None, low: int = 1, high: int = 2**31 - 1) -> int:
        value = next((said[one] for one in (key, *NAMES.get(key, ())) if said.get(one) is not None), default)
        if value is None:
            raise ModelError(source, f"has no {key}")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            told = f"{value!r}"[:60]
            raise ModelError(path, f"has {key} = {told}, which is not a whole number from {low} to {high}")
        return value

    kind: Any = str(said.get("model_type", raw.get("model_type")))
    hidden, heads = whole("hidden_size"), whole("num_attention_heads")
    layers = whole("num_hidden_layers", high=MAX_LAYERS)
    inner = whole("intermediate_size", 4 * hidden if kind in PLAIN else None)
    experts, expert_inner = whole("num_experts", 1), whole("moe_intermediate_size", inner)
    one_head = said.get("multi_query") is True and said.get("new_decoder_architecture") is not True
    windowed = said.get("sliding_window") is not None and said.get("use_sliding_window", kind == "mistral") is True
    tied = said.get("tie_word_embeddings", raw.get("tie_word_embeddings", kind in TIED))
    config = ModelConfig(
        architecture=kind if kind in ("mistral", "qwen2", "qwen3") else "llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=expert_inner,
        num_heads=heads,
        num_kv_heads=1 if one_head else whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", max(hidden // heads, 1)),
        vocab_size=whole("vocab_size"),
        context_length=whole("max_position_embeddings", 2048 if kind in ("bloom", "falcon") else None),
        norm_eps=1e-5,
        rope_theta=1e4,
        sliding_window=whole("sliding_window") if windowed else None,
        tie_embeddings=tied is True,
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
    )
    # ── feed-forward networks: those of experts, and in layers without any, a larger one
    shared = whole("shared_expert_intermediate_size", whole("n_shared_experts", 0, 0) * expert_inner, 0)
    if kind == "llama4_text":
        shared, inner = expert_inner, whole("intermediate_size_mlp", inner)
    every = whole("decoder_sparse_step", whole("interleave_moe_layer_step", 1))
    first, dense = whole("first_k_dense_replace", 0, 0), listed("mlp_only_layers")
    sparse = [at for at in range(first, layers) if experts > 1 and at not in dense and (at + 1) % every == 0]
    matrices = hidden * (2 if kind in PLAIN else 3)
    feed_forward = len(sparse) * (matrices * (experts * expert_inner + shared) + experts * hidden)
    return Shape(source, config, experts, feed_forward=feed_forward + (layers - len(sparse)) * matrices * inner)


def _data_bytes(file: Path) -> int:
    """Of the tensors in a safetensors file: what follows its header."""
    with file.open("rb") as stream:
        return max(file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little"), 0)
