"""What serving over HTTP costs beside the offline LLM, on the same requests in turn; print JSON.

    python -m bench.server_overhead --rounds 3 --requests 64 --clients 32 --streams 40

*throughput*: output tokens/s of the mixed workload, prompts as token ids, to the offline LLM in one call and to the
server from as many streaming clients as the offline engine runs sequences. *first token*: one stream at a time, from
sending the request (offline: from the call) to the first text, the same prompts in turn. The client shares the cores.
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
from typing import Any

from bench.load import Server, anonymous_bytes, completion, processor_time

from octavo import LLM, SamplingParams
from octavo.bench.machine import machine
from octavo.bench.wire import Connection
from octavo.bench.workloads import WORKLOADS, Work
from octavo.client import Endpoint
from octavo.models.catalog import resolve

KV_BYTES = 1 << 30


async def serve_all(endpoint: Endpoint, requests: list[Work], num_clients: int) -> tuple[int, float]:
    """(tokens of the answers, seconds) with clients that take the next request when theirs is answered."""
    queue = list(reversed(requests))
    connections = [await Connection.open(endpoint) for _ in range(num_clients)]
    num_tokens = 0

    async def client(connection: Connection) -> None:
        nonlocal num_tokens
        while queue:
            prompt, length = queue.pop()
            reply = await connection.post("/v1/completions", completion(prompt, length))
            usage = reply.events[-1]["usage"]
            assert (reply.status, usage["completion_tokens"]) == (200, length), reply.body[:500]
            num_tokens += length

    start = time.perf_counter()
    await asyncio.gather(*(client(connection) for connection in connections))
    seconds = time.perf_counter() - start
    for connection in connections:
        connection.close()
    return num_tokens, seconds


def offline_all(llm: LLM, requests: list[Work]) -> tuple[int, float]:
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for _, length in requests]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    return sum(len(output.outputs[0].token_ids) for output in outputs), time.perf_counter() - start


async def first_token(connection: Connection, prompt: list[int]) -> float:
    reply = await connection.post("/v1/completions", completion(prompt, 4))
    assert reply.status == 200, reply.body[:500]
    return reply.first_at - reply.sent_at


def offline_first_token(llm: LLM, prompt: list[int]) -> float:
    start = time.perf_counter()
    events = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    next(events)
    seconds = time.perf_counter() - start
    list(events)
    return seconds


async def measure(args: argparse.Namespace, llm: LLM, server: Server) -> dict[str, Any]:
    vocab_size = llm.model.vocab_size
    rounds, costs, others = [], [], []
    for number in range(args.rounds + 1):
        count = args.requests if number else 8
        requests = WORKLOADS["mixed"].make(count, vocab_size, random.Random(number))
        runs: dict[str, tuple[int, float]] = {}
        used: dict[str, float] = {}
        strangers: dict[str, float] = {}
        for side in ("offline", "server") if number % 2 else ("server", "offline"):
            before = processor_time(server)
            if side == "offline":
                runs[side] = offline_all(llm, requests)
            else:
                runs[side] = await serve_all(server.endpoint, requests, args.clients)
            spent = {name: after - before[name] for name, after in processor_time(server).items()}
            ours = spent["engine"] + spent["server"] + spent["client"]
            strangers[side] = round((spent["machine"] - ours) / runs[side][1], 2)
            used |= {"offline": spent["client"]} if side == "offline" else spent
        assert runs["offline"][0] == runs["server"][0] == sum(length for _, length in requests)
        if number:  # the first round warms up
            rounds.append({side: round(tokens / seconds, 2) for side, (tokens, seconds) in runs.items()})
            num_tokens = runs["server"][0]
            del used["machine"]
            costs.append({name: round(1e3 * seconds / num_tokens, 3) for name, seconds in used.items()})
            others.append(strangers)
    ratios = [one["server"] / one["offline"] for one in rounds]

    rng = random.Random(7)
    connection = await Connection.open(server.endpoint)
    waits: dict[str, list[float]] = {"offline": [], "server": []}
    for number in range(args.streams + 3):
        prompt = [rng.randrange(3, vocab_size) for _ in range(args.prompt)]
        for side in ("offline", "server") if number % 2 else ("server", "offline"):
            await asyncio.sleep(0.05)  # threads that spin after a step are asleep again
            wait = offline_first_token(llm, prompt) if side == "offline" else await first_token(connection, prompt)
            if number >= 3:
                waits[side].append(wait)
    connection.close()
    added = [1e3 * (served - alone) for served, alone in zip(waits["server"], waits["offline"], strict=True)]
    return {
        "throughput": {
            "requests": args.requests,
            "clients": args.clients,
            "tokens_per_s": rounds,
            "processor_ms_per_token": costs,
            "cores_taken_by_others": others,
            "ratios": [round(ratio, 4) for ratio in ratios],
            "median_ratio": round(statistics.median(ratios), 4),
        },
        "first_token": {
            "streams": args.streams,
            "prompt_tokens": args.prompt,
            "median_ms": {side: round(1e3 * statistics.median(seconds), 3) for side, seconds in waits.items()},
            "added_ms": {
                "median": round(statistics.median(added), 3),
                "quartiles": [round(cut, 3) for cut in statistics.quantiles(added, n=4)],
            },
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the single streams' prompts")
    args = parser.parse_args()
    path = resolve(args.model)
    on = machine()
    log = Path(tempfile.mkstemp(prefix="octavo-server-", suffix=".log")[1])
    engine = {"kv_cache_memory_bytes": KV_BYTES, "max_num_seqs": args.clients}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items()]
    with Server(str(path), *options, log=log) as server, LLM(path, **engine) as llm:
        results = asyncio.run(measure(args, llm, server))
        memory = {"server": anonymous_bytes(server.pid), "engine": anonymous_bytes(server.engine_pid)}
    print(json.dumps({"machine": on, "engine": engine, **results, "anonymous_bytes": memory}, indent=1))


if __name__ == "__main__":
    main()
