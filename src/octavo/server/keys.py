"""Who a client is, by the key that it sends.

Keys are kept and compared as SHA-256 digests, in a time that does not depend on them.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from starlette.types import Scope

from octavo.server.protocol import APIError
from octavo.server.settings import ServerConfig

SHOWN_DIGITS = 12
"""Of a digest, where a tenant is named to the administrator."""


class Caller(NamedTuple):
    """Whoever asks: the digest of its API key, "" where none are wanted, and whether it may see every tenant."""

    tenant: str
    admin: bool


class Keys:
    """The keys of a server. `tenants` are all that its requests can be of."""

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [_digest(key.encode()) for key in config.api_key]
        self._admin = None if config.admin_api_key is None else _digest(config.admin_api_key.encode())
        self.tenants = tuple(dict.fromkeys([*self._keys, *([self._admin] if self._admin else [])]))
        if not self._keys:
            self.tenants = ("",)

    def caller(self, scope: Scope) -> Caller:
        """Who sends this request. Raises APIError(401)."""
        value = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = value.partition(b" ")
        sent = _digest(key.strip()) if scheme.lower() == b"bearer" else ""
        # every key is compared, and in the same time
        known = [hmac.compare_digest(sent, own) for own in self._keys]
        admin = self._admin is not None and hmac.compare_digest(sent, self._admin)
        if not self._keys:
            return Caller("", admin or self._admin is None)
        if not admin and not any(known):
            message = "send a valid API key as `Authorization: Bearer KEY`"
            raise APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return Caller(sent, admin)


def shown(tenant: str) -> str:
    """A tenant's name, for people."""
    return tenant[:SHOWN_DIGITS]


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
