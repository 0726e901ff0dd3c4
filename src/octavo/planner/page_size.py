"""What a page size costs in memory: all bytes that go with a token, and the slots that lengths leave empty.

    data       keys and values; scales: of codes, in the page; padding: what makes a page whole lines of memory
    table      an entry of a page table for each page
    index      Python objects of the pool and of the prefix index, counted here and now on pages of real tokens
    empty      of the slots that sequences hold over their lives, those without a token

Lengths are log-normal, with the means that are published, in a fixed number of quantiles: no draw decides a figure.
"""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from statistics import NormalDist
from typing import Any

from rich.table import Table

from octavo.cache.manager import Admission, CacheManager
from octavo.config import EngineConfig, ModelConfig
from octavo.kv_format import SCALE_BYTES
from octavo.planner.memory import Demand

SIZES = (4, 8, 16, 32, 64, 128, 256)
DTYPES = ("bf16", "int8", "fp8_e4m3", "int4")
TABLE_ENTRY_BYTES = array("i").itemsize
SIGMA = 0.9
NUM_QUANTILES = 64
COUNTED_TOKENS = 16_384
"""Tokens of the pages whose objects are counted."""

MEANS = {"sharegpt": (161, 338), "alpaca": (19, 58), "azure-chat": (1155, 211)}
"""Tokens of prompts and answers: Kwon and others, 2023, figure 11; Azure's trace of 2023, conversations."""


@dataclass(frozen=True, slots=True)
class PageCost:
    """Bytes a token where pages are full; by lengths, the share of slots that is empty, and all bytes a token."""

    dtype: str
    block_size: int
    data: float
    scales: float
    padding: float
    table: float
    index: float
    empty: dict[str, float]
    bytes: dict[str, float]

    @property
    def full_bytes(self) -> float:
        return self.data + self.scales + self.padding + self.table + self.index


def usual_lengths() -> dict[str, list[Demand]]:
    """Demands by name: quantiles of prompts, each with a quantile of answers that has nothing to do with it."""
    stride = 27  # coprime to NUM_QUANTILES
    return {
        name: [
            Demand(_quantile(prompt, i), _quantile(answer, i * stride % NUM_QUANTILES)) for i in range(NUM_QUANTILES)
        ]
        for name, (prompt, answer) in MEANS.items()
    }


def _quantile(mean: float, index: int) -> int:
    mu = math.log(mean) - SIGMA**2 / 2
    return max(round(math.exp(mu + SIGMA * NormalDist().inv_cdf((index + 0.5) / NUM_QUANTILES))), 1)


def held(demands: Sequence[Demand], block_size: int) -> tuple[int, ...]:
    """Tokens, and slots of the pages that hold them, added up over the steps of all lives."""
    longest = max(sum(demand[:2]) for demand in demands)
    slots = [0, *accumulate(-(-length // block_size) * block_size for length in range(longest))]
    tokens = [0, *accumulate(range(longest))]
    lives = [(demand.prompt_tokens, sum(demand[:2])) for demand in demands]
    return tuple(sum(of[end] - of[begin] for begin, end in lives) for of in (tokens, slots))


@cache
def index_bytes(block_size: int) -> float:
    """Bytes of Python's objects for each token of a pool whose pages are all cached."""
    chance, num_pages = random.Random(1), COUNTED_TOKENS // block_size
    in_a_sequence = max(512 // block_size, 1)
    tracing = tracemalloc.is_tracing()
    gc.collect()
    if not tracing:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    manager = CacheManager(num_pages, block_size)
    for _ in range(num_pages // in_a_sequence):
        tokens = array("i", [chance.randrange(1000, 100_000) for _ in range(in_a_sequence * block_size)])
        admission = manager.admit(tokens)
        assert isinstance(admission, Admission)
        manager.commit(admission.table, tokens, len(tokens))
        manager.release(admission.table)
    del tokens, admission
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    if not tracing:
        tracemalloc.stop()
    return taken / (num_pages * block_size)


def page_costs(
    model: ModelConfig,
    config: EngineConfig,
    lengths: dict[str, list[Demand]],
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = DTYPES,
) -> list[PageCost]:
    """By format, then by size. Raises ConfigError for heads that a format cannot hold."""
    use = {(name, size): held(demands, size) for name, demands in lengths.items() for size in sizes}
    costs = []
    for dtype in dtypes:
        for size in sizes:
            f = replace(config, kv_cache_dtype=dtype, block_size=size).kv_format(model)
            scaled = sum(map(f.is_scaled, range(f.num_layers)))
            scales, padding = 2.0 * SCALE_BYTES * f.num_kv_heads * scaled, (f.page_bytes - f.used_bytes) / size
            cost = PageCost(
                dtype, size, f.used_bytes / size - scales, scales, padding, TABLE_ENTRY_BYTES / size, index_bytes(size),
                {name: 1 - tokens / slots for name in lengths for tokens, slots in [use[name, size]]}, {},
            )  # fmt: skip
            taken = {name: cost.full_bytes / (1 - empty) for name, empty in cost.empty.items()}
            costs.append(replace(cost, bytes=taken))
    return costs


def report(costs: Sequence[PageCost], measured: dict[str, dict[int, Any]]) -> Iterator[str | Table]:
    """Tables for a terminal, with measured times of steps where there are any."""
    for dtype in dict.fromkeys(cost.dtype for cost in costs):
        own = [cost for cost in costs if cost.dtype == dtype]
        least = {name: min(cost.bytes[name] for cost in own) for name in own[0].bytes}
        table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
        times = ("decode", "prompt") if dtype in measured else ()
        for title in ("tokens", "data", "scales", "padding", "table", "index", *least, *times):
            table.add_column(title, justify="right")
        for cost in own:
            cells = [f"{cost.block_size}", f"{cost.data:,.0f}", f"{cost.scales:,.0f}"]
            cells += [f"{each:,.1f}" for each in (cost.padding, cost.table, cost.index)]
            for name, taken in cost.bytes.items():
                mark = "*" if taken == least[name] else " "
                cells.append(f"{taken:,.0f}{mark} {cost.empty[name]:>4.0%}")
            if times:
                of = measured[dtype][cost.block_size]
                cells += [f"{1e3 * of['decode_s']:.1f} ms", f"{1e3 * of['prompt_s']:.1f} ms"]
            table.add_row(*cells)
        yield f"{dtype}: bytes a token; by lengths: all bytes a token that is held, and slots left empty (* the least)"
        yield table
        yield ""
