"""Time the layers' matrix products of one step of SmolLM2-135M on the native backend; print JSON.

    python bench/kernels.py --formats w4,w8,bf16 --rows 1,4,16,64,512 --threads 1,2 --variants avx2

`gb_s` counts the weights as they are packed, read once; `gop_s` two operations for each weight and row. Both belong to
the best of the repeats, all of which are printed. There are 30 layers of random weights, more than caches hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

import numpy as np

from octavo import _native
from octavo.ops.api import Quantized
from octavo.ops.cpu import CpuOps

LAYERS = 30
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
BYTES = {"w4": 4 / 8 + 4 / 32, "w8": 1 + 2 / 32, "bf16": 2.0}
BITS = {"w4": 4, "w8": 8, "bf16": 16}
SEED = 1


class Random:
    """A matrix of random weights: w4 with minimums, as Q4_1 has, w8 without, as Q8_0."""

    group = 32

    def __init__(self, kind: str, outputs: int, inputs: int) -> None:
        rng = np.random.default_rng(SEED)
        self.shape = (outputs, inputs)
        self.bits = BITS[kind]
        self.codes = rng.integers(0, 16, self.shape, np.uint8 if kind == "w4" else np.int8)
        self.scales = np.full((outputs, inputs // 32), 2.0**-7, np.float32)
        self.minimums = -8 * self.scales if kind == "w4" else None

    def quantized(self, start: int, stop: int) -> Quantized:
        minimums = None if self.minimums is None else self.minimums[start:stop]
        return Quantized(self.codes[start:stop], self.scales[start:stop], minimums, 32, self.bits)

    def float32(self, start: int, stop: int) -> Any:
        return self.codes[start:stop].astype(np.float32)


def measure(kind: str, variant: str, threads: int, rows: list[int], repeats: int) -> list[dict[str, Any]]:
    """One result for each number of rows."""
    ops = CpuOps(threads, variant)
    stored = [Random(kind, *shape) for shape in SHAPES.values()]
    weights = [ops.linear([weight]) for _ in range(LAYERS) for weight in stored]
    count = LAYERS * sum(outputs * inputs for outputs, inputs in SHAPES.values())
    results = []
    for n in rows:
        inputs = {weight.inputs: _native.Matrix(weight.inputs) for weight in weights}
        outputs = {weight.outputs: _native.Matrix(weight.outputs) for weight in weights}
        for width, matrix in inputs.items():
            matrix.resize(n)
            matrix.numpy()[:] = np.random.default_rng(SEED).standard_normal((n, width), np.float32)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            for weight in weights:
                _native.linear(ops.backend, inputs[weight.inputs], None, 0.0, weight, outputs[weight.outputs])
            seconds.append(time.perf_counter() - start)
        best = min(seconds)
        figures = {"gb_s": count * BYTES[kind] / best / 1e9, "gop_s": 2 * count * n / best / 1e9, "rows_s": n / best}
        results.append(
            {"format": kind, "variant": variant, "threads": threads, "rows": n, "best_s": round(best, 6)}
            | {name: round(value, 2) for name, value in figures.items()}
            | {"repeats_s": [round(s, 6) for s in seconds]}
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="w4,w8,bf16")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--threads", default=str(_native.available_cores()))
    parser.add_argument("--variants", default=_native.variants()[-1])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = [int(n) for n in args.rows.split(",")]
    results: list[dict[str, Any]] = []
    for kind in args.formats.split(","):
        for variant in args.variants.split(","):
            for threads in args.threads.split(","):
                results += measure(kind, variant, int(threads), rows, args.repeats)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": _native.available_cores()}
    print(json.dumps({"machine": machine, "seed": SEED, "repeats": args.repeats, "results": results}, indent=1))


if __name__ == "__main__":
    main()
