"""Tiers: the pages below the device tier, and the copies between tiers that are under way.

    device ──leave──► host ──leave──► disk ──leave──► forgotten
      ▲                │               │
      └──────load──────┴───────────────┘

A page that leaves a tier is copied to the one below, unless a copy is there already or computing it again is cheaper.
A page never changes once it can be found, so a copy above and one below may stay side by side, and what is about to
leave is copied ahead of need. Copies are begun in a plan and end in a later result: until then nobody finds the copy,
and whoever needs the page that is read waits for the copy (AwaitMove). A copy that failed makes the page a miss.

It never touches memory or files, reads no clock, and does not know requests.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import fsum
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from octavo.cache.page_table import PageTable
from octavo.cache.pages import PagePool
from octavo.cache.prefix import NOWHERE, Node, PrefixIndex
from octavo.types import AwaitMove, Moved, MovePage, PageOp, Place, Tier

if TYPE_CHECKING:
    from octavo.cache.explain import Explainer
    from octavo.cache.watch import Watch

AHEAD = 64
"""Pages that are kept ready to leave a tier at once, because a copy lies below, when none are free; at most a quarter
of the tiers below."""
MAX_AHEAD_MOVES = 32
"""Copies under way that nobody waits for."""
WEIGHT = 0.1
"""Of a new measurement in a running mean."""


@dataclass(slots=True)
class Costs:
    """What it takes to have a page again, in seconds: copied from a tier, or computed. Measured, and corrected.

    A token at position p takes token_s · (1 + p · slope) seconds, since it looks back at p others; a step that computes
    nothing else takes step_s.
    """

    mode: str = "swap"
    token_s: float = 0.0
    slope: float = 0.0
    load_s: dict[Tier, float] = field(default_factory=dict)
    step_s: float = 0.0
    num_learned: int = 0  # of the steps that token_s was corrected by

    @classmethod
    def fitted(
        cls, mode: str, step_s: float, count: int, near_s: float, far: int, far_s: float, load_s: dict[Tier, float]
    ) -> Self:
        """From steps of one token, and of `count` at the beginning and from position `far` on.

        What a step takes besides its tokens is not the tokens', but a tenth of it always is.
        """
        busy_s = max((near_s - step_s) * count / max(count - 1, 1), near_s / 10)
        slope = max(far_s - near_s, 0.0) / busy_s / max(far, 1)
        return cls(mode, busy_s / count / (1 + count / 2 * slope), slope, load_s, step_s)

    def recompute_s(self, start: int, num_tokens: int) -> float:
        """To compute tokens from position `start` on."""
        return num_tokens * self.token_s * (1 + (start + num_tokens / 2) * self.slope)

    def worth_keeping(self, tier: Tier, num_tokens: int) -> bool:
        """Whether a page of so many tokens would be fetched from the tier rather than computed."""
        if self.mode == "auto":
            return self.load_s.get(tier, 0.0) <= self.recompute_s(0, num_tokens)
        return self.mode == "swap"

    def num_worth_loading(self, tiers: Sequence[Tier], start: int, num_tokens: int) -> int:
        """How many of these pages, the first at position `start`, to fetch: what follows them is computed."""
        if self.mode != "auto":
            return len(tiers) if self.mode == "swap" else 0
        best = gain = 0.0
        count = 0
        for number, tier in enumerate(tiers, 1):
            gain += self.recompute_s(start, num_tokens) - self.load_s.get(tier, 0.0)
            start += num_tokens
            if gain >= best:
                best, count = gain, number
        return count

    def preempting_pays(self, num_running: int, num_steps: int, num_tokens: int) -> bool:
        """Whether one sequence more, for so many steps beside so many, saves what it takes to compute its tokens again.

        It bears its share of what a step takes for any number of rows. Where nothing was measured it pays.
        """
        saved = num_steps * max(self.step_s - self.token_s, 0.0) / num_running
        return saved >= self.recompute_s(0, num_tokens)

    def computed(self, slices: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that computed these (start, num_tokens): at first the mean of all, then of the latest."""
        work = fsum(count * (1 + (start + count / 2) * self.slope) for start, count in slices)
        seconds -= self.step_s
        if work > 0 and seconds > 0:
            self.num_learned += 1
            before = self.token_s or seconds / work
            self.token_s = before + max(WEIGHT, 1 / (1 + self.num_learned)) * (seconds / work - before)

    def loaded(self, tier: Tier, seconds: float) -> None:
        """Learn from a page that came back."""
        if seconds > 0:
            before = self.load_s.get(tier, seconds)
            self.load_s[tier] = before + WEIGHT * (seconds - before)


