"""CacheManager: the only class of the cache that the scheduler calls.

It joins the page pool, the page tables and the prefix index, and collects the page operations that the next step must
carry out. Reserving is all or nothing: a call that returns None or False has changed nothing and evicted nothing.
It never touches a tensor, never reads a clock and never decides who is served.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.cache.page_table import PageTable
from octavo.cache.pages import PagePool
from octavo.cache.prefix import Node, PrefixIndex, Tokens
from octavo.types import CopyPage


class Admission(NamedTuple):
    """A table that covers all tokens asked for, and where computing begins.

    num_computed: tokens whose KV is in the pages and is not computed again.
    write_start: tokens whose KV is in the pages; passes num_computed by one when every token was found.
    """

    table: PageTable
    num_computed: int
    write_start: int


class Wait(NamedTuple):
    """Not now: a running sequence is about to compute the page `tokens` after `node`, which will then be shared."""

    node: Node
    tokens: Tokens

    @property
    def over(self) -> bool:
        return self.tokens not in self.node.promised


@dataclass(slots=True)
class CacheStats:
    """Counts since the start, in tokens where not said otherwise."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_tokens: int = 0
    pages_allocated: int = 0
    pages_shared: int = 0
    pages_copied: int = 0
    pages_merged: int = 0
    pages_evicted: int = 0
    peak_pages: int = 0


