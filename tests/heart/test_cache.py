"""The cache against a naive model: a stateful property test, a long seeded loop, and eviction by exact page id."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.cache.explain import Explainer
from octavo.cache.invariants import check
from octavo.cache.manager import Admission, CacheManager, Wait
from octavo.cache.page_table import PageTable
from octavo.types import Tier

BLOCK = 2
PAGES = 8


class Model:
    """Sequences over a cache, with the tokens that each page must hold written out plainly."""

    def __init__(self, num_pages: int = PAGES, block_size: int = BLOCK) -> None:
        self.cache = CacheManager(num_pages, block_size)
        self.contents: dict[int, list[int]] = {page: [] for page in range(num_pages)}
        self.live: list[tuple[PageTable, array[int]]] = []

    def copy(self) -> None:
        for op in self.cache.take_page_ops():
            self.contents[op.dst] = list(self.contents[op.src])

    def write(self, table: PageTable, tokens: array[int], start: int) -> None:
        size = self.cache.block_size
        for position in range(start, len(tokens)):
            page = table.pages[position // size]
            assert self.cache.pool.refs(page) == 1 and page not in self.cache.index, "a shared page is written"
            self.contents[page][position % size :] = [tokens[position]]

    def admit(self, tokens: array[int]) -> bool:
        available, longest = self.cache.pool.num_available, self.longest_cached(tokens)
        admission = self.cache.admit(tokens)
        if not isinstance(admission, Admission):
            assert not isinstance(admission, Wait), "nobody here announces pages without computing them at once"
            assert available == self.cache.pool.num_available, "a refused admission changed something"
            return False
        size, longest = self.cache.block_size, min(longest, len(tokens) - 1)
        tight = self.cache.pages_for(len(tokens)) >= available  # then a partly matching page may have to make room
        assert admission.num_computed in ((longest, longest // size * size) if tight else (longest,))
        self.copy()
        self.write(admission.table, tokens, max(admission.num_computed, admission.write_start))
        self.cache.commit(admission.table, tokens, len(tokens))
        self.live.append((admission.table, tokens))
        return True

    def longest_cached(self, tokens: array[int]) -> int:
        """The longest beginning of `tokens` that findable pages hold, by comparing with every one of them."""
        best = 0
        for page in self.cache.index.pages():
            path, node = [], self.cache.index.node_of(page)
            while node.parent is not None:
                path[:0] = self.contents[node.page]
                node = node.parent
            common = 0
            while common < min(len(path), len(tokens)) and path[common] == tokens[common]:
                common += 1
            best = max(best, common)
        return best

    def append(self, at: int, token: int) -> bool:
        table, tokens = self.live[at]
        if not self.cache.reserve(table, len(tokens), len(tokens) + 1):
            return False
        self.copy()
        tokens.append(token)
        self.write(table, tokens, len(tokens) - 1)
        self.cache.commit(table, tokens, len(tokens))
        return True

    def fork(self, at: int) -> None:
        table, tokens = self.live[at]
        self.live.append((self.cache.fork(table), tokens[:]))

    def finish(self, at: int) -> None:
        table, _ = self.live.pop(at)
        self.cache.release(table)

    def verify(self) -> None:
        check(self.cache)
        size = self.cache.block_size
        for table, tokens in self.live:
            read = [self.contents[table.pages[p // size]][p % size] for p in range(len(tokens))]
            assert read == list(tokens), "a sequence reads somebody else's tokens"
        for page in self.cache.index.pages():
            assert tuple(self.contents[page]) == self.cache.index.node_of(page).tokens


class CacheMachine(RuleBasedStateMachine):
    """Vocabulary 2, page size 2, eight pages: everything collides."""

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda ids: array("i", ids))

    @initialize()
    def start(self) -> None:
        self.model = Model()

    @rule(tokens=tokens)
    def admit(self, tokens: array[int]) -> None:
        self.model.admit(tokens)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        self.model.append(data.draw(st.integers(0, len(self.model.live) - 1)), token)

    @precondition(lambda self: self.model.live and len(self.model.live) < 12)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.model.fork(data.draw(st.integers(0, len(self.model.live) - 1)))

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.model.finish(data.draw(st.integers(0, len(self.model.live) - 1)))

    @rule()
    def drop_cached(self) -> None:
        self.model.cache.drop_cached()
        assert self.model.cache.pool.num_cached == 0

    @invariant()
    def adds_up(self) -> None:
        self.model.verify()

    def teardown(self) -> None:
        while self.model.live:
            self.model.finish(0)
        check(self.model.cache)
        assert self.model.cache.pool.num_referenced == 0


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_a_long_seeded_life(seed: int) -> None:
    chance = random.Random(seed)
    model = Model(num_pages=24, block_size=4)
    for _ in range(5_000):
        action = chance.random()
        if action < 0.25 or not model.live:
            tokens = array("i", chance.choices(range(2), k=chance.randint(1, 30)))
            if not model.admit(tokens) and model.live:
                model.finish(chance.randrange(len(model.live)))
        elif action < 0.75:
            at = chance.randrange(len(model.live))
            if not model.append(at, chance.randrange(2)):
                model.finish(at)
        elif action < 0.85:
            model.fork(chance.randrange(len(model.live)))
        else:
            model.finish(chance.randrange(len(model.live)))
        model.verify()
    assert model.cache.stats.pages_evicted > 100 and model.cache.stats.pages_copied > 100
    assert model.cache.stats.pages_merged > 10


def admit(cache: CacheManager, tokens: list[int]) -> PageTable:
    admission = cache.admit(array("i", tokens))
    assert isinstance(admission, Admission)
    cache.commit(admission.table, array("i", tokens), len(tokens))
    return admission.table


def test_a_sequence_is_evicted_tail_first_and_the_least_recent_sequence_before_others() -> None:
    cache = CacheManager(6, 2)
    first, second = admit(cache, [1, 1, 1, 1, 1, 1]), admit(cache, [2, 2, 2, 2])
    assert (list(first.pages), list(second.pages)) == ([0, 1, 2], [3, 4])
    cache.release(first)
    cache.release(second)
    assert cache.pool.eviction_order() == [2, 1, 0, 4, 3]
    cache.release(admit(cache, [1, 1, 9]))  # a hit on page 0 makes it recent; 1 stays where it was
    assert cache.pool.eviction_order() == [2, 1, 4, 3, 0]


def test_a_hit_refreshes_what_everybody_shares() -> None:
    cache = CacheManager(12, 4)
    system = list(range(16))
    cache.release(admit(cache, system))
    for number in range(50):
        match = cache.index.match((), array("i", system))
        assert len(match.nodes) == 4, f"the shared pages are gone after {number} one-off prompts"
        cache.release(admit(cache, [*system, 100 + number, 7]))
        cache.release(admit(cache, [1000 + number] * 7))


@pytest.mark.parametrize("kv_quota", [1.0, 0.9])
def test_whatever_way_pages_are_forgotten_they_are_counted_and_remembered(kv_quota: float) -> None:
    cache = CacheManager(4, 4, kv_quota=kv_quota)
    explainer = Explainer(cache)
    cache.release(admit(cache, list(range(8))))
    cache.release(admit(cache, list(range(50, 62))))  # its third page takes the place of the other's second
    assert len(cache.index.match((), array("i", range(8))).nodes) == 1
    assert cache.tiers.stats.pages_dropped == cache.stats.pages_evicted == len(explainer._forgotten) == 1


def test_evicting_one_page_leaves_the_rest_of_the_path_findable() -> None:
    cache = CacheManager(3, 4)
    tokens = list(range(12))
    cache.release(admit(cache, tokens))
    cache.release(admit(cache, [99, 98]))
    assert [node.page for node in cache.index.match((), array("i", tokens)).nodes] == [0, 1]


def test_nothing_is_evicted_for_an_admission_that_cannot_succeed() -> None:
    cache = CacheManager(6, 2)
    held = admit(cache, [1, 2, 3, 4])
    cache.release(admit(cache, [5, 6, 7, 8]))
    assert cache.admit(array("i", [9] * 10)) is None
    assert not cache.reserve(held, 4, 14)
    assert cache.stats.pages_evicted == 0 and cache.pool.num_cached == 2
    check(cache)


def test_many_tables_get_a_page_each_or_none_does() -> None:
    cache = CacheManager(6, 2)
    one, two = admit(cache, [1, 2]), admit(cache, [3, 4])
    cache.release(admit(cache, [5, 6, 7, 8]))
    assert cache.extend([]) and cache.extend([two, one])  # from those that are free
    assert (list(one.pages), list(two.pages)) == ([0, 5], [1, 4])
    assert cache.extend([one, two])  # from those that are cached, the coldest first
    assert (list(one.pages), list(two.pages)) == ([0, 5, 3], [1, 4, 2])
    assert cache.stats.pages_evicted == 2 and cache.stats.pages_allocated == 8 and cache.num_named == 6
    assert not cache.extend([one])
    cache.release(two)
    twin = cache.fork(one)
    assert not cache.extend([one]), "whoever writes to a shared page needs a copy first"
    check(cache)
    cache.release(twin)
    assert len(one.pages) == 3


def test_roots_vanish_with_their_last_page() -> None:
    cache = CacheManager(4, 2)
    for tenant in range(100):
        admission = cache.admit(array("i", [1, 2, 3]), (str(tenant),))
        assert isinstance(admission, Admission)
        cache.commit(admission.table, array("i", [1, 2, 3]), 3)
        cache.release(admission.table)
    del admission
    assert len(cache.index._roots) <= 4


def test_the_audit_sees_a_leak_and_a_wrong_count() -> None:
    from octavo.errors import AuditError

    for break_it in (
        lambda cache: cache.pool.acquire(0),
        lambda cache: cache.pool._free.append(0),
        lambda cache: cache.pool.take(),
        lambda cache: cache.index.take(cache.index.node_of(1), Tier.DEVICE),
    ):
        cache = CacheManager(6, 2)
        admit(cache, [1, 2, 3, 4])
        check(cache)
        break_it(cache)
        with pytest.raises(AuditError):
            check(cache)
