"""The map that is told change by change: after every act it is what a new look at everything gives, and the audit's."""

from __future__ import annotations

import pytest

from octavo.cache.manager import CacheManager
from octavo.cache.watch import STATE, STATE_BITS, STATES, Holder, News, Watch
from octavo.types import Place, Tier
from tests.heart.test_fuzz import Life

Cell = tuple[str, tuple[str, str, str]]
NOBODY = ("", "", "")


class Map:
    """What somebody knows who heard all the news."""

    def __init__(self, manager: CacheManager) -> None:
        self.cells = {
            Place(tier, page): 0
            for tier, pool in zip(Tier, manager.tiers.pools, strict=True)
            for page in range(pool.num_pages)
        }
        self.holders: dict[int, Holder] = {}
        self.news: News

    def take(self, news: News) -> None:
        self.news = news
        for tier, runs in zip(Tier, news.runs, strict=True):
            end = 0
            for first, count, cell in zip(*[iter(runs)] * 3, strict=True):
                assert first >= end
                end = first + count
                for page in range(first, end):
                    assert self.cells[tier, page] != cell
                    self.cells[Place(tier, page)] = cell
        self.holders |= {holder.id: holder for holder in news.holders}
        for number in news.gone:
            del self.holders[number]
        used = {cell >> STATE_BITS for cell in self.cells.values()} - {0}
        assert self.holders.keys() == used

    def pages(self) -> dict[Place, Cell]:
        return {
            place: (STATES[cell & STATE], self.holders[cell >> STATE_BITS][1:4] if cell >> STATE_BITS else NOBODY)
            for place, cell in self.cells.items()
        }

    def people(self) -> list[tuple[object, ...]]:
        return sorted(holder[1:] for holder in self.holders.values())


def from_scratch(manager: CacheManager) -> Map:
    fresh = Map(manager)
    fresh.take(Watch(manager).news())
    return fresh


def check_map(manager: CacheManager, told: Map) -> None:
    fresh = from_scratch(manager)
    assert told.pages() == fresh.pages()
    assert told.people() == fresh.people()
    assert told.news.counts == fresh.news.counts
    assert told.news.num_saved == fresh.news.num_saved
    for (_, pages), counts in zip(manager.tier_pages().items(), told.news.counts, strict=True):
        by_state = dict(zip(STATES, counts, strict=True))
        assert sum(counts) == pages.total
        assert by_state["free"] == pages.free
        assert by_state["idle"] + by_state["cached"] + by_state["shared_idle"] == pages.cached


class WatchedLife(Life):
    """Somebody looks after every act, and seldom looks away for a while, or at a few pages only."""

    def look(self) -> None:
        cache, rng = self.engine.cache, self.rng
        if self.of is not self.engine:
            self.of, self.watch = self.engine, None
        if self.watch is None:
            if rng.random() < 0.9:
                self.watch, self.map = Watch(cache), Map(cache)
                self.watch.start()
        elif rng.random() < 0.02:
            self.watch.stop()
            self.watch = None
        if self.watch is None:
            return
        few = rng.random() < 0.2
        self.map.take(self.watch.news(3) if few else self.watch.news())
        if self.map.news.complete:
            check_map(cache, self.map)
        else:
            assert few

    def begin(self):  # type: ignore[no-untyped-def]
        self.of, self.watch = None, None
        return super().begin()

    def audit(self) -> None:
        super().audit()
        self.look()

    def step(self) -> None:
        super().step()
        self.look()


@pytest.mark.parametrize("number", [0, 1, 2, 4, 6])
def test_a_map_that_is_kept_is_one_made_anew(number: int) -> None:
    WatchedLife(number).live_on(150)
