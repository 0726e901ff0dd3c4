"""Owns the memory of every tier: its size, and the page operations on it. Never decides whose a page is."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from xxhash import xxh3_64_intdigest

from octavo.config import EngineConfig
from octavo.engine.page_file import NUM_READINGS, DamagedPage, PageFile
from octavo.errors import ConfigError
from octavo.kv_format import KVFormat
from octavo.ops.api import Bytes, Ops
from octavo.types import AwaitMove, CopyPage, Moved, MovePage, PageOp, Place, Tier

_log = logging.getLogger(__name__)

GIB = 1 << 30

MEMORY_PERCENT = 40
"""How much of the memory that is free the pool may take unless told. Untouched pages cost nothing: the system maps
memory when it is first written."""


WARN_EVERY_S = 10.0


class KVStore:
    """The pages of all tiers. A thread copies from tier to tier, move after move, while the engine computes.

    A page gets a checksum where it leaves the pool, and is checked whenever it is read from below. A move that cannot
    be done is logged and told as not ok; it never raises.
    """

    def __init__(
        self, ops: Ops, format: KVFormat, num_pages: int, *, num_host_pages: int = 0, disk: PageFile | None = None
    ) -> None:
        self._ops = ops
        self.pool = ops.allocate_pages(format, num_pages)
        self.host: Bytes = np.empty((num_host_pages, format.page_bytes), np.uint8)  # mapped as it is written
        self.disk = disk
        self._checksums = array("Q", bytes(8 * num_host_pages))  # of host pages
        self._moves: SimpleQueue[MovePage | None] = SimpleQueue()
        self._changed = threading.Condition()  # guards the next two
        self._under_way: set[int] = set()
        self._ended: list[Moved] = []
        self._num_unsaid, self._warned_at = 0, -WARN_EVERY_S
        self._thread: threading.Thread | None = None
        if num_host_pages or disk is not None:
            self._thread = threading.Thread(target=self._work, name="octavo-pages", daemon=True)
            self._thread.start()

    def begin(self, page_ops: Iterable[PageOp]) -> None:
        """Carry out a plan's page operations, in order: a later one may read what an earlier one wrote.

        Moves are only begun; an AwaitMove waits for its own.
        """
        for op in page_ops:
            if isinstance(op, CopyPage):
                self._ops.copy_page(self.pool, op.src, op.dst)
            elif isinstance(op, MovePage):
                with self._changed:
                    self._under_way.add(op.number)
                self._moves.put(op)
            else:
                self._await(op)

    def _await(self, op: AwaitMove) -> None:
        with self._changed:
            self._changed.wait_for(lambda: op.number not in self._under_way)

    def ended(self, wait: bool) -> Sequence[Moved]:
        """The moves that ended since the last call, in that order; with `wait` at least one, if any is under way."""
        if self._thread is None:
            return ()
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._ended or not self._under_way)
            ended, self._ended = self._ended, []
        return ended

    def load_seconds(self) -> dict[Tier, float]:
        """Seconds that a page takes to come up into the pool from each tier below it: infinity if that fails.

        For the start, when nothing is stored: the first page and the first host slot are written.
        """
        seconds: dict[Tier, float] = {}
        first, slot = Place(Tier.DEVICE, 0), Place(Tier.HOST, 0)
        if len(self.host):
            self._copy(MovePage(0, first, slot))
            up = MovePage(0, slot, first)
            seconds[Tier.HOST] = statistics.median(self._copy(up).seconds for _ in range(NUM_READINGS))
        if self.disk is not None:
            try:
                seconds[Tier.DISK] = self.disk.load_seconds(self._memory(first).data)
            except OSError as error:
                _log.warning("pages cannot be read back from disk: %s", error)
                seconds[Tier.DISK] = float("inf")
        return seconds

    def close(self) -> None:
        """Let the moves that have begun end, and close the file."""
        if self._thread is not None:
            self._moves.put(None)
            self._thread.join()
            self._thread = None
        if self.disk is not None:
            self.disk.close()
            self.disk = None

    # ── on the copying thread ──

    def _work(self) -> None:
        while (move := self._moves.get()) is not None:
            moved = self._copy(move)
            with self._changed:
                self._under_way.discard(move.number)
                self._ended.append(moved)
                self._changed.notify_all()

    def _copy(self, move: MovePage) -> Moved:
        start, ok = time.perf_counter(), True
        try:
            self._try_to_copy(move)
        except Exception as error:
            ok = False
            self._warn(move, error)
        return Moved(move.number, ok, time.perf_counter() - start)

    def _try_to_copy(self, move: MovePage) -> None:
        """Raises OSError, a fault of a tier. Anything else is a fault of Octavo."""
        source, target = move.source, move.target
        if Tier.DISK not in (source.tier, target.tier):
            data, copy = self._memory(source), self._memory(target)
            checksum = xxh3_64_intdigest(data.data) if source.tier is Tier.DEVICE else self._checksums[source.page]
            np.copyto(copy, data)
            if source.tier is Tier.HOST:
                _check(copy, checksum)
            if target.tier is Tier.HOST:
                self._checksums[target.page] = checksum
            return
        if self.disk is None:
            raise ValueError("there is no disk tier")
        if target.tier is Tier.DISK:
            if move.label is None:
                raise ValueError("a page on disk needs a label")
            data = self._memory(source)
            if source.tier is Tier.HOST:
                _check(data, self._checksums[source.page])
            self.disk.write(target.page, move.label, data.data)
        else:
            copy = self._memory(target)
            self.disk.read(source.page, copy.data)
            if target.tier is Tier.HOST:
                self._checksums[target.page] = xxh3_64_intdigest(copy.data)

    def _memory(self, place: Place) -> Bytes:
        if place.tier is Tier.DISK:
            raise ValueError("disk pages move to and from memory")
        return self._ops.page(self.pool, place.page) if place.tier is Tier.DEVICE else self.host[place.page]

    def _warn(self, move: MovePage, error: Exception) -> None:
        """Log why a move failed, at most once in WARN_EVERY_S seconds: a full disk fails many."""
        now = time.monotonic()
        if now - self._warned_at < WARN_EVERY_S:
            self._num_unsaid += 1
            return
        before = f" ({self._num_unsaid} failures before this one were not logged)" if self._num_unsaid else ""
        self._num_unsaid, self._warned_at = 0, now
        places = [f"{place.tier.name.lower()} page {place.page}" for place in (move.source, move.target)]
        is_fault = not isinstance(error, OSError)
        _log.warning("%s could not be copied to %s: %s%s", *places, error, before, exc_info=error if is_fault else None)


def _check(page: Bytes, checksum: int) -> None:
    if xxh3_64_intdigest(page.data) != checksum:
        raise DamagedPage("its checksum does not match")


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
    wanted = config.max_model_len or context_length
    if wanted > context_length:
        raise ConfigError("max_model_len", f"{wanted} tokens are more than the model's context of {context_length}")
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


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: what the system has free, or less where a control group has a limit."""
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return max(0, min([int(meminfo["MemAvailable"].split()[0]) * 1024, *_cgroup_headrooms(root)]))


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Limit less use, in bytes, of this process's control group and those above it, version 1 or 2.

    File pages that the kernel drops before it denies memory (a model file just read, say) count as unused.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if (folder / limit).exists() and (value := (folder / limit).read_text().strip()) != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield int(value) - int((folder / usage).read_text()) + int(stat.get(cache, 0))
            if folder == top:
                break
