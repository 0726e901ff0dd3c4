"""A server as people run it: `octavo serve` in a process, with what tests ask of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

PAGE_BYTES = 368_640
"""Of SmolLM2-135M, with 16 tokens in bf16."""


class Served:
    """A running server. `url` has no path; `log` grows as it talks."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str) -> None:
        self.process, self.log, self.url = process, log, url
        self.address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> Any:
        """The JSON of a completion, greedy unless asked otherwise; asserts that there is one."""
        reply = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def chat(self, content: str | list[dict[str, Any]], **body: Any) -> Any:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        reply = self.post("/v1/chat/completions", messages=messages, **{"temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream without [DONE], which is checked to be the last."""
        with self.http.stream("POST", path, json={"stream": True, "temperature": 0, **body}) as reply:
            text = reply.read().decode()
            assert reply.status_code == 200, text
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def refused(self, path: str, **body: Any) -> Any:
        """The error of a request that is answered 400."""
        reply = self.post(path, **body)
        assert reply.status_code == 400, (reply.status_code, reply.text[:500])
        return error_of(reply)

    def raw(self, body: bytes, path: str = "/v1/completions", headers: str = "") -> socket.socket:
        """A socket on which a request was sent."""
        sock = socket.create_connection(self.address, timeout=60)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(f"{head}{headers}\r\n".encode() + body)
        return sock

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, of all series with these labels together."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            match = re.fullmatch(rf"octavo:{name}\{{(.*)\}} (\S+)", line)
            if match and all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
                total += float(match[2])
        return total

    def settle(self) -> None:
        """Wait until nothing runs, waits or holds a page; fails after five seconds."""
        names = ("num_requests_running", "num_requests_waiting")
        until(
            lambda: all(self.metric(name) == 0 for name in names) and self.metric("kv_pages", state="referenced") == 0
        )

    def lines(self) -> list[dict[str, Any]]:
        """The log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def line(self, request_id: str) -> dict[str, Any]:
        """The log's line about a request."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [line for line in self.lines() if line.get("id") == request_id]
            return bool(found)

        until(there)
        assert len(found) == 1
        return found[0]

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


def error_of(reply: httpx.Response) -> Any:
    """The error in a reply, whose form is checked: OpenAI's, and small."""
    assert len(reply.content) < 2000, reply.content[:300]
    assert reply.headers["content-type"] == "application/json"
    error = json.loads(reply.content, parse_constant=lambda name: 1 / 0)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@contextmanager
def serving(log: Path, model: Path | str, *options: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """Run `octavo serve` on a free port; whatever is left of it is killed at the end."""
    command = [sys.executable, "-W", "error", "-m", "octavo", "serve", str(model), "--port", "0", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        url = ""

        def ready() -> bool:
            nonlocal url
            assert process.poll() is None, log.read_text()
            match = re.search(r'"message":"ready","url":"([^"]+)"', log.read_text())
            url = match[1] if match else ""
            return bool(url)

        until(ready, 60)
        served = Served(process, log, url)
        try:
            yield served
        finally:
            served.http.close()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
