"""Rotation, per-head norms and the writing of pages, of every variant against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import _native
from octavo.ops import cpu
from octavo.ops.api import KVPool, StepInputs
from octavo.ops.codes import decode, encode, from_bf16, to_bf16, turn
from octavo.ops.reference import ReferenceOps

from .paged import (
    BLOCK_SIZES,
    LAYER,
    Heads,
    MakeOps,
    Piece,
    matrix,
    native_pool,
    pages_needed,
    rows_of,
    sequence,
    step_of,
    stored,
    with_dtypes,
)

TOLERANCE = 2e-6
"""Of numbers about 1 … 5: two or three roundings."""

DTYPES = ("bf16", "fp32", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
SHAPES = [(16, 1), (64, 3), (80, 4), (96, 8), (128, 2), (256, 1)]
PIECES = [Piece(0, 0, 70), Piece(1, 63, 1), Piece(1, 100, 37), Piece(0, 255, 1)]


def tables(ops: cpu.CpuOps | ReferenceOps, dim: int):
    return ops.rope_table((1e4 ** (-np.arange(dim // 2) * 2 / dim)).astype(np.float32), 300)


def junk_pool(heads: Heads, block_size: int) -> KVPool:
    pool = ReferenceOps().allocate_pages(heads.format(block_size), pages_needed(PIECES, block_size))
    pool.data[:] = 0xFF  # NaN, or codes with scales of NaN
    return pool


def as_stored(dtype: str, part: int, heads: np.ndarray) -> np.ndarray:
    """What pages give back of keys (part 0) or values."""
    if dtype == "fp32":
        return heads
    return from_bf16(to_bf16(heads)) if dtype == "bf16" else decode(dtype, part, *encode(dtype, part, turn(heads)))


def norms(dim: int) -> tuple[np.ndarray, np.ndarray]:
    return np.linspace(0.5, 2, dim, dtype=np.float32), np.linspace(-1, 1, dim, dtype=np.float32)


def run(
    ops: cpu.CpuOps | ReferenceOps, heads: Heads, qkv: np.ndarray, step: StepInputs, block_size: int, normed: bool
) -> tuple[np.ndarray, KVPool]:
    """The rotated rows, and a reference pool with the pages' bytes."""
    pool = junk_pool(heads, block_size)
    weights = [ops.vector(w) for w in norms(heads.dim)] if normed else [None, None]
    rope = tables(ops, heads.dim)
    if isinstance(ops, ReferenceOps):
        rows = qkv.copy()
        ops.rope_write(rows, LAYER, heads.num_heads, pool, rope, step, *weights, eps=1e-6)
        return rows, pool
    rows, written = matrix(qkv), native_pool(ops, pool)
    ops.rope_write(rows, LAYER, heads.num_heads, written, rope, step, *weights, eps=1e-6)
    return rows.numpy().copy(), KVPool(pool.format, written.data.numpy().copy())


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("shape", "dtype"), with_dtypes(SHAPES))
def test_rows_and_pages_match_the_reference(
    make_ops: MakeOps, shape: tuple[int, int], dtype: str, normed: bool
) -> None:
    dim, group = shape
    heads = Heads(2, group, dim, dtype)
    data = [sequence(heads, i, 256) for i in range(2)]
    qkv = rows_of(PIECES, data)
    for block_size in (4, 16, 256):
        step = step_of(PIECES, block_size, pages_needed(PIECES, block_size), np.random.default_rng(0))
        wanted, _ = run(ReferenceOps(), heads, qkv, step, block_size, normed)
        rows, pool = run(make_ops(), heads, qkv, step, block_size, normed)
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())
        np.testing.assert_array_equal(rows[:, -heads.num_kv_heads * dim :], qkv[:, -heads.num_kv_heads * dim :])

        keys_and_values = np.split(rows[:, heads.num_heads * dim :], 2, axis=1)
        for s, piece in enumerate(PIECES):
            end = piece.start + piece.count
            for part, (got, row) in enumerate(zip(stored(pool, step, s), keys_and_values, strict=True)):
                want = row[step.row_start[s] : step.row_start[s + 1]].reshape(piece.count, heads.num_kv_heads, dim)
                want = as_stored(dtype, part, want)
                np.testing.assert_array_equal(got[piece.start : end], want)
                assert np.isnan(got[: piece.start]).all() and np.isnan(got[end:]).all()
        other_pages = np.delete(pool.data, step.pages, axis=0)
        layer = slice(pool.format.k_offset(LAYER), pool.format.k_offset(LAYER + 1))
        other_layers = np.delete(pool.data, layer, axis=1)
        assert (other_pages == 0xFF).all() and (other_layers == 0xFF).all()


