"""The reference backend: every op of `api.py` in plain numpy float32. It is the specification the kernels are held to.

It owns no policy and is written to be read, not to be fast. Matrix products are float32 in blocks of a fixed number
of rows (the last one padded), because BLAS picks its order of summation by the shape of the product; attention goes
one row at a time, so that its shapes depend on the row's position alone. Sums of squares are taken in float64. So a
row's bits depend on its inputs alone, as long as BLAS treats all rows of one block alike. OpenBLAS does so for 8 rows
of large matrices, but not for 12, 24 or 32, nor for small matrices: each matrix is tried when it is loaded, and
multiplied row by row if its block fails. The native kernels keep that rule by construction.

Blocks are spread over threads here. OPENBLAS_NUM_THREADS=1 is best: BLAS's own threads mostly wait for each other.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from octavo.kv_format import KVFormat
from octavo.ops import codes
from octavo.ops.api import Bytes, Draws, Floats, Footprint, Forward, Ints, KVPool, Scores, StepInputs, Weight

BLOCK_ROWS = 8
SMALL_PRODUCT = 10_000_000
"""Multiplications that are done before another thread has woken up."""


class Linear(NamedTuple):
    """matrix: [num_outputs, num_inputs]; bias: [num_outputs]. block_rows: how many rows are multiplied at once."""

    matrix: Floats
    bias: Floats | None
    block_rows: int


class RopeTable(NamedTuple):
    """cos, sin: [num_positions, head_dim / 2]."""

    cos: Floats
    sin: Floats


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x²) + eps) · weight, over the last axis (Zhang and Sennrich, 2019)."""
    scale = 1 / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True) + eps)
    return x * scale.astype(np.float32) * weight


def rows_agree(matrix: Floats) -> bool:
    """Whether equal rows of one block give equal bits."""
    row = np.random.default_rng(0).standard_normal(matrix.shape[1], np.float32)
    products = np.tile(row, (BLOCK_ROWS, 1)) @ matrix.T
    return bool((products == products[0]).all())


