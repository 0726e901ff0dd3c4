"""Sessions: conversations that may come back, what each of them holds, and pins.

A session is where its latest request ended in the prefix index: its pages are those on the path to there. They are kept
(see PagePool) from then on. A pin is a holder, like a page table: its pages do not leave the tier where they are. Pins
hold at most a fraction of each tier, end by themselves, and give way to a request that could not run otherwise.

It never reads a clock, and what it says costs as much as the pages it speaks of.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import islice
from math import inf

from octavo.cache.prefix import Node
from octavo.cache.tiers import Tiers
from octavo.errors import PinRefused, UnknownSession
from octavo.types import Place, SessionInfo, Tier

MAX_SESSIONS = 1 << 16
"""The session that was idle longest is forgotten for one more; its pages stay cached."""


class Session:
    """One conversation of a tenant."""

    __slots__ = (
        *("hit_tokens", "last_use", "leaf", "name", "num_requests", "num_running", "number", "pinned_until", "pins"),
        *("queried_tokens", "tenant"),
    )

    def __init__(self, tenant: str, name: str, number: int = 0) -> None:
        self.tenant = tenant
        self.name = name
        self.number = number  # no other session's, ever
        self.leaf: Node | None = None
        self.last_use = 0.0
        self.num_running = self.num_requests = 0
        self.queried_tokens = self.hit_tokens = 0
        self.pins: list[Place] = []
        self.pinned_until = 0.0

    def end_at(self, node: Node | None) -> None:
        """The conversation ends at this node, or nowhere if that is a root."""
        if self.leaf is not None and self.leaf.sessions is not None:
            del self.leaf.sessions[self]
            self.leaf.sessions = self.leaf.sessions or None
        self.leaf = None if node is None or node.parent is None else node
        if self.leaf is not None:
            self.leaf.sessions = self.leaf.sessions or {}
            self.leaf.sessions[self] = None


class Sessions:
    """All sessions of all tenants, the one idle for longest first."""

    def __init__(self, tiers: Tiers, max_pinned_fraction: float) -> None:
        self._tiers = tiers
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._by_number: dict[int, Session] = {}
        self._num_begun = 0
        self.changed: set[Session] | None = None  # None while nobody watches
        self._pinned: dict[Session, None] = {}
        self.first_end = inf  # no pin ends earlier
        self.pins: Counter[Place] = Counter()
        self.num_pinned = [0] * len(Tier)
        self._budget = [int(pool.num_pages * max_pinned_fraction) for pool in tiers.pools]

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    # ── requests of a session ──

    def begin(self, tenant: str, name: str) -> Session:
        """A request of the session has come."""
        session = self._sessions.get((tenant, name))
        if session is None:
            self._num_begun += 1
            session = self._sessions[tenant, name] = Session(tenant, name, self._num_begun)
            self._by_number[session.number] = session
            self._forget_some()
        session.num_requests += 1
        session.num_running += 1
        self._touch(session)
        return session

    def asked(self, session: Session, num_tokens: int, num_hit: int) -> None:
        """Of so many tokens of a prompt so many were found."""
        session.queried_tokens += num_tokens
        session.hit_tokens += num_hit
        self._mark(session)

    def end(self, session: Session) -> None:
        """The request has ended."""
        session.num_running -= 1
        self._touch(session)

    def follow(self, session: Session, node: Node) -> None:
        """The session's conversation now leads to `node`."""
        if not node.tokens or not self._known(session):
            return
        before = set(self.path(session))
        for at in node.path():
            if at in before:
                break
            at.kept = True
        self._lead(session, node)
        if session in self._pinned:
            self._pin(session)

    def _lead(self, session: Session, node: Node | None) -> None:
        number, mark = session.number, self._tiers.index.mark
        for at in self.path(session):
            at.num_sessions -= 1
            at.led_by ^= number
            mark(at)
        session.end_at(node)
        for at in self.path(session):
            at.num_sessions += 1
            at.led_by ^= number
            mark(at)

    def leader(self, node: Node) -> Session:
        """The session on whose path the node is; there must be just one."""
        return self._by_number[node.led_by]

    # ── what an operator asks and does ──

    def infos(self, tenant: str | None, limit: int) -> list[SessionInfo]:
        """Sessions of a tenant, or of all (None), the longest idle first, running ones last."""
        chosen = (at for at in self._sessions.values() if tenant is None or at.tenant == tenant)
        return [self.info(session) for session in islice(chosen, limit)]

    def get(self, tenant: str, name: str) -> Session:
        """Raises UnknownSession."""
        session = self._sessions.get((tenant, name))
        if session is None:
            raise UnknownSession(f"there is no session {name!r}")
        return session

    def info(self, session: Session) -> SessionInfo:
        """What the session holds now. O(its pages)."""
        now = self._tiers.now
        path = self.path(session)
        coming = (node.nearest or next((move.target for move in node.moves), None) for node in path)
        tiers = Counter(place.tier for place in coming if place is not None)
        return SessionInfo(
            session.tenant,
            session.name,
            session.num_running,
            session.num_requests,
            (tiers[Tier.DEVICE], tiers[Tier.HOST], tiers[Tier.DISK]),
            sum(1 for node in path if node.num_sessions > 1),
            0.0 if session.num_running else max(now - session.last_use, 0.0),
            max(self.pinned_until(session) - now, 0.0),
            session.queried_tokens,
            session.hit_tokens,
        )

    def pin(self, session: Session, ttl_s: float) -> None:
        """Hold the session's pages, and those to come, for so long; 0 ends that.

        Raises PinRefused, and leaves an earlier pin as it is.
        """
        if ttl_s <= 0:
            self._unpin(session)
            return
        own = {place for place in session.pins if self.pins[place] == 1}
        for tier, pages in self._wanted(session).items():
            more = sum(1 for page in pages if (place := Place(tier, page)) in own or place not in self.pins)
            held = self.num_pinned[tier] - sum(1 for place in own if place.tier is tier)
            if held + more > self._budget[tier]:
                raise PinRefused(
                    f"the session's {more} pages and the {held} that are pinned exceed the {self._budget[tier]} of the "
                    f"{tier.name.lower()} tier that pins may hold: release other pins or raise --max-pinned-fraction"
                )
        session.pinned_until = self._tiers.now + ttl_s
        self.first_end = min(self.first_end, session.pinned_until)
        self._pin(session)

    def demote(self, session: Session) -> None:
        """Let the session's own idle pages leave the device tier now."""
        for node in self.path(session):
            if node.num_sessions <= 1:
                self._tiers.vacate(node)

    def release(self, session: Session) -> None:
        """Forget the session, and its own idle pages on every tier."""
        self._unpin(session)
        own = [node for node in self.path(session) if node.num_sessions <= 1]
        self._forget(session)
        self._tiers.blame("released", tenant=session.tenant)
        for node in own:
            if not self._idle(node):
                break
            self._tiers.drop(node)
        self._tiers.blame()

    def tick(self) -> None:
        """End pins whose time is over."""
        if self._tiers.now < self.first_end:
            return
        for session in [at for at in self._pinned if at.pinned_until <= self._tiers.now]:
            self._unpin(session)
        self.first_end = min((session.pinned_until for session in self._pinned), default=inf)

    def pinned_until(self, session: Session) -> float:
        """When its pin ends; 0 without one."""
        return session.pinned_until if session in self._pinned else 0.0

    def yield_pin(self) -> bool:
        """End the pin that would end first, for a request that cannot run otherwise; False if there is none."""
        if not self._pinned:
            return False
        self._unpin(min(self._pinned, key=lambda at: (at.pinned_until, at.tenant, at.name)))
        return True

    # ── inside ──

    def path(self, session: Session) -> list[Node]:
        """The session's pages, last first."""
        return [] if session.leaf is None else list(session.leaf.path())

    def _idle(self, node: Node) -> bool:
        """Whether nobody holds the node or what is below it, on any tier."""
        below = [node]
        for at in below:
            below += at.children.values()
            if at.load is not None or at.promised:
                return False
            if any(self._tiers.pools[place.tier].refs(place.page) for place in at.all_places()):
                return False
        return True

    def _touch(self, session: Session) -> None:
        session.last_use = self._tiers.now
        self._mark(session)
        if self._known(session):
            self._sessions.move_to_end((session.tenant, session.name))

    def _mark(self, session: Session) -> None:
        if self.changed is not None:
            self.changed.add(session)

    def _known(self, session: Session) -> bool:
        """Whether it was not forgotten while a request of it ran."""
        return self._sessions.get((session.tenant, session.name)) is session

    def _forget_some(self) -> None:
        idle = (at for at in self._sessions.values() if not at.num_running)
        if len(self._sessions) > MAX_SESSIONS and (oldest := next(idle, None)) is not None:
            self._unpin(oldest)
            self._forget(oldest)

    def _forget(self, session: Session) -> None:
        self._lead(session, None)
        del self._sessions[session.tenant, session.name]
        del self._by_number[session.number]

    def _wanted(self, session: Session) -> dict[Tier, list[int]]:
        pages: dict[Tier, list[int]] = {}
        for node in self.path(session):
            if (place := node.nearest) is not None:
                pages.setdefault(place.tier, []).append(place.page)
        return pages

    def _pin(self, session: Session) -> None:
        """Hold as many of the session's pages, the first first, as the budget allows."""
        self._give_up(session)
        for node in reversed(self.path(session)):
            place = node.nearest
            if place is None:
                break
            if place not in self.pins and self.num_pinned[place.tier] >= self._budget[place.tier]:
                break
            self._hold(session, place)
        self._pinned[session] = None
        self._mark(session)

    def _hold(self, session: Session, place: Place) -> None:
        self._tiers.acquire(place)
        self.num_pinned[place.tier] += place not in self.pins
        self.pins[place] += 1
        session.pins.append(place)

    def _unpin(self, session: Session) -> None:
        self._pinned.pop(session, None)
        self._give_up(session)
        self._mark(session)

    def _give_up(self, session: Session) -> None:
        places, session.pins = session.pins, []
        for place in reversed(places):
            self.pins[place] -= 1
            if not self.pins[place]:
                del self.pins[place]
                self.num_pinned[place.tier] -= 1
            self._tiers.release(place)
