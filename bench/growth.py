"""How the time of a step grows: with the context, with running sequences, with cached pages. Prints JSON, plots a PNG.

    make growth                                    docs/growth.png, and growth.json beside the sources
    python bench/growth.py --axes context running --plot growth.png
    python bench/growth.py --axes running full cached --control --host-pages 4096 --watch

Steps draw one token for each running sequence. *context*: one sequence, its context up to the model's; longer prompts
begin with the shorter ones, which are found in the cache. *running*: 1 to 256 sequences of 64 tokens. *full*: the
same in a pool that is full of cached pages, so that each new page costs one; each step a sixteenth of the sequences
needs one. *cached*: 32 sequences beside up to 100,000 cached pages, which an executor that computes nothing has
filled, so that they take no memory.

With `--control` nothing is computed anywhere, with `--host-pages` pages leave for host memory, and with `--watch` the
map of the memory is told as a server's engine tells it.

A point is the median of some steps, in seconds, in the repeat where that was least; `control_s` is what is spent
outside of the executor: scheduling, the plan, and taking its results in. `slope_s` is that of a straight line through
the points (least squares), `r2` how well it fits. Every second repeat goes backwards.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.machine import machine
from octavo.cache.explain import Explainer
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor
from octavo.engine.llm import Engine, assemble
from octavo.engine.process import framed
from octavo.engine.sizing import GIB
from octavo.engine.watching import Observing
from octavo.models.catalog import resolve
from octavo.models.weights import open_checkpoint
from octavo.types import Moved, MovePage, Request, Sampled, SamplingParams, SliceResult, StepPlan, StepResult

SEED = 1
CONTEXTS = [128, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8128]
RUNNING = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
CACHED = [0, 1000, 10_000, 25_000, 50_000, 75_000, 100_000]
LABELS = {
    "context": "tokens of context, one sequence",
    "running": "running sequences of 64 tokens",
    "full": "running sequences of 64 tokens, beside cached pages",
    "cached": "cached pages, 32 sequences of 64 tokens",
}


class Switch:
    """An executor that can be told to compute nothing, and times what it does."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.idle = False
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        if self.idle:
            results = [SliceResult([Sampled(0, 0.0, 0, ())] * len(piece.draws)) for piece in plan.slices]
            result = StepResult(results, [Moved(op.number, True) for op in plan.page_ops if isinstance(op, MovePage)])
        else:
            result = self._executor.execute(plan)
        self.seconds = time.perf_counter() - start
        return result

    def close(self) -> None:
        self._executor.close()


