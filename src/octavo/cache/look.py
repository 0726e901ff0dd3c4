"""A closer look at one page, and at what is shared: for people who ask, in plain values.

It changes nothing, and takes as long as what it speaks of: the path and the users of a page; every chain of pages.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.cache.manager import CacheManager
from octavo.cache.page_table import PageTable
from octavo.cache.prefix import NOWHERE, Node
from octavo.cache.watch import View
from octavo.types import Place, Tier

MAX_NAMES = 100
"""Sessions and requests that are named of a page."""
MAX_NODES = 200_000
"""Pages that are looked at for a tree: what lies beyond them counts as not shared."""

Name = tuple[str, str]
"""A session's or a request's tenant, and its own."""


class PageInfo(NamedTuple):
    """What is known of a page. `state` is one of octavo.cache.watch's, `start` the position of its first token, None
    where nobody knows it.
    """

    state: int
    refs: int
    owner: str
    start: int | None
    idle_s: float | None
    sessions: list[Name]
    requests: list[Name]
    pinned: bool
    elsewhere: list[Tier]
    tokens: tuple[int, ...]


def page_info(manager: CacheManager, place: Place) -> PageInfo:
    """Raises IndexError for a page that there is not."""
    tiers, size = manager.tiers, manager.block_size
    pool, node = tiers.pools[place.tier], manager.index.find(place)
    refs = pool.refs(place.page)
    held = dict.fromkeys(_tables_of(manager, place.page)) if place.tier is Tier.DEVICE and refs else {}
    view = View(manager, place.tier)
    state, _ = view.cell(place.page, node, held if len(held) > 1 else next(iter(held), None))
    node = node or view.moving.get(place.page)
    if node is not None:
        start: int | None = (sum(1 for _ in node.path()) - 1) * size
        owner = node.owner
    else:
        start, owner = next(((t.pages.index(place.page) * size, t.owner) for t in held), (None, ""))
    return PageInfo(
        state,
        refs,
        owner,
        start,
        max(tiers.now - pool.released(place.page)[1].at, 0.0) if node is not None and not refs else None,
        [] if node is None else _sessions_through(node),
        [(table.owner, table.request) for table in held][:MAX_NAMES],
        place in manager.sessions.pins,
        [] if node is None else [at.tier for at in node.all_places() if at != place],
        () if node is None else node.tokens,
    )


def _tables_of(manager: CacheManager, page: int) -> list[PageTable]:
    """Those that name a page of the device tier; found at once while somebody watches."""
    if manager.tiers.watch is not None:
        return manager.tiers.watch.tables_of(page)
    return [table for table in manager.tables if page in table.pages]


def _sessions_through(node: Node) -> list[Name]:
    found: list[Name] = []
    below = [node] if node.num_sessions else []
    for at in below:
        found += [(session.tenant, session.name) for session in at.sessions or ()]
        if len(found) >= MAX_NAMES:
            break
        below += [child for child in at.children.values() if child.num_sessions]
    return found[:MAX_NAMES]


class Branch(NamedTuple):
    """A chain of pages that two or more use, between two places where their ways part; `parent` goes before it.

    `tiers` counts its pages that lie on each; `num_branches` are the ways on from its end that are not told.
    `num_saved` pages would be needed more if nobody shared it.
    """

    id: str
    parent: str | None
    start: int
    num_tokens: int
    num_pages: int
    tiers: tuple[int, ...]
    num_sessions: int
    num_requests: int
    num_branches: int
    num_saved: int
    owner: str
    tokens: tuple[int, ...]


class Tree(NamedTuple):
    """Depth first, where most is saved first. `num_left_out` shared chains are not told."""

    branches: list[Branch]
    num_left_out: int
    num_saved: int


class _Chain:
    """Pages with one way on, from `first` to `last`; at its end ways part, or a session ends."""

    __slots__ = ("below", "depth", "first", "last", "num_pages", "num_saved", "num_users", "saved_below", "tiers")

    def __init__(self, first: Node, depth: int) -> None:
        self.first = self.last = first
        self.depth, self.num_pages = depth, 1
        self.tiers = [0] * len(Tier)
        self.below: list[_Chain] = []
        self.num_users = self.num_saved = self.saved_below = 0


class Forest:
    """What is shared at one moment, of everybody's. Takes as long as all pages."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._tops, self._in_order = _chains(manager)
        for chain in reversed(self._in_order):  # what is below is counted before what is above
            users = sum(below.num_users for below in chain.below) + len(chain.last.sessions or ())
            chain.num_users = max(users, chain.first.num_sessions, _num_requests(manager, chain.first), 1)
            chain.num_saved = chain.num_pages * (chain.num_users - 1)
            chain.saved_below = chain.num_saved + sum(below.saved_below for below in chain.below)

    def tree(self, tenant: str | None, limit: int) -> Tree:
        """What is shared of a tenant's, or of all (None): `limit` chains at most."""
        shared = [chain for chain in self._in_order if chain.num_users > 1 and _theirs(chain.first, tenant)]
        told: list[tuple[_Chain, _Chain | None]] = []
        pending: list[tuple[_Chain, _Chain | None]] = [(chain, None) for chain in self._tops]
        pending.sort(key=lambda at: at[0].saved_below)
        while pending and len(told) < limit:
            chain, parent = pending.pop()
            if chain.num_users < 2:
                continue
            if _theirs(chain.first, tenant):
                told.append((chain, parent))
                parent = chain
            pending += [(below, parent) for below in sorted(chain.below, key=lambda at: at.saved_below)]
        known = {id(chain) for chain, _ in told}
        branches = [_branch(self._manager, chain, parent, known) for chain, parent in told]
        return Tree(branches, len(shared) - len(told), sum(chain.num_saved for chain in shared))


