"""Paged attention of every variant: against the reference to 1e-5 of the largest value (of codes, 2e-4), against itself
bit for bit.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from octavo import _native
from octavo.errors import ConfigError
from octavo.kv_format import KVFormat
from octavo.ops import cpu
from octavo.ops.reference import ReferenceOps

from .paged import (
    BLOCK_SIZES,
    CODED,
    JUNK,
    LAYER,
    Heads,
    MakeOps,
    Piece,
    attend,
    filled_pool,
    matrix,
    native_pool,
    pages_needed,
    rows_of,
    sequence,
    step_of,
    with_dtypes,
)

TOLERANCE, CODES_TOLERANCE = 1e-5, 2e-4
"""Of the largest value. Queries of codes, and weights, are rounded to int16: the codes themselves lose 1e-2."""
DTYPES = ("bf16", "fp32", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
WINDOWS = (None, 1, 8, 15, 16, 17, 100, 4096)

SHAPES = [(16, 1), (64, 3), (80, 4), (96, 8), (128, 3), (256, 1), (32, 7), (16, 49)]
"""head_dim and query heads a KV head."""


def lengths(block_size: int) -> list[int]:
    return sorted(
        {1, block_size - 1, block_size, block_size + 1, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 700}
    )


def ragged(block_size: int) -> list[Piece]:
    """One row at the end of each length, between chunks that start anywhere."""
    decodes = [Piece(0, length - 1, 1) for length in lengths(block_size)]
    return [Piece(1, 0, 70), *decodes[::2], Piece(1, 500, 31), *decodes[1::2], Piece(0, 61, 3), Piece(1, 127, 2)]


@pytest.fixture(scope="module")
def sequences() -> dict[Heads, list[np.ndarray]]:
    """Two sequences of 700 tokens for each shape, made once."""
    return {}


def two(sequences: dict[Heads, list[np.ndarray]], heads: Heads) -> list[np.ndarray]:
    if heads not in sequences:
        sequences[heads] = [sequence(heads, i, 700) for i in range(2)]
    return sequences[heads]


def assert_close(got: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = TOLERANCE) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def tolerance(dtype: str) -> float:
    return CODES_TOLERANCE if dtype in CODED else TOLERANCE


def assert_same(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize(("shape", "dtype"), with_dtypes(SHAPES))
def test_head_shapes_match_the_reference(make_ops: MakeOps, sequences, shape: tuple[int, int], dtype: str) -> None:
    dim, group = shape
    heads = Heads(1 if group > 8 else 2, group, dim, dtype)
    pieces = ragged(16)
    if group > 8:
        pieces = pieces[::4]
    data = two(sequences, heads)
    wanted = attend(ReferenceOps(), heads, pieces, data)
    assert_close(attend(make_ops(), heads, pieces, data), wanted, tolerance(dtype))


@pytest.mark.parametrize(("block_size", "dtype"), with_dtypes(BLOCK_SIZES))
def test_page_sizes_match_the_reference(make_ops: MakeOps, sequences, block_size: int, dtype: str) -> None:
    heads = Heads(2, 3, 32, dtype)
    data, pieces = two(sequences, heads), ragged(block_size)
    wanted = attend(ReferenceOps(), heads, pieces, data, block_size)
    assert_close(attend(make_ops(), heads, pieces, data, block_size, seed=1), wanted, tolerance(dtype))


@pytest.mark.parametrize("dtype", CODED)
def test_rounding_queries_and_weights_costs_nothing_beside_the_codes(make_ops: MakeOps, sequences, dtype: str) -> None:
    heads, pieces = Heads(2, 3, 64, dtype), [Piece(0, 300, 60)]
    data = two(sequences, heads)
    exact = attend(ReferenceOps(), replace(heads, dtype="fp32"), pieces, data)[0]
    coded = attend(ReferenceOps(), heads, pieces, data)[0]
    got = attend(make_ops(), heads, pieces, data)[0]
    assert np.square(got - coded).mean() < 1e-4 * np.square(coded - exact).mean()


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_match_the_reference(make_ops: MakeOps, sequences, window: int | None, block_size: int) -> None:
    heads = Heads(2, 3, 32, "bf16")
    data, pieces = two(sequences, heads), ragged(block_size)
    wanted = attend(ReferenceOps(), heads, pieces, data, block_size, window)
    assert_close(attend(make_ops(), heads, pieces, data, block_size, window), wanted)


@pytest.mark.parametrize(("block_size", "dtype"), with_dtypes([4, 8, 16, 48, 64, 640]))
def test_unused_slots_never_matter(make_ops: MakeOps, sequences, block_size: int, dtype: str) -> None:
    """Whatever lies in slots past a row's position, in other pages and in other layers."""
    heads = Heads(2, 3, 32, dtype)
    data, pieces, ops = two(sequences, heads), ragged(block_size), make_ops()
    for window in (None, 17):
        clean = attend(ops, heads, pieces, data, block_size, window, junk=0.0)
        for junk in JUNK.values():
            assert_same(attend(ops, heads, pieces, data, block_size, window, junk), clean)


