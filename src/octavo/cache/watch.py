"""Watch: what every page is in at the moment and who holds it, told change by change.

    pool, index, sessions ──note what changed──► Watch.news ──► runs of pages that are now in another cell

While somebody watches, whatever changes a page notes its number, and nothing else; `news` looks at those pages only and
tells the ones that are not as it told them before. So watching costs what changes, and nothing is scanned. A *cell* is
a page's state and its holder in one number: state | holder << 3.

It changes no page, and reads no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from octavo.cache.page_table import PageTable
from octavo.cache.prefix import Node
from octavo.cache.sessions import Session
from octavo.cache.tiers import Tiers
from octavo.types import Tier

if TYPE_CHECKING:
    from octavo.cache.manager import CacheManager

STATE_BITS = 3
STATE = (1 << STATE_BITS) - 1


STATES = ("free", "active", "shared", "pinned", "idle", "cached", "moving", "shared_idle")
FREE, ACTIVE, SHARED, PINNED, IDLE, CACHED, MOVING, SHARED_IDLE = range(len(STATES))
"""Of a page in use: by one, by several, by a pin. Of one that nobody uses: on the path of one session (idle), of none,
of several. A moving one is to be written by a copy that is under way. Plain numbers, as an enumeration is slow."""


class Party(NamedTuple):
    """Whose a page is, where that is no session: a request's, what a tenant left, or several sessions' together.

    `tenant` is "" of what more than one tenant may share.
    """

    kind: Literal["request", "prefix", "shared"]
    tenant: str
    request: str = ""


Key = Session | Party
Held = PageTable | dict[PageTable, None] | None
"""The tables that name a page: one, several or none."""


class Holder(NamedTuple):
    """A holder as it is told. A session's `last_use` and `pinned_until` (0: no pin) are in the seconds of `tick`."""

    id: int
    kind: Literal["session", "request", "prefix", "shared"]
    tenant: str
    name: str
    num_running: int = 0
    last_use: float = 0.0
    pinned_until: float = 0.0
    num_requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


class News(NamedTuple):
    """What changed. `runs` has (first page, how many, their cell) for each tier, one after the other.

    `counts` are the pages of each tier by state. `complete` is whether that is all: a Watch that has just begun tells
    the pages there are in several pieces.
    """

    runs: tuple[array[int], ...]
    counts: tuple[list[int], ...]
    holders: list[Holder]
    gone: list[int]
    num_saved: int
    complete: bool


class Watch:
    """Begins with all pages untold, that is, thought free. Nothing is noted before `start` and after `stop`."""

    def __init__(self, manager: CacheManager) -> None:
        tiers = manager.tiers
        self._manager, self._tiers, self._pools = manager, tiers, tiers.pools
        self._index, self._sessions = manager.index, manager.sessions
        self._told = tuple(array("I", bytes(4 * pool.num_pages)) for pool in tiers.pools)
        self._counts = tuple([pool.num_pages, *([0] * STATE)] for pool in tiers.pools)
        self._more = array("I", bytes(4 * manager.num_pages))  # holders beyond the first, of device pages
        self._num_saved = 0
        self._tables: dict[int, PageTable | dict[PageTable, None]] = {}
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._num_cells: dict[int, int] = {}
        self._num_ids = 0
        for table in manager.tables:
            self.hold(table, table.pages)
        self._changed = tuple(set(range(pool.num_used)) for pool in tiers.pools)
        self._touched: set[Session] = set()

    def start(self) -> None:
        """Somebody watches."""
        for pool, changed in zip(self._pools, self._changed, strict=True):
            pool.changed = changed
        self._index.changed, self._sessions.changed, self._tiers.watch = self._changed, self._touched, self

    def stop(self) -> None:
        """Nobody watches any more."""
        for pool in self._pools:
            pool.changed = None
        self._index.changed = self._sessions.changed = self._tiers.watch = None

    @property
    def num_changed(self) -> int:
        """Pages to be looked at."""
        return sum(map(len, self._changed))

    # ── tables, which know their pages, while pages do not know them ──

    def hold(self, table: PageTable, pages: Iterable[int]) -> None:
        """The table names these pages too."""
        tables = self._tables
        for page in pages:
            held = tables.setdefault(page, table)
            if held is table:
                continue
            if isinstance(held, PageTable):
                tables[page] = {held: None, table: None}
            else:
                held[table] = None

    def let_go(self, table: PageTable) -> None:
        """The table names no page any more."""
        for page in table.pages:
            self._drop(table, page)

    def swap(self, table: PageTable, old: int, new: int) -> None:
        """The table names one page in place of another."""
        self._drop(table, old)
        self.hold(table, (new,))

    def _drop(self, table: PageTable, page: int) -> None:
        held = self._tables[page]
        if held is table:
            del self._tables[page]
        elif not isinstance(held, PageTable):
            del held[table]
            if len(held) == 1:
                self._tables[page] = next(iter(held))

    def tables_of(self, page: int) -> list[PageTable]:
        """Those that name a page of the device tier."""
        held = self._tables.get(page, ())
        return [held] if isinstance(held, PageTable) else list(held)

    # ── what is told ──

    def news(self, limit: int = 1 << 30) -> News:
        """What changed since the last news. Looks at `limit` pages at most, and at the rest the next time."""
        left, complete = limit, True
        runs: list[array[int]] = []
        new: dict[int, None] = {}
        maybe_gone: set[int] = set()
        for tier, changed in zip(Tier, self._changed, strict=True):
            view = View(self._manager, tier)
            changed.update(view.moving)  # whose they are may change without a word
            chosen = sorted(islice(changed, left))
            if len(chosen) == len(changed):
                changed.clear()
            else:
                changed.difference_update(chosen)
                complete = False
            left -= len(chosen)
            runs.append(self._tell(tier, chosen, view, new, maybe_gone))
        gone = [number for number in sorted(maybe_gone) if not self._num_cells[number]]
        for number in gone:
            del self._ids[self._keys.pop(number)], self._num_cells[number]
        for session in self._touched:
            if (number := self._ids.get(session, 0)) != 0:
                new[number] = None
        self._touched.clear()
        holders = [self._holder(number) for number in new if number in self._keys]
        counts = tuple(counts[:] for counts in self._counts)
        return News(tuple(runs), counts, holders, gone, self._num_saved, complete)

    def _tell(
        self,
        tier: Tier,
        pages: list[int],
        view: View,
        new: dict[int, None],
        maybe_gone: set[int],
    ) -> array[int]:
        """The runs of these pages, in ascending order, whose cells are new; notes whose they were and are."""
        told, counts, ids, num_cells = self._told[tier], self._counts[tier], self._ids, self._num_cells
        find, tables, device, more = view.nodes.get, self._tables, tier is Tier.DEVICE, self._more
        runs = array("I")
        end = last = -1
        for page in pages:
            node = find(page)
            held = tables.get(page) if device else None
            state, key = view.cell(page, node, held)
            if device:
                others = max(len(held) if held.__class__ is dict else 1, node.num_sessions if node else 1, 1) - 1
                if others != more[page]:
                    self._num_saved += others - more[page]
                    more[page] = others
            number = 0
            if key is not None:
                number = ids.get(key, 0)
                if not number:
                    self._num_ids += 1
                    number = ids[key] = self._num_ids
                    self._keys[number] = key
                    num_cells[number] = 0
                    new[number] = None
            cell, before = state | number << STATE_BITS, told[page]
            if cell == before:
                continue
            told[page] = cell
            counts[before & STATE] -= 1
            counts[state] += 1
            if number:
                num_cells[number] += 1
            if before > STATE:
                num_cells[before >> STATE_BITS] -= 1
                maybe_gone.add(before >> STATE_BITS)
            if page == end and cell == last:
                runs[-2] += 1
            else:
                runs.extend((page, 1, cell))
                last = cell
            end = page + 1
        return runs

    def _holder(self, number: int) -> Holder:
        key = self._keys[number]
        if isinstance(key, Party):
            return Holder(number, key.kind, key.tenant, key.request, int(key.kind == "request"))
        return Holder(
            *(number, "session", key.tenant, key.name, key.num_running, key.last_use),
            *(self._sessions.pinned_until(key), key.num_requests, key.queried_tokens, key.hit_tokens),
        )


