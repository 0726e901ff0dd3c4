"""A running server and what it takes: what the server's benchmarks and the soak test share."""

from __future__ import annotations

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

from octavo.bench.wire import series
from octavo.client import Endpoint


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

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url)

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
        return series(self.get("/metrics"))

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