class Bench:
    """An engine whose steps are taken one by one."""

    def __init__(self, engine: Engine, *, control: bool = False, watch: bool = False) -> None:
        self.switch = Switch(engine.core.executor)
        self.core = EngineCore(engine.core.scheduler, self.switch)
        self.control = self.switch.idle = control
        self.observing = Observing(self.core, framed)
        if watch:
            Explainer(self.core.cache)
            self.observing.turn(True)
        self.vocab_size = engine.model.vocab_size
        self._numbers = itertools.count()

    def add(self, prompt: list[int], max_tokens: int) -> str:
        request_id = str(next(self._numbers))
        self.core.add(
            Request(request_id, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        )
        return request_id

    def decode(self, prompts: list[list[int]], steps: int) -> list[tuple[float, float]]:
        """(seconds, of which outside the executor) of so many steps of these sequences, once they are all running."""
        ids = [self.add(prompt, steps + 16) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < len(ids):
            begun |= {output.request_id for output in self.core.step()}
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            assert len(self.core.step()) == len(ids)
            self.observing.tell(time.monotonic())
            seconds = time.perf_counter() - start
            times.append((seconds, seconds - self.switch.seconds))
        for request_id in ids:
            self.core.abort(request_id)
        return times

    def fill(self, num_pages: int, chance: random.Random) -> None:
        """Cache at least so many pages, nothing computed."""
        self.switch.idle = True
        while self.core.cache.pool.num_cached < num_pages:
            missing = num_pages - self.core.cache.pool.num_cached
            self.add([chance.randrange(self.vocab_size) for _ in range(16 * min(missing, 500) + 1)], 1)
            while self.core.has_work:
                self.core.step()
        self.switch.idle = self.control


def context(bench: Bench, chance: random.Random, args: argparse.Namespace) -> Iterator[tuple[int, Callable[[], Any]]]:
    text = [chance.randrange(bench.vocab_size) for _ in range(max(CONTEXTS))]
    for length in CONTEXTS:
        yield length, lambda length=length: bench.decode([text[:length]], args.steps)


def running(bench: Bench, chance: random.Random, args: argparse.Namespace) -> Iterator[tuple[int, Callable[[], Any]]]:
    prompts = [[chance.randrange(bench.vocab_size) for _ in range(56)] for _ in range(max(RUNNING))]
    for count in RUNNING:
        yield count, lambda count=count: bench.decode(prompts[:count], args.steps)


def full(bench: Bench, chance: random.Random, args: argparse.Namespace) -> Iterator[tuple[int, Callable[[], Any]]]:
    bench.fill(bench.core.cache.num_pages - 1, chance)
    prompts = [[chance.randrange(bench.vocab_size) for _ in range(41 + at % 16)] for at in range(max(RUNNING))]
    for count in RUNNING:
        yield count, lambda count=count: bench.decode(prompts[:count], args.steps)


def cached(bench: Bench, chance: random.Random, args: argparse.Namespace) -> Iterator[tuple[int, Callable[[], Any]]]:
    prompts = [[chance.randrange(bench.vocab_size) for _ in range(56)] for _ in range(32)]
    for count in CACHED:

        def run(count: int = count) -> list[tuple[float, float]]:
            bench.fill(count, chance)
            return bench.decode(prompts, args.steps)

        yield count, run


AXES = {"context": (context, 1), "running": (running, 256), "full": (full, 256), "cached": (cached, 32)}
"""What gives the points, and how many sequences run at most."""


def engine(path: Path, axis: str, args: argparse.Namespace) -> Engine:
    checkpoint = open_checkpoint(path)
    c = checkpoint.config
    page_bytes = 16 * 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2
    num_pages = max(CACHED) + 1000 if axis == "cached" else 2048  # of the many pages most are never written, nor mapped
    config = EngineConfig(
        max_num_seqs=AXES[axis][1],
        kv_cache_memory_bytes=num_pages * page_bytes,
        swap_space=args.host_pages * page_bytes / GIB,
        num_threads=args.threads,
    )
    return assemble(checkpoint, config)


def measure(path: Path, axis: str, args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(engine(path, axis, args), control=args.control, watch=args.watch)
    points = list(AXES[axis][0](bench, random.Random(SEED), args))
    passes = [points if repeat % 2 == 0 else points[::-1] for repeat in range(args.repeats)]
    if axis == "cached":  # pages that are cached stay so: forwards only
        passes = [[point for point in points for _ in range(args.repeats)]]
    medians: dict[int, list[list[float]]] = {x: [] for x, _ in points}
    for x, run in itertools.chain(*passes):
        medians[x].append([statistics.median(column) for column in zip(*run(), strict=True)])
    bench.core.close()
    x = np.array(list(medians))
    step, control = np.array([[min(column) for column in zip(*found, strict=True)] for found in medians.values()]).T
    slope, start = np.polyfit(x, step, 1)
    return {
        "axis": LABELS[axis],
        "x": x.tolist(),
        "step_s": step.round(6).tolist(),
        "control_s": control.round(6).tolist(),
        "slope_s": float(slope),
        "intercept_s": float(start),
        "r2": float(np.corrcoef(x, step)[0, 1] ** 2),
        "control_slope_s": float(np.polyfit(x, control, 1)[0]),
    }


def plot(figures: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(figures), figsize=(5 * len(figures), 3.6), squeeze=False)
    for panel, found in zip(panels[0], figures.values(), strict=True):
        x = np.array(found["x"])
        panel.plot(x, 1e3 * np.array(found["step_s"]), "o", label="a step")
        panel.plot(
            x, 1e3 * (found["intercept_s"] + found["slope_s"] * x), "-", label=f"{1e6 * found['slope_s']:.4g} µs each"
        )
        panel.plot(x, 1e3 * np.array(found["control_s"]), ".", label="control plane")
        panel.set_xlabel(found["axis"])
        panel.set_ylabel("ms")
        panel.set_ylim(bottom=0)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=["context", "running", "cached"])
    parser.add_argument("--control", action="store_true", help="compute nothing")
    parser.add_argument("--host-pages", type=int, default=0, help="of a tier below")
    parser.add_argument("--watch", action="store_true", help="watch the memory, and explain what was not found")
    parser.add_argument("--steps", type=int, default=7, help="that are timed at each point and in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plot", type=Path, help="write a PNG")
    parser.add_argument("--json", type=Path, help="write the figures here instead of to standard output")
    args = parser.parse_args()
    on, path = machine(), resolve(args.model)
    figures = {}
    for axis in args.axes:
        found = figures[axis] = measure(path, axis, args)
        line = f"{1e3 * found['intercept_s']:.2f} ms + {1e6 * found['slope_s']:.4f} µs each, r² {found['r2']:.3f}"
        control = f"control plane at most {1e3 * max(found['control_s']):.2f} ms"
        print(f"{axis}: {line}; {control}, {1e6 * found['control_slope_s']:.4f} µs each", file=sys.stderr)
    if args.plot:
        plot(figures, args.plot)
    text = json.dumps({"machine": on, "seed": SEED, "steps": args.steps, "repeats": args.repeats, **figures}, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
