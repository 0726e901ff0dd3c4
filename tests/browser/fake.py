"""A feed without an engine: a pool of any size whose pages change as told, behind the page as it is served.

It is for what no small machine can do with a model: 100,000 pages that change ten times a second.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from octavo.server import assets

STATES = ("free", "active", "shared", "pinned", "idle", "cached", "moving")
REFERENCED = (1, 2, 3, 6)
TOTALS = (
    *("evicted", "dropped", "copied", "merged", "swapped_out", "swapped_in", "saved", "moves_failed", "preemptions"),
    *("prompt_tokens", "generation_tokens", "computed_tokens", "queried_tokens", "hit_tokens"),
)


class FakePool:
    """Pages with states and holders that chance changes; what a server would tell of them."""

    def __init__(self, tiers: dict[str, int], *, num_sessions: int = 40, seed: int = 0, fill: bool = True) -> None:
        self.chance = random.Random(seed)
        self.seq = 1
        self.tiers = {name: [[0, 0] for _ in range(size)] for name, size in tiers.items()}
        self.page_bytes = 368_640
        self.totals = dict.fromkeys(TOTALS, 0)
        self.holders = [
            {
                "id": i + 1,
                "kind": "session",
                "tenant": "",
                "name": f"conversation {i + 1}",
                "running": int(i % 5 == 0),
                "idle_s": 0.0 if i % 5 == 0 else float(self.chance.randrange(5, 9000)),
                "pinned_s": 300.0 if i == 3 else 0.0,
                "num_requests": i % 7 + 1,
                "queried_tokens": 1000,
                "hit_tokens": 640,
            }
            for i in range(num_sessions)
        ]
        self.holders.append({**self.holders[0], "id": num_sessions + 1, "kind": "prefix", "name": "", "running": 0})
        self.holders.append({**self.holders[0], "id": num_sessions + 2, "kind": "shared", "name": "", "running": 0})
        self.requests: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        if fill:
            for name, cells in self.tiers.items():
                first = 0
                while first < len(cells):
                    count = min(self.chance.randrange(4, 2 + max(len(cells) // 24, 8)), len(cells) - first)
                    self.put(name, first, count)
                    first += count

    def put(self, tier: str, first: int, count: int) -> list[list[int]]:
        """Give a run of pages to somebody, or to nobody. The runs that changed."""
        state = self.chance.choices((0, 1, 2, 3, 4, 5, 6), (16, 18, 7, 2, 42, 18, 1))[0]
        if tier != "device" and state in (1, 3):
            state = 4
        n = len(self.holders) - 2
        holder = {0: 0, 2: n + 2, 5: n + 1, 3: 4}.get(state) or 0
        if state in (1, 4, 6):
            holder = self.chance.randrange(0, n, 5) + 1 if state == 1 else int(n * self.chance.random() ** 2.2) + 1
        for cell in self.tiers[tier][first : first + count]:
            cell[:] = [state, holder]
        return [[first, count, state, holder]]

    def churn(self, num_runs: int, longest: int) -> dict[str, list[list[int]]]:
        """Change runs of random pages on the device."""
        cells = self.tiers["device"]
        runs: list[list[int]] = []
        for _ in range(num_runs):
            count = self.chance.randrange(1, longest + 1)
            runs += self.put("device", self.chance.randrange(len(cells) - count), count)
        self.totals["evicted"] += self.chance.randrange(3)
        self.totals["swapped_out"] += self.chance.random() < 0.1
        self.totals["preemptions"] += self.chance.random() < 0.02
        self.seq += 1
        return {"device": runs}

    def stats(self) -> dict[str, Any]:
        tiers = {}
        for name, cells in self.tiers.items():
            of = [0] * len(STATES)
            for state, _ in cells:
                of[state] += 1
            tiers[name] = {
                "total": len(cells),
                "referenced": sum(of[state] for state in REFERENCED),
                "cached": of[4] + of[5],
                "free": of[0],
                "pinned": of[3],
                "states": dict(zip(STATES, of, strict=True)),
            }
        return {
            "tiers": tiers,
            "running": sum(request["phase"] != "waiting" for request in self.requests),
            "waiting": sum(request["phase"] == "waiting" for request in self.requests),
            "totals": dict(self.totals),
            "spared_pages": 0,
            "saved_by_sharing_pages": len(self.tiers["device"]) // 9,
            "ttft_s": {"p50": 0.142, "p99": 0.81, "n": 40},
            "itl_s": {"p50": 0.021, "p99": 0.064, "n": 900},
        }

    def snapshot(self) -> dict[str, Any]:
        return {
            "version": 1,
            "seq": self.seq,
            "time": time.time(),
            "model": "fake",
            "kv_layout": "paged",
            "page_tokens": 16,
            "page_bytes": self.page_bytes,
            "show_text": False,
            "admin": True,
            "states": STATES,
            "tiers": [
                {"name": name, "num_pages": len(cells), "runs": runs(cells)} for name, cells in self.tiers.items()
            ],
            "holders": self.holders,
            "stats": self.stats(),
            "requests": self.requests,
            "num_requests": len(self.requests),
            "history": self.history,
        }

    def delta(self, changed: dict[str, list[list[int]]], stats: dict[str, Any]) -> dict[str, Any]:
        tiers = [{"name": name, "runs": runs} for name, runs in changed.items()]
        return {
            "seq": self.seq,
            "time": time.time(),
            "tiers": tiers,
            "holders": [],
            "gone": [],
            "stats": stats,
            "num_requests": len(self.requests),
        }


def runs(cells: list[list[int]]) -> list[list[int]]:
    """Cells as [first, count, state, holder]."""
    found: list[list[int]] = []
    for i, (state, holder) in enumerate(cells):
        if found and found[-1][2:] == [state, holder]:
            found[-1][1] += 1
        else:
            found.append([i, 1, state, holder])
    return found


def application(pool: FakePool, step: Callable[[], dict[str, list[list[int]]]], hz: float = 10) -> Starlette:
    """The page and a feed below it; `step` changes the pool and says what it changed."""

    async def events() -> AsyncIterator[str]:
        yield f"event: snapshot\ndata: {json.dumps(pool.snapshot())}\n\n"
        stats = pool.stats()
        due = time.monotonic()
        while True:
            due += 1 / hz
            await asyncio.sleep(max(due - time.monotonic(), 0))
            yield f"event: delta\ndata: {json.dumps(pool.delta(step(), stats))}\n\n"

    async def feed(http: Request) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    async def nothing(http: Request) -> Response:
        return JSONResponse({"error": {"message": "a fake has none"}}, 404)

    routes = [*assets.routes(), Route("/v1/cache/map", feed), Route("/{rest:path}", nothing)]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return app


@contextmanager
def running(app: Starlette, port: int = 0) -> Iterator[str]:
    """Serve it in a thread. Its URL."""
    sock = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=0))
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()