How = Literal["evicted", "released", "quota", "lost", "dropped"]


class Cause(NamedTuple):
    """Why pages are being forgotten: `request` of `tenant` needs the room, or what was done."""

    how: How = "dropped"
    request: str = ""
    tenant: str = ""


class Move:
    """A copy under way. `node` is None once nobody wants it; `load` is whose part it is, at place `at`."""

    __slots__ = ("at", "load", "node", "number", "source", "target")

    def __init__(self, number: int, node: Node | None, source: Place, target: Place) -> None:
        self.number = number
        self.node = node
        self.source = source
        self.target = target
        self.load: Load | None = None
        self.at = 0


class Load:
    """Pages on their way back to the device, for one table: `nodes` in order, into `pages`, from `sources`.

    They become findable together, when the last has come. `complete` then says whether all are right. Their ancestors'
    pages, `above`, are held until then, whatever becomes of the table.
    """

    __slots__ = ("above", "arrived", "complete", "first", "nodes", "num_open", "pages", "sources", "table")

    def __init__(self, table: PageTable, first: int, nodes: list[Node], pages: list[int], sources: list[Place]) -> None:
        self.table: PageTable | None = table
        self.first = first
        self.nodes = nodes
        self.pages = pages
        self.sources = sources
        self.above = [Place(Tier.DEVICE, page) for page in table.pages[:first]]
        self.arrived = [False] * len(nodes)
        self.num_open = len(nodes)
        self.complete = False

    @property
    def done(self) -> bool:
        return self.num_open == 0


@dataclass(slots=True)
class TierStats:
    """Counts since the start, of pages. Moves are counted by (from, to) when they have ended well."""

    moved: dict[tuple[Tier, Tier], int] = field(default_factory=Counter)
    moves_failed: int = 0
    pages_dropped: int = 0


