"""CacheManager: the only class of the cache that the scheduler calls.

It joins the pools of all tiers, the page tables, the prefix index and the sessions, and collects the page operations
that the next step must carry out. Reserving is all or nothing: a call that returns None or False has changed nothing
and evicted nothing. It never touches a tensor, never reads a clock and never decides who is served.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.cache.explain import nothing_asked
from octavo.cache.page_table import PageTable
from octavo.cache.pages import PagePool
from octavo.cache.prefix import NOWHERE, Node, PrefixIndex, Tokens, on_its_way
from octavo.cache.sessions import Session, Sessions
from octavo.cache.tiers import Costs, Tiers
from octavo.types import AwaitMove, CopyPage, Found, Moved, PageLabel, PageOp, Place, Tier


class Admission(NamedTuple):
    """A table that covers all tokens asked for, and where computing begins.

    num_computed: tokens whose KV is in the pages and is not computed again.
    write_start: tokens whose KV is in the pages; passes num_computed by one when every token was found.
    Some of the pages may still be on their way: nothing may be computed while the table's `load` is not done, and if
    that is not complete then, the table must be released. `found` says why it is so, if that is explained.
    """

    table: PageTable
    num_computed: int
    write_start: int
    found: Found | None = None


class Wait(NamedTuple):
    """Not now: the page `tokens` after `node` will soon be there to be shared. A running sequence is about to compute
    it, or it is being copied.
    """

    node: Node
    tokens: Tokens

    @property
    def over(self) -> bool:
        child = self.node.children.get(self.tokens)
        return self.tokens not in self.node.promised and (child is None or not on_its_way(child))


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


class TierPages(NamedTuple):
    """The pages of a tier, by state."""

    total: int
    referenced: int
    cached: int
    free: int


class CacheManager:
    """Pages of `block_size` tokens for many sequences, shared where their tokens agree, on up to three tiers.

    `session_ttl`, `max_pinned_fraction` and `kv_quota` are EngineConfig's.
    """

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_pages: int = 0,
        num_disk_pages: int = 0,
        costs: Costs | None = None,
        session_ttl: float = 0.0,
        max_pinned_fraction: float = 0.25,
        kv_quota: float = 1.0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        pools = tuple(PagePool(number, session_ttl) for number in (num_pages, num_host_pages, num_disk_pages))
        self.pool = pools[Tier.DEVICE]
        self.index = PrefixIndex(block_size)
        self.tiers = Tiers(self.index, pools, costs or Costs(), block_size, kv_quota)
        self.sessions = Sessions(self.tiers, max_pinned_fraction)
        self.tables: dict[PageTable, None] = {}
        self.num_named = 0  # pages of all tables, each as often as it is named
        self.stats = CacheStats()

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def busy(self) -> bool:
        """Whether pages are to be moved, or copies are under way."""
        tiers = self.tiers
        return bool(tiers.moves or tiers.page_ops or tiers.to_save or tiers.over_quota)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def tier_pages(self) -> dict[Tier, TierPages]:
        """Every tier's pages by state."""
        return {
            tier: TierPages(pool.num_pages, pool.num_referenced, pool.num_cached, pool.num_free)
            for tier, pool in zip(Tier, self.tiers.pools, strict=True)
        }

    def restore(self, labels: Iterable[tuple[int, PageLabel]]) -> int:
        """Make pages findable that an earlier process left on disk; returns how many. Before any request."""
        pool = self.tiers.pools[Tier.DISK]
        nodes = self.index.restore((record, label) for record, label in labels if record < pool.num_pages)
        pool.take_these([node.places[Tier.DISK] for node in nodes])
        for node in reversed(nodes):
            self.tiers.release(Place(Tier.DISK, node.places[Tier.DISK]))
        return len(nodes)

    # ── time and copies ──

    def tick(self, now: float) -> None:
        """It is `now`, in seconds from anywhere: pins end."""
        self.tiers.now = max(now, self.tiers.now)
        self.sessions.tick()

    def ended(self, moved: Iterable[Moved]) -> None:
        """Take the ends of copies in."""
        self.tiers.ended(moved)

    def lost(self) -> None:
        """No copy is under way: those that have not ended were never begun, since a step broke off, and have failed."""
        self.tiers.ended([Moved(number, False) for number in self.tiers.moves])

    def broke_off(self, page_ops: Iterable[PageOp]) -> None:
        """These may not have been carried out: what would be written next is still awaited."""
        self.tiers.page_ops[:0] = [op for op in page_ops if isinstance(op, AwaitMove)]

    def take_page_ops(self) -> list[PageOp]:
        """What must be done to pages, in this order, before the next forward pass, and what may be done meanwhile."""
        self.tiers.hold_to_quota()
        self.tiers.ahead()
        ops, self.tiers.page_ops = self.tiers.page_ops, []
        return ops

    # ── a sequence's life: admit, reserve, commit, (fork), release ──

    def admit(
        self,
        tokens: array[int],
        identity: tuple[str, ...] = (),
        *,
        spare: int = 0,
        use_cache: bool = True,
        owner: str = "",
        session: Session | None = None,
        request: str = "",
        explain: bool = False,
    ) -> Admission | Wait | None:
        """Reserve pages for all `tokens`, taking from the cache what is there.

        At most len(tokens) - 1 tokens count as computed: the last one's logits are needed. If all are found, its KV is
        not written again, so that even the last page stays shared. `spare` pages must remain available afterwards.
        Pages that lie below are brought back as far as that is cheaper than computing them. What is computed belongs to
        `owner`; the table is for `request`. Returns Wait if a page that comes next is on its way already, None if there
        is no room.
        """
        size, pool = self.block_size, self.pool
        if not (use_cache and self.enable_prefix_caching):
            if self.pages_for(len(tokens)) + spare > pool.num_available:
                return None
            table = self._open(PageTable(self.index.root(identity), array("i"), owner, request, session))
            self._grow(table, self.pages_for(len(tokens)))
            explain = explain and self.tiers.explainer is not None
            why = nothing_asked(len(tokens), caching=self.enable_prefix_caching) if explain else None
            return Admission(table, 0, 0, why)

        match = self.index.match(identity, tokens)
        if match.promise is not None and len(match.promise) == size:
            return Wait(match.node, match.promise)
        hits, below = self._split(match.nodes)
        nodes = match.nodes[: len(hits) + len(below)]
        found = len(nodes) * size
        num_partial = max(min(match.num_partial, len(tokens) - 1 - found), 0)
        whole = match.partial is not None and len(nodes) == len(match.nodes) and match.partial.page != NOWHERE
        source = match.partial.page if match.partial is not None and whole and num_partial > 0 else None
        num_new = self.pages_for(len(tokens)) - len(hits)
        room = pool.num_available - spare - sum(1 for page in hits if pool.refs(page) == 0)
        if num_new > room:
            return None
        if source is None or num_new > room - (pool.refs(source) == 0):
            source, num_partial = None, 0  # a page to copy from might have to be evicted to make room for its copy

        for page in hits:
            self._acquire(page)
        self.stats.pages_shared += len(hits)
        if source is not None:
            self._acquire(source)
        places = self.tiers.hold(below)
        table = PageTable(nodes[-1] if nodes else match.root, array("i", hits), owner, request, session)
        self._open(table)
        table.num_indexed = len(nodes)
        self._grow(table, len(hits) + num_new)
        if below:
            table.load = self.tiers.load(table, len(hits), below, places)
        if source is not None:
            self._copy(source, table.pages[len(nodes)])
            self._release(source)

        num_computed = min(found + num_partial, len(tokens) - 1)
        self._promise(table, tokens)
        why = None
        if explain and self.tiers.explainer is not None:
            on = [Tier.DEVICE] * len(hits) + [place.tier for place in places]
            why = self.tiers.explainer.found(match, tokens, on, num_computed, owner)
        return Admission(table, num_computed, max(found, num_computed), why)

    def found(self, num_tokens: int, num_found: int, *, resumed: bool = False, session: Session | None = None) -> None:
        """Count what an admission found, once it is there: of a prompt, or of what a preempted sequence had."""
        if not self.enable_prefix_caching:
            return
        if resumed:
            self.stats.resumed_tokens += num_found
        else:
            self.stats.queried_tokens += num_tokens
            self.stats.hit_tokens += num_found
            if session is not None:
                self.sessions.asked(session, num_tokens, num_found)

    def find(self, tokens: array[int], identity: tuple[str, ...] = ()) -> list[int]:
        """The pages on the device that admission would find."""
        nodes = self.index.match(identity, tokens).nodes if self.enable_prefix_caching else []
        return [node.page for node in nodes if node.page != NOWHERE]

    def _split(self, nodes: list[Node]) -> tuple[list[int], list[Node]]:
        """Of a path: the pages on the device, and what follows them below and is worth bringing back."""
        hits = [node.page for node in nodes if node.page != NOWHERE]
        below = nodes[len(hits) :]
        if not below:
            return hits, below
        tiers = [place.tier for node in below if (place := node.nearest) is not None]
        return hits, below[: self.tiers.costs.num_worth_loading(tiers, len(hits) * self.block_size, self.block_size)]

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
            pages[at] = self._take(table, 1)[0]
            if self.tiers.watch is not None:
                self.tiers.watch.swap(table, shared, pages[at])
            self._copy(shared, pages[at])
            self._release(shared)
        table.tail_shared = False
        if num_new > 0:
            self._grow(table, len(pages) + num_new)
        return True

    def extend(self, tables: Sequence[PageTable]) -> bool:
        """One page more for each of these tables, in this order; False if not all can have one, or a tail is shared."""
        if not tables:
            return True
        if len(tables) > self.pool.num_available or True in [table.tail_shared for table in tables]:
            return False
        pages = self.pool.take_free(len(tables))
        self._taken(len(pages))
        self.num_named += len(pages)
        for table, page in zip(tables, pages, strict=False):
            table.pages.append(page)
            if self.tiers.watch is not None:
                self.tiers.watch.hold(table, table.pages[-1:])
        for table in tables[len(pages) :]:
            self._grow(table, len(table.pages) + 1)
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
                child = self.index.insert(node, key, Place(Tier.DEVICE, pages[at]), table.owner)
            elif child.page == NOWHERE:
                self.index.own(child, table.owner)
                self.index.put(child, Place(Tier.DEVICE, pages[at]))
            elif child.page != pages[at]:
                self.tiers.replace(pages, at, child.page, table)
                self.stats.pages_merged += 1
            node = child
        table.node = node
        table.num_indexed = num_computed // size
        self._promise(table, tokens)

    def fork(self, table: PageTable) -> PageTable:
        """A second table over the same pages, the one being filled included; whoever writes first copies it."""
        twin = PageTable(table.node, table.pages[:], table.owner, table.request, table.session)
        twin.num_indexed = table.num_indexed
        twin.tail_shared = table.tail_shared = True
        for page in table.pages:
            self._acquire(page)
        self.stats.pages_shared += len(table.pages)
        return self._open(twin)

    def release(self, table: PageTable, session: Session | None = None) -> None:
        """Give all pages back, tail first: in the eviction queue a descendant stands before its ancestors.

        Pages on their way come back when they have arrived. The session may come back to where the table ends.
        """
        self._withdraw(table)
        if table.load is not None:
            table.load.table = None
        if session is not None and table.load is None:
            self.sessions.follow(session, table.node)
        if self.tiers.watch is not None:
            self.tiers.watch.let_go(table)
        self.tiers.release_pages(table.pages[::-1])
        del self.tables[table]
        self.num_named -= len(table.pages)
        del table.pages[:]

    def drop_cached(self) -> int:
        """Let every cached page that nobody references leave the device tier; returns how many."""
        count = self.pool.num_cached
        for _ in range(count):
            self._evict()
        return count

    # ── inside ──

    def _open(self, table: PageTable) -> PageTable:
        self.tables[table] = None
        self.num_named += len(table.pages)
        if self.tiers.watch is not None:
            self.tiers.watch.hold(table, table.pages)
        return table

    def _grow(self, table: PageTable, num_pages: int) -> None:
        pages = self._take(table, num_pages - len(table.pages))
        table.pages.extend(pages)
        self.num_named += len(pages)
        if self.tiers.watch is not None:
            self.tiers.watch.hold(table, pages)

    def _take(self, table: PageTable, num_pages: int) -> array[int]:
        """So many pages, at the price of cached ones if need be, which then go for the table's request."""
        pool = self.pool
        pages = pool.take_free(num_pages)
        if len(pages) < num_pages:
            self.tiers.blame("evicted", table.request, table.owner)
            for _ in range(num_pages - len(pages)):
                if not pool.num_free:
                    self._evict()
                pages.append(pool.take())
            self.tiers.blame()
        self._taken(num_pages)
        return pages

    def _taken(self, num_pages: int) -> None:
        stats, held = self.stats, self.pool.num_referenced
        stats.pages_allocated += num_pages
        if held > stats.peak_pages:
            stats.peak_pages = held

    def _evict(self) -> None:
        self.tiers.evict(Tier.DEVICE)
        self.stats.pages_evicted += 1

    def _acquire(self, page: int) -> None:
        self.tiers.acquire(Place(Tier.DEVICE, page))

    def _release(self, page: int) -> None:
        self.tiers.release(Place(Tier.DEVICE, page))

    def _copy(self, src: int, dst: int) -> None:
        self.tiers.page_ops.append(CopyPage(src, dst))
        self.stats.pages_copied += 1

    def _promise(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Announce the next page this table will make findable, if all its tokens are known."""
        self._withdraw(table)
        start = table.num_indexed * self.block_size
        if start + self.block_size <= len(tokens):
            key = tuple(tokens[start : start + self.block_size])
            if self.index.promise(table.node, key):
                table.promise = (table.node, key)

    def _withdraw(self, table: PageTable) -> None:
        if table.promise is not None:
            node, key = table.promise
            node.promised.discard(key)
            table.promise = None
