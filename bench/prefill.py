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
from typing import Any, NamedTuple

from octavo import SamplingParams
from octavo.bench.machine import Probe, Shape, Step, machine, probe, standing
from octavo.bench.throughput import watched
from octavo.config import EngineConfig
from octavo.models.catalog import resolve

SEED = 1


def measure(args: argparse.Namespace) -> tuple[Probe, list[dict[str, Any]]]:
    config = EngineConfig(enable_prefix_caching=False, max_num_seqs=1, num_threads=args.threads)
    llm, watch, shape = watched(resolve(args.model), config)
    chance, before = random.Random(SEED), probe(args.threads)
    runs: dict[int, list[Fill]] = {length: [] for length in args.lengths}
    for length, fills in runs.items():
        for _ in range(args.repeats + 1):
            prompt = [chance.randrange(llm.model.vocab_size) for _ in range(length)]
            watch.steps.clear()
            start = time.perf_counter()
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            fills.append(Fill(time.perf_counter() - start, start, watch.steps.copy()))
        del fills[0]  # which warmed up
    llm.close()
    allowed = before.best(probe(args.threads))
    return allowed, [figures(length, fills, shape, allowed) for length, fills in runs.items()]


class Fill(NamedTuple):
    """One prompt's run: how long it took, when it began, and its steps."""

    seconds: float
    start: float
    steps: list[Step]


def figures(length: int, fills: list[Fill], shape: Shape, allowed: Probe) -> dict[str, Any]:
    best = min(fills)
    stands = standing(best.steps, best.start, shape, allowed)["all"]
    attention = stands["operations"]["float32"] / allowed.operations["float32"] / stands["multiply_s"]
    print(f"{length} tokens: {length / best.seconds:.0f} tokens/s, {100 * stands['share']:.0f} %", file=sys.stderr)
    return {
        "tokens": length,
        "best_s": best.seconds,
        "median_s": statistics.median(fill.seconds for fill in fills),
        "tokens_per_s": length / best.seconds,
        "share": stands["share"],
        "attention": attention,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    on = machine()
    allowed, results = measure(args)
    print(json.dumps({"machine": on, "seed": SEED, "probe": allowed._asdict(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
