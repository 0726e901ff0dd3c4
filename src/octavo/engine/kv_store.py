"""Owns the memory of every tier, and the page operations on it. Never decides whose a page is."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
from xxhash import xxh3_64_intdigest

from octavo.engine.page_file import NUM_READINGS, DamagedPage, PageFile
from octavo.errors import ConfigError
from octavo.kv_format import KVFormat
from octavo.ops.api import Bytes, Ops
from octavo.types import AwaitMove, CopyPage, Moved, MovePage, PageOp, Place, Tier

_log = logging.getLogger(__name__)

WARN_EVERY_S = 10.0


@contextmanager
def _wanted(option: str, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise ConfigError(option, f"the system does not give {num_bytes:,} bytes: lower {option}") from None


class KVStore:
    """The pages of all tiers. A thread copies from tier to tier, move after move, while the engine computes.

    A page gets a checksum where it leaves the pool, and is checked whenever it is read from below. A move that cannot
    be done is logged and told as not ok; it never raises.

    Raises ConfigError where there is not so much memory.
    """

    def __init__(
        self, ops: Ops, format: KVFormat, num_pages: int, *, num_host_pages: int = 0, disk: PageFile | None = None
    ) -> None:
        self._ops = ops
        with _wanted("kv_cache_memory_bytes", num_pages * format.page_bytes):
            self.pool = ops.allocate_pages(format, num_pages)
        with _wanted("swap_space", num_host_pages * format.page_bytes):
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
