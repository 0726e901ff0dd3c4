"""The native backend: a thin binding of the op set to the kernels of `native/`.

It owns the choice of instruction set and of threads, the order in which weights are packed, and the memory that
activations live in. It never computes: what the numbers are is said in native/linear.h and its neighbours.

The environment variable OCTAVO_ISA (generic, avx2, avx512, amx) forces a variant; all give the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo import _native
from octavo.allowance import available_cores
from octavo.errors import ConfigError
from octavo.kv_format import KVFormat
from octavo.ops.api import (
    Bytes,
    Draws,
    Floats,
    Footprint,
    Forward,
    Ints,
    KVPool,
    Scores,
    StepInputs,
    Tensor,
    Weight,
)

PACKED_AT_ONCE = 1 << 22  # weights decoded before they are packed: bounds the memory that loading takes
MAX_THREADS = 1024


def choose_variant(name: str | None) -> str:
    """The fastest variant that this machine runs, or the one named. Raises ConfigError if it cannot run that one."""
    available: list[str] = _native.variants()
    if not name:
        return available[-1]
    if name not in available:
        raise ConfigError("OCTAVO_ISA", f"this machine runs {', '.join(available)}, not {name!r}")
    return name


def choose_threads(num_threads: int | None) -> int:
    """The number given, or one for each core this process may use. Raises ConfigError."""
    if num_threads is None:
        return min(available_cores(), MAX_THREADS)
    if not 1 <= num_threads <= MAX_THREADS:
        raise ConfigError("num_threads", f"must be from 1 to {MAX_THREADS}, got {num_threads}")
    return num_threads


class CpuOps:
    """See `api.Ops`. Activations are `_native.Matrix`, projections `_native.Linear`; one thread at a time may call."""

    name = "cpu"

    def __init__(self, num_threads: int | None = None, variant: str | None = None) -> None:
        chosen = choose_variant(variant or os.environ.get("OCTAVO_ISA"))
        self.backend = _native.Backend(chosen, choose_threads(num_threads))
        self._outputs: dict[tuple[str, int], _native.Matrix] = {}
        self._rows = _native.Step()
        self._step: StepInputs | None = None  # which `_rows` is a copy of
        self._kept: list[Any] | None = None  # what the program that is being recorded refers to

    def _output(self, method: str, columns: int) -> _native.Matrix:
        """The memory that a method's results of this width always use."""
        matrix = self._outputs.get((method, columns))
        if matrix is None:
            matrix = self._outputs[method, columns] = _native.Matrix(columns)
        return matrix

    def _native_step(self, step: StepInputs) -> _native.Step:
        """The step checked and copied, once for all layers."""
        if self._step is not step:
            self._step = None
            self._rows.set(*step)
            self._step = step
        return self._rows

    def _perform(self, op: Callable[..., None], *args: Any) -> None:
        op(self.backend, *args)
        if self._kept is not None:
            self._kept.append(args)

    # ── at load ──

    def linear(self, weights: list[Weight], bias: Floats | None = None, *, fine: bool = False) -> _native.Linear:
        packed = _native.Linear(self.backend, weights[0].shape[1], fine)
        for weight in weights:
            _pack(packed, weight)
        if bias is not None:
            packed.set_bias(np.ascontiguousarray(bias, np.float32))
        return packed

    def footprint(self, weight: _native.Linear) -> Footprint:
        num_bf16 = weight.num_bf16
        return Footprint(weight.num_bytes, int8=weight.outputs * weight.inputs - num_bf16, bf16=num_bf16)

    def vector(self, values: Floats) -> _native.Vector:
        return _native.Vector(np.ascontiguousarray(values, np.float32))

    def rope_table(self, inverse_frequencies: Floats, num_positions: int) -> _native.RopeTable:
        angles = np.outer(np.arange(num_positions), inverse_frequencies.astype(np.float64))
        return _native.RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    def allocate_pages(self, format: KVFormat, num_pages: int) -> KVPool:
        """Raises ConfigError for a head_dim that the kernels lack."""
        if format.head_dim % 16 or format.head_dim > 256:
            raise ConfigError(
                "backend",
                f"the cpu kernels need a head_dim that is a multiple of 16, at most 256; "
                f"this model's is {format.head_dim}: use backend='reference'",
            )
        layers = [(format.k_offset(layer), format.layer_dtype(layer)) for layer in range(format.num_layers)]
        shape = (format.num_kv_heads, format.head_dim, format.block_size)
        return KVPool(format, _native.Pages(num_pages, format.page_bytes, *shape, layers))

    def compiled(self, forward: Forward) -> Forward:
        """Native calls cost some microseconds each from Python, and a step of one row makes hundreds that take ten."""
        program: tuple[KVPool, _native.Program, list[Any], Tensor] | None = None

        def run(step: StepInputs, pool: KVPool) -> Tensor:
            nonlocal program
            if program is None or program[0] is not pool:
                program = (pool, *self._record(forward, step, pool))
            else:
                self._native_step(step)
                program[1].run()
            return program[3]

        return run

    def _record(self, forward: Forward, step: StepInputs, pool: KVPool) -> tuple[_native.Program, list[Any], Tensor]:
        """Run a forward pass: (its calls, what they refer to, what it returned)."""
        program, self._kept = _native.Program(), []
        self.backend.record(program)
        try:
            return program, self._kept, forward(step, pool)
        finally:
            self.backend.record(None)
            self._kept = None

    # ── between forward passes ──

    def copy_page(self, pool: KVPool, src: int, dst: int) -> None:
        pool.data.copy(src, dst)

    def page(self, pool: KVPool, page: int) -> Bytes:
        return pool.data.numpy()[page]

    # ── the forward pass ──

    def embed(self, table: _native.Linear, step: StepInputs) -> _native.Matrix:
        x = self._output("embed", table.inputs)
        self._perform(_native.embed, table, self._native_step(step), x)
        return x

    def norm_linear(
        self, x: _native.Matrix, norm: _native.Vector, eps: float, weight: _native.Linear
    ) -> _native.Matrix:
        out = self._output("norm_linear", weight.outputs)
        self._perform(_native.linear, x, norm, eps, weight, out)
        return out

    def rope_write(
        self,
        qkv: _native.Matrix,
        layer: int,
        num_heads: int,
        pool: KVPool,
        rope: _native.RopeTable,
        step: StepInputs,
        q_norm: _native.Vector | None = None,
        k_norm: _native.Vector | None = None,
        eps: float = 0.0,
    ) -> None:
        rows = self._native_step(step)
        self._perform(_native.rope_write, qkv, layer, num_heads, pool.data, rope, rows, q_norm, k_norm, eps)

    def attention(
        self,
        qkv: _native.Matrix,
        layer: int,
        num_heads: int,
        pool: KVPool,
        step: StepInputs,
        window: int | None = None,
    ) -> _native.Matrix:
        out = self._output("attention", num_heads * pool.format.head_dim)
        self._perform(_native.attention, qkv, layer, num_heads, pool.data, self._native_step(step), window or 0, out)
        return out

    def add_linear(self, x: _native.Matrix, inputs: _native.Matrix, weight: _native.Linear) -> None:
        self._perform(_native.add_linear, x, inputs, weight)

    def norm_gate_up(
        self, x: _native.Matrix, norm: _native.Vector, eps: float, weight: _native.Linear
    ) -> _native.Matrix:
        out = self._output("norm_gate_up", weight.outputs // 2)
        self._perform(_native.gate_up, x, norm, eps, weight, out)
        return out

    def logits(self, x: _native.Matrix, rows: Ints, norm: _native.Vector, eps: float, weight: _native.Linear) -> Floats:
        out = self._output("logits", weight.outputs)
        _native.logits(self.backend, x, rows, norm, eps, weight, out)
        logits: Floats = out.numpy()
        return logits

    # ── what the machine allows ──

    def read_rates(self, sizes: list[int]) -> list[float]:
        """Bytes a second at which all threads together read working sets of these sizes, over and over."""
        rates: list[float] = _native.read_rates(self.backend, sizes)
        return rates

    def product_rate(self, dtype: str) -> float:
        """Operations a second, two a product, of all threads with operands in their first-level caches.

        As the linears multiply "int8" and "bf16" with this instruction set, and attention "float32".
        """
        rate: float = _native.product_rate(self.backend, dtype)
        return rate

    # ── from logits to tokens ──

    def best(self, logits: Floats) -> Ints:
        tokens = np.empty(len(logits), np.int32)
        _native.best(self.backend, logits, tokens)
        return tokens

    def choose(self, logits: Floats, draws: Draws) -> Ints:
        tokens = np.empty(len(draws.rows), np.int32)
        _native.choose(self.backend, logits, *draws, tokens)
        return tokens

    def score(self, logits: Floats, rows: Ints, tokens: Ints, num_tops: Ints) -> Scores:
        width = min(int(num_tops.max(initial=0)), logits.shape[1])
        scores = Scores(np.empty(len(rows)), np.empty(len(rows), np.int32), np.zeros((len(rows), width), np.int32))
        _native.score(self.backend, logits, rows, tokens, np.minimum(num_tops, width), *scores)
        return scores


def _pack(packed: _native.Linear, weight: Weight) -> None:
    """Append a matrix, a few million weights at a time."""
    num_outputs, num_inputs = weight.shape
    rows = max(PACKED_AT_ONCE // num_inputs // 16 * 16, 16)
    chunks = [(start, min(start + rows, num_outputs)) for start in range(0, num_outputs, rows)]
    if weight.bits > 8:
        packed.add_segment(num_outputs, 16, 0, False, False)
        for start, stop in chunks:
            packed.pack_float(start, np.ascontiguousarray(weight.float32(start, stop)))
    elif not _pack_quantized(packed, weight, chunks, wide=False):
        packed.drop_segment()
        _pack_quantized(packed, weight, chunks, wide=True)


def _pack_quantized(packed: _native.Linear, weight: Weight, chunks: list[tuple[int, int]], wide: bool) -> bool:
    """Append a matrix with scales in f16 or, where `wide`, in float32. False where f16 does not hold every scale."""
    for start, stop in chunks:
        codes, scales, minimums, group, bits = weight.quantized(start, stop)
        fits = wide or (_native.fit_f16(scales) and (minimums is None or _native.fit_f16(minimums)))
        if start == 0:
            packed.add_segment(weight.shape[0], bits, group, minimums is not None, wide)
        if not fits:
            return False
        packed.pack_quantized(start, np.ascontiguousarray(codes).view(np.uint8), scales, minimums)
    return True