class Tiers:
    """The pools of all tiers, and every copy between them."""

    def __init__(
        self, index: PrefixIndex, pools: tuple[PagePool, ...], costs: Costs, block_size: int, quota: float = 1.0
    ) -> None:
        self.index = index
        self.pools = pools
        self.costs = costs
        self.stats = TierStats()
        self.now = 0.0
        self.page_ops: list[PageOp] = []
        self.moves: dict[int, Move] = {}
        self.loads: dict[Load, None] = {}
        self.to_save: deque[Node] = deque()
        self.num_saving = self.num_unsaved = 0
        self._saving: set[int] = set()
        self._block_size = block_size
        self._next_number = 0
        self.watch: Watch | None = None
        self.explainer: Explainer | None = None
        self._alone = not any(pool.num_pages for pool in pools[Tier.HOST :])
        self._quota = int(pools[Tier.DEVICE].num_pages * quota) if quota < 1 else None
        # with a quota: each owner's cached device pages, coldest first, and who has too many of them
        self._idle: dict[str, OrderedDict[int, None]] = {}
        self.over_quota: dict[str, None] = {}

    # ── holders ──

    def release(self, place: Place) -> None:
        """One holder less of a page; the last one leaves it cached where it can be found."""
        node, pool = self.index.find(place), self.pools[place.tier]
        pool.release(place.page, findable=node is not None, kept=node is not None and node.kept, now=self.now)
        if self._quota is not None and node is not None and place.tier is Tier.DEVICE and not pool.refs(place.page):
            idle = self._idle.setdefault(node.owner, OrderedDict())
            idle[place.page] = None
            if len(idle) > self._quota:
                self.over_quota[node.owner] = None

    def release_pages(self, pages: array[int]) -> None:
        """One holder less of each of these pages of the device tier, in this order."""
        if not self.index:
            self.pools[Tier.DEVICE].release_unfindable(pages)
            return
        find, release = self.index.page_nodes(Tier.DEVICE).get, self.pools[Tier.DEVICE].release
        for page in pages:
            if (node := find(page)) is None:
                release(page, findable=False)
            elif self._quota is None:
                release(page, findable=True, kept=node.kept, now=self.now)
            else:
                self.release(Place(Tier.DEVICE, page))

    def acquire(self, place: Place) -> None:
        """One more holder of a findable page, or of one that is held."""
        self._not_idle(place)
        self.pools[place.tier].acquire(place.page)

    def replace(self, pages: MutableSequence[int], at: int, page: int, table: PageTable | None = None) -> None:
        """Hold another page of the device tier in place of one; `pages` may be a table's."""
        own, pages[at] = pages[at], page
        if table is not None and self.watch is not None:
            self.watch.swap(table, own, page)
        self.acquire(Place(Tier.DEVICE, page))
        self.release(Place(Tier.DEVICE, own))

    def hold_to_quota(self) -> None:
        """Let the coldest idle pages of each tenant leave the device tier while they are more than its quota."""
        while self.over_quota:
            owner, _ = self.over_quota.popitem()
            self.blame("quota", tenant=owner)
            while self._quota is not None and len(idle := self._idle.get(owner, ())) > self._quota:
                self.vacate(self.index.node_of(next(iter(idle))))
            self.blame()

    def _not_idle(self, place: Place) -> None:
        if self._quota is not None and place.tier is Tier.DEVICE and (node := self.index.find(place)) is not None:
            idle = self._idle.get(node.owner, OrderedDict())
            idle.pop(place.page, None)
            if not idle:
                self._idle.pop(node.owner, None)

    def blame(self, how: How = "dropped", request: str = "", tenant: str = "") -> None:
        """Say why pages are forgotten from now on, if anybody wants to know."""
        if self.explainer is not None:
            self.explainer.cause = Cause(how, request, tenant)

    # ── down ──

    def evict(self, tier: Tier) -> None:
        """Free the coldest cached page of a tier."""
        pool = self.pools[tier]
        page = pool.coldest(self.now)
        node = self.index.node_of(page, tier)
        if self._alone and self._quota is None and not node.children:  # as nearly always, without going all the ways
            self.index.take(node, tier)
            pool.evict(page)
            if self.explainer is not None:
                self.explainer.forget(node)
            self.index.remove(node)
            self.stats.pages_dropped += 1
        else:
            self.leave(node, tier)

    def leave(self, node: Node, tier: Tier, *, alone: bool = False) -> bool:
        """Free a node's cached page of this tier. Where it is the last copy, it goes to a tier below or is forgotten,
        and all that is below it; if `alone` nothing is done then, and the answer is False.
        """
        place = Place(tier, node.places[tier])
        safe = self._safe_below(node, tier) or self._begin_demotion(node, place) or _elsewhere(node, tier)
        if not safe:
            if alone and node.children:
                return False
            self.drop(node)
            return True
        self._free(node, place)
        return True

    def vacate(self, node: Node) -> None:
        """Make a node's cached device page leave, and its descendants' before."""
        if node.page == NOWHERE or self.pools[Tier.DEVICE].refs(node.page):
            return
        subtree = [node]
        for at in subtree:
            subtree += [child for child in at.children.values() if child.page != NOWHERE]
        for at in reversed(subtree):
            self.leave(at, Tier.DEVICE)

    def drop(self, node: Node) -> None:
        """Forget a node and everything below it, on every tier. Pages with holders are freed by the last of them."""
        subtree = [node]
        for at in subtree:
            subtree += at.children.values()
        for at in reversed(subtree):
            for place in at.all_places():
                self._free(at, place)
            for move in at.moves:
                move.node = None
            at.moves = ()
            if self.explainer is not None:
                self.explainer.forget(at)
            self.index.remove(at)
        self.stats.pages_dropped += len(subtree)

    def ahead(self) -> None:
        """Copy what is going to leave soon, so that it can leave at once; and what is to be saved.

        What could not be copied is tried again when it must leave, and not before: a full disk keeps nobody busy.
        """
        if self._alone:
            return
        pools = self.pools
        for tier in (Tier.DEVICE, Tier.HOST):
            count = min(AHEAD, sum(pool.num_pages for pool in pools[tier + 1 :]) // 4)
            if pools[tier].num_free >= count:
                continue
            for page in list(islice(pools[tier].coldest_first(self.now), count)):
                if len(self.moves) >= MAX_AHEAD_MOVES:
                    break
                node = self.index.find(Place(tier, page))
                if node is not None and not node.unmoved and not self._safe_below(node, tier):
                    self._begin_demotion(node, Place(tier, page), ahead=True)
        while self.to_save and len(self.moves) < MAX_AHEAD_MOVES:
            self._save(self.to_save.popleft())

    def save(self) -> None:
        """Begin to copy to disk every page that is not there, ancestors first; `num_saving` goes down to 0."""
        if self.num_saving:
            return
        wanted = [
            node for node in self.index.by_depth() if node.nearest is not None and node.places[Tier.DISK] == NOWHERE
        ]
        room = self.pools[Tier.DISK].num_pages
        self.to_save = deque(wanted[:room])
        self.num_saving, self.num_unsaved = len(self.to_save), len(wanted) - len(self.to_save)

    def _save(self, node: Node) -> None:
        source = node.nearest
        if source is None or node.places[Tier.DISK] != NOWHERE or not node.alive:
            self.num_saving -= 1
            return
        move = _moving_to(node, Tier.DISK) or self._begin(node, source, Tier.DISK)
        if move is None:
            self.num_saving, self.num_unsaved = self.num_saving - 1, self.num_unsaved + 1
        else:
            self._saving.add(move.number)

    def _begin_demotion(self, node: Node, source: Place, *, ahead: bool = False) -> bool:
        """Begin a copy to the first tier below that has room and is worth it."""
        for tier in (Tier.HOST, Tier.DISK):
            if (
                tier <= source.tier
                or not self.pools[tier].num_pages
                or node.places[tier] != NOWHERE
                or not self.costs.worth_keeping(tier, self._block_size)
            ):
                continue
            if tier is Tier.DISK:  # a restart finds a page by its ancestors
                for above in reversed([*node.path()][1:]):
                    from_ = above.nearest
                    if above.places[Tier.DISK] == NOWHERE and from_ is not None and not _moving_to(above, Tier.DISK):
                        self._begin(above, from_, Tier.DISK, ahead=ahead)
            if self._begin(node, source, tier, ahead=ahead) is not None:
                return True
        return False

    def _safe_below(self, node: Node, tier: Tier) -> bool:
        """Whether nothing needs to be done for a page to leave: a copy lies, or is being made, where it should go."""
        if tier is Tier.DEVICE and self.pools[Tier.HOST].num_pages:
            return bool(node.moves) or node.places[Tier.HOST] != NOWHERE
        return bool(node.moves) or _elsewhere(node, tier)

    def _begin(self, node: Node, source: Place, tier: Tier, *, ahead: bool = False) -> Move | None:
        """Begin a copy to a tier, if room can be made there."""
        if not self._make_room(tier, ahead) or node.places[source.tier] != source.page:
            return None
        target = Place(tier, self.pools[tier].take())
        move = self._move(node, source, target)
        node.moves = (*node.moves, move)
        label = self.index.label(node) if tier is Tier.DISK else None
        self.page_ops.append(MovePage(move.number, source, target, label))
        return move

    def _make_room(self, tier: Tier, ahead: bool) -> bool:
        """Have a free page on a lower tier. What has descendants, which could not be found then, is not forgotten; and
        no copy that was made ahead of need goes for another.
        """
        pool = self.pools[tier]
        spared: list[Place] = []
        while pool.num_cached and not pool.num_free:
            node = self.index.node_of(pool.coldest(self.now), tier)
            if ahead and _elsewhere(node, tier):
                break
            if not self.leave(node, tier, alone=True):
                spared.append(Place(tier, node.places[tier]))
                self.acquire(spared[-1])
        for place in reversed(spared):  # so that descendants stand before their ancestors, and are found at once next
            self.release(place)
        return pool.num_free > 0

    def _free(self, node: Node, place: Place) -> None:
        """Let a page be found no more, and be free once nobody holds it and no copy reads it."""
        self.page_ops += [AwaitMove(move.number) for move in node.moves if move.source == place]
        self._not_idle(place)
        self.index.take(node, place.tier)
        if self.pools[place.tier].refs(place.page) == 0:
            self.pools[place.tier].evict(place.page)

    # ── up ──

    def hold(self, nodes: Iterable[Node]) -> list[Place]:
        """The nearest copies of nodes, which stay until a load of them has ended."""
        places = [place for node in nodes if (place := node.nearest) is not None]
        for place in places:
            self.acquire(place)
        return places

    def load(self, table: PageTable, first: int, nodes: list[Node], sources: list[Place]) -> Load:
        """Begin to bring nodes back from where they are held, into the table's pages from `first` on."""
        load = Load(table, first, nodes, table.pages[first : first + len(nodes)].tolist(), sources)
        for at, (node, page, source) in enumerate(zip(nodes, load.pages, sources, strict=True)):
            node.load = load
            self.index.own(node, table.owner)
            target = Place(Tier.DEVICE, page)
            self.acquire(target)
            move = self._move(node, source, target)
            move.load, move.at = load, at
            self.page_ops.append(MovePage(move.number, source, target))
        for place in load.above:
            self.acquire(place)
        self.loads[load] = None
        return load

    # ── ends ──

    def ended(self, moved: Iterable[Moved]) -> None:
        """Take the ends of copies in."""
        for number, ok, seconds in moved:
            move = self.moves.pop(number)
            if ok:
                self.stats.moved[move.source.tier, move.target.tier] += 1
            else:
                self.stats.moves_failed += 1
            if move.load is not None:
                move.load.arrived[move.at] = ok
                move.load.num_open -= 1
                if ok:
                    self.costs.loaded(move.source.tier, seconds)
                if move.load.done:
                    self._end_load(move.load)
            else:
                self._end_demotion(move, ok)

    def _end_demotion(self, move: Move, ok: bool) -> None:
        node = move.node
        if move.number in self._saving:
            self._saving.remove(move.number)
            self.num_saving -= 1
            self.num_unsaved += not ok
        if node is not None:
            node.moves = tuple(other for other in node.moves if other is not move)
            node.unmoved = not ok
            if ok:
                self.index.put(node, move.target)
        self.release(move.target)
        if node is not None and node.nearest is None and not node.moves:
            self.blame("lost")
            self.drop(node)
            self.blame()

    def _end_load(self, load: Load) -> None:
        del self.loads[load]
        good = [ok and node.alive for ok, node in zip(load.arrived, load.nodes, strict=True)]
        num_good = good.index(False) if False in good else len(good)
        load.complete = num_good == len(good)
        for node in load.nodes:
            node.load = None
        for at, (node, page) in enumerate(zip(load.nodes[:num_good], load.pages, strict=False)):
            if node.page == NOWHERE:
                self.index.put(node, Place(Tier.DEVICE, page))
                continue
            self.replace(load.pages, at, node.page)  # somebody has computed it meanwhile
            if load.table is not None:
                self.replace(load.table.pages, load.first + at, node.page, load.table)
        for at in reversed(range(len(load.nodes))):
            node, source = load.nodes[at], load.sources[at]
            if not load.arrived[at] and node.places[source.tier] == source.page:
                self._free(node, source)
            self.release(source)
            self.release(Place(Tier.DEVICE, load.pages[at]))
        self.blame("lost")
        for node in reversed(load.nodes):
            if node.alive and node.nearest is None and not node.moves:
                self.drop(node)
        self.blame()
        for place in reversed(load.above):
            self.release(place)

    # ── inside ──

    def _move(self, node: Node, source: Place, target: Place) -> Move:
        self._next_number += 1
        move = self.moves[self._next_number] = Move(self._next_number, node, source, target)
        return move


def _elsewhere(node: Node, tier: Tier) -> bool:
    return len(node.places) - node.places.count(NOWHERE) > (node.places[tier] != NOWHERE)


def _moving_to(node: Node, tier: Tier) -> Move | None:
    return next((move for move in node.moves if move.target.tier is tier), None)
