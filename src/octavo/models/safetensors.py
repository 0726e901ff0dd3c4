"""Reading a Hugging Face folder: config.json, *.safetensors, and the tokenizer's files beside them.

Our own reader of the header: numpy has no bfloat16, so the `safetensors` package could not hand such tensors over, and
the format is a JSON table before raw bytes (github.com/huggingface/safetensors, README). Every offset is checked
against the file's size, and an index may only name files of its own folder.
"""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.config import Architecture, ModelConfig, RopeScaling
from octavo.errors import ModelError
from octavo.models.tokenizer import Tokenizer, from_folder
from octavo.models.weights import BF16, F16, F32, Checkpoint, MappedFile, Stored, positive_number, whole_number

_FORMATS = {"F32": F32, "F16": F16, "BF16": BF16}
_MAX_HEADER = 100_000_000  # the limit of the reference implementation
_TOP = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "lm_head"}
_LAYER = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
    "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "o_proj",
    "mlp.gate_proj": "gate_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "down_proj",
}  # fmt: skip
_LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)\.(weight|bias)")
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # old exports stored what follows from the configuration


def _canonical(name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if not match or match[2] not in _LAYER:
        return _TOP.get(name, name)
    return f"layers.{match[1]}.{_LAYER[match[2]]}" + (".bias" if match[3] == "bias" else "")


def read_json(path: Path, what: bytes | None = None) -> dict[str, Any]:
    """The object in a JSON file (or in `what`, read from it). Raises ModelError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a name comes twice")
        return found

    try:
        value = json.loads(path.read_bytes() if what is None else what, object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(path, "must hold a JSON object")
    return value


def read_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of one .safetensors file by their names there. Raises ModelError."""
    file = MappedFile(path)
    size = len(file.bytes)
    length = int.from_bytes(file.buffer[:8], "little")
    base = 8 + length
    if size < 8 or length > _MAX_HEADER or base > size:
        raise ModelError(path, f"claims a header of {length} bytes, but the file has {size}")
    header = read_json(path, file.buffer[8:base])
    header.pop("__metadata__", None)
    spans: list[tuple[int, int, str]] = []
    tensors = {}
    for name, entry in header.items():
        try:
            kind, dims, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*dims, start, stop))
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole:
            raise ModelError(path, f"tensor {name!r} has no dtype, shape and data_offsets of whole numbers")
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise ModelError(
                path, f"tensor {name!r} has the type {kind!r}, which is not supported (F32, F16, BF16 are)"
            )
        if _COMPUTED.fullmatch(name):
            continue
        if not 1 <= len(dims) <= 2 or min(dims) < 1:
            raise ModelError(path, f"tensor {name!r} has the shape {dims}; one or two dimensions above 0 are needed")
        needed = math.prod(dims) * _FORMATS[kind].block_bytes
        if stop - start != needed:
            raise ModelError(path, f"tensor {name!r} has {stop - start} bytes but its shape {dims} needs {needed}")
        if base + stop > size:
            raise ModelError(path, f"tensor {name!r} ends at byte {base + stop} but the file has {size}")
        spans.append((start, stop, name))
        tensors[name] = Stored(file, name, tuple(dims), _FORMATS[kind], base + start)
    spans.sort()
    for (_, end, _), (start, _, name) in pairwise(spans):
        if start < end:
            raise ModelError(path, f"tensor {name!r} begins at offset {start}, inside the tensor before it")
    return tensors


def open_folder(path: Path) -> Checkpoint:
    """A checkpoint from a folder. Raises ModelError."""
    raw = read_json(path / "config.json")
    index = path / "model.safetensors.index.json"
    if index.exists():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(shard, str) for shard in table.values()):
            raise ModelError(index, "has no weight_map from tensors to files")
        stored: dict[str, Stored] = {}
        for shard in sorted(set(table.values())):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ModelError(index, f"names the file {shard!r}, which is not a .safetensors file of its folder")
            stored |= {name: tensor for name, tensor in read_tensors(path / shard).items() if table.get(name) == shard}
        for name, shard in table.items():
            if name not in stored and not _COMPUTED.fullmatch(name):
                raise ModelError(index, f"names the tensor {name!r}, which {shard!r} does not have")
    else:
        stored = read_tensors(path / "model.safetensors")
    tensors = {_canonical(name): tensor for name, tensor in stored.items()}
    config = read_config(path, raw, tensors)
    if config.tie_embeddings:
        tensors.pop("lm_head", None)  # some exports write the shared matrix twice
    return Checkpoint(path, config, tensors, lambda: _tokenizer(path, config))


