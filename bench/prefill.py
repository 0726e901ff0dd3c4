"""How fast prompts of 512 and of 4,096 tokens are computed, against what the machine multiplies; print JSON.

    python bench/prefill.py --lengths 512 4096 --repeats 5

One prompt at a time, nothing cached, one token drawn. `share` is of the bound of octavo.bench.machine in the fastest
repeat, and `attention` the part of that bound's operations which attention takes, at float32's rate. The target is a
share of 0.6 for 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from octavo import SamplingParams
from octavo.bench.machine import Probe, Shape, machine, probe, standing
from octavo.bench.throughput import watched
from octavo.config import EngineConfig
from octavo.models.catalog import resolve

SEED = 1


def measure(args: argparse.Namespace, allowed: Probe) -> list[dict[str, Any]]:
    config = EngineConfig(enable_prefix_caching=False, max_num_seqs=1, num_threads=args.threads)
    llm, watch, shape = watched(resolve(args.model), config)
    chance, results = random.Random(SEED), []
    for length in args.lengths:
        runs = []
        for _ in range(args.repeats + 1):
            prompt = [chance.randrange(llm.model.vocab_size) for _ in range(length)]
            watch.steps.clear()
            start = time.perf_counter()
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            runs.append((time.perf_counter() - start, standing(watch.steps, start, shape, allowed)["all"]))
        results.append(figures(length, runs[1:], allowed, shape))  # the first one warms up
        told = results[-1]
        print(f"{length} tokens: {told['tokens_per_s']:.0f} tokens/s, {100 * told['share']:.0f} %", file=sys.stderr)
    llm.close()
    return results


def figures(length: int, runs: list[tuple[float, dict[str, Any]]], allowed: Probe, shape: Shape) -> dict[str, Any]:
    seconds, best = min(runs, key=lambda run: run[0])
    attention = best["operations"]["float32"] / allowed.operations["float32"]
    return {
        "tokens": length,
        "best_s": seconds,
        "median_s": statistics.median(run[0] for run in runs),
        "tokens_per_s": length / seconds,
        "share": best["share"],
        "attention": attention / best["multiply_s"] if not shape.layers.float32 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    on, allowed = machine(), probe(args.threads)
    results = measure(args, allowed)
    print(json.dumps({"machine": on, "seed": SEED, "probe": allowed._asdict(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
