"""The audit: does every page have exactly one state, and every count its holders?"""

from __future__ import annotations

from collections import Counter

from octavo.cache.manager import CacheManager
from octavo.errors import AuditError
from octavo.types import StepPlan


def check(manager: CacheManager) -> None:
    """Raise AuditError unless the page accounting adds up.

    free + cached + referenced = total; each count equals the tables that name the page; no page is in two states;
    index and findable pages are a bijection; a cached page's ancestors outlive it. O(pages).
    """
    pool, index = manager.pool, manager.index
    free, cached = pool.free_pages(), pool.eviction_order()
    holders = Counter(page for table in manager.tables for page in table.pages)
    _expect(len(set(free)) == len(free), "a page is free twice")
    _expect(not set(free) & set(cached), "a page is free and cached")
    _expect(not holders.keys() & set(free), "a free page is in a table")
    _expect(not holders.keys() & set(cached), "a page in the eviction queue is in a table")
    _expect(len(free) + len(cached) + len(holders) == pool.num_pages, "free + cached + referenced is not the total")
    for page in range(pool.num_pages):
        _expect(pool.refs(page) == holders[page], f"page {page} counts {pool.refs(page)} holders of {holders[page]}")
    _expect(set(cached) <= set(index.pages()), "a cached page cannot be found")
    _expect(not set(free) & set(index.pages()), "a free page can be found")
    queue = {page: place for place, page in enumerate(cached)}
    for page in index.pages():
        node = index.node_of(page)
        parent = node.parent
        if parent is None or parent.children.get(node.tokens) is not node or node.page != page:
            raise AuditError(f"page {page} and its index node do not name each other")
        _expect(len(parent.ordered) == len(parent.children), f"the children of page {parent.page} are not all in order")
        if parent.page >= 0 and parent.page in queue:
            _expect(queue.get(page, len(queue)) < queue[parent.page], f"page {parent.page} would go before page {page}")
    for table in manager.tables:
        _expect(len(set(table.pages)) == len(table.pages), "a table names a page twice")
        last = table.pages[table.num_indexed - 1] if table.num_indexed else -1
        named = last < 0 or (last in index and index.node_of(last) is table.node)
        _expect(table.node.page == last and named, "a table's index node is not its last findable page")


def check_plan(manager: CacheManager, plan: StepPlan) -> None:
    """Raise AuditError if the plan writes a page that has several holders or can be found."""
    size = manager.block_size
    for piece in plan.slices:
        stop = piece.start + len(piece.token_ids)
        _expect(len(piece.pages) * size >= stop, f"sequence {piece.seq_id} has no page for position {stop - 1}")
        first = max(piece.start, piece.write_start)
        for page in piece.pages[first // size : -(-stop // size)] if first < stop else ():
            _expect(manager.pool.refs(page) == 1, f"sequence {piece.seq_id} would write the shared page {page}")
            _expect(page not in manager.index, f"sequence {piece.seq_id} would write the findable page {page}")


def _expect(condition: bool, fault: str) -> None:
    if not condition:
        raise AuditError(fault)
