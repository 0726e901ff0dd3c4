"""Running the server: its sockets, its signals, its log, and the order in which all of it ends.

first SIGTERM or SIGINT   new requests get 503, those under way finish or are failed after --drain-timeout, exit 0
second SIGINT             leave at once
the engine dies twice     exit 1
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import stat
import sys
import time
from asyncio import TimerHandle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ConfigError
from octavo.server.app import Application
from octavo.server.protocol import APIError, encode
from octavo.server.settings import ServerConfig

_log = logging.getLogger("octavo.server")

MAX_HEAD_BYTES = 1 << 16
"""Of a request's first line and headers."""
LINGER_S = 1.0
"""How long clients that do not read may hold up the end."""
BACKLOG = 2048
CROWDED_S = 1.0
"""How long one connection too many has to send a head, which is then answered."""
SPARE_FILES = 64
"""Open files that are no client's connection."""


def run(path: Path, model: str, server: ServerConfig, engine: EngineConfig) -> int:
    """Serve the model at `path`, which the user called `model`. The exit status.

    Raises ConfigError and ModelError before anything is served.
    """
    _log_as_json()
    server = replace(server, max_connections=_connections(server.max_connections))
    sock = _bind(server)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(path, model, server, engine, sock))
    finally:
        sock.close()
        if server.uds is not None:
            Path(server.uds).unlink(missing_ok=True)


async def _serve(path: Path, model: str, server: ServerConfig, engine: EngineConfig, sock: socket.socket) -> int:
    loop, failed = asyncio.get_running_loop(), asyncio.Event()
    with _signals(loop) as interrupted:
        starting = asyncio.ensure_future(
            AsyncLLM.start(
                path,
                engine,
                max_queued_requests=server.max_queued_requests,
                step_timeout=server.step_timeout,
                on_fatal=lambda cause: failed.set(),
            )
        )
        waiting = asyncio.ensure_future(interrupted.wait())
        await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
            return 0
        llm = await starting
        try:
            app = Application(llm, server, model)
            app.feed.start()
            web = uvicorn.Server(_Uvicorn(app, server))
            web.capture_signals = _no_signals  # type: ignore[method-assign]
            web._log_started_message = lambda listeners: None  # type: ignore[method-assign]
            serving = asyncio.create_task(web.serve(sockets=[sock]))
            while not web.started and not serving.done():
                await asyncio.sleep(0.005)
            url = _url(server, sock)
            fields = {"url": url, "models": list(app.names), "pid": os.getpid()}
            if not server.no_ui and server.uds is None:
                fields["memory_view"] = f"{url}/ui/"
            _log.info("ready", extra={"fields": fields})
            dying = asyncio.ensure_future(failed.wait())
            await asyncio.wait((serving, waiting, dying), return_when=asyncio.FIRST_COMPLETED)
            await _drain(app, web, 0.0 if dying.done() else server.drain_timeout)
            web.should_exit = True
            await serving
            app.close()
        finally:
            await llm.close()
    return 1 if failed.is_set() else 0


async def _drain(app: Application, web: uvicorn.Server, timeout_s: float) -> None:
    """Take no new requests, and see those under way to their end."""
    app.draining = True
    app.feed.end()
    _log.info("draining", extra={"fields": {"open": app.num_open, "timeout_s": timeout_s}})
    start = time.monotonic()
    cut = await app.llm.drain(timeout_s)
    until = max(start + timeout_s, time.monotonic()) if not cut else time.monotonic()
    while app.num_open and time.monotonic() < until + LINGER_S:
        await asyncio.sleep(0.01)  # answers that are complete, or have failed, are being written
    stalled = app.num_open
    if stalled:
        for connection in list(web.server_state.connections):
            if connection.cycle is not None and not connection.cycle.response_complete:  # type: ignore[union-attr]
                connection.transport.abort()
        await asyncio.sleep(0.01)  # their requests end
    seconds = round(time.monotonic() - start, 3)
    _log.info("drained", extra={"fields": {"cut": cut, "stalled": stalled, "seconds": seconds}})