@pytest.mark.parametrize(("block_size", "dtype"), with_dtypes(BLOCK_SIZES))
def test_keys_and_values_before_write_start_stay(make_ops: MakeOps, block_size: int, dtype: str) -> None:
    """They lie in pages that others hold; the rows themselves are rotated all the same."""
    heads = Heads(2, 3, 32, dtype)
    data = [sequence(heads, i, 256) for i in range(2)]
    qkv = rows_of(PIECES, data)
    step = step_of(PIECES, block_size, pages_needed(PIECES, block_size), np.random.default_rng(0))
    late = step._replace(write_start=np.array([33, 64, 100, 0], np.int32))
    rows, pool = run(make_ops(), heads, qkv, late, block_size, False)
    all_rows, all_written = run(make_ops(), heads, qkv, step, block_size, False)
    np.testing.assert_array_equal(rows, all_rows)
    for s, (piece, first) in enumerate(zip(PIECES, (33, 64, 100, 255), strict=True)):
        end = piece.start + piece.count
        for got, want in zip(stored(pool, step, s), stored(all_written, step, s), strict=True):
            assert np.isnan(got[:first]).all()
            np.testing.assert_array_equal(got[first:], want[first:])
            assert not np.isnan(got[first:end]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_one_result(make_ops: MakeOps, dtype: str) -> None:
    """Alone or among others, for any number of threads."""
    heads = Heads(2, 3, 80, dtype)
    data = [sequence(heads, i, 256) for i in range(2)]
    qkv = rows_of(PIECES, data)
    step = step_of(PIECES, 16, pages_needed(PIECES, 16), np.random.default_rng(0))
    rows, pool = run(make_ops(1), heads, qkv, step, 16, True)
    for num_threads in (2, 3):
        again, again_pool = run(make_ops(num_threads), heads, qkv, step, 16, True)
        np.testing.assert_array_equal(again, rows)
        np.testing.assert_array_equal(again_pool.data, pool.data)
    ops = make_ops(2)
    for row in (0, 69, 70, 71, 107, 108):
        s = int(np.searchsorted(step.row_start, row, side="right")) - 1
        single = StepInputs(
            token_ids=np.zeros(1, np.int32),
            positions=step.positions[row : row + 1],
            row_start=np.array([0, 1], np.int32),
            write_start=step.write_start[s : s + 1],
            page_start=np.array([0, step.page_start[s + 1] - step.page_start[s]], np.int32),
            pages=step.pages[step.page_start[s] : step.page_start[s + 1]],
        )
        np.testing.assert_array_equal(run(ops, heads, qkv[row : row + 1], single, 16, True)[0][0], rows[row])


def test_variants_agree(make_ops: MakeOps, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads(2, 3, 80, "bf16")
    qkv = rows_of(PIECES, [sequence(heads, i, 256) for i in range(2)])
    step = step_of(PIECES, 16, pages_needed(PIECES, 16), np.random.default_rng(0))
    rows, pool = run(make_ops(), heads, qkv, step, 16, True)
    monkeypatch.setattr(cpu, "_native", _native)
    generic_rows, generic_pool = run(cpu.CpuOps(2, "generic"), heads, qkv, step, 16, True)
    np.testing.assert_array_equal(rows, generic_rows)
    np.testing.assert_array_equal(pool.data, generic_pool.data)


def test_bf16_rounds_to_nearest_even(make_ops: MakeOps) -> None:
    """V is stored as it comes: ties, overflow, infinities, NaN, zeros and subnormals included."""
    heads = Heads(1, 1, 16, "bf16")
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF7F8000, 0x7F800000, 0xFF800000]
    bits += [0x80000000, 0x00000000, 0x00008000, 0x00018000, 0x807FFFFF, 0x7F800001, 0xFFFFFFFF, 0x7FC00000]
    values = np.array(bits, np.uint32).view(np.float32)
    qkv = np.concatenate([np.zeros(32, np.float32), values])[None]
    step = step_of([Piece(0, 0, 1)], 16, 1, np.random.default_rng(0))
    pieces_pool = ReferenceOps().allocate_pages(heads.format(16), 1)
    ops = make_ops(1)
    pool = native_pool(ops, pieces_pool)
    ops.rope_write(matrix(qkv), LAYER, 1, pool, tables(ops, 16), step)
    _, v = stored(KVPool(pool.format, pool.data.numpy()), step, 0)
    got, wanted = v[0].ravel(), (to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(values))
    real = ~np.isnan(values)
    np.testing.assert_array_equal(got[real].view(np.uint32), wanted[real].view(np.uint32))


def test_what_cannot_be_computed_is_refused(make_ops: MakeOps) -> None:
    heads, ops = Heads(2, 3, 32, "bf16"), make_ops()
    step = step_of([Piece(0, 299, 2)], 16, 20, np.random.default_rng(0))
    pool = ops.allocate_pages(heads.format(16), 20)
    qkv = matrix(np.zeros((2, heads.columns), np.float32))
    with pytest.raises(ValueError, match="beyond the rope table"):
        ops.rope_write(qkv, LAYER, heads.num_heads, pool, tables(ops, 32), step)
    with pytest.raises(ValueError, match="the rope table has a wrong width"):
        ops.rope_write(qkv, LAYER, heads.num_heads, pool, tables(ops, 64), step)
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        ops.rope_write(qkv, LAYER, 5, pool, tables(ops, 32), step)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_is_copied_whole(make_ops: MakeOps, dtype: str) -> None:
    """All layers, and nothing else; a page onto itself is left as it is."""
    heads, ops = Heads(3, 1, 16, dtype), make_ops()
    pool = ops.allocate_pages(heads.format(4), 5)
    pages = pool.data.numpy()
    pages[:] = before = np.random.default_rng(0).integers(0, 256, pages.shape, np.uint8)
    ops.copy_page(pool, 3, 1)
    ops.copy_page(pool, 2, 2)
    np.testing.assert_array_equal(pages, before[[0, 3, 2, 3, 4]])
    for src, dst in ((5, 0), (0, 5)):
        with pytest.raises(ValueError, match="a page is out of range"):
            ops.copy_page(pool, src, dst)
    with pytest.raises(TypeError):
        ops.copy_page(pool, 0, -1)
