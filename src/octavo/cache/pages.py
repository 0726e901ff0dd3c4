"""PagePool: reference counts, free pages, and unreferenced pages in eviction order.

Every page is in exactly one of three states, and every transition is O(1):

    free ──take──► referenced ──release, not findable──► free
                    ▲      └────release, findable──────► cached ──evict──► free
                    └──acquire───────────────────────────┘

Cached pages stand in two queues, the least recently released first. Those that are *kept* (a session may come back for
them) seem younger than they are: after t seconds as if after t · t / session_ttl, until t is session_ttl and they are
pages like any other. So their advantage fades and nowhere jumps, and a kept page never goes before another that was
released earlier: an ancestor, which is released no earlier and is kept if a descendant is, outlives it.

While somebody watches, it notes which pages changed. It knows page ids and counts, and never whose a page is or which
tokens lie in it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import NamedTuple


class Released(NamedTuple):
    """When a page became cached: the time, and a count that tells apart what has the same time."""

    at: float
    number: int


class PagePool:
    """The pages of one tier."""

    __slots__ = (
        *("_cached", "_free", "_held", "_kept", "_more", "_num_releases", "_num_used", "_session_ttl", "changed"),
        "num_pages",
    )

    def __init__(self, num_pages: int, session_ttl: float = 0.0) -> None:
        self.num_pages = num_pages
        self._session_ttl = session_ttl
        self._held: set[int] = set()
        self._more: dict[int, int] = {}  # holders besides the first, of pages that have any
        self._free = array("i")  # given back, the latest last
        self._num_used = 0  # those from here on were never taken
        self._cached: OrderedDict[int, Released] = OrderedDict()
        self._kept: OrderedDict[int, Released] = OrderedDict()
        self._num_releases = 0
        self.changed: set[int] | None = None  # None while nobody watches

    @property
    def num_free(self) -> int:
        return self.num_pages - self._num_used + len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Those of the cached pages that a session left and may come back for."""
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and cached ones at the price of moving or forgetting them."""
        return self.num_pages - len(self._held)

    @property
    def num_referenced(self) -> int:
        return len(self._held)

    def refs(self, page: int) -> int:
        """How many holders name the page."""
        return 1 + self._more.get(page, 0) if page in self._held else 0

    def take(self) -> int:
        """A free page, now referenced once. The caller has made sure that one is free."""
        if self._free:
            page = self._free.pop()
        else:
            page = self._num_used
            self._num_used += 1
        self._held.add(page)
        if self.changed is not None:
            self.changed.add(page)
        return page

    def take_free(self, count: int) -> array[int]:
        """So many free pages, or all that there are, each now referenced once; as `take` gives them one by one."""
        if count <= 0:
            return array("i")
        pages = self._free[-count:]
        del self._free[-count:]
        pages.reverse()
        if len(pages) < count:
            first, self._num_used = self._num_used, min(self._num_used + count - len(pages), self.num_pages)
            pages.extend(range(first, self._num_used))
        self._held.update(pages)
        if self.changed is not None:
            self.changed.update(pages)
        return pages

    def take_these(self, pages: Collection[int]) -> None:
        """Reference these pages of a pool that is as new, once each."""
        taken = set(pages)
        self._num_used = max(taken, default=-1) + 1
        self._free = array("i", (page for page in range(self._num_used - 1, -1, -1) if page not in taken))
        self._held = taken

    def acquire(self, page: int) -> None:
        """One more holder of a referenced or cached page."""
        if page in self._held:
            self._more[page] = self._more.get(page, 0) + 1
        else:
            del (self._kept if page in self._kept else self._cached)[page]
            self._held.add(page)
        if self.changed is not None:
            self.changed.add(page)

    def release(self, page: int, *, findable: bool, kept: bool = False, now: float = 0.0) -> None:
        """One holder less. The last one leaves the page cached if it is findable, else free."""
        if self.changed is not None:
            self.changed.add(page)
        if page in self._more:
            self._more[page] -= 1
            if not self._more[page]:
                del self._more[page]
            return
        self._held.remove(page)
        if findable:
            self._num_releases += 1
            (self._kept if kept else self._cached)[page] = Released(now, self._num_releases)
        else:
            self._free.append(page)

    def release_unfindable(self, pages: array[int]) -> None:
        """One holder less of each of these pages, none of which is findable."""
        if self._more:
            for page in pages:
                self.release(page, findable=False)
            return
        self._held.difference_update(pages)
        self._free.extend(pages)
        if self.changed is not None:
            self.changed.update(pages)

    def evict(self, page: int) -> None:
        """Free a cached page."""
        del (self._kept if page in self._kept else self._cached)[page]
        self._free.append(page)
        if self.changed is not None:
            self.changed.add(page)

    def coldest(self, now: float) -> int:
        """The cached page that goes next; there must be one. O(1)."""
        if not self._kept:
            return next(iter(self._cached))
        if not self._cached:
            return next(iter(self._kept))
        page, released = next(iter(self._cached.items()))
        kept, kept_released = next(iter(self._kept.items()))
        return kept if self._goes_first(kept_released, released, now) else page

    def coldest_first(self, now: float) -> Iterator[int]:
        """Cached pages in eviction order. The queues must not change meanwhile."""
        cached, kept = iter(self._cached.items()), iter(self._kept.items())
        one, other = next(cached, None), next(kept, None)
        while one is not None or other is not None:
            if one is None or (other is not None and self._goes_first(other[1], one[1], now)):
                assert other is not None
                yield other[0]
                other = next(kept, None)
            else:
                yield one[0]
                one = next(cached, None)

    def _goes_first(self, kept: Released, other: Released, now: float) -> bool:
        """Whether the first of the kept pages goes before the first of the others."""
        age = now - kept.at
        seems = age * age / self._session_ttl if age < self._session_ttl else age
        return (-seems, kept.number) < (other.at - now, other.number)

    def eviction_order(self, now: float = 0.0) -> list[int]:
        """Cached pages, the next to go first."""
        return list(self.coldest_first(now))

    def released(self, page: int) -> tuple[bool, Released]:
        """Of a cached page: whether it is kept, and since when it is cached."""
        kept = page in self._kept
        return kept, (self._kept if kept else self._cached)[page]

    def free_pages(self) -> list[int]:
        """Those that were taken before; the pages from `num_used` on are free too."""
        return list(self._free)

    @property
    def num_used(self) -> int:
        """Pages below this number have been taken at some time."""
        return self._num_used
