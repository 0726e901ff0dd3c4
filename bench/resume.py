"""How long a prompt that comes back takes to its first token: its pages fetched from a tier, or computed; print JSON.

    python bench/resume.py --repeats 5
    python bench/resume.py --tiers slow --repeats 3

A prompt of each length is served, leaves the pool with all that is cached there, and returns with a few new tokens. The
preemption modes take turns, to and fro, on one engine for each tier. *disk* is a file that no memory holds when it is
read. *slow* is the same file, but a page takes at least `--slowness` times what it takes to compute one near the
beginning: since a token costs more the further back it looks, short prompts are then computed faster than they come
back, and long ones are not. For each length: seconds to the first token (median, least and most), `ratio` of computing
to fetching, `auto_ratio` of auto to the better one, at most 1.1 if all is well, and the share of the prompt that auto
fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from octavo import LLM, SamplingParams
from octavo.bench.machine import machine
from octavo.engine import page_file

SEED = 1
LENGTHS = [256, 512, 1024, 2048, 4096]
MODES = ("swap", "recompute", "auto")
NUM_NEW = 8
"""Tokens that a returning prompt brings along. Fewer than a page."""
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
TARGETS = {"auto_ratio": 1.1}


class Bench:
    """An engine whose cached pages leave for one tier."""

    def __init__(self, model: str, tier: str, directory: str, args: argparse.Namespace) -> None:
        options: dict[str, Any] = {"swap_space": 0.5} if tier == "host" else {"kv_offload_dir": directory}
        longest = max(args.lengths) + 2 * NUM_NEW
        self.llm = LLM(
            model, kv_cache_memory_bytes=args.pool, max_model_len=longest, num_threads=args.threads, **options
        )
        self.core = self.llm._core
        self.costs = self.core.cache.tiers.costs
        self.path = Path(directory, page_file.NAME) if tier != "host" else None
        if tier == "slow":
            store, page_s = self.llm._engine.store, args.slowness * self.costs.recompute_s(0, 16)
            assert store.disk is not None
            store.disk.read = partial(_slowly, store.disk.read, page_s)
            self.costs.load_s = store.load_seconds()
        chance = random.Random(SEED)
        self.draw = partial(chance.randrange, 10, 40_000)

    def prompt(self, length: int) -> list[int]:
        """Serve a new prompt."""
        tokens = [self.draw() for _ in range(length)]
        self.push_out()
        self.llm.generate([tokens], GREEDY)
        return tokens

    def push_out(self) -> None:
        """Let everything leave the pool, and wait until it has."""
        self.costs.mode = "swap"
        self.core.cache.drop_cached()
        while self.core.has_work:
            self.core.step(now=time.monotonic())
        if self.path is not None:
            with self.path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def come_back(self, tokens: list[int], mode: str) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens were not computed."""
        self.push_out()
        self.costs.mode = mode
        [output] = self.llm.generate([tokens + [self.draw() for _ in range(NUM_NEW)]], GREEDY)
        assert output.metrics.time_to_first_token_s is not None
        return output.metrics.time_to_first_token_s, output.metrics.num_cached_tokens


def _slowly(read: Callable[[int, memoryview], None], least_s: float, record: int, page: memoryview) -> None:
    begun = time.perf_counter()
    read(record, page)
    time.sleep(max(0.0, begun + least_s - time.perf_counter()))


def measure(
    model: str, tier: str, directory: str, args: argparse.Namespace, done: Callable[[], None]
) -> dict[str, Any]:
    bench = Bench(model, tier, directory, args)
    at_start = {tier.name.lower(): seconds for tier, seconds in bench.costs.load_s.items()}
    page_s = {"computed": bench.costs.recompute_s(0, 16), **at_start}
    found = []
    for length in args.lengths:
        tokens = bench.prompt(length)
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        fetched: list[int] = []
        for repeat in range(args.repeats):
            for mode in MODES if repeat % 2 == 0 else reversed(MODES):  # what is read soon again may still be near
                took, num_cached = bench.come_back(tokens, mode)
                seconds[mode].append(took)
                assert mode == "auto" or num_cached == (length if mode == "swap" else 0), (mode, num_cached)
                fetched += [num_cached] if mode == "auto" else []
                done()
        swap, recompute, auto = (statistics.median(seconds[mode]) for mode in MODES)
        found.append(
            {
                "tokens": length,
                **{
                    mode: [round(told(times), 4) for told in (statistics.median, min, max)]
                    for mode, times in seconds.items()
                },
                "ratio": round(recompute / swap, 2),
                "auto_ratio": round(auto / min(swap, recompute), 3),
                "auto_fetched": round(statistics.mean(fetched) / length, 2),
            }
        )
    bench.llm.close()
    return {"page_s": page_s, "lengths": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tiers", nargs="+", choices=("host", "disk", "slow"), default=["host", "disk", "slow"])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens, multiples of 16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slowness", type=float, default=1.5)
    parser.add_argument("--pool", type=int, default=128 << 20, help="bytes; the longest prompt must fit")
    parser.add_argument("--directory", help="where the file shall lie; a temporary folder unless given")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    on, results = machine(), {}
    total = len(args.tiers) * len(args.lengths) * args.repeats * len(MODES)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        for tier in args.tiers:
            bar.update(task, description=tier)
            with tempfile.TemporaryDirectory(dir=args.directory) as directory:
                results[tier] = measure(args.model, tier, directory, args, partial(bar.advance, task))
    for tier, result in results.items():
        for row in result["lengths"]:
            told = ", ".join(f"{mode} {row[mode][0] * 1e3:.0f} ms" for mode in MODES)
            print(f"{tier}, {row['tokens']} tokens: {told}; auto / better {row['auto_ratio']}", file=sys.stderr)
    print(json.dumps({"machine": on, "arguments": vars(args), "targets": TARGETS, "results": results}, indent=1))


if __name__ == "__main__":
    main()
