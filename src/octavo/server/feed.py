"""The live map of the cache: kept here from what the engine tells, and sent to whoever watches (docs/feed.md).

Owns the map, its subscribers and the history. The engine is asked to tell while somebody watches and a moment longer.
Every subscriber has a place in a short log of changes and no queue: when its turn comes it is sent all that changed
since, or, if it has fallen out of the log, a new snapshot. What one tenant is sent names no other.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType

from octavo.cache import watch
from octavo.cache.watch import SHARED, SHARED_IDLE, STATE, STATE_BITS, Holder
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import EngineDead
from octavo.server.keys import Caller, shown
from octavo.server.protocol import APIError, encode
from octavo.server.recent import Percentiles, Recent
from octavo.types import Tier

if TYPE_CHECKING:
    from octavo.cache.manager import TierPages
    from octavo.engine.process import EngineStats
    from octavo.engine.watching import Mapped

STATES = list(watch.STATES[:SHARED_IDLE])
MAX_HZ, MIN_HZ = 10.0, 0.2
MAX_STREAMS = 64
LOG = 64
"""Changes kept for subscribers that are behind."""
LINGER_S = 5.0
"""How long the engine goes on telling when nobody watches any more: a client that asks now and then costs little so."""
KEEP_ALIVE_S = 10.0
SAMPLES = 600
START_S = 10.0
"""How long a snapshot may be waited for."""

# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────────────────

Runs = list[tuple[int, int, int, int]]


class MapRuns(Struct):
    """Pages of a tier: runs of (first page, how many, number of the state, holder)."""

    name: str
    runs: Runs
    num_pages: int | UnsetType = UNSET


class MapHolder(Struct):
    """Whose pages are: a session's, a request's, of a tenant's that nobody uses, or of several sessions'."""

    id: int
    kind: str
    tenant: str
    name: str
    running: int
    idle_s: float
    pinned_s: float
    num_requests: int
    queried_tokens: int
    hit_tokens: int


class MapTier(Struct):
    """A tier's pages: as the audit counts them, and by state. `idle_shared` of those shared nobody uses now."""

    total: int
    referenced: int
    cached: int
    free: int
    pinned: int
    states: dict[str, int]
    idle_shared: int


class MapTotals(Struct):
    """Counts since the start: of pages, moves, preemptions, tokens."""

    evicted: int
    dropped: int
    copied: int
    merged: int
    swapped_out: int
    swapped_in: int
    saved: int
    moves_failed: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    computed_tokens: int
    queried_tokens: int
    hit_tokens: int


class MapLatency(Struct):
    """Of the last ten seconds, within 5 %."""

    p50: float
    p99: float
    n: int


class MapStats(Struct):
    """Figures that go with every change."""

    tiers: dict[str, MapTier]
    running: int
    waiting: int
    spared_pages: int
    totals: MapTotals
    saved_by_sharing_pages: int
    ttft_s: MapLatency | None
    itl_s: MapLatency | None


class MapRequest(Struct):
    """A request that has not ended."""

    id: str
    tenant: str
    session: str | None
    phase: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_tokens: int
    pages: int
    age_s: float
    preemptions: int


class MapSample(Struct):
    """One second of the history: pages by state on each tier, what happened in it, latencies (medians) up to it."""

    time: float
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    evicted: int
    swapped_out: int
    swapped_in: int
    preemptions: int
    ttft_s: float | None
    itl_s: float | None
    running: int
    waiting: int


class MapSnapshot(Struct, kw_only=True):
    """Everything at one moment."""

    version: int = 1
    seq: int
    time: float
    model: str
    kv_layout: str
    page_tokens: int
    page_bytes: int
    show_text: bool
    admin: bool
    states: list[str]
    tiers: list[MapRuns]
    holders: list[MapHolder]
    stats: MapStats
    requests: list[MapRequest]
    num_requests: int
    history: list[MapSample]