def moving_on(tiers: Tiers, tier: Tier) -> dict[int, Node | None]:
    """A tier's pages that a copy under way is to write, and the nodes that they are for, if anybody wants them."""
    moving = {at.target.page: at.node for at in tiers.moves.values() if at.load is None and at.target.tier is tier}
    if tier is Tier.DEVICE:
        for load in tiers.loads:
            moving |= zip(load.pages, load.nodes, strict=True)
    return moving


class View:
    """One tier as it is now, to be asked about many pages."""

    __slots__ = ("_leader", "_pins", "_refs", "_tier", "moving", "nodes")

    def __init__(self, manager: CacheManager, tier: Tier) -> None:
        self.nodes = manager.index.page_nodes(tier)
        self.moving = moving_on(manager.tiers, tier)
        self._refs, self._leader = manager.tiers.pools[tier].refs, manager.sessions.leader
        self._pins, self._tier = manager.sessions.pins, tier

    def cell(self, page: int, node: Node | None, held: Held) -> tuple[int, Key | None]:
        """The state of a page that is found by `node` and named by these tables, and whose it is."""
        if not self._refs(page):
            if node is None:
                return FREE, None
            if node.num_sessions == 1:
                return IDLE, self._leader(node)
            return (SHARED_IDLE, _shared(node)) if node.num_sessions else (CACHED, _prefix(node.owner))
        if page in self.moving:
            return MOVING, self._key(self.moving[page], held)
        key = self._key(node, held)
        if self._pins and (self._tier, page) in self._pins:
            return PINNED, key
        if held.__class__ is dict or (isinstance(key, Party) and key.kind == "shared"):
            return SHARED, key
        return ACTIVE, key

    def _key(self, node: Node | None, held: Held) -> Key | None:
        """Whose a page in use is: of all tables that name it and all sessions that lead through it, if that is one."""
        key: Key | None = None
        if node is not None and node.num_sessions:
            if node.num_sessions > 1:
                return _shared(node)
            key = self._leader(node)
        for table in (held,) if isinstance(held, PageTable) else held or ():
            own = table.session or _request(table.owner, table.request)
            if key is None:
                key = own
            elif key != own:
                return _shared(node if node is not None else table.node)
        return _prefix(node.owner) if key is None and node is not None else key


@lru_cache(1 << 12)
def _request(tenant: str, request: str) -> Party:
    return Party("request", tenant, request)


@lru_cache(1 << 12)
def _prefix(tenant: str) -> Party:
    return Party("prefix", tenant)


@lru_cache(1 << 12)
def _common(tenant: str) -> Party:
    return Party("shared", tenant)


def _shared(node: Node) -> Party:
    return _common(node.root.tenant if node.root is not None else "")
