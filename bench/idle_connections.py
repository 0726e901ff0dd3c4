"""Whether idle connections and slow readers slow a running stream; print JSON.

    python -m bench.idle_connections --idle 1000 --slow 200 --rounds 5

Each round measures the speed of one stream alone, then beside `--idle` connections (a third silent, a third with half a
head sent, a third kept open after a reply) and `--slow` clients that asked for a streamed answer of tens of kilobytes
and read a few hundred bytes a second. Their answers are computed before the stream begins. The result is the median
over the rounds of how much slower the stream was in the crowd than alone, before and after, on average. Takes about two
minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.load import Server, processor_time
from rich.console import Console
from rich.progress import Progress

from octavo.bench.machine import machine
from octavo.bench.wire import Connection
from octavo.client import Endpoint
from octavo.models.catalog import resolve

SLOW_BYTES = 256
PATIENCE_S = 60.0
OPTIONS = ("--kv-cache-memory-bytes=1GiB", "--header-timeout=3600", "--timeout-keep-alive=3600")
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: octavo\r\nContent-"


class Crowd:
    """Connections that do next to nothing. A silent one that the server closes is opened again."""

    def __init__(self, port: int, num_tokens: int = 64) -> None:
        self.port = port
        self.num_tokens = num_tokens  # of an answer that is read slowly, with log-probabilities: over a kilobyte each
        self.num_reopened = 0
        self.num_cut = 0  # slow readers that the server gave up
        self._tasks: list[asyncio.Task[None]] = []

    async def gather_round(self, num_idle: int, num_slow: int) -> None:
        ready = [asyncio.Event() for _ in range(num_idle + num_slow)]
        for number, event in enumerate(ready):
            kind = self._idle(number % 3, event) if number < num_idle else self._slow(event)
            self._tasks.append(asyncio.create_task(kind))
            if number % 50 == 49:
                await asyncio.sleep(0)
        await asyncio.gather(*(event.wait() for event in ready))

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        self._tasks.clear()

    async def _idle(self, kind: int, ready: asyncio.Event) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                if kind == 1:
                    writer.write(HALF_A_HEAD)
                elif kind == 2:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: octavo\r\n\r\n")
                ready.set()
                with suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
            finally:
                writer.transport.abort()
            self.num_reopened += 1
            await asyncio.sleep(0.5)

    async def _slow(self, ready: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", self.port))
            asked = json.dumps(
                {
                    "prompt": [7, 8, 9],
                    "max_tokens": self.num_tokens,
                    "ignore_eos": True,
                    "stream": True,
                    "logprobs": 20,
                }
            ).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: octavo\r\nContent-Length: {len(asked)}\r\n"
            await loop.sock_sendall(sock, f"{head}Content-Type: application/json\r\n\r\n".encode() + asked)
            assert (await loop.sock_recv(sock, SLOW_BYTES)).startswith(b"HTTP/1.1 200"), "a slow reader was refused"
            ready.set()
            with suppress(ConnectionError):
                while await loop.sock_recv(sock, SLOW_BYTES):
                    await asyncio.sleep(1)
            self.num_cut += 1


async def stream_speed(endpoint: Endpoint, num_tokens: int) -> float:
    """Tokens/s between the first and the last of one stream."""
    connection = await Connection.open(endpoint)
    reply = await connection.post(
        "/v1/completions",
        {"prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True},
    )
    connection.close()
    assert reply.status == 200, reply.body[:500]
    return (num_tokens - 1) / (reply.last_at - reply.first_at)


async def at_rest(server: Server) -> None:
    """Wait until the engine computes nothing. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while (now := await asyncio.to_thread(server.metrics))["num_requests_running"] or now["num_requests_waiting"]:
            await asyncio.sleep(0.2)


async def measure(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"alone": [], "crowded": []}
    costs: dict[str, list[dict[str, float]]] = {"alone": [], "crowded": []}
    crowd = Crowd(server.port, args.slow_tokens)
    await stream_speed(server.endpoint, 50)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=(2 * args.rounds + 1) * args.repeats)

        async def some(side: str) -> None:
            for _ in range(args.repeats):
                before = processor_time(server)
                speeds[side].append(await stream_speed(server.endpoint, args.tokens))
                spent = {name: after - before[name] for name, after in processor_time(server).items()}
                costs[side].append({name: round(1e3 * cost / args.tokens, 3) for name, cost in spent.items()})
                bar.advance(task)

        for _ in range(args.rounds):
            await some("alone")
            await crowd.gather_round(args.idle, args.slow)
            await at_rest(server)
            await some("crowded")
            open_now = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
            await crowd.leave()
            await asyncio.sleep(1)
        await some("alone")
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    alone, crowded = (
        [statistics.median(values[at : at + args.repeats]) for at in range(0, len(values), args.repeats)]
        for values in speeds.values()
    )
    rounds = [1 - 2 * speed / (alone[i] + alone[i + 1]) for i, speed in enumerate(crowded)]
    return {
        "tokens_per_s": {side: [round(speed, 2) for speed in values] for side, values in speeds.items()},
        "median": {side: round(speed, 2) for side, speed in medians.items()},
        "processor_ms_per_token": costs,
        "slower_by_in_each_round": [round(share, 4) for share in rounds],
        "slower_by": round(statistics.median(rounds), 4),
        "server_descriptors_in_the_crowd": open_now,
        "idle_connections_reopened": crowd.num_reopened,
        "slow_readers_cut": crowd.num_cut,
        "anonymous_bytes": server.memory(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--slow-tokens", type=int, default=32, help="length of the answers that are read slowly")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2, help="streams measured on each side of a round")
    parser.add_argument("--tokens", type=int, default=300, help="length of the measured stream")
    args = parser.parse_args()
    before = machine()
    log = Path(tempfile.mkstemp(prefix="octavo-server-", suffix=".log")[1])
    with Server(str(resolve(args.model)), *OPTIONS, log=log) as server:
        results = asyncio.run(measure(args, server))
    print(json.dumps({"machine": before, "idle": args.idle, "slow": args.slow, **results}, indent=1))


if __name__ == "__main__":
    main()
