"""The audit: does every page have exactly one state, and every count its holders?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from octavo.cache.manager import CacheManager
from octavo.errors import AuditError
from octavo.types import Place, StepPlan, Tier


def check(manager: CacheManager) -> None:
    """Raise AuditError unless the page accounting adds up.

    On every tier: free + cached + referenced = total; each count equals the tables, pins and copies that name the page;
    no page is in two states; index and findable pages are a bijection. On the device tier a page's ancestors are there
    too, and outlive it. O(pages that were ever used).
    """
    for tier in Tier:
        _check_tier(manager, tier)
    pool, index = manager.pool, manager.index
    for page in index.pages():
        parent = index.node_of(page).parent
        if parent is None or parent.parent is None:
            continue
        _expect(parent.page >= 0, f"page {page} is on the device and its parent is not")
        if pool.refs(parent.page) == 0:
            _expect(pool.refs(page) == 0, f"page {page} is held and its parent is not")
            (kept, since), (parent_kept, parent_since) = pool.released(page), pool.released(parent.page)
            _expect(since < parent_since and kept <= parent_kept, f"page {parent.page} would go before page {page}")
    _check_sessions(manager)
    named = sum(len(table.pages) for table in manager.tables)
    _expect(manager.num_named == named, f"tables name {named} pages and count {manager.num_named}")
    for table in manager.tables:
        _expect(len(set(table.pages)) == len(table.pages), "a table names a page twice")
        last = table.pages[table.num_indexed - 1] if table.num_indexed else -1
        right = last < 0 or (last in index and index.node_of(last) is table.node)
        right = right or (table.load is not None and not table.load.complete)
        _expect(
            right and (last < 0) == (table.node.parent is None), "a table's index node is not its last findable page"
        )


def _check_tier(manager: CacheManager, tier: Tier) -> None:
    pool, index = manager.tiers.pools[tier], manager.index
    free, cached, findable = pool.free_pages(), pool.eviction_order(manager.tiers.now), set(index.pages(tier))
    holders = Counter(place.page for place in _held(manager) if place.tier is tier)
    _expect(len(set(free)) == len(free), f"a {tier.name} page is free twice")
    _expect(not set(free) & set(cached), f"a {tier.name} page is free and cached")
    _expect(not holders.keys() & set(free), f"a free {tier.name} page is held")
    _expect(not holders.keys() & set(cached), f"a {tier.name} page in the eviction queue is held")
    _expect(pool.num_referenced == len(holders), f"{pool.num_referenced} {tier.name} pages count as held")
    total = len(free) + len(cached) + len(holders)
    _expect(total == pool.num_used, f"{tier.name}: free + cached + referenced is {total} of {pool.num_used} used")
    for page in range(pool.num_used):
        refs = pool.refs(page)
        _expect(refs == holders[page], f"{tier.name} page {page} counts {refs} holders of {holders[page]}")
    _expect(set(cached) <= findable, f"a cached {tier.name} page cannot be found")
    _expect(not set(free) & findable, f"a free {tier.name} page can be found")
    for page in findable:
        node = index.node_of(page, tier)
        parent = node.parent
        if parent is None or not node.alive or node.places[tier] != page:
            raise AuditError(f"{tier.name} page {page} and its index node do not name each other")
        _expect(
            len(parent.ordered) == len(parent.children), f"the children above {tier.name} page {page} are not in order"
        )


def _check_sessions(manager: CacheManager) -> None:
    sessions, tiers = manager.sessions, manager.tiers
    nodes = {index.node_of(page, tier) for index in [manager.index] for tier in Tier for page in index.pages(tier)}
    paths = Counter(node for session in sessions for node in sessions.path(session))
    for node in nodes:
        _expect(node.num_sessions == paths[node], f"a page counts {node.num_sessions} sessions of {paths[node]}")
    _expect(paths.keys() <= nodes | {move.node for move in tiers.moves.values()}, "a session holds on to a lost page")
    pins = Counter(place for session in sessions for place in session.pins)
    _expect(pins == sessions.pins, "pins are not those of the sessions")
    _expect(sessions.num_pinned == [sum(place.tier is tier for place in pins) for tier in Tier], "pins are miscounted")


def _held(manager: CacheManager) -> Iterator[Place]:
    """Every place that a holder names, once for each holder: tables, pins, targets of copies, sources of loads."""
    for table in manager.tables:
        yield from (Place(Tier.DEVICE, page) for page in table.pages)
    yield from manager.sessions.pins.elements()
    yield from (move.target for move in manager.tiers.moves.values() if move.load is None)
    for load in manager.tiers.loads:
        yield from load.sources
        yield from load.above
        yield from (Place(Tier.DEVICE, page) for page in load.pages)


def check_plan(manager: CacheManager, plan: StepPlan) -> None:
    """Raise AuditError if the plan writes a page that has several holders or can be found."""
    size = manager.block_size
    coming = {page for load in manager.tiers.loads for page in load.pages}
    for piece in plan.slices:
        stop = piece.start + len(piece.token_ids)
        _expect(len(piece.pages) * size >= stop, f"sequence {piece.seq_id} has no page for position {stop - 1}")
        _expect(not coming & set(piece.pages), f"sequence {piece.seq_id} would read a page that has not come")
        first = max(piece.start, piece.write_start)
        for page in piece.pages[first // size : -(-stop // size)] if first < stop else ():
            _expect(manager.pool.refs(page) == 1, f"sequence {piece.seq_id} would write the shared page {page}")
            _expect(page not in manager.index, f"sequence {piece.seq_id} would write the findable page {page}")


def _expect(condition: bool, fault: str) -> None:
    if not condition:
        raise AuditError(fault)
