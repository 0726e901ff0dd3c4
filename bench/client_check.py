"""Whether `octavo bench serve` sees what OpenAI's own Python client sees: the very same answers, at the same time.

    python -m bench.client_check smollm2-135m --rounds 3

Both clients, each in a process of its own, send the same requests, a few at a time. Between them and the server stands
a tee: it sends each request on once both have sent it, and every piece of the answer to both the moment it comes. So
whatever the server and the machine do hits both alike, and what differs is the clients' own. Prints JSON: the medians
of the rounds of both clients, and by how many percent they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

from bench.load import Server
from openai import AsyncOpenAI

from octavo.bench.loads import of_workload
from octavo.bench.machine import machine
from octavo.bench.serve import Plan, Target, measure
from octavo.bench.workloads import WORKLOADS, Work
from octavo.models.catalog import resolve

OPTIONS = ("--no-enable-prefix-caching", "--kv-cache-memory-bytes=512MiB", "--max-model-len=2048", "--num-threads=1")
LENGTH = re.compile(rb"(?i)\ncontent-length: *(\d+)")
ALONE = 4
"""Tokens of the warm-up's answers."""
PREPARE_S = 6.0
"""How long both clients have to get ready."""
NAMES = ("output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms", "mean_itl_ms", "median_e2el_ms")


async def ask_all(url: str, prompts: list[Work], at_once: int, begin_at: float) -> dict[str, float]:
    """The figures of a run, as someone would write them who knows nothing of ours but what is sent."""
    places = asyncio.Semaphore(at_once)
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    num_tokens = 0

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        model = (await client.models.list()).data[0].id

        async def one(prompt: list[int], max_tokens: int) -> None:
            nonlocal num_tokens
            async with places:
                sent, times, usage = time.perf_counter(), [], 0
                stream = await client.completions.create(
                    model=model,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                async for chunk in stream:
                    if chunk.choices and (chunk.choices[0].text or not chunk.choices[0].finish_reason):
                        times.append(time.perf_counter())
                    if chunk.usage:
                        usage = chunk.usage.completion_tokens
            num_tokens += usage
            found["ttft"].append(times[0] - sent)
            found["tpot"].append((times[-1] - times[0]) / (usage - 1))
            found["itl"] += [after - before for before, after in pairwise(times)]
            found["e2el"].append(times[-1] - sent)

        await asyncio.sleep(begin_at - time.time())
        start = time.perf_counter()
        await asyncio.gather(*(one(work.prompt, work.max_tokens) for work in prompts))
        seconds = time.perf_counter() - start
    latencies = {f"median_{name}_ms": 1e3 * statistics.median(values) for name, values in found.items()}
    rates = {"output_throughput": num_tokens / seconds, "request_throughput": len(prompts) / seconds}
    return {**rates, **latencies, "mean_itl_ms": 1e3 * statistics.fmean(found["itl"])}


class Tee:
    """Answers two clients that ask for the same with what a server answers one. Short answers are asked for alone."""

    def __init__(self, port: int) -> None:
        self.open: set[asyncio.Task[None]] = set()
        self._port = port
        self._waiting: dict[str, tuple[asyncio.StreamWriter, asyncio.Event]] = {}

    async def serve(self, port: int) -> None:
        await (await asyncio.start_server(self.client, "127.0.0.1", port)).serve_forever()

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection to its end."""
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                asked = json.loads(body) if body else {"max_tokens": 0}
                if asked["max_tokens"] <= ALONE:
                    await self._forward(head + body, [writer])
                    continue
                key = str(asked["prompt"])
                if key not in self._waiting:
                    self._waiting[key] = writer, asyncio.Event()
                    await self._waiting[key][1].wait()
                else:
                    twin, answered = self._waiting[key]
                    await self._forward(head + body, [writer, twin])
                    del self._waiting[key]
                    answered.set()

    async def _forward(self, request: bytes, to: list[asyncio.StreamWriter]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(request)
        head = data = await reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        left = int(length[1]) if length else -1
        while True:
            for one in to:
                one.write(data)
            if left == 0 or (left < 0 and data.endswith(b"\r\n0\r\n\r\n")) or data == b"0\r\n\r\n":
                break
            data = await reader.read(65536)
            left -= len(data) if left > 0 else 0
        writer.close()


def tee(*ports: int) -> None:
    asyncio.run(Tee(ports[1]).serve(ports[0]))


def theirs(*args: Any) -> dict[str, float]:
    return asyncio.run(ask_all(*args))


def ours(target: Target, plan: Plan, begin_at: float) -> dict[str, float]:
    def wait(about: str, done: int, total: int) -> None:
        if done == 0 and "round" in about:
            time.sleep(max(begin_at - time.time(), 0))

    [record], _ = measure([target], plan, wait)
    return {name: record["runs"][0][name] for name in NAMES}


def wait_for(port: int) -> None:
    """Until something listens there."""
    deadline = time.monotonic() + 60
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        if time.monotonic() > deadline:
            raise SystemExit("the tee did not start")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    on = machine()
    load = of_workload(WORKLOADS["uniform"], args.requests)
    plan = Plan(load, [0.0], [args.concurrency], 1, 1, 600.0, 4, ignore_eos=True, goals={}, price=None)
    runs: dict[str, list[dict[str, float]]] = {"octavo": [], "openai": []}
    spawn = get_context("spawn")
    with (
        Server(str(resolve(args.model)), *OPTIONS) as server,
        ProcessPoolExecutor(1, mp_context=spawn) as pool,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        port = free.getsockname()[1]
        free.close()
        between = spawn.Process(target=tee, args=(port, server.port), daemon=True)
        between.start()
        url = f"http://127.0.0.1:{port}"
        wait_for(port)
        target = Target.find(url, None, None, None, "/v1/completions", False, 49_152)
        prompts = [talk.turns[0] for talk in plan.draw(0, 0.0, target.vocab)]
        for number in range(args.rounds):
            begin_at = time.time() + PREPARE_S
            other = pool.submit(theirs, url, prompts, args.concurrency, begin_at)
            runs["octavo"].append(ours(target, plan, begin_at))
            runs["openai"].append(other.result())
            speeds = ", ".join(f"{side} {of[-1]['output_throughput']:.1f}" for side, of in runs.items())
            print(f"round {number + 1}: {speeds} tokens/s", file=sys.stderr)
    medians = {side: {name: statistics.median(run[name] for run in of) for name in NAMES} for side, of in runs.items()}
    percent = {name: 100 * (medians["octavo"][name] / medians["openai"][name] - 1) for name in NAMES}
    print(
        json.dumps({"machine": on, "asked": vars(args), "medians": medians, "percent": percent, "runs": runs}, indent=1)
    )


if __name__ == "__main__":
    main()
