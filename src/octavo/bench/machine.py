"""What the machine allows: how fast it reads and multiplies, and the least time that an engine's steps can take.

Owns the probe, the sums of what a step must read and multiply, and the comparison of steps with their bounds. The sums
follow from the model's shape, the weights as the backend stores them and the plan of the step; nothing is assumed.

    reading      the layers' weights once, the vocabulary's where a token is drawn, each sequence's keys and values once
    multiplying  two operations for each weight and row, those of the vocabulary for rows that are drawn from, and in
                 each layer 4 · heads · head_dim for each row and token that it attends to
    the bound    the larger of two times: of the bytes, at the rate of the smallest probed working set that holds them,
                 and of the operations, each at the rate of its type: the weights', and float32 in attention
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import ModelConfig
from octavo.engine.executor import Executor
from octavo.ops.api import Footprint
from octavo.types import StepPlan, StepResult

WORKING_SETS = [size << 20 for size in (8, 64, 128, 256)]
DTYPES = ("int8", "bf16", "float32")


def machine() -> dict[str, Any]:
    """What the figures were taken on: they mean nothing without it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


class Probe(NamedTuple):
    """reads: bytes a second by working set. operations: a second, by type, operands in the first-level cache."""

    variant: str
    num_threads: int
    reads: dict[int, float]
    operations: dict[str, float]

    def best(self, other: Probe) -> Probe:
        """The higher rates of both, which were taken alike: other work only ever slows a probe down."""
        reads = {size: max(rate, other.reads[size]) for size, rate in self.reads.items()}
        operations = {dtype: max(rate, other.operations[dtype]) for dtype, rate in self.operations.items()}
        return self._replace(reads=reads, operations=operations)


def probe(num_threads: int | None = None, variant: str | None = None, sizes: Iterable[int] = WORKING_SETS) -> Probe:
    """Measure this machine with the threads and the instruction set that an engine would use. Takes a second."""
    from octavo.ops.cpu import CpuOps  # loads the native library

    ops, sizes = CpuOps(num_threads, variant), sorted(sizes)
    reads = dict(zip(sizes, ops.read_rates(sizes), strict=True))
    rates = {dtype: ops.product_rate(dtype) for dtype in DTYPES}
    return Probe(ops.backend.variant, ops.backend.num_threads, reads, rates)


class Load(NamedTuple):
    """What a step, or several, must read and multiply. Operations are two for each product."""

    num_tokens: int
    num_bytes: int
    int8: int
    bf16: int
    float32: int

    def seconds(self, probe: Probe) -> tuple[float, float]:
        """The least time for the bytes, and for the operations, of one step."""
        size = next((size for size in probe.reads if size >= self.num_bytes), max(probe.reads))
        return self.num_bytes / probe.reads[size], sum(getattr(self, name) / probe.operations[name] for name in DTYPES)


class Run(NamedTuple):
    """Tokens of a sequence from position `start` on, and how many of them have their logits computed."""

    start: int
    num_tokens: int
    num_logits: int


class Shape(NamedTuple):
    """What decides a step's load: the model, its layers' and its vocabulary's weights, the bytes of a token's KV."""

    model: ModelConfig
    layers: Footprint
    head: Footprint
    token_bytes: int

    def load(self, runs: Sequence[Run]) -> Load:
        """Of the step that computes these."""
        model, window = self.model, self.model.sliding_window
        num_rows, num_logits = (sum(column) for column in list(zip(*runs, strict=True))[1:])
        attended = sum(_attended(start + count, window) - _attended(start, window) for start, count, _ in runs)
        stored = sum(_seen(start + count, count, window) for start, count, _ in runs)
        num_bytes = self.layers.num_bytes + stored * self.token_bytes + self.head.num_bytes * (num_logits > 0)
        products = [num_rows * a + num_logits * b for a, b in zip(self.layers[1:], self.head[1:], strict=True)]
        int8, bf16, float32 = (2 * n for n in products)
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * attended
        return Load(num_rows, num_bytes, int8, bf16, float32 + attention)


def _attended(length: int, window: int | None) -> int:
    """Pairs of a row and a token it sees, over the first `length` positions."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * (window or 0)


def _seen(end: int, count: int, window: int | None) -> int:
    """Tokens that any of the `count` rows before `end` sees."""
    return end if window is None else min(end, window + count - 1)


class Step(NamedTuple):
    """What was computed, and when that began and ended."""

    runs: list[Run]
    start: float
    end: float


class Watch:
    """An executor that notes what another one computed and when."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[Step] = []

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        result = self._executor.execute(plan)
        end = time.perf_counter()
        runs = [Run(p.start, len(p.token_ids), len(p.targets) + bool(p.draws)) for p in plan.slices]
        self.steps.append(Step(runs, start, end))
        return result

    def close(self) -> None:
        self._executor.close()


def standing(steps: Iterable[Step], since: float, shape: Shape, probe: Probe) -> dict[str, Any]:
    """How near steps came to what the probe allows: those with prompts, those without, and all of them.

    A step lasts from the end of the one before, so that scheduling and texts count; the first one begins at `since`.
    Means are of a step; `share` is bound / time.
    """
    kinds: dict[str, list[tuple[Load, float, float]]] = {"prompts": [], "decode": [], "all": []}
    for runs, start, end in steps:
        step = shape.load(runs), end - since, start - since
        kinds["prompts" if any(run.num_tokens > 1 for run in runs) else "decode"].append(step)
        kinds["all"].append(step)
        since = end
    return {kind: _mean(steps, probe) for kind, steps in kinds.items() if steps}


def _mean(steps: list[tuple[Load, float, float]], probe: Probe) -> dict[str, Any]:
    count = len(steps)
    loads, times, controls = zip(*steps, strict=True)
    total = Load(*map(sum, zip(*loads, strict=True)))
    least = [load.seconds(probe) for load in loads]
    bound = sum(map(max, least))
    return {
        "num_steps": count,
        "num_tokens": total.num_tokens / count,
        "read_bytes": total.num_bytes / count,
        "operations": {name: getattr(total, name) / count for name in DTYPES},
        "read_s": sum(reading for reading, _ in least) / count,
        "multiply_s": sum(multiplying for _, multiplying in least) / count,
        "bound_s": bound / count,
        "step_s": sum(times) / count,
        "control_s": sum(controls) / count,
        "share": bound / sum(times),
    }
