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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.config import EngineConfig, ModelConfig
from octavo.engine.sizing import GIB, host_size, pool_size
from octavo.errors import ConfigError
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
    if (name := name.lower()) not in GPUS:
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
    number, model = device.number, shape.model.divided(device.number)
    weights = -(-weights // number)
    activations = _activations(model, config, item_bytes)
    pages = config.for_model(model.context_length).kv_format(model)
    max_model_len = config.longest(model.context_length)
    if isinstance(where, int):
        num_pages, max_model_len = pool_size(config, pages, model.context_length, where - weights)
        num_host_pages = host_size(config, pages, where - weights - num_pages * pages.page_bytes)
    else:
        left = max(int(device.memory_bytes * device.share) - weights - activations, 0)
        num_pages = _pool_pages(config.kv_cache_memory_bytes, number, left, pages)
        num_host_pages = int(config.swap_space * GIB) // number // pages.page_bytes
    reservation = replace(pages, block_size=whole_block_size(max_model_len))
    longest = max_model_len
    if isinstance(where, int) and num_pages < pages.num_pages(longest):
        longest -= 1  # it was cut to what fits, and the last token drawn is never stored
    demands = demands or [Demand(length) for length in [*filter(longest.__gt__, USUAL_LENGTHS), longest]]
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
        sequence_bytes=number * pages.num_pages(max(max_model_len - 1, 1)) * pages.page_bytes,
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


def _pool_pages(budget: int | None, number: int, left: int, pages: KVFormat) -> int:
    """Of each device, where each has so many bytes left, for a pool of `budget` altogether or of all that is left."""
    if budget is None:
        return left // pages.page_bytes
    if budget // number < pages.page_bytes:
        least = f"one page takes {number * pages.page_bytes:,} bytes and the pool gives {budget:,}"
        raise ConfigError("kv_cache_memory_bytes", least)
    if budget // number > left:
        most = f"{budget:,} bytes are more than the {number * left:,} that weights and activations leave"
        raise ConfigError("kv_cache_memory_bytes", most)
    return budget // number // pages.page_bytes


def _weight_bytes(shape: Shape, dtype: str | None) -> int:
    if dtype is None and shape.weight_bytes is not None:
        return shape.weight_bytes
    if (dtype := dtype or "bf16") not in WEIGHT_BITS:
        raise ConfigError("weight_dtype", f"must be one of {', '.join(WEIGHT_BITS)}; got {dtype!r}")
    return math.ceil(shape.num_parameters * WEIGHT_BITS[dtype] / 8)


def _activations(model: ModelConfig, config: EngineConfig, item_bytes: int) -> int:
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    row = 2 * model.hidden_size + heads + 3 * model.intermediate_size
    return config.max_num_batched_tokens * row * item_bytes + config.max_num_seqs * model.vocab_size * 4


def each_of(lengths: str, prompt: int | None, output: int | None, shared: int) -> list[Demand]:
    """The demands that a command line asks for, `lengths` with commas between them. Raises ConfigError."""
    try:
        demands = [Demand(int(length), 1, shared) for length in lengths.split(",") if length.strip()]
    except ValueError:
        raise ConfigError("lengths", f"must look like 150,4096, got {lengths!r}") from None
    if prompt is not None or output is not None:
        demands.append(Demand(1 if prompt is None else prompt, 1 if output is None else output, shared))
    for name, number in (("prompt_tokens", prompt), ("output_tokens", output)):
        if number is not None and number < 1:
            raise ConfigError(name, f"must be a number of tokens above 0, got {number}")
    if shared and not demands:
        raise ConfigError("shared_tokens", "is a part of prompts: give lengths or prompt_tokens too")
    for demand in demands:
        if demand.prompt_tokens < 1:
            raise ConfigError("lengths", f"must be numbers of tokens above 0, got {demand.prompt_tokens}")
        if not 0 <= shared <= demand.prompt_tokens:
            raise ConfigError("shared_tokens", f"{shared:,} is not from 0 to the prompt's {demand.prompt_tokens:,}")
    return demands