def _tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    tokenizer = from_folder(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            path, f"its tokenizer has {tokenizer.vocab_size} tokens but its embedding only {config.vocab_size} rows"
        )
    return tokenizer


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1), "quantization_config": (None,), "num_local_experts": (None, 0),
    "no_rope_layers": (None,), "attention_multiplier": (None,), "logits_scaling": (None, 1),
}  # fmt: skip
"""Settings that would change the mathematics, with the values that do not. The first is what absence means."""


def read_config(path: Path, raw: dict[str, Any], tensors: dict[str, Stored]) -> ModelConfig:
    """The model's shape from config.json. Raises ModelError for a model that Octavo cannot run."""
    kinds: dict[Any, Architecture] = {kind: kind for kind in ("llama", "mistral", "qwen2", "qwen3")}
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        raise ModelError(path, f"has model_type {kind!r}, which is not supported ({', '.join(kinds)} are)")
    for key, values in _NEUTRAL.items():
        if (value := raw.get(key, values[0])) not in values:
            raise ModelError(path, f"has {key} = {value!r}, which is not supported")

    def whole(key: str, default: int | None = None) -> int:
        value = raw.get(key)
        return whole_number(path, key, default if value is None else value)

    hidden, heads = whole("hidden_size"), whole("num_attention_heads")
    embed = tensors.get("embed")
    if embed is None:
        raise ModelError(path, "has no tensor 'model.embed_tokens.weight'")
    theta, scaling = _rope(path, raw)
    return ModelConfig(
        architecture=kinds[kind],
        num_layers=whole("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", max(hidden // heads, 1)),
        vocab_size=embed.num_rows,
        context_length=whole("max_position_embeddings"),
        norm_eps=positive_number(path, "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=_window(path, raw),
        tie_embeddings=raw.get("tie_word_embeddings", False) is True,
        qkv_bias="layers.0.q_proj.bias" in tensors,
        qk_norm="layers.0.q_norm" in tensors,
    )


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Transformers 5 writes `rope_parameters`; earlier ones `rope_theta` and, unless it is plain, `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(path, f"has rope_scaling = {rope!r}, which is not an object")
    theta = positive_number(path, "rope_theta", rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(path, f"has the rope_type {kind!r}, which is not supported (default and llama3 are)")
    low, high, factor = (
        positive_number(path, key, rope.get(key)) for key in ("low_freq_factor", "high_freq_factor", "factor")
    )
    if low >= high:
        raise ModelError(path, f"has low_freq_factor {low:g}, which is not below high_freq_factor {high:g}")
    original = whole_number(path, "original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    return theta, RopeScaling(factor, low, high, original)


def _window(path: Path, raw: dict[str, Any]) -> int | None:
    """The sliding window of all layers, or None. Layers that differ in this are refused."""
    window = raw.get("sliding_window")
    if window is None or raw.get("use_sliding_window", raw["model_type"] == "mistral") is False:
        return None
    window = whole_number(path, "sliding_window", window)
    layers = raw.get("layer_types")
    if layers is None and "max_window_layers" in raw:  # the first so many layers see everything
        full = raw["max_window_layers"]
        num_layers = raw.get("num_hidden_layers")
        layers = ["sliding_attention"] if full == 0 else ["full_attention"] if full == num_layers else ["mixed"]
    if layers is None or set(map(str, layers)) == {"sliding_attention"}:
        return window
    if set(map(str, layers)) == {"full_attention"}:
        return None
    raise ModelError(path, "has a sliding window in some layers only, which is not supported")
