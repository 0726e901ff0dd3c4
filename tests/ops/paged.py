"""Sequences with random queries, keys and values, laid out in pages in any way a test wants.

A sequence's numbers depend on its length's prefix only: token t of sequence i is the same in every layout, so that what
is computed from different layouts can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from octavo.kv_format import KVFormat
from octavo.ops import codes, cpu
from octavo.ops.api import KVPool, StepInputs
from octavo.ops.reference import ReferenceOps

LAYERS, LAYER = 3, 1
CODED = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")
BLOCK_SIZES = (4, 8, 16, 32, 48, 64, 128, 256, 640)
MakeOps = Callable[..., cpu.CpuOps]

JUNK = {"zero": 0.0, "nan": np.nan, "inf": np.inf, "huge": 1e30}


class Piece(NamedTuple):
    """Rows start … start+count-1 of a sequence."""

    sequence: int
    start: int
    count: int


@dataclass(frozen=True)
class Heads:
    """num_heads query heads that share num_kv_heads KV heads of `dim`, stored as `dtype`."""

    num_kv_heads: int
    group: int
    dim: int
    dtype: str

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def columns(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim

    def format(self, block_size: int) -> KVFormat:
        return KVFormat(self.dtype, LAYERS, self.num_kv_heads, self.dim, block_size)


def sequence(heads: Heads, index: int, length: int) -> np.ndarray:
    """The qkv rows of a whole sequence, [length, columns]. Scores have a standard deviation of about 2."""
    rows = [np.random.default_rng((index, t)).standard_normal(heads.columns, np.float32) for t in range(length)]
    qkv = np.stack(rows)
    qkv[:, : heads.num_heads * heads.dim] *= 2
    return qkv


def step_of(pieces: list[Piece], block_size: int, num_pages: int, rng: np.random.Generator) -> StepInputs:
    """Pages are drawn at random, none twice."""
    free = list(rng.permutation(num_pages))
    counts = [-(-(p.start + p.count) // block_size) for p in pieces]
    pages = [free.pop() for _ in range(sum(counts))]
    positions = [t for p in pieces for t in range(p.start, p.start + p.count)]
    return StepInputs(
        token_ids=np.zeros(len(positions), np.int32),
        positions=np.array(positions, np.int32),
        row_start=np.cumsum([0, *(p.count for p in pieces)], dtype=np.int32),
        write_start=np.array([p.start for p in pieces], np.int32),
        page_start=np.cumsum([0, *counts], dtype=np.int32),
        pages=np.array(pages, np.int32),
    )


def with_dtypes(values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """(value, dtype): each with numbers as they are, and with one of the codes in turn, which only differ in how they
    become numbers.
    """
    return [(value, dtype) for i, value in enumerate(values) for dtype in ("bf16", "fp32", CODED[i % len(CODED)])]


def pages_needed(pieces: list[Piece], block_size: int) -> int:
    return sum(-(-(p.start + p.count) // block_size) for p in pieces) + 2


def fill(pool: KVPool, junk: float) -> None:
    """Make every number of the pool `junk`; codes are any bits, their scales `junk`."""
    for layer in range(pool.format.num_layers):
        view = codes.views(pool, layer)
        for part in (view.k, view.v, view.scales):
            if part is not None and part.dtype != np.uint8:
                value = np.full(1, junk, np.float32)
                part[:] = value if part.dtype == np.float32 else codes.to_bf16(value)
            elif part is not None:
                part[:] = 0xA5


def filled_pool(
    heads: Heads, pieces: list[Piece], sequences: list[np.ndarray], step: StepInputs, block_size: int, junk: float
) -> KVPool:
    """A reference pool with the pieces' keys and values where the step says; all else is `junk`, other layers too."""
    f = heads.format(block_size)
    pool = ReferenceOps().allocate_pages(f, pages_needed(pieces, block_size))
    fill(pool, junk)
    for s, piece in enumerate(pieces):
        end = piece.start + piece.count
        k, v = (
            part.reshape(end, heads.num_kv_heads, heads.dim)
            for part in np.split(sequences[piece.sequence][:end, heads.num_heads * heads.dim :], 2, axis=1)
        )
        index, slot = np.divmod(np.arange(end), block_size)
        codes.write(pool, LAYER, step.pages[step.page_start[s] + index], slot, k, v)
    return pool


def rows_of(pieces: list[Piece], sequences: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([sequences[p.sequence][p.start : p.start + p.count] for p in pieces])


def matrix(values: np.ndarray) -> Any:
    """A native matrix with these values."""
    m = cpu._native.Matrix(values.shape[1])
    m.resize(len(values))
    m.numpy()[:] = values
    return m


def native_pool(ops: cpu.CpuOps, pool: KVPool) -> KVPool:
    """A native copy of a reference pool."""
    copy = ops.allocate_pages(pool.format, len(pool.data))
    copy.data.numpy()[:] = pool.data
    return copy


def attend(
    ops: cpu.CpuOps | ReferenceOps,
    heads: Heads,
    pieces: list[Piece],
    sequences: list[np.ndarray],
    block_size: int = 16,
    window: int | None = None,
    junk: float = np.nan,
    seed: int = 0,
) -> list[np.ndarray]:
    """Attention of each piece's rows, [count, num_heads · dim]."""
    step = step_of(pieces, block_size, pages_needed(pieces, block_size), np.random.default_rng(seed))
    pool = filled_pool(heads, pieces, sequences, step, block_size, junk)
    qkv = rows_of(pieces, sequences)
    if isinstance(ops, ReferenceOps):
        out = ops.attention(qkv, LAYER, heads.num_heads, pool, step, window)
    else:
        out = ops.attention(matrix(qkv), LAYER, heads.num_heads, native_pool(ops, pool), step, window).numpy().copy()
    return np.split(out, step.row_start[1:-1])


def stored(pool: KVPool, step: StepInputs, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values in all slots of slice `index` as float32, [num_slots, num_kv_heads, dim]; codes stay turned."""
    pages = step.pages[step.page_start[index] : step.page_start[index + 1]]
    k, v = codes.read(pool, LAYER, pages)
    return k.transpose(1, 0, 2), v.transpose(1, 0, 2)