class _Uvicorn(uvicorn.Config):
    def __init__(self, app: Application, server: ServerConfig) -> None:
        super().__init__(
            app.asgi(),
            http=_connection(server),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
            timeout_graceful_shutdown=int(LINGER_S),
            timeout_keep_alive=server.timeout_keep_alive,  # type: ignore[arg-type]
            backlog=BACKLOG,
        )
        self._server = server

    def load(self) -> None:
        super().load()
        self.ssl = self._server.ssl_context()


def _connection(server: ServerConfig) -> type[HttpToolsProtocol]:
    """A connection that ends when a request's head is too slow or too large, and soon when there are too many."""

    class Connection(HttpToolsProtocol):
        _deadline: TimerHandle | None = None
        _head_s = 0.0
        _head_bytes = 0
        _in_head = True

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._head_s = server.header_timeout
            if len(self.connections) > server.max_connections:
                self.app, self._head_s = _crowded, min(self._head_s, CROWDED_S)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._arm()
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "this is no HTTP request")

        def _refuse(self, status: int, message: str) -> None:
            body = encode(APIError(status, message, code="invalid_http").body())
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
            self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0
            if self._deadline is None:
                self._arm()

        def on_headers_complete(self) -> None:
            self._disarm()
            self._in_head = False
            super().on_headers_complete()

        def _arm(self) -> None:
            self._deadline = self.loop.call_later(self._head_s, self._late)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _late(self) -> None:
            self._deadline = None
            if not self.transport.is_closing():
                self.transport.close()

    return Connection


async def _crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection that is one too many. Those that were there before go on as ever."""
    error = APIError(503, "there are too many connections: try again later", code="too_many_connections")
    headers = {"Retry-After": "1", "Connection": "close"}
    await Response(encode(error.body()), error.status, headers, "application/json")(scope, receive, send)


# ── sockets ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _bind(server: ServerConfig) -> socket.socket:
    """A socket that is bound and does not listen yet: a port in use is known before the model is loaded."""
    if server.uds is not None:
        return _bind_path(server.uds)
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            server.host or None, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError("host", f"{server.host!r} is no address of this machine: {error}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError("port", f"cannot listen on {server.host}:{server.port}: {error}") from error
    return sock


def _bind_path(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError("uds", f"{path} is there and is no socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError("uds", f"another server listens on {path}")
            os.unlink(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError("uds", f"cannot listen on {path}: {error}") from error
    except ConfigError:
        sock.close()
        raise
    return sock


def _connections(wanted: int) -> int:
    """How many there can be. Each is an open file: the soft limit on those is raised as far as may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted + SPARE_FILES if hard == resource.RLIM_INFINITY else min(wanted + SPARE_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted + SPARE_FILES:
        wanted = max(most - SPARE_FILES, 1)
        _log.warning("no more than %d connections: the process may have %d files open", wanted, hard)
    return wanted


def _url(server: ServerConfig, sock: socket.socket) -> str:
    if server.uds is not None:
        return f"unix:{server.uds}"
    host, port = sock.getsockname()[:2]
    return f"{'https' if server.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


# ── signals ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.Event]:
    """An event that the first signal to stop sets. A second SIGINT leaves at once."""
    interrupted = asyncio.Event()

    def caught(number: int) -> None:
        if interrupted.is_set() and number == signal.SIGINT:
            _log.warning("interrupted again: leaving at once")
            logging.shutdown()
            os._exit(130)  # the engine's process follows: its socket ends
        interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, caught, number)
    try:
        yield interrupted
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextmanager
def _no_signals() -> Iterator[None]:
    yield


# ── log ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _JSONLines(logging.Formatter):
    """One JSON object a record; `extra={"fields": …}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _log_as_json() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JSONLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)  # warns of what clients do wrong, which they are told
