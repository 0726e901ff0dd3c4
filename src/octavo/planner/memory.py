"""What a deployment takes and how many sequences it has room for, paged and contiguous, before anything is loaded.

Plain integers on the one KV arithmetic of the project (kv_format.py) and the sums by which the engine sizes its pools
(engine/sizing.py), so that a plan for this machine is what the engine allocates, to the byte. What is not measured is
a stated formula:

    weights      parameters · bits / 8, or what the file at hand stores; divided among the devices
    activations  rows · (2 · hidden + 2 · (queries + keys and values) + 3 · inner) · item + sequences · vocabulary · 4
                 rows: max_num_batched_tokens; item: 2 bytes on a GPU, 4 here; all but the first divided as heads are
    page tables  4 bytes for each page that a sequence of max_model_len tokens names, for max_num_seqs sequences
    index        Python objects of the pool and of the prefix index, in the host's memory: INDEX_BYTES, measured
    waste        of a sequence's memory, the part that holds no token; means are over the steps of its life, one for
                 each token that it draws: a prompt of P and an answer of O tokens hold P … P + O - 1
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import EngineConfig, ModelConfig
from octavo.engine.sizing import host_size, pool_size
from octavo.errors import ConfigError, ModelError
from octavo.gpus import GPUS
from octavo.kv_format import KVFormat, whole_block_size
from octavo.planner.known import Shape

WEIGHT_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.5, "int4": 4.5}
"""Of a parameter; int8 and int4 with a scale of 16 bits for each 32 of them (GGUF's Q8_0 and Q4_0)."""
INDEX_BYTES = (840, 40)
"""For each page, and for each token in it: CPython 3.11, 20,000 cached pages of random tokens; the tests measure it."""
USUAL_LENGTHS = (150, 300, 1024, 4096)


class Device(NamedTuple):
    """Where a model is to run: its memory, how much of that an engine may use, and among how many it is divided."""

    name: str
    memory_bytes: int
    number: int = 1
    share: float = 1.0


def gpu(name: str, number: int = 1, share: float = 0.9) -> Device:
    """A GPU of the table. Raises ConfigError."""
    if name not in GPUS:
        raise ConfigError("gpu", f"there is no {name!r}, but {', '.join(GPUS)}; --memory takes any size")
    return Device(name, GPUS[name].memory_bytes, number, share)


class Demand(NamedTuple):
    """A sequence to be held. With an answer of one token, which is never stored, it is just a length.

    The first `shared_tokens` of the prompt are those of all others: paged, they lie in memory once.
    """

    prompt_tokens: int
    output_tokens: int = 1
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """How many sequences of some kind fit, both ways. Several kinds are equally frequent, and figures their means.

    tokens, pages, sequence_bytes: of one at its end, what is shared included. mean_tokens: over the steps of its life.
    at_once: that many fit to their ends. typically: that many fit while some are near their beginnings, if others take
    the place of those that end.
    """

    prompt_tokens: float
    output_tokens: float
    tokens: float
    mean_tokens: float
    pages: float
    sequence_bytes: float
    paged_at_once: int
    paged_typically: float
    paged_waste: float
    contiguous_at_once: int
    contiguous_waste: float

    @property
    def gain(self) -> float | None:
        """Sequences at once, paged over contiguous."""
        return int(self.paged_typically) / self.contiguous_at_once if self.contiguous_at_once else None


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment's memory, all devices together. Each of them has an equal part of every page and of all the rest."""

    device: str
    num_devices: int
    memory_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_dtype: str
    token_bytes: int
    block_size: int
    page_bytes: int
    num_pages: int
    pool_bytes: int
    pool_tokens: int
    num_host_pages: int
    page_table_bytes: int
    index_bytes: int
    max_model_len: int
    sequence_bytes: int
    reservation_tokens: int
    reservation_bytes: int
    num_reservations: int
    rooms: tuple[Room, ...]


def plan(
    shape: Shape,
    config: EngineConfig,
    demands: Sequence[Demand],
    where: Device | int,
    *,
    weight_dtype: str | None = None,
    kv_dtype: str = "",
) -> Plan:
    """The memory of a model on a device, or of this engine on a machine that has so many bytes free.

    `weight_dtype` None takes the bytes of the file, where there is one, else bf16. `kv_dtype` is the name to tell for
    the config's. Raises ConfigError where the engine would.
    """
    weights = _weight_bytes(shape, weight_dtype)
    if isinstance(where, Device):
        device, item_bytes = where, 2
    else:
        device, item_bytes = Device("this machine", where), 4
    number, model = device.number, _divided(shape.model, device.number)
    weights = -(-weights // number)
    activations = _activations(model, config, item_bytes)
    pages = config.for_model(model.context_length).kv_format(model)
    max_model_len, num_host_pages = config.max_model_len or model.context_length, 0
    if isinstance(where, int):
        num_pages, max_model_len = pool_size(config, pages, model.context_length, where - weights)
        num_host_pages = host_size(config, pages, where - weights - num_pages * pages.page_bytes)
    elif config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // number // pages.page_bytes
    else:
        num_pages = max(int(device.memory_bytes * device.share) - weights - activations, 0) // pages.page_bytes
    reservation = replace(pages, block_size=whole_block_size(max_model_len))
    demands = demands or [Demand(length) for length in [*filter(max_model_len.__gt__, USUAL_LENGTHS), max_model_len]]
    rooms = [room(pages, reservation, num_pages, (demand,)) for demand in demands]
    fixed, for_each_token = INDEX_BYTES
    return Plan(
        device=device.name,
        num_devices=number,
        memory_bytes=number * device.memory_bytes,
        weight_bytes=number * weights,
        activation_bytes=number * activations,
        kv_dtype=kv_dtype or pages.dtype,
        token_bytes=number * pages.token_bytes,
        block_size=pages.block_size,
        page_bytes=number * pages.page_bytes,
        num_pages=num_pages,
        pool_bytes=number * num_pages * pages.page_bytes,
        pool_tokens=num_pages * pages.block_size,
        num_host_pages=num_host_pages,
        page_table_bytes=4 * pages.num_pages(max_model_len) * config.max_num_seqs,
        index_bytes=num_pages * (fixed + for_each_token * pages.block_size),
        max_model_len=max_model_len,
        sequence_bytes=number * pages.num_pages(max_model_len) * pages.page_bytes,
        reservation_tokens=reservation.block_size,
        reservation_bytes=number * reservation.page_bytes,
        num_reservations=num_pages * pages.page_bytes // reservation.page_bytes,
        rooms=tuple(replace(found, sequence_bytes=number * found.sequence_bytes) for found in rooms),
    )


def room(format: KVFormat, reservation: KVFormat, num_pages: int, demands: Sequence[Demand]) -> Room:
    """How many sequences, each like one of `demands`, fit into so many pages, or into as much memory contiguously.

    `reservation` is a page that holds the longest sequence. Raises ConfigError for one that it does not hold.
    """
    size, count = format.block_size, len(demands)
    num_reservations = num_pages * format.page_bytes // reservation.page_bytes
    shared = min(demand.shared_tokens // size for demand in demands)
    lengths = [demand.prompt_tokens + demand.output_tokens - 1 for demand in demands]
    if (longest := max(lengths)) > reservation.block_size:
        raise ConfigError("lengths", f"{longest:,} tokens are more than max_model_len, {reservation.block_size:,}")
    own = sum(format.num_pages(length) - shared for length in lengths) / count
    life = [held for demand in demands for held in range(demand.prompt_tokens, sum(demand[:2]))]
    tokens, pages = sum(life), sum(map(format.num_pages, life))
    own_tokens, own_pages = tokens - shared * size * len(life), pages - shared * len(life)
    available = max(num_pages - shared, 0)
    return Room(
        prompt_tokens=sum(demand.prompt_tokens for demand in demands) / count,
        output_tokens=sum(demand.output_tokens for demand in demands) / count,
        tokens=sum(lengths) / count,
        mean_tokens=tokens / len(life),
        pages=own + shared,
        sequence_bytes=(own + shared) * format.page_bytes,
        paged_at_once=int(available / own) if own else available,
        paged_typically=available * len(life) / own_pages if own_pages else available,
        paged_waste=1 - own_tokens / (own_pages * size) if own_pages else 0.0,
        contiguous_at_once=num_reservations,
        contiguous_waste=1 - tokens / len(life) / reservation.block_size,
    )


def _weight_bytes(shape: Shape, dtype: str | None) -> int:
    if dtype is None and shape.weight_bytes is not None:
        return shape.weight_bytes
    if (dtype := dtype or "bf16") not in WEIGHT_BITS:
        raise ConfigError("weight_dtype", f"must be one of {', '.join(WEIGHT_BITS)}; got {dtype!r}")
    return math.ceil(shape.num_parameters * WEIGHT_BITS[dtype] / 8)


def _divided(model: ModelConfig, number: int) -> ModelConfig:
    """What one of `number` devices holds of a model: its share of the heads and of the inner columns.

    Where there are more devices than KV heads, each of them has a copy of one. Raises ConfigError.
    """
    kv_heads = model.num_kv_heads
    if model.num_heads % number or (kv_heads % number and number % kv_heads):
        heads = f"{model.num_heads} heads over {kv_heads} of keys and values"
        raise ConfigError("tensor_parallel_size", f"{number} devices cannot share {heads} equally")
    return replace(
        model,
        num_heads=model.num_heads // number,
        num_kv_heads=max(kv_heads // number, 1),
        intermediate_size=-(-model.intermediate_size // number),
        vocab_size=-(-model.vocab_size // number),
    )


def _activations(model: ModelConfig, config: EngineConfig, item_bytes: int) -> int:
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    row = 2 * model.hidden_size + heads + 3 * model.intermediate_size
    return config.max_num_batched_tokens * row * item_bytes + config.max_num_seqs * model.vocab_size * 4


# ── shapes from files ─────────────────────────────────────────────────────────────────────────────────────────────


def read_shape(path: Path) -> Shape:
    """The shape of a config.json, or of a folder with one; the sizes of its safetensors files count as the weights'.

    Raises ModelError for models whose keys and values are not kept for every layer and token.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(file, f"cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(file, "must hold a JSON object")
    weights = sum(_data_bytes(part) for part in path.glob("*.safetensors")) if path.is_dir() else 0
    return shape_of(file, raw)._replace(weight_bytes=weights or None)


def shape_of(path: Path, raw: dict[str, Any]) -> Shape:
    """The shape that a config.json describes; see `read_shape`."""
    for key in ("kv_lora_rank", "num_kv_shared_layers", "cla_share_factor"):
        if raw.get(key):
            raise ModelError(path, f"has {key} = {raw[key]!r}: these sums are for models that keep all keys and values")
    kinds = raw.get("layer_types") or ()
    if others := set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        raise ModelError(path, f"has layers of {', '.join(sorted(others))}: these sums are for layers of attention")

    def whole(*keys: str, default: int | None = None) -> int:
        value = next((raw[key] for key in keys if raw.get(key) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ModelError(path, f"has {keys[0]} = {value!r}, which is not a whole number from 1 to {2**31 - 1}")
        return value

    hidden, heads = whole("hidden_size"), whole("num_attention_heads")
    kind = raw.get("model_type")
    windowed = raw.get("sliding_window") is not None and raw.get("use_sliding_window", kind == "mistral") is True
    config = ModelConfig(
        architecture=kind if kind in ("mistral", "qwen2", "qwen3") else "llama",
        num_layers=whole("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=whole("moe_intermediate_size", "intermediate_size"),
        num_heads=heads,
        num_kv_heads=whole("num_key_value_heads", default=1 if raw.get("multi_query") is True else heads),
        head_dim=whole("head_dim", default=max(hidden // heads, 1)),
        vocab_size=whole("vocab_size"),
        context_length=whole("max_position_embeddings"),
        norm_eps=1e-5,
        rope_theta=1e4,
        sliding_window=whole("sliding_window") if windowed else None,
        tie_embeddings=raw.get("tie_word_embeddings") is True,
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
    )
    return Shape(str(path), config, whole("num_local_experts", "num_experts", default=1))


def _data_bytes(file: Path) -> int:
    """Of the tensors in a safetensors file: what follows its header."""
    with file.open("rb") as stream:
        return max(file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little"), 0)


def each_of(lengths: str, prompt: int | None, output: int | None, shared: int) -> list[Demand]:
    """The demands that a command line asks for, `lengths` with commas between them. Raises ConfigError."""
    try:
        demands = [Demand(int(length), 1, shared) for length in lengths.split(",") if length.strip()]
    except ValueError:
        raise ConfigError("lengths", f"must look like 150,4096, got {lengths!r}") from None
    if prompt is not None or output is not None:
        demands.append(Demand(1 if prompt is None else prompt, 1 if output is None else output, shared))
    for demand in demands:
        if min(demand[:2]) < 1:
            raise ConfigError("lengths", f"must be numbers of tokens above 0, got {min(demand[:2])}")
        if not 0 <= shared <= demand.prompt_tokens:
            raise ConfigError("shared_tokens", f"{shared:,} is not from 0 to the prompt's {demand.prompt_tokens:,}")
    return demands
