"""A request over a connection, and the pieces of its reply as they came: a client that costs next to nothing.

Owns bytes and the times at which they came; what a reply says is looked at afterwards. It never decides what is sent.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Iterator
from typing import Any

import httptools
import msgspec

from octavo.client import Endpoint

DONE = b"[DONE]"
SERIES = re.compile(r"^(?:\w+:)?(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COMMON_LABELS = ("engine", "model_name")


class Broken(Exception):
    """The server closed the connection before the reply's end, or what it sent is no HTTP."""


class Reply:
    """A reply, as it came. Times are those of time.perf_counter()."""

    __slots__ = ("content_type", "pieces", "sent_at", "status")

    def __init__(self) -> None:
        self.sent_at = time.perf_counter()
        self.status = 0
        self.content_type = b""
        self.pieces: list[tuple[float, bytes]] = []

    @property
    def first_at(self) -> float:
        """When the body began."""
        return self.pieces[0][0]

    @property
    def last_at(self) -> float:
        """When the body ended."""
        return self.pieces[-1][0]

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def data(self) -> Iterator[tuple[float, bytes]]:
        """What the events of a stream carry, and when each was whole; one that was cut is not told."""
        rest, lines = b"", []
        for at, piece in self.pieces:
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                line = line.rstrip(b"\r")
                if line.startswith(b"data:"):
                    lines.append(line[5:].strip())
                elif not line and lines:
                    yield at, b"\n".join(lines)
                    lines = []
        if lines or rest.startswith(b"data:"):  # the blank line after the last event is left out by some
            yield self.last_at, b"\n".join([*lines, *([rest[5:].strip()] if rest.startswith(b"data:") else [])])

    @property
    def events(self) -> list[Any]:
        """The events of a stream, decoded, without the final [DONE]."""
        return [msgspec.json.decode(data) for _, data in self.data() if data != DONE]


class Connection(asyncio.Protocol):
    """A connection that is used for one request after the other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.reply = Reply()
        self.transport: asyncio.Transport
        self.closed = False
        self._endpoint = endpoint
        self._waiter: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._until_closed = False
        self._head = "".join(f"{name}: {value}\r\n" for name, value in endpoint.headers.items())

    @classmethod
    async def open(cls, endpoint: Endpoint) -> Connection:
        """Connect. Raises OSError."""
        context = ssl.create_default_context() if endpoint.secure else None
        loop = asyncio.get_running_loop()
        _, self = await loop.create_connection(lambda: cls(endpoint), endpoint.host, endpoint.port, ssl=context)
        return self

    def send(self, path: str, body: Any, method: str = "POST") -> Reply:
        """Send a request for `path` of the host; `finish` waits for its reply."""
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.reply = Reply()
        self._until_closed = True
        self._waiter = asyncio.get_running_loop().create_future()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._endpoint.authority}\r\n{self._head}"
        self.transport.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return self.reply

    async def finish(self) -> Reply:
        """The whole reply. Raises Broken."""
        assert self._waiter is not None
        if self.closed and not self._waiter.done():
            raise Broken("closed")
        await self._waiter
        return self.reply

    async def post(self, path: str, body: Any) -> Reply:
        self.send(path, body)
        return await self.finish()

    async def get(self, path: str) -> Reply:
        self.send(path, None, "GET")
        return await self.finish()

    def close(self) -> None:
        self.transport.abort()

    # ── asyncio.Protocol ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Broken(f"no HTTP: {error}"))
            self.closed = True
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        whole = error is None and self.reply.status and self._until_closed
        self._end(None if whole else Broken(str(error or "closed")))

    # ── httptools ──

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self.reply.content_type = value
        elif name in (b"content-length", b"transfer-encoding"):
            self._until_closed = False

    def on_headers_complete(self) -> None:
        self.reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.reply.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        if self.reply.status >= 200:
            self.closed = self.closed or not self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Broken | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)
            self._waiter.exception()  # whoever abandons a request does not ask


def series(page: bytes) -> dict[str, float]:
    """A metrics page's series by name, without the namespace; labels that tell two of them apart follow in braces."""
    found = {}
    for name, labels, value in SERIES.findall(page.decode(errors="replace")):
        own = [f"{key}={text}" for key, text in LABEL.findall(labels) if key not in COMMON_LABELS]
        found[name + (f"{{{','.join(own)}}}" if own else "")] = float(value)
    return found
