"""PagePool: reference counts, free pages, and unreferenced pages in eviction order.

Every page is in exactly one of three states, and every transition is O(1):

    free ──take──► referenced ──release, not findable──► free
                    ▲      └────release, findable──────► cached ──evict──► free
                    └──acquire───────────────────────────┘

It knows page ids and counts. It never knows whose a page is or which tokens lie in it.
"""

from __future__ import annotations

from collections import OrderedDict


class PagePool:
    """The pages of one tier."""

    __slots__ = ("_cached", "_free", "_refs", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # first = least recently used

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and cached ones at the price of forgetting them."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_pages - self.num_available

    def refs(self, page: int) -> int:
        """How many holders name the page."""
        return self._refs[page]

    def take(self) -> int:
        """A free page, now referenced once. The caller has made sure that one is free."""
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """One more holder of a referenced or cached page."""
        if self._refs[page] == 0:
            del self._cached[page]
        self._refs[page] += 1

    def release(self, page: int, *, findable: bool) -> None:
        """One holder less. The last one leaves the page cached if it is findable, else free."""
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if findable:
                self._cached[page] = None
            else:
                self._free.append(page)

    def evict(self) -> int:
        """Free the least recently used cached page and say which it was."""
        page, _ = self._cached.popitem(last=False)
        self._free.append(page)
        return page

    def eviction_order(self) -> list[int]:
        """Cached pages, the next to go first."""
        return list(self._cached)

    def free_pages(self) -> list[int]:
        return list(self._free)
