"""A closer look at one page and at what is shared, as far as whoever asks may see it.

Of another tenant's page only its state is told. Texts are shown where the operator lets them be.
"""

from __future__ import annotations

import re
import time

from msgspec import UNSET, Struct, UnsetType

from octavo.cache.look import Branch
from octavo.cache.watch import FREE, SHARED, SHARED_IDLE, STATES
from octavo.engine.async_llm import AsyncLLM
from octavo.server.keys import Caller, shown
from octavo.server.protocol import APIError
from octavo.types import Tier

LISTED, MAX_LISTED = 200, 1000
TIERS = {tier.name.lower(): tier for tier in Tier}


class CachePage(Struct):
    """The reply of /v1/cache/pages/{tier}/{page}: the tokens it holds, who uses it, and where else it lies."""

    tier: str
    page: int
    state: str
    refs: int
    tenant: str
    positions: tuple[int, int] | None
    idle_s: float | None
    sessions: list[str]
    requests: list[str]
    others: int
    pinned: bool
    elsewhere: list[str]
    text: str | UnsetType = UNSET


class CacheBranch(Struct):
    """Pages in a row that two or more use. `branches` ways on from its end are not listed."""

    id: str
    parent: str | None
    start: int
    num_tokens: int
    pages: int
    tiers: dict[str, int]
    sessions: int
    requests: int
    branches: int
    saved_pages: int
    tenant: str
    text: str | UnsetType = UNSET


class CacheTree(Struct):
    """The reply of /v1/cache/tree: what is shared, depth first, where most is saved first."""

    time: float
    nodes: list[CacheBranch]
    num_left_out: int
    saved_pages: int
    saved_bytes: int


class Looks:
    """What callers ask about pages."""

    def __init__(self, llm: AsyncLLM, *, show_text: bool) -> None:
        self._llm, self._show_text = llm, show_text

    async def page(self, caller: Caller, tier_name: str, number: str) -> CachePage:
        """Raises APIError(404) for a page that there is not."""
        tier, pages = TIERS.get(tier_name), self._llm.stats().tiers.pages
        if tier is None or not pages[tier].total:
            there = ", ".join(name for name, at in TIERS.items() if pages[at].total)
            what = tier_name if len(tier_name) <= 20 else tier_name[:19] + "…"
            raise APIError(404, f"there is no tier {what!r}: there is {there}", code="tier_not_found")
        total = pages[tier].total
        if not re.fullmatch("[0-9]{1,9}", number) or int(number) >= total:
            raise APIError(404, f"the {tier_name} tier has pages 0 to {total - 1}", code="page_not_found")
        info = await self._llm.look_at(tier, int(number))
        state = STATES[SHARED if info.state == SHARED_IDLE else info.state]
        shape = CachePage(
            *(tier_name, int(number), state, info.refs, "", None, None, [], [], 0, False, []),
        )
        named = dict.fromkeys([*info.sessions, *info.requests])
        theirs = [tenant for tenant, _ in named if not caller.admin and tenant != caller.tenant]
        shape.others, shape.pinned = len(theirs), info.pinned
        own = caller.admin or len(theirs) < len(named) or (info.start is not None and info.owner == caller.tenant)
        if not own or info.state == FREE:
            shape.others = max(shape.others, int(info.state != FREE))
            return shape
        if caller.admin or info.owner == caller.tenant:
            shape.tenant = shown(info.owner)
        size = self._llm.limits.block_size
        shape.positions = None if info.start is None else (info.start, info.start + size)
        shape.idle_s = None if info.idle_s is None else round(info.idle_s, 3)
        shape.sessions = [name for tenant, name in info.sessions if caller.admin or tenant == caller.tenant]
        shape.requests = list(
            dict.fromkeys(name for tenant, name in info.requests if caller.admin or tenant == caller.tenant)
        )
        shape.elsewhere = [at.name.lower() for at in info.elsewhere]
        if self._show_text:
            shape.text = self._text(info.tokens)
        return shape

    async def tree(self, caller: Caller, limit: str | None) -> CacheTree:
        """What is shared of the caller's; of everybody's for an administrator. Raises APIError(400)."""
        if limit is not None and not (re.fullmatch("[0-9]{1,4}", limit) and 1 <= int(limit) <= MAX_LISTED):
            message = f"limit: must be a whole number from 1 to {MAX_LISTED}"
            raise APIError(400, message, param="limit", code="invalid_value")
        whose = None if caller.admin else caller.tenant
        tree = await self._llm.tree(whose, LISTED if limit is None else int(limit))
        nodes = [self._node(branch) for branch in tree.branches]
        page_bytes = self._llm.stats().page_bytes
        return CacheTree(time.time(), nodes, tree.num_left_out, tree.num_saved, tree.num_saved * page_bytes)

    def _node(self, branch: Branch) -> CacheBranch:
        tiers = {name: count for name, count in zip(TIERS, branch.tiers, strict=True) if count}
        node = CacheBranch(
            *(branch.id, branch.parent, branch.start, branch.num_tokens, branch.num_pages, tiers),
            *(branch.num_sessions, branch.num_requests, branch.num_branches, branch.num_saved, shown(branch.owner)),
        )
        if self._show_text:
            node.text = self._text(branch.tokens)
        return node

    def _text(self, tokens: tuple[int, ...]) -> str:
        return self._llm.tokenizer.decode(list(tokens), False)