class CacheManager:
    """Pages of `block_size` tokens for many sequences, shared where their tokens agree."""

    def __init__(self, num_pages: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(block_size)
        self.tables: dict[PageTable, None] = {}
        self.stats = CacheStats()
        self._page_ops: list[CopyPage] = []

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    # ── a sequence's life: admit, reserve, commit, (fork), release ──

    def admit(
        self,
        tokens: array[int],
        identity: tuple[str, ...] = (),
        *,
        spare: int = 0,
        use_cache: bool = True,
        resumed: bool = False,
    ) -> Admission | Wait | None:
        """Reserve pages for all `tokens`, taking from the cache what is there.

        At most len(tokens) - 1 tokens count as computed: the last one's logits are needed. If all are found, its KV is
        not written again, so that even the last page stays shared. `spare` pages must remain available afterwards.
        Returns Wait if a page that comes next is being computed by another sequence, None if there is no room.
        """
        size, pool = self.block_size, self.pool
        if not (use_cache and self.enable_prefix_caching):
            if self.pages_for(len(tokens)) + spare > pool.num_available:
                return None
            table = self._open(PageTable(self.index.root(identity), array("i")))
            self._grow(table, self.pages_for(len(tokens)))
            return Admission(table, 0, 0)

        match = self.index.match(identity, tokens)
        if match.promise is not None and len(match.promise) == size:
            return Wait(match.node, match.promise)
        hits = [node.page for node in match.nodes]
        found = len(hits) * size
        num_partial = max(min(match.num_partial, len(tokens) - 1 - found), 0)
        source = match.partial.page if match.partial is not None and num_partial > 0 else None
        num_new = self.pages_for(len(tokens)) - len(hits)
        room = pool.num_available - spare - sum(1 for page in hits if pool.refs(page) == 0)
        if num_new > room:
            return None
        if source is not None and num_new > room - (pool.refs(source) == 0):
            source, num_partial = None, 0  # the page to copy from would have to be evicted to make room for its copy

        for page in hits:
            pool.acquire(page)
        self.stats.pages_shared += len(hits)
        if source is not None:
            pool.acquire(source)
        table = self._open(PageTable(match.node, array("i", hits)))
        table.num_indexed = len(hits)
        self._grow(table, len(hits) + num_new)
        if source is not None:
            self._copy(source, table.pages[len(hits)])
            pool.release(source, findable=True)

        num_computed = min(found + num_partial, len(tokens) - 1)
        if resumed:
            self.stats.resumed_tokens += num_computed
        else:
            self.stats.queried_tokens += len(tokens)
            self.stats.hit_tokens += num_computed
        self._promise(table, tokens)
        return Admission(table, num_computed, max(found, num_computed))

    def reserve(self, table: PageTable, start: int, stop: int) -> bool:
        """Make positions start…stop writable: add pages up to `stop`, copy the page of `start` if it is shared."""
        pool, pages = self.pool, table.pages
        if not table.tail_shared and stop <= len(pages) * self.block_size:
            return True
        num_new = self.pages_for(stop) - len(pages)
        at = start // self.block_size
        copy = table.tail_shared and at < len(pages) and pool.refs(pages[at]) > 1
        if max(num_new, 0) + copy > pool.num_available:
            return False
        if copy:
            shared = pages[at]
            pages[at] = self._take()
            self._copy(shared, pages[at])
            pool.release(shared, findable=shared in self.index)
        table.tail_shared = False
        if num_new > 0:
            self._grow(table, len(pages) + num_new)
        return True

    def commit(self, table: PageTable, tokens: array[int], num_computed: int) -> None:
        """Make the pages that are now full of computed tokens findable.

        A page that another sequence has meanwhile made findable under the same tokens holds the same bits: the table
        then takes that page and gives its own back.
        """
        size = self.block_size
        if not self.enable_prefix_caching or (table.num_indexed + 1) * size > num_computed:
            return
        node, pages = table.node, table.pages
        for at in range(table.num_indexed, num_computed // size):
            key = tuple(tokens[at * size : (at + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = self.index.insert(node, key, pages[at])
            elif child.page != pages[at]:
                own, pages[at] = pages[at], child.page
                self.pool.acquire(child.page)
                self.pool.release(own, findable=False)
                self.stats.pages_merged += 1
            node = child
        table.node = node
        table.num_indexed = num_computed // size
        self._promise(table, tokens)

    def fork(self, table: PageTable) -> PageTable:
        """A second table over the same pages, the one being filled included; whoever writes first copies it."""
        twin = PageTable(table.node, table.pages[:])
        twin.num_indexed = table.num_indexed
        twin.tail_shared = table.tail_shared = True
        for page in table.pages:
            self.pool.acquire(page)
        self.stats.pages_shared += len(table.pages)
        return self._open(twin)

    def release(self, table: PageTable) -> None:
        """Give all pages back, tail first: in the eviction queue a descendant stands before its ancestors."""
        self._withdraw(table)
        for page in reversed(table.pages):
            self.pool.release(page, findable=page in self.index)
        del self.tables[table]
        del table.pages[:]

    def take_page_ops(self) -> list[CopyPage]:
        """The copies that must be made, in this order, before the next forward pass."""
        ops, self._page_ops = self._page_ops, []
        return ops

    def drop_cached(self) -> int:
        """Forget every cached page nobody references; returns how many."""
        count = self.pool.num_cached
        for _ in range(count):
            self._evict()
        return count

    # ── inside ──

    def _open(self, table: PageTable) -> PageTable:
        self.tables[table] = None
        return table

    def _grow(self, table: PageTable, num_pages: int) -> None:
        for _ in range(num_pages - len(table.pages)):
            table.pages.append(self._take())

    def _take(self) -> int:
        if self.pool.num_free == 0:
            self._evict()
        page = self.pool.take()
        self.stats.pages_allocated += 1
        self.stats.peak_pages = max(self.stats.peak_pages, self.pool.num_referenced)
        return page

    def _evict(self) -> None:
        self.index.remove(self.pool.evict())
        self.stats.pages_evicted += 1

    def _copy(self, src: int, dst: int) -> None:
        self._page_ops.append(CopyPage(src, dst))
        self.stats.pages_copied += 1

    def _promise(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Announce the next page this table will make findable, if all its tokens are known."""
        self._withdraw(table)
        start = table.num_indexed * self.block_size
        if start + self.block_size <= len(tokens):
            key = tuple(tokens[start : start + self.block_size])
            if key not in table.node.promised:
                table.node.promised.add(key)
                table.promise = (table.node, key)

    def _withdraw(self, table: PageTable) -> None:
        if table.promise is not None:
            node, key = table.promise
            node.promised.discard(key)
            table.promise = None
