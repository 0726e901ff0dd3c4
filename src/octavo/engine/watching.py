"""Telling who watches: the messages, and when the engine's process sends them.

    parent ── Watch ──►  child        on, or off when the last one has gone
           ◄── Mapped ──              what changed, at most TELL_HZ times a second, between two steps
           ── LookAtPage, LookAtTree ──►
           ◄── Page, Branches ──

Nothing is looked at while nobody watches or asks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec

from octavo.cache import look, watch
from octavo.cache.look import PageInfo, Tree
from octavo.cache.manager import TierPages
from octavo.cache.watch import Holder
from octavo.engine.core import EngineCore
from octavo.types import Place, RequestInfo, Tier

TELL_HZ = 10
IDLE_S = 1.0
"""How often an engine that has nothing to do looks at what time alone changes, as the ends of pins."""
MAX_PAGES = 4096
"""Looked at for one message, so that no step waits for long; the rest comes before the next step."""
MAX_REQUESTS = 200
FOREST_S = 1.0
"""For so long it is not found out again what is shared."""


class Watch(msgspec.Struct, array_like=True, tag=True):
    """Tell what changes from now on, beginning with all there is; or tell nothing more."""

    on: bool


class Mapped(msgspec.Struct, array_like=True, tag=True):
    """What changed up to this step: octavo.cache.watch.News, its runs as C unsigned ints, and the requests there are.

    `pages` and `num_pinned` are the audit's counts of the tiers then; `requests` are some of `num_requests`.
    `first` says that every page is free but for what this and the next messages say. `time` is CLOCK_MONOTONIC.
    """

    step: int
    time: float
    first: bool
    complete: bool
    runs: list[bytes]
    counts: list[list[int]]
    holders: list[Holder]
    gone: list[int]
    num_saved: int
    pages: list[TierPages]
    num_pinned: list[int]
    requests: list[RequestInfo]
    num_requests: int


class LookAtPage(msgspec.Struct, array_like=True, tag=True):
    """Answered by Page of the same number, or Denied."""

    number: int
    tier: Tier
    page: int


class LookAtTree(msgspec.Struct, array_like=True, tag=True):
    """What is shared of a tenant's, or of everybody's (None). Answered by Branches of the same number, or Denied."""

    number: int
    tenant: str | None
    limit: int


class Page(msgspec.Struct, array_like=True, tag=True):
    """What is known of a page."""

    number: int
    info: PageInfo


class Branches(msgspec.Struct, array_like=True, tag=True):
    """What is shared."""

    number: int
    tree: Tree


class Observing:
    """The child's side."""

    def __init__(self, core: EngineCore, send: Callable[[msgspec.Struct], None]) -> None:
        self._core, self._send = core, send
        self._watch: watch.Watch | None = None
        self._due_at = 0.0
        self._first = self._behind = False
        self._forest: look.Forest | None = None  # of `_forest_at`, for a second
        self._forest_at = 0.0

    @property
    def due_at(self) -> float:
        """When `tell` has something to do though the engine has not."""
        if self._watch is None:
            return inf if self._forest is None else self._forest_at + FOREST_S
        return self._due_at if self._behind or self._watch.num_changed else self._due_at + IDLE_S

    def answer(self, command: LookAtPage | LookAtTree, now: float) -> Page | Branches:
        """What is asked. What is shared is found out once a second."""
        if isinstance(command, LookAtPage):
            return Page(command.number, self._core.look_at(Place(command.tier, command.page)))
        if self._forest is None:
            self._forest, self._forest_at = look.Forest(self._core.cache), now
        return Branches(command.number, self._forest.tree(command.tenant, command.limit))

    def turn(self, on: bool) -> None:
        """Begin to watch, from the beginning, or end."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if on:
            self._watch = watch.Watch(self._core.cache)
            self._watch.start()
            self._due_at, self._first = 0.0, True

    def tell(self, now: float) -> None:
        """Send what changed, if it is time."""
        if now >= self._forest_at + FOREST_S:
            self._forest = None
        if self._watch is None or now < self._due_at:
            return
        news, core = self._watch.news(MAX_PAGES), self._core
        self._behind = not news.complete
        self._send(
            Mapped(
                core.scheduler.stats.num_steps,
                now,
                self._first,
                news.complete,
                [runs.tobytes() for runs in news.runs],
                list(news.counts),
                news.holders,
                news.gone,
                news.num_saved,
                list(core.cache.tier_pages().values()),
                list(core.cache.sessions.num_pinned),
                core.scheduler.infos(MAX_REQUESTS),
                core.scheduler.num_requests,
            )
        )
        self._first = False
        self._due_at = now if self._behind else now + 1 / TELL_HZ
