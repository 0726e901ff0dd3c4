"""How large the tiers in memory are: from what is asked for, what a page takes, and what this machine has free.

Plain integers, so that a plan and the engine size the same pool with the same sums. It never allocates.
"""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv_format import KVFormat

_log = logging.getLogger(__name__)

GIB = 1 << 30

MEMORY_PERCENT = 40
"""How much of the memory that is free the pool may take unless told. Untouched pages cost nothing: the system maps
memory when it is first written."""


def host_size(config: EngineConfig, format: KVFormat, free_bytes: int) -> int:
    """Pages of the host tier: what `swap_space` holds.

    Raises ConfigError where that is not one page, or more than `free_bytes`, which pool and weights leave.
    """
    budget = int(config.swap_space * GIB)
    num_pages = budget // format.page_bytes
    if budget and not num_pages:
        raise ConfigError("swap_space", f"one page takes {format.page_bytes:,} bytes and it gives {budget:,}")
    if num_pages and budget > free_bytes:
        raise ConfigError(
            "swap_space",
            f"{budget:,} bytes are more than the {max(0, free_bytes):,} that are free beside the weights and the pool: "
            "lower swap_space or kv_cache_memory_bytes",
        )
    return num_pages


def pool_size(config: EngineConfig, format: KVFormat, context_length: int, available_bytes: int) -> tuple[int, int]:
    """(num_pages, max_model_len): the pool's size and the longest sequence, prompt and answer, that it serves.

    `kv_cache_memory_bytes` decides if it is set; otherwise all the sequences at their longest, but at most
    MEMORY_PERCENT of `available_bytes`. A sequence of L tokens stores L - 1: the last one drawn is never read. A
    `max_model_len` that was asked for must fit; the model's context length is cut to what does, and a log line says so.

    Raises ConfigError naming both numbers and the option.
    """
    wanted = config.longest(context_length)
    needed = max(1, format.num_pages(wanted - 1))
    option, budget = "kv_cache_memory_bytes", config.kv_cache_memory_bytes
    if budget is None:
        budget = available_bytes * MEMORY_PERCENT // 100
        num_pages = min(config.max_num_seqs * needed, budget // format.page_bytes)
        source = f"{MEMORY_PERCENT} % of the {available_bytes:,} bytes of memory that are free"
    else:
        num_pages = budget // format.page_bytes
        source = "the pool"
    if num_pages < 1:
        raise ConfigError(option, f"one page takes {format.page_bytes:,} bytes and {source} gives {budget:,}")
    if num_pages >= needed:
        return num_pages, wanted
    longest = num_pages * format.block_size + 1
    if config.max_model_len is not None:
        raise ConfigError(
            "max_model_len",
            f"a sequence of {wanted} tokens takes {needed} pages and the pool has {num_pages} ({budget:,} bytes): "
            f"lower max_model_len to {longest} or raise kv_cache_memory_bytes to {needed * format.page_bytes:,}",
        )
    _log.warning(
        "the pool has %d pages: max_model_len is %d instead of the model's %d tokens, which take %d pages",
        *(num_pages, longest, context_length, needed),
    )
    return num_pages, longest
