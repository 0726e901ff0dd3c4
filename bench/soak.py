"""Many short requests, a third of them abandoned in every phase, and what is left of them afterwards; print JSON.

    python -m bench.soak --requests 20000 --clients 48 --abandoned 0.3

The pool is so small that requests preempt each other and evict what others cached. The process leaves with status 1
unless all of this holds: every request that was not abandoned got the reply it must get; when all is over the gauges
are zero and every page is free or cached; the memory of server and engine stays level after the first fifth; the server
ends with code 0 when told to and leaves no process behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.load import Server
from rich.console import Console
from rich.progress import Progress

from octavo.bench.machine import machine
from octavo.bench.wire import Broken, Connection
from octavo.models.catalog import resolve

OPTIONS = ("--max-model-len=512", "--max-num-seqs=32", "--max-num-batched-tokens=256")
PATIENCE_S = 120.0
"""A reply that takes longer is stuck."""
LEVEL_BYTES = 100.0
"""Growth for each request, after the warm-up, that is still called level."""
LONG = 10_000
"""Fewer requests than this do not fill every cache that has a bound."""

ABANDONED = ("half a head", "half a body", "just sent", "queued", "first token", "midway", "whole reply")
"""Where a client leaves: the last means a reply that does not stream, after a while."""


class Soak:
    """Clients that each send one request after the other, each request drawn from (seed, number)."""

    def __init__(self, server: Server, num_requests: int, num_clients: int, share_abandoned: float, seed: int) -> None:
        self.server = server
        self.num_requests = num_requests
        self.num_clients = num_clients
        self.share_abandoned = share_abandoned
        self.seed = seed
        self.num_done = 0
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.samples: list[dict[str, Any]] = []

    async def run(self, sample_every: int, *, progress: bool) -> None:
        numbers = iter(range(self.num_requests))
        with Progress(console=Console(stderr=True), transient=True, disable=not progress) as bar:
            task = bar.add_task("", total=self.num_requests)

            async def client() -> None:
                connection: Connection | None = None
                for number in numbers:
                    if connection is None or connection.closed:
                        connection = await Connection.open(self.server.endpoint)
                    try:
                        kept = await self._one(connection, number)
                    except TimeoutError:
                        self.faults.append(f"request {number} is stuck")
                        kept = False
                    except Broken:
                        self.faults.append(f"request {number} was cut off")
                        kept = False
                    if not kept:
                        connection.close()
                        connection = None
                    self.num_done += 1
                    bar.update(task, completed=self.num_done, description=f"{len(self.faults)} faults")
                    if self.num_done % sample_every == 0:
                        self.samples.append({"requests": self.num_done, **self.server.memory()})
                if connection is not None:
                    connection.close()

            await asyncio.gather(*(client() for _ in range(self.num_clients)))

    async def _one(self, connection: Connection, number: int) -> bool:
        """One request; whether the connection can serve another."""
        rng = random.Random(self.seed * 1_000_003 + number)
        if rng.random() < self.share_abandoned:
            where = rng.choice(ABANDONED)
            self.outcomes[f"abandoned: {where}"] += 1
            await self._abandon(connection, rng, where)
            return False
        path, body, expected = a_request(rng)
        reply = await asyncio.wait_for(connection.post(path, body), PATIENCE_S)
        self.outcomes[str(reply.status)] += 1
        fault = what_is_wrong(
            reply.status, expected, reply.events if b"event-stream" in reply.content_type else reply.body, body
        )
        if fault:
            self.faults.append(f"request {number}: {fault}")
        return not connection.closed

    async def _abandon(self, connection: Connection, rng: random.Random, where: str) -> None:
        path, body, _ = a_request(rng, valid=True)
        body |= {"max_tokens": rng.randrange(20, 100), "ignore_eos": True, "stream": where != "whole reply"}
        if where == "half a head":
            connection.transport.write(b"POST /v1/completions HTTP/1.1\r\nHo")
            await asyncio.sleep(rng.random() * 0.01)
        elif where == "half a body":
            head = b"POST /v1/completions HTTP/1.1\r\nHost: o\r\nContent-Length: 100\r\n\r\n"
            connection.transport.write(head + b'{"prompt": "')
            await asyncio.sleep(rng.random() * 0.01)
        else:
            reply = connection.send(path, body)
            if where == "queued":
                await asyncio.sleep(rng.random() * 0.02)
            elif where == "whole reply":
                await asyncio.sleep(rng.random() * 0.3)
            elif where in ("first token", "midway"):
                wanted = 1 if where == "first token" else rng.randrange(2, 12)
                end = time.monotonic() + PATIENCE_S
                while len(reply.pieces) < wanted and not connection.closed:
                    if time.monotonic() > end:
                        raise TimeoutError
                    await asyncio.sleep(0.002)


def a_request(rng: random.Random, *, valid: bool = False) -> tuple[str, dict[str, Any], int]:
    """(path, body, status that it must be answered with)."""
    if rng.random() < 0.05 and not valid:
        wrong: list[dict[str, Any]] = [
            {"prompt": "a", "temperature": -1},
            {"prompt": [10**9]},
            {"prompt": [5] * 600},
            {"prompt": []},
            {"prompt": 5},
        ]
        return "/v1/completions", rng.choice(wrong), 400
    stream = rng.random() < 0.6
    body: dict[str, Any] = {
        "max_tokens": rng.choice((1, 1, 1, 2, 3, 5, 8)),
        "temperature": rng.choice((0, 1)),
        "seed": rng.randrange(1000),
        "stream": stream,
    }
    if rng.random() < 0.06:
        body |= {"max_tokens": 120, "ignore_eos": True}  # long enough to outgrow the pool
    if stream:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.1:
        body["n"] = rng.choice((2, 3))
    if rng.random() < 0.1:
        body["stop"] = [rng.choice("aeiou")]
    if rng.random() < 0.1:
        body["cache_salt"] = str(rng.random())
    if rng.random() < 0.03:
        body["guided_regex"] = f"[a-z]{{1,{rng.randrange(2, 1000)}}}"
    if rng.random() < 0.2:
        words = " ".join(rng.choice(("sea", "page", "stone", "wind", "seven")) for _ in range(rng.randrange(1, 12)))
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}, 200
    if rng.random() < 0.05:
        body["logprobs"] = rng.choice((0, 5))
    shared = [11] * rng.choice((0, 0, 16, 48))
    own = [rng.randrange(3, 40000) for _ in range(rng.randrange(1, 24))]
    return "/v1/completions", body | {"prompt": shared + own}, 200


def what_is_wrong(status: int, expected: int, told: Any, body: dict[str, Any]) -> str:
    """What contradicts the API in a reply: its events if it was a stream, else its body. Nothing is an empty string."""
    if status != expected:
        return f"status {status}, not {expected}: {str(told)[:200]} for {str(body)[:200]}"
    if status != 200:
        return "" if "error" in json.loads(told) else f"no error in {told[:200]!r}"
    n, most = body.get("n", 1), body["max_tokens"]
    if body["stream"]:
        *chunks, last = told
        usage = last.get("usage") or {}
        ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    else:
        whole = json.loads(told)
        usage, ends = whole["usage"], whole["choices"]
    if sorted(end["index"] for end in ends) != list(range(n)):
        return f"choices {ends} for n={n}"
    if any(end["finish_reason"] not in ("stop", "length") for end in ends):
        return f"ends {ends}"
    if not n <= usage.get("completion_tokens", 0) <= n * most:
        return f"usage {usage} for n={n} max_tokens={most}"
    return ""


def settle(server: Server, patience_s: float = 10.0) -> tuple[dict[str, float], list[str]]:
    """(metrics at rest, what is left that should not be)."""
    deadline = time.monotonic() + patience_s
    while True:
        now = server.metrics()
        left = [name for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc") if now[name]]
        left += [name for name in ("kv_pages{state=referenced}", "kv_cache_bytes{holder=running}") if now[name]]
        if not left or time.monotonic() > deadline:
            return now, left
        time.sleep(0.1)


def growth(samples: list[dict[str, Any]], process: str) -> float:
    """Bytes for each request, by the median slope of all pairs of samples after the first fifth (Theil and Sen)."""
    late = [sample for sample in samples if sample["requests"] > samples[-1]["requests"] / 5]
    slopes = [
        (b[process] - a[process]) / (b["requests"] - a["requests"]) for i, a in enumerate(late) for b in late[i + 1 :]
    ]
    return statistics.median(slopes) if slopes else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--abandoned", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pool", default="12MiB", help="bytes of the page pool, for another model")
    args = parser.parse_args()
    before = machine()
    log = Path(tempfile.mkstemp(prefix="octavo-server-", suffix=".log")[1])
    options = (f"--kv-cache-memory-bytes={args.pool}", *OPTIONS)
    with Server(str(resolve(args.model)), *options, log=log) as server:
        soak = Soak(server, args.requests, args.clients, args.abandoned, args.seed)
        at_start = server.metrics()
        start = time.monotonic()
        asyncio.run(soak.run(max(args.requests // 40, 1), progress=True))
        seconds = time.monotonic() - start
        at_end, left = settle(server)
        soak.faults += [f"{name} is {at_end[name]} at rest" for name in left]
        pages = {state: [page[f"kv_pages{{state={state}}}"] for page in (at_start, at_end)] for state in STATES}
        if sum(start for start, _ in pages.values()) != sum(end for _, end in pages.values()):
            soak.faults.append(f"pages do not add up: {pages}")
        slopes = {process: round(growth(soak.samples, process), 1) for process in ("server", "engine")}
        if args.requests >= LONG:
            soak.faults += [
                f"the {name} grows by {by} bytes a request" for name, by in slopes.items() if by > LEVEL_BYTES
            ]
        descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
        engine_pid, code = server.engine_pid, server.stop()
        if code or os.path.exists(f"/proc/{engine_pid}"):
            soak.faults.append(
                f"the server ended with {code}; engine left behind: {os.path.exists(f'/proc/{engine_pid}')}"
            )
    counters = ("num_preemptions_total", "kv_pages_evicted_total", "prefix_cache_hits_total", "generation_tokens_total")
    results = {
        "machine": before,
        "model": args.model,
        "options": options,
        "requests": args.requests,
        "clients": args.clients,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(soak.outcomes.items())),
        "ends": {name: value for name, value in at_end.items() if name.startswith("request_success")},
        "counters": {name: at_end[name] for name in counters},
        "pages_before_and_after": pages,
        "descriptors_at_rest": descriptors,
        "bytes_a_request": slopes,
        "memory": soak.samples,
        "num_faults": len(soak.faults),
        "faults": soak.faults[:50],
        "log": str(log),
    }
    print(json.dumps(results, indent=1))
    sys.exit(1 if soak.faults else 0)


STATES = ("referenced", "cached", "free")


if __name__ == "__main__":
    main()
