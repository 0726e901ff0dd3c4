"""Sessions over HTTP, and saving: which of them a client may see and touch, and what is said of them.

An API key's sessions are its own, and another's are to it as if there were none. The engine keeps them; nothing is kept
here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Literal

from starlette.types import Scope

from octavo.engine.async_llm import AsyncLLM
from octavo.errors import UnknownSession
from octavo.server.keys import Caller, Keys, shown
from octavo.server.protocol import (
    SESSION_ID,
    APIError,
    CacheSave,
    GenerationRequest,
    PerTier,
    Session,
    SessionList,
)
from octavo.types import SessionInfo

LISTED = 100
MAX_LISTED = 1000
PIN_S = 600.0
HEADER = "X-Session-ID"

Action = Literal["show", "pin", "release", "demote"]


def session_of(body: GenerationRequest, scope: Scope) -> str | None:
    """A request's session: what its body says, or else its header; each must be right. Raises APIError(400)."""
    raw = next((value for name, value in scope["headers"] if name == HEADER.lower().encode()), None)
    try:
        named = None if raw is None else _checked(HEADER, raw.decode())
    except UnicodeDecodeError:
        raise APIError(400, f"{HEADER}: is not UTF-8", param=HEADER, code="invalid_value") from None
    return named if body.session_id is None else _checked("session_id", body.session_id)


def _checked(field: str, session_id: str) -> str:
    if not re.fullmatch(SESSION_ID, session_id):
        message = f"{field}: must have 1 to 256 characters, none of them a control character"
        raise APIError(400, message, param=field, code="invalid_value")
    return session_id


class SessionAPI:
    """What callers ask about sessions."""

    def __init__(self, llm: AsyncLLM, keys: Keys) -> None:
        self._llm, self._keys = llm, keys

    async def listed(self, caller: Caller, tenant: str | None, limit: str | None) -> SessionList:
        """The caller's sessions, the longest idle first; of an administrator's, everybody's, or one tenant's."""
        if limit is not None and not (re.fullmatch("[0-9]{1,4}", limit) and 1 <= int(limit) <= MAX_LISTED):
            message = f"limit: must be a whole number from 1 to {MAX_LISTED}"
            raise APIError(400, message, param="limit", code="invalid_value")
        tenants = self._tenants(caller, tenant)
        whose = tenants[0] if len(tenants) == 1 else None
        found = await self._llm.sessions(whose, LISTED if limit is None else int(limit))
        return SessionList(data=[self._shown(info) for info in found])

    async def act(
        self, caller: Caller, tenant: str | None, session_id: str, action: Action, ttl_s: float = PIN_S
    ) -> Session:
        """Look at a session or do something with it. Raises APIError(404), PinRefused."""
        llm = self._llm
        work: dict[Action, Callable[[str], Awaitable[SessionInfo]]] = {
            "show": lambda whose: llm.session(whose, session_id),
            "pin": lambda whose: llm.pin(whose, session_id, ttl_s),
            "release": lambda whose: llm.release_session(whose, session_id),
            "demote": lambda whose: llm.demote_session(whose, session_id),
        }
        try:
            return self._shown(await work[action](await self._owner(self._tenants(caller, tenant), session_id)))
        except UnknownSession:
            name = session_id if len(session_id) <= 256 else session_id[:255] + "…"
            raise APIError(404, f"there is no session {name!r}", code="session_not_found") from None

    async def save(self, caller: Caller) -> CacheSave:
        """Write what can be found to disk. Raises APIError(403), ConfigError."""
        if not caller.admin:
            raise _forbidden("only the admin key may save the cache")
        saved = await self._llm.save()
        return CacheSave(pages=saved.pages, failed=saved.failed, seconds=saved.seconds)

    def _tenants(self, caller: Caller, named: str | None) -> tuple[str, ...]:
        """Whose sessions a request is about: of one tenant, or of all that there can be."""
        if not caller.admin:
            if named is not None:
                raise _forbidden("tenant: only the admin key may name one")
            return (caller.tenant,)
        tenants = tuple(tenant for tenant in self._keys.tenants if tenant.startswith(named or ""))
        if not tenants or (named and len(tenants) > 1):
            message = f"tenant: is the beginning of {len(tenants)} tenants' names, not of one"
            raise APIError(400, message, param="tenant", code="invalid_value")
        return tenants

    async def _owner(self, tenants: tuple[str, ...], session_id: str) -> str:
        """Which of the tenants has a session of this name. Raises UnknownSession, and APIError(409) if several have."""
        if len(tenants) == 1:
            return tenants[0]
        looks = (self._llm.session(tenant, session_id) for tenant in tenants)
        found = []
        for tenant, answer in zip(tenants, await asyncio.gather(*looks, return_exceptions=True), strict=True):
            if not isinstance(answer, BaseException):
                found.append(tenant)
            elif not isinstance(answer, UnknownSession):
                raise answer
        if not found:
            raise UnknownSession(session_id)
        if len(found) > 1:
            names = ", ".join(map(shown, found))
            raise APIError(409, f"tenant: {names} each have a session of this name", param="tenant", code="ambiguous")
        return found[0]

    def _shown(self, info: SessionInfo) -> Session:
        page_bytes, held = self._llm.stats().page_bytes, sum(info.pages)
        return Session(
            id=info.session_id,
            tenant=shown(info.tenant),
            running=info.num_running,
            requests=info.num_requests,
            idle_s=round(info.idle_s, 3),
            pinned_s=round(info.pinned_s, 3),
            pages=PerTier(*info.pages),
            bytes=PerTier(*(count * page_bytes for count in info.pages)),
            shared_pages=info.shared_pages,
            own_pages=held - info.shared_pages,
            prompt_tokens=info.queried_tokens,
            cached_tokens=info.hit_tokens,
            hit_rate=info.hit_tokens / info.queried_tokens if info.queried_tokens else 0.0,
        )


def _forbidden(message: str) -> APIError:
    return APIError(403, message, code="forbidden")