class MapDelta(Struct, kw_only=True):
    """What changed since the last one."""

    seq: int
    time: float
    tiers: list[MapRuns]
    holders: list[MapHolder]
    gone: list[int]
    stats: MapStats
    requests: list[MapRequest] | UnsetType = UNSET
    num_requests: int


# ── the map ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Change:
    """One message of the engine. `told` are holders that are new or changed, `born` those of them that are new."""

    runs: list[array[int]]
    told: list[int]
    born: set[int]
    gone: list[Holder]
    requests: bool


class Feed:
    """The map, its history and who is sent them. `start` before anybody asks; `end` ends every stream."""

    def __init__(
        self, llm: AsyncLLM, model: str, first_token_s: Recent, token_s: Recent, *, show_text: bool = False
    ) -> None:
        self._llm, self._model, self._show_text = llm, model, show_text
        self._first_token_s, self._token_s = first_token_s, token_s
        self._history: deque[MapSample] = deque(maxlen=SAMPLES)
        self._sampling: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._num_watchers = self.num_streams = 0
        self._lingering: asyncio.TimerHandle | None = None
        self._cells: list[array[int]] = []
        self._holders: dict[int, Holder] = {}
        self._latest: Mapped | None = None
        self._log: deque[_Change] = deque(maxlen=LOG)
        self._at = 0  # changes so far; the log has the last of them
        self._begun_at = 0  # whoever is not beyond this one needs a snapshot
        self._news = asyncio.Event()  # replaced at each change
        self._bodies: dict[tuple[str | None, int], bytes] = {}  # of the latest change, by view and place
        self._last_stats: MapStats | None = None
        llm.on_map = self._take

    def start(self) -> None:
        """Begin the history."""
        self._sampling = asyncio.create_task(self._sample())

    def end(self) -> None:
        """End the streams and the history."""
        self._ending.set()
        if self._sampling is not None:
            self._sampling.cancel()
        self._wake()

    # ── what is asked ──

    async def snapshot(self, caller: Caller) -> bytes:
        """The whole map as JSON. Raises EngineDead if there is none to be had."""
        self._enter()
        try:
            await self._ready(START_S)
            return self._snapshot(caller)
        finally:
            self._leave()

    def open(self, caller: Caller, hz: float) -> AsyncIterator[bytes]:
        """A stream of events, at most `hz` a second. Raises APIError(429) if there are too many."""
        if self.num_streams >= MAX_STREAMS:
            message = f"{MAX_STREAMS} clients watch already: close one, or ask for a snapshot now and then"
            raise APIError(429, message, code="too_many_streams", headers={"Retry-After": "5"})
        self.num_streams += 1
        self._enter()
        return self._events(caller, hz)

    def close(self) -> None:
        """A stream that was opened is not read any more."""
        self.num_streams -= 1
        self._leave()

    async def _events(self, caller: Caller, hz: float) -> AsyncIterator[bytes]:
        at, clock = -1, asyncio.get_running_loop().time
        while not self._ending.is_set():
            if not self._complete or at == self._at:
                try:
                    await asyncio.wait_for(self._news.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield b": keep-alive\n\n"
                continue
            sent, due = self._at, clock() + 1 / hz
            if self._behind(at):
                yield b"event: snapshot\ndata: " + self._snapshot(caller) + b"\n\n"
            else:
                yield b"event: delta\ndata: " + self._delta(caller, at) + b"\n\n"
            at = sent
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), max(due - clock(), 0.0))

    # ── whether the engine tells ──

    def _enter(self) -> None:
        self._num_watchers += 1
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        elif self._num_watchers == 1:
            self._llm.watch(True)

    def _leave(self) -> None:
        self._num_watchers -= 1
        if not self._num_watchers:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._rest)

    def _rest(self) -> None:
        self._lingering = None
        self._llm.watch(False)
        self._reset()

    def _reset(self) -> None:
        self._latest = None
        self._holders.clear()
        self._log.clear()
        self._bodies.clear()
        self._cells = []
        self._begun_at = self._at

    @property
    def _complete(self) -> bool:
        return self._latest is not None and self._latest.complete and self._llm.healthy

    async def _ready(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._complete:
                    await self._news.wait()
        except TimeoutError:
            raise EngineDead("the engine has not said what its pages are") from None

    # ── what the engine tells ──

    def _take(self, news: Mapped) -> None:
        if not self._num_watchers and self._lingering is None:
            return  # from before it knew that nobody watches
        if news.first:
            self._reset()
            self._begun_at = self._at + 1
            totals = self._llm.stats().tiers.pages
            self._cells = [array("I", bytes(4 * totals[tier].total)) for tier in Tier]
        elif self._latest is None:
            return
        changed = self._latest is None or [*self._latest.requests] != [*news.requests]
        runs = []
        for cells, data in zip(self._cells, news.runs, strict=True):
            own = array("I")
            own.frombytes(data)
            for first, count, cell in zip(*[iter(own)] * 3, strict=True):
                if count == 1:
                    cells[first] = cell
                else:
                    cells[first : first + count] = array("I", [cell]) * count
            runs.append(own)
        told = [holder.id for holder in news.holders]
        born = set(told) - self._holders.keys()
        self._holders.update(zip(told, news.holders, strict=True))
        gone = [self._holders.pop(number) for number in news.gone]
        self._latest = news
        self._log.append(_Change(runs, told, born, gone, changed))
        self._changed()

    def _changed(self) -> None:
        self._at += 1
        self._bodies.clear()
        self._last_stats = None
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # ── what is sent ──

    def _behind(self, at: int) -> bool:
        """Whether a subscriber that knows the first `at` changes needs a snapshot."""
        return at < max(self._begun_at, self._at - len(self._log))

    def _snapshot(self, caller: Caller) -> bytes:
        view = None if caller.admin else caller.tenant
        body = self._bodies.get((view, -1))
        if body is None:
            assert self._latest is not None
            tiers = [
                MapRuns(name, list(self._shown(_whole(cells), view)), len(cells))
                for name, cells in zip(NAMES, self._cells, strict=True)
                if cells
            ]
            now = time.monotonic()
            requests = self._requests(view, now)
            snapshot = MapSnapshot(
                seq=self._latest.step,
                time=time.time(),
                model=self._model,
                kv_layout=self._llm.config.kv_layout,
                page_tokens=self._llm.limits.block_size,
                page_bytes=self._llm.stats().page_bytes,
                show_text=self._show_text,
                admin=caller.admin,
                states=STATES,
                tiers=tiers,
                holders=[self._holder(at, now) for at in self._holders.values() if _sees(view, at)],
                stats=self._stats(),
                requests=requests,
                num_requests=self._num_requests(view, requests),
                history=list(self._history),
            )
            body = self._bodies[view, -1] = encode(snapshot)
        return body

    def _delta(self, caller: Caller, at: int) -> bytes:
        """What changed after the first `at` changes."""
        view = None if caller.admin else caller.tenant
        body = self._bodies.get((view, at))
        if body is None:
            assert self._latest is not None
            changes = list(self._log)[at - self._at :]
            now, born = time.monotonic(), set().union(*(change.born for change in changes))
            told = dict.fromkeys(number for change in changes for number in change.told)
            tiers = []
            for tier, name in enumerate(NAMES):
                if runs := list(self._shown(self._since(changes, tier), view)):
                    tiers.append(MapRuns(name, runs))
            holders = [self._holders[number] for number in told if number in self._holders]
            gone = [holder for change in changes for holder in change.gone if holder.id not in born]
            requests = self._requests(view, now)
            delta = MapDelta(
                seq=self._latest.step,
                time=time.time(),
                tiers=tiers,
                holders=[self._holder(holder, now) for holder in holders if _sees(view, holder)],
                gone=[holder.id for holder in gone if _sees(view, holder)],
                stats=self._stats(),
                num_requests=self._num_requests(view, requests),
            )
            ended = any(self._llm.stream(info.request_id) is None for info in self._latest.requests)
            if ended or any(change.requests for change in changes):
                delta.requests = requests
            body = self._bodies[view, at] = encode(delta)
        return body

    def _since(self, changes: list[_Change], tier: int) -> Iterator[tuple[int, int, int]]:
        """Runs (first page, how many, cell) of the pages that changed, as they are now."""
        if len(changes) == 1:
            yield from zip(*[iter(changes[0].runs[tier])] * 3, strict=True)
            return
        pages: set[int] = set()
        for change in changes:
            for first, count, _ in zip(*[iter(change.runs[tier])] * 3, strict=True):
                pages.update(range(first, first + count))
        cells = self._cells[tier]
        for page in sorted(pages):
            yield page, 1, cells[page]

    def _shown(self, runs: Iterable[tuple[int, int, int]], view: str | None) -> Iterator[tuple[int, int, int, int]]:
        """Runs as they are sent, those that look the same to this viewer joined."""
        known: dict[int, tuple[int, int]] = {}
        start = end = -1
        last = (-1, -1)
        for first, count, cell in runs:
            look = known.get(cell)
            if look is None:
                state, number = cell & STATE, cell >> STATE_BITS
                seen = number and (view is None or _sees(view, self._holders[number]))
                state = SHARED if state == SHARED_IDLE else state
                look = known[cell] = (state, number if seen else 0)
            if first == end and look == last:
                end += count
                continue
            if end > start:
                yield (start, end - start, *last)
            start, end, last = first, first + count, look
        if end > start:
            yield (start, end - start, *last)

    def _holder(self, holder: Holder, now: float) -> MapHolder:
        session = holder.kind == "session"
        return MapHolder(
            holder.id,
            holder.kind,
            shown(holder.tenant),
            holder.name,
            holder.num_running,
            round(max(now - holder.last_use, 0.0), 3) if session and not holder.num_running else 0.0,
            round(max(holder.pinned_until - now, 0.0), 3),
            holder.num_requests,
            holder.queried_tokens,
            holder.hit_tokens,
        )

    def _requests(self, view: str | None, now: float) -> list[MapRequest]:
        shapes = []
        for info in self._latest.requests if self._latest is not None else ():
            stream = self._llm.stream(info.request_id)
            if stream is None or (view is not None and stream.request.tenant != view):
                continue
            shapes.append(
                MapRequest(
                    info.request_id,
                    shown(stream.request.tenant),
                    stream.request.session_id,
                    info.phase,
                    len(stream.request.prompt_token_ids),
                    info.num_cached or 0,
                    info.num_computed,
                    info.num_generated,
                    info.max_tokens,
                    info.num_pages,
                    round(now - stream.queued_at, 3),
                    info.num_preemptions,
                )
            )
        return shapes

    def _num_requests(self, view: str | None, listed: list[MapRequest]) -> int:
        """How many there are: those listed, if that is all."""
        assert self._latest is not None
        if self._latest.num_requests == len(self._latest.requests):
            return len(listed)
        return self._latest.num_requests if view is None else self._llm.num_open_of(view)

    def _stats(self) -> MapStats:
        if self._last_stats is None:
            assert self._latest is not None
            stats = self._llm.stats()
            self._last_stats = MapStats(
                {name: tier for name, tier in zip(NAMES, _told(self._latest), strict=True) if tier.total},
                stats.num_running,
                stats.num_waiting,
                stats.pages_spared,
                _totals(stats),
                self._latest.num_saved,
                _latency(self._first_token_s.percentiles()),
                _latency(self._token_s.percentiles()),
            )
        return self._last_stats

    # ── history ──

    async def _sample(self) -> None:
        """Take a sample a second; and let those who watch know when figures changed though no page did."""
        before = _totals(self._llm.stats())
        due = asyncio.get_running_loop().time()
        while True:
            due = max(due + 1, asyncio.get_running_loop().time())
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            stats = self._llm.stats()
            totals = _totals(stats)
            first, token = self._first_token_s.percentiles(), self._token_s.percentiles()
            tiers = _told(self._latest) if self._latest is not None and self._complete else _known(stats)
            pages = {name: tier.states for name, tier in zip(NAMES, tiers, strict=True) if tier.total}
            self._history.append(
                MapSample(
                    round(time.time(), 3),
                    pages.get("device", {}),
                    pages.get("host", {}),
                    pages.get("disk", {}),
                    totals.evicted - before.evicted,
                    totals.swapped_out - before.swapped_out,
                    totals.swapped_in - before.swapped_in,
                    totals.preemptions - before.preemptions,
                    None if first is None else first.p50,
                    None if token is None else token.p50,
                    stats.num_running,
                    stats.num_waiting,
                )
            )
            before = totals
            self._bodies.clear()  # so that no snapshot is older than this
            if self._num_watchers and self._complete:
                last, self._last_stats = self._last_stats, None
                if last != self._stats():
                    self._log.append(_Change([array("I") for _ in NAMES], [], set(), [], requests=False))
                    self._changed()


NAMES = [tier.name.lower() for tier in Tier]


def _whole(cells: array[int]) -> Iterator[tuple[int, int, int]]:
    first = 0
    for cell, group in groupby(cells):
        count = sum(1 for _ in group)
        yield first, count, cell
        first += count


def _sees(view: str | None, holder: Holder) -> bool:
    """Whether a tenant, or an administrator (None), may know of a holder."""
    return view is None or holder.tenant == view


def _known(stats: EngineStats) -> list[MapTier]:
    """The tiers, as far as they are known while nobody watches: shared pages are counted as active, and idle ones that
    several sessions share as idle.
    """
    tiers = []
    for tier, pages in stats.tiers.pages.items():
        pinned, kept = stats.tiers.num_pinned[tier], stats.tiers.num_kept[tier]
        counts = [pages.free, pages.referenced - pinned, 0, pinned, kept, pages.cached - kept, 0, 0]
        tiers.append(_tier(pages, pinned, counts))
    return tiers


def _told(news: Mapped) -> list[MapTier]:
    """The tiers as they were told."""
    return [_tier(*at) for at in zip(news.pages, news.num_pinned, news.counts, strict=True)]


def _tier(pages: TierPages, pinned: int, counts: list[int]) -> MapTier:
    states = {name: counts[number] for number, name in enumerate(STATES)}
    states["shared"] += counts[SHARED_IDLE]
    return MapTier(*pages, pinned, states, counts[SHARED_IDLE])


def _totals(stats: EngineStats) -> MapTotals:
    cache, steps, moves = stats.cache, stats.scheduler, stats.moves
    moved = moves.moved.items()
    return MapTotals(
        cache.pages_evicted,
        moves.pages_dropped,
        cache.pages_copied,
        cache.pages_merged,
        sum(count for (source, _), count in moved if source is Tier.DEVICE),
        sum(count for (_, target), count in moved if target is Tier.DEVICE),
        sum(count for (_, target), count in moved if target is Tier.DISK),
        moves.moves_failed,
        steps.num_preemptions,
        steps.prompt_tokens,
        steps.generation_tokens,
        steps.computed_tokens,
        cache.queried_tokens,
        cache.hit_tokens,
    )


def _latency(times: Percentiles | None) -> MapLatency | None:
    return None if times is None else MapLatency(*times)


def rate(text: str | None) -> float:
    """What `hz` says. Raises APIError(400)."""
    if text is None:
        return MAX_HZ
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,20})?", text) or not MIN_HZ <= float(text) <= MAX_HZ:
        message = f"hz: must be a number from {MIN_HZ:g} to {MAX_HZ:g}"
        raise APIError(400, message, param="hz", code="invalid_value")
    return float(text)