class ReferenceOps:
    """See `api.Ops`. Tensors are numpy arrays, projections `Linear`s, a rope table a `RopeTable`."""

    name = "reference"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(os.cpu_count())

    def _project(self, x: Floats, weight: Linear) -> Floats:
        """x · matrixᵀ + bias, [len(x), num_outputs]."""
        block = weight.block_rows
        padded = np.zeros((-(-len(x) // block) * block, x.shape[1]), np.float32)
        padded[: len(x)] = x
        out = np.empty((len(padded), len(weight.matrix)), np.float32)

        def multiply(row: int) -> None:
            np.matmul(padded[row : row + block], weight.matrix.T, out=out[row : row + block])

        spread = self._threads.map if len(out) * weight.matrix.size > SMALL_PRODUCT else map
        list(spread(multiply, range(0, len(out), block)))
        return out[: len(x)] if weight.bias is None else out[: len(x)] + weight.bias

    def linear(self, weights: list[Weight], bias: Floats | None = None, *, fine: bool = False) -> Linear:
        matrix = np.concatenate([w.float32(0, w.shape[0]) for w in weights])
        return Linear(matrix, bias, BLOCK_ROWS if rows_agree(matrix) else 1)

    def footprint(self, weight: Linear) -> Footprint:
        return Footprint(weight.matrix.nbytes, float32=weight.matrix.size)

    def vector(self, values: Floats) -> Floats:
        return np.array(values, np.float32)

    def rope_table(self, inverse_frequencies: Floats, num_positions: int) -> RopeTable:
        angles = np.outer(np.arange(num_positions), inverse_frequencies.astype(np.float64))
        return RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))

    def allocate_pages(self, format: KVFormat, num_pages: int) -> KVPool:
        return KVPool(format, np.zeros((num_pages, format.page_bytes), np.uint8))

    def compiled(self, forward: Forward) -> Forward:
        return forward

    def copy_page(self, pool: KVPool, src: int, dst: int) -> None:
        pool.data[dst] = pool.data[src]

    def page(self, pool: KVPool, page: int) -> Bytes:
        return pool.data[page]

    def embed(self, table: Linear, step: StepInputs) -> Floats:
        return table.matrix[step.token_ids]

    def norm_linear(self, x: Floats, norm: Floats, eps: float, weight: Linear) -> Floats:
        return self._project(rms_norm(x, norm, eps), weight)

    def rope_write(
        self,
        qkv: Floats,
        layer: int,
        num_heads: int,
        pool: KVPool,
        rope: RopeTable,
        step: StepInputs,
        q_norm: Floats | None = None,
        k_norm: Floats | None = None,
        eps: float = 0.0,
    ) -> None:
        f = pool.format
        heads = qkv.reshape(len(qkv), -1, f.head_dim)
        q, k, v = np.split(heads, (num_heads, num_heads + f.num_kv_heads), axis=1)
        cos, sin = rope.cos[step.positions, None], rope.sin[step.positions, None]
        for part, norm in ((q, q_norm), (k, k_norm)):
            low, high = np.split(part if norm is None else rms_norm(part, norm, eps), 2, axis=-1)
            part[:] = np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)

        slice_of_row = np.repeat(np.arange(len(step.write_start)), np.diff(step.row_start))
        written = step.positions >= step.write_start[slice_of_row]
        page_index, slot = np.divmod(step.positions[written], f.block_size)
        page = step.pages[step.page_start[slice_of_row[written]] + page_index]
        codes.write(pool, layer, page, slot, k[written], v[written])

    def attention(
        self, qkv: Floats, layer: int, num_heads: int, pool: KVPool, step: StepInputs, window: int | None = None
    ) -> Floats:
        f = pool.format
        q = qkv[:, : num_heads * f.head_dim].reshape(len(qkv), f.num_kv_heads, -1, f.head_dim)
        out = np.empty_like(q)
        if f.is_scaled(layer):
            q = codes.turn(q)
        for s in range(len(step.write_start)):
            rows = range(step.row_start[s], step.row_start[s + 1])
            pages = step.pages[step.page_start[s] : step.page_start[s + 1]]
            pages = pages[: f.num_pages(int(step.positions[rows[-1]]) + 1)]
            k, v = codes.read(pool, layer, pages)
            for row in rows:
                end = int(step.positions[row]) + 1
                seen = slice(0 if window is None else max(0, end - window), end)
                scores = q[row] @ k[:, seen].transpose(0, 2, 1) * np.float32(f.head_dim**-0.5)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                out[row] = weights @ v[:, seen] / weights.sum(axis=-1, keepdims=True)
        return (codes.turn_back(out) if f.is_scaled(layer) else out).reshape(len(qkv), -1)

    def add_linear(self, x: Floats, inputs: Floats, weight: Linear) -> None:
        x += self._project(inputs, weight)

    def norm_gate_up(self, x: Floats, norm: Floats, eps: float, weight: Linear) -> Floats:
        gate, up = np.split(self._project(rms_norm(x, norm, eps), weight), 2, axis=-1)
        with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, -0
            return gate / (1 + np.exp(-gate)) * up

    def logits(self, x: Floats, rows: Ints, norm: Floats, eps: float, weight: Linear) -> Floats:
        return self._project(rms_norm(x[rows], norm, eps), weight)

    def best(self, logits: Floats) -> Ints:
        tokens = logits.argmax(axis=1).astype(np.int32)  # the first NaN, if there is one
        tokens[~np.isfinite(logits[np.arange(len(logits)), tokens])] = -1
        return tokens

    def choose(self, logits: Floats, draws: Draws) -> Ints:
        return np.array([_choose(logits[row], *draw) for row, *draw in zip(*draws, strict=True)], np.int32)

    def score(self, logits: Floats, rows: Ints, tokens: Ints, num_tops: Ints) -> Scores:
        width = min(int(num_tops.max(initial=0)), logits.shape[1])
        scores = Scores(np.empty(len(rows)), np.empty(len(rows), np.int32), np.zeros((len(rows), width), np.int32))
        for i, (row, token, count) in enumerate(zip(logits[rows], tokens, num_tops, strict=True)):
            largest = np.float64(row.max())
            scores.log_totals[i] = largest + np.log(np.exp(row - largest).sum())
            scores.ranks[i] = 1 + np.count_nonzero(row > row[token])
            if count:
                scores.tops[i, :count] = likely_first(row)[:count]
        return scores


def likely_first(logits: Floats) -> Ints:
    """All token ids, most likely first, lower ids first among equals."""
    return np.argsort(-logits, kind="stable").astype(np.int32)


def _choose(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float, point: float) -> int:
    kept = likely_first(logits)
    kept = kept[logits[kept] > -np.inf][: top_k if top_k > 0 else None]
    if not len(kept):
        return 0
    mass = np.exp((logits[kept].astype(np.float64) - np.float64(logits[kept[0]])) / temperature)
    if top_p < 1.0:
        line = np.cumsum(mass)
        mass = mass[: np.searchsorted(line, top_p * line[-1]) + 1]
    if min_p > 0.0:
        mass = mass[: max(1, np.count_nonzero(mass >= min_p))]
    line = np.cumsum(mass)
    return int(kept[min(np.searchsorted(line, point * line[-1], side="right"), len(mass) - 1)])
