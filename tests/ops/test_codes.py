"""Keys and values of a byte or less: the codec's promises, and every variant of the kernels against it bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kv_format import KVFormat
from octavo.ops import codes
from octavo.ops.api import KVPool, StepInputs
from octavo.ops.codes import decode, encode, turn, turn_back
from octavo.ops.reference import ReferenceOps

from .paged import LAYER, Heads, MakeOps, Piece, attend, fill, matrix, native_pool, sequence, step_of

DTYPES = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
ERRORS = {"int8": 0.01, "fp8_e4m3": 0.035, "fp8_e5m2": 0.07, "int4": 0.12}
"""Of what a turned head of normal numbers loses, root of the mean square."""


def odd_heads(dim: int) -> np.ndarray:
    """[…, dim]: rows of all kinds that a model may make, and some that it may not."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((40, dim), np.float32)
    outliers = normal.copy()
    outliers[:, 3] = 1e4
    one = np.zeros((2, dim), np.float32)
    one[0, dim - 1], one[1, 0] = 7, -1e-3
    sizes = normal[:12] * np.float32(10.0) ** np.arange(-36, 36, 6, dtype=np.float32)[:, None]
    ties = np.linspace(-448, 448, 2 * dim, dtype=np.float32).reshape(2, dim)
    same = np.full((3, dim), 1, np.float32) * np.array([[1], [-2.5], [1e-41]], np.float32)
    subnormal = normal[:2] * np.float32(1e-39)
    zeros = np.array([[0.0], [-0.0]], np.float32) * np.ones(dim, np.float32)
    broken = normal[:4].copy()
    broken[0, 0], broken[1, 5], broken[2, 5], broken[3] = np.nan, np.inf, -np.inf, np.nan
    return np.concatenate([normal, outliers, one, sizes, ties, same, subnormal, zeros, broken])


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128, 256])
def test_turning_keeps_dot_products_and_turns_back(dim: int) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 9, dim))
    np.testing.assert_allclose((turn(a) * turn(b)).sum(-1), (a * b).sum(-1), atol=1e-4)
    np.testing.assert_allclose(turn_back(turn(a)), a, atol=1e-5)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_code_loses(dtype: str, part: int) -> None:
    heads = np.random.default_rng(0).standard_normal((1000, 64), np.float32)
    error = decode(dtype, part, *encode(dtype, part, heads)) - heads
    assert np.sqrt(np.mean(error**2)) < ERRORS[dtype]
    assert abs(error.mean()) < 0.001


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_saturate_and_never_wrap(dtype: str, part: int) -> None:
    heads = odd_heads(64)
    sound = np.isfinite(heads).all(-1)
    numbers = decode(dtype, part, *encode(dtype, part, heads))
    assert np.isfinite(numbers[sound]).all() and np.isnan(numbers[~sound]).any(-1).all()
    largest = np.abs(heads[sound]).max(-1)
    assert (np.abs(numbers[sound]).max(-1) <= (1.2 if dtype == "int4" else 1.01) * largest).all()
    clear = np.abs(heads[sound]) >= 0.5 * largest[:, None]
    clear &= largest[:, None] > 1e-11
    assert (np.sign(numbers[sound]) == np.sign(heads[sound]))[clear].all()


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_exact(dtype: str, part: int) -> None:
    for value in (0.0, -0.0, 1e-41):
        assert (decode(dtype, part, *encode(dtype, part, np.full((2, 32), value, np.float32))) == 0).all()


def test_the_largest_number_is_the_largest_code() -> None:
    """448 in e4m3, whose bits above that are a NaN elsewhere; 57,344 in e5m2, below its infinity; 127 in int8."""
    heads = np.array([[1.0, -1.0, 0.5, 0.0] * 4], np.float32)
    for dtype, bits in (("fp8_e4m3", 0x7E), ("fp8_e5m2", 0x7B), ("int8", 127)):
        found, _ = encode(dtype, 1, heads * np.float32(1 + 2**-9))  # rounds the scale down
        assert found[0, 0] == bits and found[0, 3] == 0
        assert found[0, 1] == (bits | 0x80 if dtype != "int8" else 256 - 127)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_number_is_its_own_code(dtype: str) -> None:
    top = codes.TOPS[dtype]
    numbers = decode(dtype, 1, np.arange(128, dtype=np.uint8)[:, None], np.full(128, 0x3F80, np.uint16))[:, 0]
    numbers = numbers[numbers <= top]  # the others are not used
    heads = np.stack([numbers, -numbers, np.full_like(numbers, top), *[np.zeros_like(numbers)] * 13], axis=1)
    found, scales = encode(dtype, 1, heads)
    assert (scales == 0x3F80).all()
    np.testing.assert_array_equal(found[:, 0], np.arange(len(numbers)))
    np.testing.assert_array_equal(found[1:, 1], np.arange(1, len(numbers)) | 0x80)


