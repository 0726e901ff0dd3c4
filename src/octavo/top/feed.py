"""Feed: a server's events as they come, over one connection, and what may be done to its sessions."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import quote, urlencode

from octavo.client import Endpoint, Refused
from octavo.errors import OctavoError
from octavo.top.memory import Holder

SILENCE_S = 30.0
"""The server says something every 10 seconds; one that does not is gone."""
Action = Literal["pin", "unpin", "demote", "release"]


class Feed:
    """A server, watched. Every call raises OctavoError when the server cannot be reached, or refuses."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._endpoint = Endpoint(url, api_key)
        self._socket: socket.socket | None = None
        self.url = url

    def snapshot(self) -> Any:
        """The memory as it is now."""
        return self._endpoint.json("GET", "/cache/map", silence_s=SILENCE_S)

    def events(self, hz: float) -> Iterator[tuple[str, Any]]:
        """A snapshot and the deltas that follow it, until the connection ends, which is an error too."""
        connection = self._endpoint.connect()
        try:
            connection.connect()
            self._socket = connection.sock
            path = f"/cache/map?{urlencode({'stream': 'true', 'hz': hz})}"
            event = ""
            with self._endpoint.ask(connection, "GET", path, silence_s=SILENCE_S) as response:
                for line in response:
                    if line.startswith(b"event:"):
                        event = line[6:].strip().decode()
                    elif line.startswith(b"data:"):
                        yield event, json.loads(line[5:])
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise OctavoError(f"{self.url} cannot be watched: {error}") from error
        finally:
            connection.close()
        raise OctavoError(f"{self.url} ended the connection")

    def act(self, action: Action, session: Holder, ttl_s: float, *, admin: bool) -> None:
        """Pin a session's pages for so long, or undo that; put them away; or forget it. Only an admin names tenants."""
        tenant = f"?{urlencode({'tenant': session.tenant})}" if admin and session.tenant else ""
        verb = "pin" if action == "unpin" else action
        body = {"ttl_s": ttl_s if action == "pin" else 0} if verb == "pin" else None
        path = f"/sessions/{quote(session.name, safe='')}/{verb}{tenant}"
        self._endpoint.json("POST", path, body, silence_s=SILENCE_S)

    def explain(self, request_id: str) -> Any:
        """Why a request took what it took."""
        return self._endpoint.json("GET", f"/requests/{quote(request_id, safe='')}/explain", silence_s=SILENCE_S)

    def close(self) -> None:
        """End `events` from another thread."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def hopeless(error: OctavoError) -> str | None:
    """What to do about an error that trying again does not cure; None for any other."""
    if not isinstance(error, Refused):
        return None
    if error.status in (401, 403):
        return f"{error}: give a key with --api-key, or in OCTAVO_ADMIN_API_KEY, which sees every key's sessions"
    if error.status in (400, 404, 405):
        return f"{error}: it must be an `octavo serve` of this version"
    return None