@pytest.mark.parametrize("block_size", [4, 8, 16, 64])
def test_pages_outside_the_window_are_not_looked_up(make_ops: MakeOps, sequences, block_size: int) -> None:
    """Their ids may have been given to others: here they name a page of NaN."""
    heads, window = Heads(2, 3, 32, "bf16"), 40
    data, ops = two(sequences, heads), make_ops()
    pieces = [Piece(0, 600, 1), Piece(1, 530, 60)]
    wanted = attend(ops, heads, pieces, data, block_size, window)
    step = step_of(pieces, block_size, pages_needed(pieces, block_size), np.random.default_rng(0))
    pool = filled_pool(heads, pieces, data, step, block_size, np.nan)
    unused = next(p for p in range(len(pool.data)) if p not in step.pages)
    for s, piece in enumerate(pieces):
        first = (piece.start - window + 1) // block_size
        step.pages[step.page_start[s] : step.page_start[s] + first] = unused
    out = ops.attention(
        matrix(rows_of(pieces, data)), LAYER, heads.num_heads, native_pool(ops, pool), step, window
    ).numpy()
    assert_same([out], [np.concatenate(wanted)])


@pytest.mark.parametrize(("window", "dtype"), with_dtypes([None, 17, 300]))
def test_a_row_has_one_result(make_ops: MakeOps, sequences, window: int | None, dtype: str) -> None:
    """Whole or in chunks, alone or among others, for every page size and number of threads."""
    heads = Heads(1, 3, 32, dtype)
    data = [rows[:540] for rows in two(sequences, heads)]
    whole = attend(make_ops(1), heads, [Piece(0, 0, 540)], data, 16, window)[0]
    rng = np.random.default_rng(1)
    for trial, block_size in enumerate(BLOCK_SIZES):
        cuts = sorted({0, 540, *rng.integers(1, 540, 1 + trial * 2).tolist()})
        chunks = [Piece(0, a, b - a) for a, b in itertools.pairwise(cuts)]
        decodes = [Piece(0, int(t), 1) for t in rng.integers(0, 540, 8)]
        others = [
            Piece(1, int(t), int(n)) for t, n in zip(rng.integers(0, 440, 3), rng.integers(1, 99, 3), strict=True)
        ]
        pieces = [*others, *chunks, *decodes]
        order = rng.permutation(len(pieces))
        got = attend(make_ops(1 + trial % 3), heads, [pieces[i] for i in order], data, block_size, window, seed=trial)
        for i, rows in zip(order, got, strict=True):
            if pieces[i].sequence == 0:
                assert_same([rows], [whole[pieces[i].start : pieces[i].start + pieces[i].count]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_is_divided_between_threads(make_ops: MakeOps, dtype: str) -> None:
    """A tile cut by the division of work, over one or several threads, is put together in the same order."""
    heads = Heads(1, 3, 16, dtype)
    data = [sequence(heads, 0, 3300)]
    pieces = [Piece(0, 3299, 1), Piece(0, 2040, 20), Piece(0, 5, 1), Piece(0, 2600, 1)]
    wanted = attend(ReferenceOps(), heads, pieces, data)
    alone = [attend(make_ops(1), heads, [piece], data)[0] for piece in pieces]
    assert_close(alone, wanted, tolerance(dtype))
    for num_threads in (2, 3, 4, 7, 16):
        assert_same(attend(make_ops(num_threads), heads, pieces, data), alone)
        assert_same(attend(make_ops(num_threads), heads, pieces[:1], data), alone[:1])


@pytest.mark.parametrize(("shape", "dtype"), with_dtypes([(80, 3), (64, 8), (16, 1), (128, 4)]))
def test_variants_agree(make_ops: MakeOps, monkeypatch, sequences, shape: tuple[int, int], dtype: str) -> None:
    dim, group = shape
    heads = Heads(2, group, dim, dtype)
    data, pieces = two(sequences, heads), ragged(16)
    got = attend(make_ops(), heads, pieces, data, window=300)
    monkeypatch.setattr(cpu, "_native", _native)
    assert_same(got, attend(cpu.CpuOps(2, "generic"), heads, pieces, data, window=300))


def test_large_scores_stay_finite(make_ops: MakeOps, sequences) -> None:
    """Scores in the thousands, whose own rounding is a thousand times that of ordinary ones."""
    heads = Heads(2, 3, 32, "fp32")
    data = [rows.copy() for rows in two(sequences, heads)]
    for rows in data:
        rows[:, : heads.num_heads * heads.dim] *= 1000
    pieces = ragged(16)
    wanted = attend(ReferenceOps(), heads, pieces, data)
    assert_close(attend(make_ops(), heads, pieces, data), wanted, 1000 * TOLERANCE)


def test_what_cannot_be_computed_is_refused(make_ops: MakeOps) -> None:
    heads, ops = Heads(2, 3, 32, "bf16"), make_ops()
    with pytest.raises(ConfigError, match=r"head_dim .* 20: use backend='reference'"):
        ops.allocate_pages(KVFormat("bf16", 1, 1, 20, 16), 1)
    pieces = [Piece(0, 20, 2)]
    pool = ops.allocate_pages(heads.format(16), 4)
    qkv = matrix(np.zeros((2, heads.columns), np.float32))
    good = step_of(pieces, 16, 4, np.random.default_rng(0))
    for wrong in (good._replace(pages=good.pages + 4), good._replace(pages=good.pages - 4)):
        with pytest.raises(ValueError, match="a page is out of range"):
            ops.attention(qkv, LAYER, heads.num_heads, pool, wrong)
    short = good._replace(pages=good.pages[:1], page_start=np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match="too few pages"):
        ops.attention(qkv, LAYER, heads.num_heads, pool, short)
    with pytest.raises(ValueError, match="do not follow each other"):
        ops.attention(qkv, LAYER, heads.num_heads, pool, good._replace(positions=np.array([20, 22], np.int32)))
    with pytest.raises(ValueError, match="the layer is out of range"):
        ops.attention(qkv, 3, heads.num_heads, pool, good)
    assert ops.attention(qkv, LAYER, heads.num_heads, pool, good).numpy().shape == (2, heads.num_heads * heads.dim)
