"""Time each kernel alone, on the shapes of SmolLM2-135M, against what the machine allows; print JSON.

    python bench/kernels.py --variants generic,avx2 --threads 1,2 --rows 1,4,32,512 --formats w4,w8,bf16
    python bench/kernels.py --kernels linear --formats w4 --rows 1,32 --reference
    python bench/kernels.py --kernels attention --kv-dtypes bf16,int8,fp8_e4m3,fp8_e5m2,int4 --steps 32x1024x1,32x4096x1

A pass is 30 layers, each with weights and pages of its own, so that caches do not hold them all; the vocabulary's is
one matrix. `gb_s` counts what must be read, weights as they are packed, `gop_s` two operations for each product; both
are of the best repeat. `share` is the least time that a probe with the same instructions and threads allows
(octavo.bench.machine) over the best repeat's: above 1 where a cache holds more than the probe assumed.
With several --kv-dtypes and --rounds, `times_first` is the median, and the quartiles, of how much faster than the first
of them a format was in the same round, which a machine that is slower for a while changes little.
With --reference the numpy backend does the same passes, and `times_reference` says how many times as long it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy comes: the reference backend has threads of its own

import numpy as np

from octavo import _native
from octavo.allowance import available_cores
from octavo.bench.machine import Load, Run, Shape, machine, probe
from octavo.config import ModelConfig
from octavo.kv_format import KV_BITS, KVFormat
from octavo.ops.api import Footprint, Ops, Quantized, StepInputs, Tensor
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps

MODEL = ModelConfig("llama", 30, 576, 1536, 9, 3, 64, 49_152, 8192, 1e-5, 1e4)
COLUMNS = (MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_dim
BITS = {"w4": 4, "w8": 8, "bf16": 16}
SEED = 1
LAYERS = range(MODEL.num_layers)


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


class Case(NamedTuple):
    """A kernel on one shape: what a pass must read and multiply, and the pass."""

    kernel: str
    shape: dict[str, Any]
    load: Load
    run: Callable[[], None]


def matrix(ops: Ops, rows: int, columns: int) -> Tensor:
    values = np.random.default_rng(SEED).standard_normal((rows, columns), np.float32)
    if isinstance(ops, ReferenceOps):
        return values
    held = _native.Matrix(columns)
    held.resize(rows)
    held.numpy()[:] = values
    return held


def linears(ops: Ops, kind: str, rows: list[int]) -> Iterator[Case]:
    """The four products of a layer as the model calls them."""
    hidden, inner, q = MODEL.hidden_size, MODEL.intermediate_size, MODEL.num_heads * MODEL.head_dim
    norm = ops.vector(np.ones(hidden, np.float32))
    matrices = {
        "qkv": [(COLUMNS, hidden)],
        "o": [(hidden, q)],
        "gate_up": [(inner, hidden)] * 2,
        "down": [(hidden, inner)],
    }
    for kernel, shapes in matrices.items():
        stored = [Random(kind, *shape) for shape in shapes]
        weights = [ops.linear(stored, fine=kernel == "down") for _ in LAYERS]
        held = Footprint(*map(sum, zip(*map(ops.footprint, weights), strict=True)))
        for n in rows:
            x, inputs = matrix(ops, n, hidden), matrix(ops, n, shapes[0][1])

            def run(kernel: str = kernel, weights: Any = weights, x: Tensor = x, inputs: Tensor = inputs) -> None:
                for weight in weights:
                    if kernel == "qkv":
                        ops.norm_linear(x, norm, 1e-5, weight)
                    elif kernel == "gate_up":
                        ops.norm_gate_up(x, norm, 1e-5, weight)
                    else:
                        ops.add_linear(x, inputs, weight)

            products = [2 * n * weights for weights in held[1:]]
            yield Case(kernel, {"format": kind, "rows": n}, Load(n, held.num_bytes, *products), run)


def vocabulary(ops: Ops, kind: str, rows: list[int]) -> Iterator[Case]:
    """The product with the vocabulary, and the rows of its matrix that a step begins with."""
    head = ops.linear([Random(kind, MODEL.vocab_size, MODEL.hidden_size)])
    held, norm = ops.footprint(head), ops.vector(np.ones(MODEL.hidden_size, np.float32))
    for n in rows:
        x, ids, zero = matrix(ops, n, MODEL.hidden_size), np.arange(n, dtype=np.int32), np.zeros(1, np.int32)
        products = [2 * n * weights for weights in held[1:]]

        def run(x: Tensor = x, ids: Any = ids) -> None:
            ops.logits(x, ids, norm, 1e-5, head)

        yield Case("vocabulary", {"format": kind, "rows": n}, Load(n, held.num_bytes, *products), run)
        tokens = np.random.default_rng(SEED).integers(0, MODEL.vocab_size, n, np.int32)
        step = StepInputs(tokens, ids, np.array([0, n], np.int32), zero, np.array([0, 1], np.int32), zero)
        moved = n * (held.num_bytes // MODEL.vocab_size + 4 * MODEL.hidden_size)

        def embed(step: StepInputs = step) -> None:
            ops.embed(head, step)

        yield Case("embed", {"format": kind, "rows": n}, Load(n, moved, 0, 0, 0), embed)


def attention(ops: Ops, steps: list[tuple[int, int, int]], dtypes: list[str]) -> Iterator[Case]:
    """rope_write and attention: sequences, tokens that each has, and how many of the last ones are computed."""
    rope = ops.rope_table(np.ones(MODEL.head_dim // 2, np.float32), max(tokens for _, tokens, _ in steps))
    for (sequences, tokens, count), dtype in product(steps, dtypes):
        pages = KVFormat(dtype, MODEL.num_layers, MODEL.num_kv_heads, MODEL.head_dim, 16)
        shape = Shape(MODEL, Footprint(), Footprint(), pages.token_bytes)
        per = pages.num_pages(tokens)
        pool = ops.allocate_pages(pages, sequences * per)
        data = pool.data if isinstance(ops, ReferenceOps) else pool.data.numpy()
        data.view(np.uint32)[:] = 0x3F003F00  # 0.5 twice, or any codes and scales of 0.5
        step = StepInputs(
            token_ids=np.zeros(sequences * count, np.int32),
            positions=np.tile(np.arange(tokens - count, tokens, dtype=np.int32), sequences),
            row_start=np.arange(sequences + 1, dtype=np.int32) * count,
            write_start=np.full(sequences, tokens - count, np.int32),
            page_start=np.arange(sequences + 1, dtype=np.int32) * per,
            pages=np.random.default_rng(SEED).permutation(sequences * per).astype(np.int32),
        )
        qkv = matrix(ops, sequences * count, COLUMNS)
        about = {"dtype": dtype, "sequences": sequences, "tokens": tokens, "rows": count}

        def rope_write(qkv: Tensor = qkv, pool: Any = pool, step: StepInputs = step) -> None:
            for layer in LAYERS:
                ops.rope_write(qkv, layer, MODEL.num_heads, pool, rope, step)

        def attend(qkv: Tensor = qkv, pool: Any = pool, step: StepInputs = step) -> None:
            for layer in LAYERS:
                ops.attention(qkv, layer, MODEL.num_heads, pool, step)

        written = sequences * count * (4 * COLUMNS * MODEL.num_layers + pages.token_bytes)
        yield Case("rope_write", about, Load(sequences * count, written, 0, 0, 0), rope_write)
        yield Case("attention", about, shape.load([Run(tokens - count, count, 0)] * sequences), attend)


def cases(ops: Ops, args: argparse.Namespace) -> Iterator[Case]:
    for kind in args.formats:
        if "linear" in args.kernels:
            yield from linears(ops, kind, args.rows)
        if "vocabulary" in args.kernels:
            yield from vocabulary(ops, kind, args.rows)
    if "attention" in args.kernels:
        yield from attention(ops, args.steps, args.kv_dtypes)


def time_of(run: Callable[[], None], repeats: int) -> list[float]:
    seconds: list[float] = []
    run()
    while len(seconds) < repeats and (len(seconds) < 2 or sum(seconds) < 4):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def show(result: dict[str, Any]) -> None:
    """A line for people, on standard error."""
    about = [f"{value} {name}" for name, value in result.items() if isinstance(value, int)]
    words = [value for value in result.values() if isinstance(value, str)]
    line = f"{' '.join(words):<24}{', '.join(about):<42}{result['gb_s']:>8.2f} GB/s{result['gop_s']:>9.1f} Gop/s"
    ratio = f"{result['times_reference']:>8.1f} × the reference" if "times_reference" in result else ""
    if "times_first" in result:
        low, middle, high = result["times_first"]
        ratio += f"{middle:>8.2f} × the first ({low:.2f} … {high:.2f})"
    print(f"{line}{100 * result['share']:>6.0f} %{ratio}", file=sys.stderr)


def count(word: str) -> int:
    if (number := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {word}")
    return number


def step(word: str) -> tuple[int, ...]:
    numbers = tuple(map(count, word.split("x")))
    if len(numbers) != 3 or not numbers[2] <= numbers[1] <= MODEL.context_length:
        reason = f"must be sequences x tokens x rows, of {MODEL.context_length} tokens at most and no more rows"
        raise argparse.ArgumentTypeError(f"{reason}, got {word}")
    return numbers


def several(of: Callable[[str], Any], among: Collection[str] = ()) -> Callable[[str], list[Any]]:
    """The type of an option that takes values with commas between them."""

    def values(text: str) -> list[Any]:
        found = [of(word) for word in text.split(",")]
        if among and not set(found) <= set(among):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(among)}, got {text}")
        return found

    values.__name__ = of.__name__  # for what argparse says
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kernels, variants = ("linear", "vocabulary", "attention"), _native.variants()
    parser.add_argument("--kernels", type=several(str, kernels), default=kernels, help=",".join(kernels))
    parser.add_argument("--formats", type=several(str, BITS), default=[*BITS], help=",".join(BITS))
    parser.add_argument("--rows", type=several(count), default=[1, 4, 32, 512])
    steps = "1x2048x1,32x256x1,1x512x512,1x4096x512"
    parser.add_argument("--steps", type=several(step), default=steps, help="sequences x tokens x rows")
    parser.add_argument("--kv-dtypes", type=several(str, KV_BITS), default=["bf16"], help=",".join(KV_BITS))
    parser.add_argument("--threads", type=several(count), default=sorted({1, available_cores()}))
    parser.add_argument("--variants", type=several(str, variants), default=variants[-1:], help=",".join(variants))
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--rounds", type=count, default=1, help="take all cases in turn, so often")
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_args()
    on = machine()
    results: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    reference = [time_of(case.run, 2) for case in cases(ReferenceOps(), args)] if args.reference else []
    for variant in args.variants:
        for threads in args.threads:
            allowed = probe(threads, variant)
            probes.append(allowed._asdict())
            times: defaultdict[int, list[float]] = defaultdict(list)
            firsts: dict[tuple[Any, ...], int] = {}
            for turn in range(args.rounds):
                for number, case in enumerate(cases(CpuOps(threads, variant), args)):
                    times[number] += time_of(case.run, args.repeats)
                    same = tuple(value for name, value in case.shape.items() if name != "dtype")
                    first = firsts.setdefault((case.kernel, *same), number)
                    if turn < args.rounds - 1:
                        continue
                    best = min(times[number])
                    operations = case.load.int8 + case.load.bf16 + case.load.float32
                    result = {"kernel": case.kernel, **case.shape, "variant": variant, "threads": threads}
                    result |= {"gb_s": case.load.num_bytes / best / 1e9, "gop_s": operations / best / 1e9}
                    result["share"] = max(case.load.seconds(allowed)) / best
                    if reference:
                        result["times_reference"] = min(reference[number]) / best
                    if first != number and args.rounds > 1:
                        ratios = [a / b for a, b in zip(times[first], times[number], strict=True)]
                        result["times_first"] = statistics.quantiles(ratios, n=4)
                    show(result)
                    median = statistics.median(times[number])
                    results.append(result | {"best_s": best, "median_s": median, "repeats": len(times[number])})
    print(json.dumps({"machine": on, "seed": SEED, "probes": probes, "results": results}, indent=1))


if __name__ == "__main__":
    main()
