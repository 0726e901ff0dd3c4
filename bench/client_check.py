"""Whether `octavo bench serve` sees what OpenAI's own Python client sees of one server, at the same time.

    python -m bench.client_check smollm2-135m --rounds 3

Both clients, each in a process of its own, send the same requests to the server, a few at a time each, beginning at the
same moment: the same batches serve both, and whatever else the machine does hits both. The server has no prefix cache,
so that neither helps the other, and one thread. Prints JSON: the medians of the rounds of both clients, and by how many
percent they differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
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


def theirs(*args: Any) -> dict[str, float]:
    return asyncio.run(ask_all(*args))


def ours(target: Target, plan: Plan, begin_at: float) -> dict[str, float]:
    def wait(about: str, done: int, total: int) -> None:
        if done == 0 and "round" in about:
            time.sleep(max(begin_at - time.time(), 0))

    [record], _ = measure([target], plan, wait)
    return {name: record["runs"][0][name] for name in NAMES}


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
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with Server(str(resolve(args.model)), *OPTIONS) as server, pool:
        target = Target.find(server.url, None, None, None, "/v1/completions", False, 49_152)
        prompts = [talk.turns[0] for talk in plan.draw(0, 0.0, target.vocab)]
        for number in range(args.rounds):
            begin_at = time.time() + PREPARE_S
            other = pool.submit(theirs, server.url, prompts, args.concurrency, begin_at)
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
