"""A running server and a client that costs it little: what the server's benchmarks and the soak test share."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
COMMON_LABELS = ("engine", "model_name")


class Server:
    """`octavo serve MODEL OPTIONS` on a free port of the loopback, ready to answer. Leaving the block ends it."""

    def __init__(self, model: str, *options: str, log: Path | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        command = [sys.executable, "-m", "octavo", "serve", model, "--port", str(self.port), *options]
        with open(log if log is not None else os.devnull, "wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.pid = self.process.pid
        deadline = time.monotonic() + 120
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                told = log.read_text()[-2000:] if log is not None else "no log"
                raise RuntimeError(f"the server did not start ({self.process.poll()}): {told}")
            time.sleep(0.05)
        [self.engine_pid] = children(self.pid)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout_s: float = 10.0) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as reply:
            body: bytes = reply.read()
            return body

    def healthy(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """The page's series by name, without the namespace; labels that tell two of them apart follow in braces."""
        found = {}
        for name, labels, value in SERIES.findall(self.get("/metrics").decode()):
            own = [f"{key}={text}" for key, text in LABEL.findall(labels) if key not in COMMON_LABELS]
            found[name.rpartition(":")[2] + (f"{{{','.join(own)}}}" if own else "")] = float(value)
        return found

    def memory(self) -> dict[str, int]:
        """Anonymous bytes, in memory or swapped out, of the server's process and of the engine's."""
        return {"server": anonymous_bytes(self.pid), "engine": anonymous_bytes(self.engine_pid)}

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask the server to end, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def children(pid: int) -> list[int]:
    """Child processes of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def anonymous_bytes(pid: int) -> int:
    """RssAnon + VmSwap: memory that files do not back, wherever it is."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+)", status, re.MULTILINE))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processor_time(server: Server) -> dict[str, float]:
    """Processor seconds so far of the whole machine, the engine's process, the server's, and this one."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return {
        "machine": (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK"),
        "engine": cpu_seconds(server.engine_pid),
        "server": cpu_seconds(server.pid),
        "client": time.process_time(),
    }


# ── the client ────────────────────────────────────────────────────────────────────────────────────────────────────


class Broken(Exception):
    """The server closed the connection before the reply's end."""


class Reply:
    """A reply, as it came. Times are those of time.perf_counter()."""

    __slots__ = ("chunks", "first_at", "head", "last_at", "sent_at", "status")

    def __init__(self) -> None:
        self.sent_at = self.first_at = self.last_at = 0.0
        self.status = 0
        self.head = b""
        self.chunks: list[bytes] = []

    @property
    def events(self) -> list[Any]:
        """The events of a stream, decoded, without the final [DONE]."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def body(self) -> bytes:
        """The body without the framing of its chunks."""
        raw = b"".join(self.chunks)
        if b"chunked" not in self.head:
            return raw
        parts, at = [], 0
        while at < len(raw):
            end = raw.index(b"\r\n", at)
            size = int(raw[at:end], 16)
            parts.append(raw[end + 2 : end + 2 + size])
            at = end + size + 4
        return b"".join(parts)


class Connection(asyncio.Protocol):
    """A connection that is used for one request after the other. It looks at nothing but a reply's head and end."""

    def __init__(self) -> None:
        self.reply = Reply()
        self.transport: asyncio.Transport
        self.closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._expected = -1  # bytes of the body that are missing, -1 for chunks
        self._buffer = b""

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1") -> Connection:
        _, self = await asyncio.get_running_loop().create_connection(cls, host, port)
        return self

    def send(self, path: str, body: Any, method: str = "POST") -> Reply:
        """Send a request; `finish` waits for its reply."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self.reply = Reply()
        self._buffer, self._expected = b"", -1
        self._waiter = asyncio.get_running_loop().create_future()
        self.reply.sent_at = time.perf_counter()
        head = f"{method} {path} HTTP/1.1\r\nHost: octavo\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return self.reply

    async def finish(self) -> Reply:
        """The whole reply. Raises Broken."""
        assert self._waiter is not None
        if self.closed and not self._waiter.done():
            raise Broken
        await self._waiter
        return self.reply

    async def post(self, path: str, body: Any) -> Reply:
        self.send(path, body)
        return await self.finish()

    def close(self) -> None:
        self.transport.abort()

    # ── asyncio.Protocol ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        reply = self.reply
        if not reply.head:
            head, mark, data = (self._buffer + data).partition(b"\r\n\r\n")
            if not mark:
                self._buffer = head
                return
            reply.head = head.lower()
            reply.status = int(head[9:12])
            length = re.search(rb"\ncontent-length: *(\d+)", reply.head)
            self._expected = int(length[1]) if length else -1
        if data:
            reply.last_at = time.perf_counter()
            if not reply.chunks:
                reply.first_at = reply.last_at
            reply.chunks.append(data)
        if self._expected >= 0:
            self._expected -= len(data)
            done = self._expected == 0
        else:
            done = data.endswith(b"0\r\n\r\n") and (b"\n0\r\n\r\n" in data or data == b"0\r\n\r\n")
        if done and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Broken(str(error or "closed")))
            self._waiter.exception()  # whoever abandons a request does not ask


def completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """The body of a streamed /v1/completions that goes on to its last token and counts them."""
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
