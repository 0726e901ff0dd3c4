"""What it costs to be watched (docs/feed.md); print JSON.

    python -m bench.feed_cost --rounds 8 --requests 24 --pages 100000

*throughput*: output tokens/s of the mixed workload over HTTP, with one client that reads the map's stream at 10 Hz and
with none, in turn; the result is the median of the rounds' ratios. The watcher looks at nothing that it reads, but it
shares the cores. *update*: the control plane alone, with a pool of so many pages that is full of conversations, and
sequences that decode, end, come back and push each other out between two updates; processor time of telling one update
in the engine's process, and of taking it in and making an event of it in the server's. Ten of those are a second's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from bench.load import Server, cpu_seconds
from bench.server_overhead import serve_all

from octavo.bench.machine import machine
from octavo.bench.wire import Connection
from octavo.bench.workloads import WORKLOADS
from octavo.cache.manager import CacheManager
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.process import EngineStats, Reply, TierNews
from octavo.engine.watching import Mapped, Observing
from octavo.models.catalog import resolve
from octavo.scheduler.scheduler import Scheduler
from octavo.server.feed import Feed
from octavo.server.keys import Caller
from octavo.server.recent import Recent
from octavo.types import Moved, MovePage, Request, Sampled, SamplingParams, SliceResult, StepPlan, StepResult, Tier

KV_BYTES = 1 << 30
CLIENTS = 16
MAP = "/v1/cache/map?stream=true"
LENGTH = 16 * 160
"""Of a conversation, in tokens."""


# ── throughput ───────────────────────────────────────────────────────────────────────────────────────────────────


async def watched(args: argparse.Namespace, server: Server, vocab_size: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"alone": [], "watched": []}
    shares: dict[str, list[float]] = {"alone": [], "watched": []}
    costs: dict[str, list[float]] = {"alone": [], "watched": []}
    ratios = []
    for number in range(args.rounds + 1):
        requests = WORKLOADS["mixed"].make(args.requests if number else 4, vocab_size, random.Random(number))
        speed = {}
        for side in ("alone", "watched") if number % 2 else ("watched", "alone"):
            watcher = None
            if side == "watched":
                watcher = await Connection.open(server.endpoint)
                watcher.send(MAP, None, "GET")
                await asyncio.sleep(0.3)
            before, engine = cpu_seconds(server.pid), cpu_seconds(server.engine_pid)
            tokens, seconds = await serve_all(server.endpoint, requests, CLIENTS)
            speed[side] = tokens / seconds
            if number:
                speeds[side].append(round(speed[side], 2))
                shares[side].append(round((cpu_seconds(server.pid) - before) / seconds, 4))
                costs[side].append(round(1e3 * (cpu_seconds(server.engine_pid) - engine) / tokens, 4))
            if watcher is not None:
                assert watcher.reply.status == 200
                watcher.close()
                await asyncio.sleep(6)  # until the engine tells no more
        if number:  # the first round warms up
            ratios.append(speed["watched"] / speed["alone"])
    return {
        "output_tokens_per_s": speeds,
        "server_cores": shares,
        "engine_ms_per_token": costs,
        "ratios": [round(ratio, 4) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 4),
        "median_server_cores": {side: round(statistics.median(values), 4) for side, values in shares.items()},
        "median_engine_ms_per_token": {side: round(statistics.median(values), 4) for side, values in costs.items()},
    }


# ── an update ────────────────────────────────────────────────────────────────────────────────────────────────────


class Nothing:
    """An executor that computes nothing: each token is drawn at random, each move ends well."""

    def __init__(self) -> None:
        self.chance = random.Random(1)

    def execute(self, plan: StepPlan) -> StepResult:
        draw = self.chance.randrange
        results = [SliceResult([Sampled(draw(50_000), 0.0, 0, ()) for _ in piece.draws]) for piece in plan.slices]
        return StepResult(results, [Moved(op.number, True) for op in plan.page_ops if isinstance(op, MovePage)])

    def close(self) -> None:
        """Nothing is open."""


class Conversations:
    """An engine that is full of them. `run` lets some go on."""

    def __init__(self, num_pages: int) -> None:
        config = EngineConfig(max_num_seqs=128, max_num_batched_tokens=4096)
        cache = CacheManager(num_pages, 16, num_host_pages=num_pages // 2, session_ttl=600)
        self.core = EngineCore(Scheduler(config, cache, max_model_len=1 << 16, vocab_size=50_000), Nothing())
        self.chance = random.Random(2)
        self.prompts: list[list[int]] = []
        self.number = 0
        for session in range(num_pages * 16 // LENGTH):
            self.prompts.append([self.chance.randrange(50_000) for _ in range(LENGTH - 32)])
            self.ask(session, 16)
            while self.core.has_work:
                self.core.step(now=time.monotonic())

    def ask(self, session: int, length: int) -> None:
        self.number += 1
        params = SamplingParams(max_tokens=length, ignore_eos=True, seed=1)
        prompt = self.prompts[session]
        self.core.add(Request(str(self.number), prompt, params, ("key", "a"), tenant="a", session_id=f"s{session}"))

    def run(self, num_steps: int, num_running: int) -> None:
        """So many steps of so many sequences; who ends is followed by another."""
        for _ in range(num_steps):
            while self.core.scheduler.num_running + self.core.scheduler.num_waiting < num_running:
                session = self.chance.randrange(len(self.prompts))
                self.prompts[session] += [self.chance.randrange(50_000) for _ in range(40)]
                self.ask(session, self.chance.randrange(20, 200))
            self.core.step(now=time.monotonic())


async def update(args: argparse.Namespace) -> dict[str, Any]:
    made = Conversations(args.pages)
    sent: list[bytes] = []
    observing = Observing(made.core, lambda message: sent.append(msgspec.msgpack.encode(message)))
    tiers = made.core.cache.tier_pages()
    llm = SimpleNamespace(
        on_map=None,
        watch=observing.turn,
        healthy=True,
        limits=made.core.scheduler.limits,
        config=EngineConfig(),
        num_open=100,
        stats=lambda: EngineStats(tiers=TierNews(pages=tiers), num_pages=args.pages),
        stream=lambda name: SimpleNamespace(
            queued_at=0.0, request=SimpleNamespace(tenant="a", session_id="s", prompt_token_ids=b"")
        ),
    )
    feed = Feed(cast("Any", llm), "m", Recent(), Recent())
    feed._enter()
    decoder = msgspec.msgpack.Decoder(Reply)
    began = time.thread_time()
    num_pieces = 0
    while not num_pieces or observing._behind:
        observing.tell(time.monotonic() + 3600 * num_pieces)
        num_pieces += 1
    first_s = time.thread_time() - began
    for data in sent:
        feed._take(cast("Mapped", decoder.decode(data)))
    began = time.thread_time()
    snapshot = feed._snapshot(Caller("", True))
    snapshot_s = time.thread_time() - began
    told, taken, sizes, changed = [], [], [], []
    for number in range(args.updates):
        made.run(args.steps, args.running)
        sent.clear()
        changed.append(observing._watch.num_changed if observing._watch is not None else 0)
        began = time.thread_time()
        observing.tell(1e9 + number)
        told.append(time.thread_time() - began)
        began = time.thread_time()
        feed._take(cast("Mapped", decoder.decode(sent[0])))
        sizes.append(len(feed._delta(Caller("", True), feed._at - 1)))
        taken.append(time.thread_time() - began)
    pages = made.core.cache.tier_pages()
    return {
        "pages": {tier.name.lower(): pages[tier].total for tier in (Tier.DEVICE, Tier.HOST)},
        "free": {tier.name.lower(): pages[tier].free for tier in (Tier.DEVICE, Tier.HOST)},
        "first": {"pieces": num_pieces, "engine_ms": round(1e3 * first_s, 2), "longest_piece_pages": 4096},
        "snapshot": {"bytes": len(snapshot), "server_ms": round(1e3 * snapshot_s, 2)},
        "changed_pages": round(statistics.mean(changed), 1),
        "event_bytes": round(statistics.mean(sizes)),
        "engine_ms": round(1e3 * statistics.mean(told), 3),
        "server_ms": round(1e3 * statistics.mean(taken), 3),
        "cores_at_10_hz": {
            "engine": round(10 * statistics.mean(told), 5),
            "server": round(10 * statistics.mean(taken), 5),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=8, help="of throughput; 0: the control plane only")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4, help="between two updates")
    parser.add_argument("--running", type=int, default=100, help="sequences in a step of the control plane")
    args = parser.parse_args()
    on = machine()
    results: dict[str, Any] = {"update": asyncio.run(update(args))} if args.updates else {}
    if args.rounds:
        log = Path(tempfile.mkstemp(prefix="octavo-server-", suffix=".log")[1])
        with Server(str(resolve(args.model)), f"--kv-cache-memory-bytes={KV_BYTES}", log=log) as server:
            results["throughput"] = asyncio.run(watched(args, server, 49_000))
    print(json.dumps({"machine": on, **results}, indent=1))


if __name__ == "__main__":
    main()
