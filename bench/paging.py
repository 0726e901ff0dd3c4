"""What pages of sixteen tokens cost beside one page for a whole sequence, on the same work; print JSON.

    python bench/paging.py --workload uniform --requests 32 --rounds 3
    python bench/paging.py --workload long --requests 8

Engines that differ in nothing but the size of a page, on one copy of the weights, take the same steps in turn:
scheduling, attention and all the rest is timed, and the tokens drawn must be equal. A step's repeats are compared by
their fastest: `overhead` by their sums, in which a few long steps with prompts weigh most and noise in them shows,
`median_step` by the median of the steps' ratios, nearly all of which decode. `rounds` has the ratio of whole rounds.

In a page a row of keys is as long as the page, and a power of two puts all rows into the same few sets of the caches: a
second size is there so that the rival is not handicapped. The target is 0.01.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from operator import truediv
from pathlib import Path
from typing import Any

from octavo.bench.machine import machine
from octavo.bench.workloads import WORKLOADS, Work
from octavo.cache.manager import CacheManager
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.guide import Guides
from octavo.engine.kv_store import KVStore
from octavo.engine.runner import ModelRunner
from octavo.engine.sampler import Sampler
from octavo.kv_format import KVFormat
from octavo.models import ARCHITECTURES
from octavo.models.catalog import resolve
from octavo.models.weights import open_checkpoint
from octavo.ops.cpu import CpuOps
from octavo.scheduler.scheduler import Scheduler
from octavo.types import Request, SamplingParams

PAGE = 16
SEED = 1


def engines(path: Path, sizes: list[int], args: argparse.Namespace) -> dict[int, EngineCore]:
    """An engine for each size of a page, without prefix caching, over one decoder."""
    checkpoint = open_checkpoint(path)
    model, max_model_len, ops = checkpoint.config, min(args.whole), CpuOps(args.threads)
    decoder, guides = (
        ARCHITECTURES[model.architecture](checkpoint, ops, max_model_len),
        Guides(checkpoint.tokenizer(), model.vocab_size),
    )
    cores = {}
    for size in sizes:
        config = EngineConfig(block_size=size, max_num_seqs=args.max_num_seqs, enable_prefix_caching=False)
        pages = KVFormat("bf16", model.num_layers, model.num_kv_heads, model.head_dim, size)
        # as many again for all, because admission keeps some free; untouched memory is not mapped
        num_pages = 2 * args.max_num_seqs * pages.num_pages(max_model_len)
        cache = CacheManager(num_pages, size, enable_prefix_caching=False)
        limits: dict[str, Any] = {"max_model_len": max_model_len, "vocab_size": model.vocab_size}
        runner = ModelRunner(decoder, KVStore(ops, pages, num_pages), Sampler(ops, frozenset()), guides)
        cores[size] = EngineCore(Scheduler(config, cache, eos_token_ids=frozenset(), **limits), runner)
    return cores


def lockstep(cores: dict[int, EngineCore], work: list[Work]) -> dict[int, list[float]]:
    """Seconds of each engine's steps, each taken by all engines before the next."""
    for core in cores.values():
        for number, (prompt, max_tokens) in enumerate(work):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            core.add(Request(str(number), prompt, params))
    times: dict[int, list[float]] = {size: [] for size in cores}
    while cores[PAGE].has_work:
        turn = list(cores) if len(times[PAGE]) % 2 else list(reversed(cores))
        drawn = []
        for size in turn:
            start = time.perf_counter()
            outputs = cores[size].step()
            times[size].append(time.perf_counter() - start)
            drawn.append([(output.request_id, output.new_tokens[0].token_id) for output in outputs])
        assert all(other == drawn[0] for other in drawn), "page sizes differ in what they computed"
    return times


def measure(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    cores = engines(path, [PAGE, *args.whole], args)
    workload = WORKLOADS[args.workload]
    vocab_size = cores[PAGE].scheduler.limits.vocab_size
    warm_up, work = workload.draw(args.requests, vocab_size, SEED)
    lockstep(cores, warm_up)
    rounds = [lockstep(cores, work) for _ in range(args.rounds)]
    fastest = {size: list(map(min, zip(*(times[size] for times in rounds), strict=True))) for size in cores}
    return [
        {
            "pages": [PAGE, size],
            "fastest_s": [round(sum(fastest[PAGE]), 4), round(sum(fastest[size]), 4)],
            "overhead": round(sum(fastest[PAGE]) / sum(fastest[size]) - 1, 4),
            "median_step": round(statistics.median(map(truediv, fastest[PAGE], fastest[size])) - 1, 4),
            "rounds": [round(sum(times[PAGE]) / sum(times[size]) - 1, 4) for times in rounds],
        }
        for size in args.whole
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--workload", choices=WORKLOADS, default="uniform")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--whole", type=int, nargs="+", default=[2048, 2064], help="tokens of the one page")
    args = parser.parse_args()
    on = machine()
    results = measure(resolve(args.model), args)
    print(json.dumps({"machine": on, "arguments": vars(args), "seed": SEED, "results": results}, indent=1))


if __name__ == "__main__":
    main()