def test_bytes_of_a_token() -> None:
    """Scales included, at 16 tokens a page and a head_dim of 64."""
    sizes = {dtype: KVFormat(dtype, 30, 3, 64, 16).page_bytes for dtype in ("bf16", *DTYPES)}
    assert all(sizes["bf16"] >= 1.9 * sizes[dtype] for dtype in ("int8", "fp8_e4m3", "fp8_e5m2"))
    assert sizes["bf16"] >= 3.5 * sizes["int4"]
    mixed = KVFormat("int4", 30, 3, 64, 16, (0, 29))
    assert mixed.page_bytes == (2 * sizes["bf16"] + 28 * sizes["int4"]) / 30
    assert mixed.token_bytes * 16 == mixed.page_bytes


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────


def written(ops: object, heads: Heads, rows: np.ndarray, block_size: int) -> tuple[np.ndarray, KVPool, StepInputs]:
    """The pages after rows that nothing rotates are written from position 0 on."""
    num_pages = -(-len(rows) // block_size)
    step = step_of([Piece(0, 0, len(rows))], block_size, num_pages, np.random.default_rng(0))
    pool = ReferenceOps().allocate_pages(heads.format(block_size), num_pages)
    fill(pool, np.nan)
    still = np.zeros(heads.dim // 2, np.float32)
    if isinstance(ops, ReferenceOps):
        with np.errstate(invalid="ignore"):  # of infinities
            ops.rope_write(rows.copy(), LAYER, heads.num_heads, pool, ops.rope_table(still, len(rows)), step)
        return pool.data, pool, step
    held = native_pool(ops, pool)  # type: ignore[arg-type]
    ops.rope_write(matrix(rows), LAYER, heads.num_heads, held, ops.rope_table(still, len(rows)), step)  # type: ignore[attr-defined]
    return held.data.numpy(), held, step


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "block_size"), [(16, 4), (64, 8), (64, 16), (80, 48), (96, 16), (256, 4)])
def test_pages_have_the_codec_s_bits(make_ops: MakeOps, dtype: str, dim: int, block_size: int) -> None:
    odd = odd_heads(dim)
    heads = Heads(2, 1, dim, dtype)
    rng = np.random.default_rng(1)
    columns = [odd[rng.permutation(len(odd))] for _ in range(heads.num_heads + 4)]
    rows = np.concatenate(columns, axis=1)
    got, _, _ = written(make_ops(), heads, rows, block_size)
    wanted, _, _ = written(ReferenceOps(), heads, rows, block_size)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_s_bytes_are_its_own(make_ops: MakeOps, dtype: str) -> None:
    """Whatever was in the slot, and whoever else is in the page."""
    heads = Heads(2, 1, 32, dtype)
    rows = sequence(heads, 0, 40)
    _, pool, step = written(make_ops(), heads, rows, 16)
    whole = codes.read(KVPool(pool.format, pool.data.numpy()), LAYER, step.pages)
    for t in (0, 7, 39):
        other = sequence(heads, 1, 40) * np.float32(100)
        other[t] = rows[t]
        _, pool, step = written(make_ops(), heads, other, 16)
        for a, b in zip(codes.read(KVPool(pool.format, pool.data.numpy()), LAYER, step.pages), whole, strict=True):
            np.testing.assert_array_equal(a[:, t], b[:, t])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_odd_tokens(make_ops: MakeOps, dtype: str) -> None:
    """Outliers, zeros and subnormal numbers among the tokens: the reference's answer, and never a NaN."""
    heads = Heads(2, 3, 64, dtype)
    data = sequence(heads, 0, 90)
    data[5, -2 * 2 * 64 :] = 0
    data[6, -2 * 2 * 64 :] *= np.float32(1e-40)
    data[9, heads.num_heads * 64 + 3] = 1e4
    data[11, -7] = -1e4
    data[12, -128:] = 3
    pieces = [Piece(0, 0, 90), Piece(0, 89, 1)]
    for block_size in (4, 16, 48):
        got = attend(make_ops(), heads, pieces, [data], block_size)
        wanted = attend(ReferenceOps(), heads, pieces, [data], block_size)
        for a, b in zip(got, wanted, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * np.abs(b).max())


def test_some_layers_stay_in_bf16(make_ops: MakeOps) -> None:
    """Each layer of a mixed pool is what it is in a pool of its own dtype."""
    heads = Heads(2, 3, 64, "int8")
    rows = sequence(heads, 0, 40)
    step = step_of([Piece(0, 0, 40)], 16, 3, np.random.default_rng(0))
    ops = make_ops()
    rope = ops.rope_table(np.ones(32, np.float32), 40)

    def outputs(format: KVFormat) -> list[np.ndarray]:
        pool = ops.allocate_pages(format, 3)
        for layer in range(3):
            qkv = matrix(rows * np.float32(layer + 1))
            ops.rope_write(qkv, layer, heads.num_heads, pool, rope, step)
        return [ops.attention(matrix(rows), i, heads.num_heads, pool, step).numpy().copy() for i in range(3)]

    bf16, int8, mixed = (
        outputs(KVFormat(dtype, 3, 2, 64, 16, kept)) for dtype, kept in (("bf16", ()), ("int8", ()), ("int8", (1,)))
    )
    for layer in range(3):
        np.testing.assert_array_equal(mixed[layer], (bf16 if layer == 1 else int8)[layer])
        assert (bf16[layer] != int8[layer]).any()