def _chains(manager: CacheManager) -> tuple[list[_Chain], list[_Chain]]:
    """Those that begin a prompt, and all, each after the one above it."""
    tops = [_Chain(node, 0) for root in manager.index.roots() for node in root.children.values()]
    in_order = list(tops)
    left = MAX_NODES
    for chain in in_order:
        node = chain.first
        _count(chain, node)
        while len(node.children) == 1 and node.sessions is None and left > 0:
            [node] = node.children.values()
            chain.num_pages += 1
            _count(chain, node)
            left -= 1
        chain.last = node
        if left > 0:
            chain.below = [_Chain(child, chain.depth + chain.num_pages) for child in node.children.values()]
            in_order += chain.below
            left -= len(chain.below)
    return tops, in_order


def _count(chain: _Chain, node: Node) -> None:
    for tier, page in enumerate(node.places):
        chain.tiers[tier] += page != NOWHERE


def _num_requests(manager: CacheManager, node: Node) -> int:
    """Tables that name a node's page, or a few more while it is being copied."""
    if node.page == NOWHERE:
        return 0
    return manager.pool.refs(node.page) - manager.sessions.pins[Place(Tier.DEVICE, node.page)]


def _theirs(node: Node, tenant: str | None) -> bool:
    return tenant is None or node.owner == tenant


def _branch(manager: CacheManager, chain: _Chain, parent: _Chain | None, known: set[int]) -> Branch:
    first, size = chain.first, manager.block_size
    return Branch(
        _id(manager, first),
        None if parent is None else _id(manager, parent.first),
        chain.depth * size,
        chain.num_pages * size,
        chain.num_pages,
        tuple(chain.tiers),
        first.num_sessions,
        _num_requests(manager, first),
        sum(id(below) not in known for below in chain.below),
        chain.num_saved,
        first.owner,
        first.tokens,
    )


def _id(manager: CacheManager, node: Node) -> str:
    return manager.index.label(node).digest[:8].hex()
