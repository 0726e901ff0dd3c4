"""Every variant of the matrix products against the arithmetic that native/linear.h states, bit for bit."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo.ops.api import Quantized
from octavo.ops.cpu import _pack

EPS = 1e-5


class Matrix(NamedTuple):
    """A weight as a file would give it: `Quantized`, or float32 values."""

    stored: Any

    @property
    def shape(self) -> tuple[int, int]:
        return (self.stored.codes if self.bits <= 8 else self.stored).shape

    @property
    def bits(self) -> int:
        return self.stored.bits if isinstance(self.stored, Quantized) else 32

    @property
    def group(self) -> int:
        return self.stored.group if self.bits <= 8 else 0

    def quantized(self, start: int, stop: int) -> Quantized:
        q = self.stored
        minimums = None if q.minimums is None else q.minimums[start:stop]
        return Quantized(q.codes[start:stop], q.scales[start:stop], minimums, q.group, q.bits)

    def float32(self, start: int, stop: int) -> Any:
        if self.bits > 8:
            return self.stored[start:stop]
        q = self.quantized(start, stop)
        values = np.repeat(q.scales, q.group, axis=1) * q.codes.astype(np.float32)
        return values if q.minimums is None else values + np.repeat(q.minimums, q.group, axis=1)


def matrix(kind: str, outputs: int, inputs: int, seed: int = 0) -> Matrix:
    """kind: w4 or w8, then -16 for groups of 16, m for minimums, + for scales that f16 lacks, ! for extreme codes."""
    rng = np.random.default_rng([seed, outputs, inputs])
    if kind == "bf16":
        return Matrix(rng.standard_normal((outputs, inputs), np.float32))
    bits, group = int(kind[1]), 16 if "-16" in kind else 32
    low, high, dtype = (0, 15, np.uint8) if bits == 4 else (-128, 127, np.int8)
    if "!" in kind:
        codes = np.where(rng.random((outputs, inputs)) < 0.5, high, low if bits == 8 else high).astype(dtype)
        codes[0] = high if bits == 4 else low
    else:
        codes = rng.integers(low, high, (outputs, inputs), dtype, endpoint=True)
    scales, minimums = (
        rng.standard_normal((outputs, inputs // group), np.float32) * np.float32(0.02) for _ in range(2)
    )
    if "+" not in kind:
        scales, minimums = (a.astype(np.float16).astype(np.float32) for a in (scales, minimums))
    return Matrix(Quantized(codes, scales, minimums if "m" in kind else None, group, bits))


def rows(count: int, inputs: int, seed: int = 1) -> Any:
    """Ordinary rows, and among them one of zeros, one with an outlier of 1e4 and one of equal values."""
    rng = np.random.default_rng([seed, count, inputs])
    x = rng.standard_normal((count, inputs), np.float32)
    if count > 1:
        x[1] = 0
    if count > 2:
        x[2, inputs // 2] = 1e4
    if count > 3:
        x[3] = -3.25
    return x


# ── the stated arithmetic, in numpy ──────────────────────────────────────────────────────────────────────────────


def fma(a: Any, b: Any, c: Any) -> Any:
    """a · b + c rounded once to float32: in float64 the product is exact, and a sum rounded to odd rounds rightly."""
    p, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = p + c
    shadow = total - p
    error = (p - (total - shadow)) + (c - shadow)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, toward), total).astype(np.float32)


def quantize(x: Any, fine: bool = False) -> tuple[Any, Any]:
    """Codes times their factors [rows, groups, 32] as int64, and scales [rows, groups, 1]."""
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    halves = np.abs(groups.reshape(*groups.shape[:2], 2, 16)).max(axis=3)
    finer = np.zeros(halves.shape, np.int64)
    for n in range(1, 8 if fine else 0):
        finer[(halves * np.float32(2**n) <= largest) & (largest > 0)] = n
    finest, finer = finer.max(axis=2, keepdims=True), np.repeat(finer, 16, axis=2)
    codes = np.rint(groups * (inverse * (1 << finer).astype(np.float32))).astype(np.int64)
    return codes << (finest - finer), largest / np.float32(127) / (1 << finest).astype(np.float32)


def bf16(x: Any) -> Any:
    word = x.view(np.uint32)
    return ((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def expected(weight: Matrix, x: Any, fine: bool = False) -> Any:
    acc = np.zeros((len(x), weight.shape[0]), np.float32)
    if weight.bits > 8:
        w, x = (np.pad(bf16(a), ((0, 0), (0, -a.shape[1] % 32))) for a in (weight.stored, x))
        for start in range(0, w.shape[1], 32):
            chains = [np.zeros_like(acc), np.zeros_like(acc)]
            for i in range(start, start + 32):
                chains[i % 2] = fma(x[:, i, None], w[None, :, i], chains[i % 2])
            acc = acc + (chains[0] + chains[1])
        return acc
    q = weight.stored
    codes, scales = quantize(x, fine)
    for g in range(q.scales.shape[1]):
        first = g * q.group
        part = codes[:, first // 32, first % 32 : first % 32 + q.group]
        scale = scales[:, first // 32]
        sums = part @ q.codes[:, first : first + q.group].astype(np.int64).T
        acc = fma(sums.astype(np.float32), q.scales[:, g] * scale, acc)
        if q.minimums is not None:
            acc = fma(q.minimums[:, g], scale * part.sum(axis=1, keepdims=True).astype(np.float32), acc)
    return acc


# ── one variant under test ───────────────────────────────────────────────────────────────────────────────────────


class Kernels:
    """The native module's functions on numpy arrays, for one variant and number of threads."""

    def __init__(self, native: Any, variant: str, num_threads: int) -> None:
        self.native = native
        self.backend = native.Backend(variant, num_threads)

    def pack(self, *weights: Matrix, bias: Any = None, fine: bool = False) -> Any:
        packed = self.native.Linear(self.backend, weights[0].shape[1], fine)
        for weight in weights:
            _pack(packed, weight)
        if bias is not None:
            packed.set_bias(bias)
        return packed

    def rows(self, values: Any) -> Any:
        matrix = self.native.Matrix(values.shape[1])
        matrix.resize(len(values))
        matrix.numpy()[:] = values
        return matrix

    def linear(self, packed: Any, x: Any, norm: Any = None) -> Any:
        out = self.native.Matrix(packed.outputs)
        weight = None if norm is None else self.native.Vector(norm)
        self.native.linear(self.backend, self.rows(x), weight, EPS, packed, out)
        return out.numpy().copy()

    def gate_up(self, packed: Any, x: Any, norm: Any) -> Any:
        out = self.native.Matrix(packed.outputs // 2)
        self.native.gate_up(self.backend, self.rows(x), self.native.Vector(norm), EPS, packed, out)
        return out.numpy().copy()


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request: Any, native_variant: tuple[Any, str]) -> Kernels:
    return Kernels(*native_variant, request.param)


def same_bits(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


KINDS = ["w4", "w4m", "w4m+", "w4!", "w8", "w8m+", "w8!", "w8-16", "w8-16m", "w8-16!+", "bf16"]
COUNTS = [1, 2, 3, 4, 5, 15, 16, 17, 33, 100]
SHAPES = [(1, 32), (16, 64), (17, 96), (48, 576), (576, 576), (192, 1536)]


@functools.cache
def stated(kind: str, outputs: int, inputs: int) -> tuple[Matrix, Any, Any]:
    """A matrix, rows, and their product."""
    weight, x = matrix(kind, outputs, inputs), rows(max(COUNTS), inputs)
    return weight, x, expected(weight, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_stated(kernels: Kernels, kind: str, shape: tuple[int, int]) -> None:
    weight, x, want = stated(kind, *shape)
    packed = kernels.pack(weight)
    for count in COUNTS:
        got = kernels.linear(packed, x[:count])
        assert same_bits(got, want[:count]), f"{count} rows"


@pytest.mark.parametrize(("kind", "inputs"), [("w4m", 576), ("w8", 96), ("w8!", 64), ("w8-16", 48), ("bf16", 48)])
def test_fine_inputs_have_a_scale_for_each_half(kernels: Kernels, kind: str, inputs: int) -> None:
    weight = matrix(kind, 40, inputs)
    packed = kernels.pack(weight, fine=True)
    x = rows(100, inputs)
    x[5, 16:32] /= 300  # by more than the factors can make good
    x[6, ::32] = 64 * np.abs(x[6, ::32])
    want = expected(weight, x, fine=True)
    for count in COUNTS:
        assert same_bits(kernels.linear(packed, x[:count]), want[:count]), f"{count} rows"


def test_fine_inputs_lose_less_beside_an_outlier(kernels: Kernels) -> None:
    weight, x = matrix("w8", 40, 64), np.random.default_rng(8).standard_normal((20, 64), np.float32)
    x[:, ::32] = 30
    exact = x.astype(np.float64) @ weight.float32(0, 40).T.astype(np.float64)
    coarse, fine = (np.abs(kernels.linear(kernels.pack(weight, fine=f), x) - exact).mean() for f in (False, True))
    assert fine < 0.8 * coarse


@pytest.mark.parametrize("kind", ["bf16", "w8-16m"])
@pytest.mark.parametrize("inputs", [16, 48, 80, 592])
def test_inputs_that_are_no_multiple_of_32(kernels: Kernels, kind: str, inputs: int) -> None:
    weight = matrix(kind, 33, inputs)
    x = rows(18, inputs)
    assert same_bits(kernels.linear(kernels.pack(weight), x), expected(weight, x))


def test_a_single_input(kernels: Kernels) -> None:
    weight = matrix("bf16", 3, 1)
    x = rows(2, 1)
    assert same_bits(kernels.linear(kernels.pack(weight), x), expected(weight, x))


def test_extreme_codes_meet_extreme_inputs(kernels: Kernels) -> None:
    """Every product has its largest size and one sign, so that any saturation would show."""
    x = np.repeat(np.float32([[1], [-1]]), 64, axis=1)
    for kind, code in (("w4", 15), ("w8", -128), ("w8", 127), ("w8-16", -128)):
        weight = matrix(kind, 16, 64)
        weight.stored.codes[:] = code
        for count in (2, 16):
            inputs = np.tile(x, (count // 2, 1))
            assert same_bits(kernels.linear(kernels.pack(weight), inputs), expected(weight, inputs))


def test_joined_matrices_of_mixed_formats(kernels: Kernels) -> None:
    weights = [matrix("w4m", 20, 96, 1), matrix("w8", 7, 96, 2), matrix("bf16", 33, 96, 3), matrix("w8-16+", 16, 96, 4)]
    bias = np.random.default_rng(5).standard_normal(76, np.float32)
    packed = kernels.pack(*weights, bias=bias)
    x = rows(19, 96)
    want = np.concatenate([expected(w, x) for w in weights], axis=1) + bias
    assert same_bits(kernels.linear(packed, x), want)

    residual = rows(19, 76, seed=6)
    total = kernels.rows(residual)
    kernels.native.add_linear(kernels.backend, total, kernels.rows(x), packed)
    assert same_bits(total.numpy().copy(), residual + want)


def test_a_norm_before_the_product(kernels: Kernels) -> None:
    """The norm itself is held to the reference elsewhere; here, that the product takes its result."""
    weight, x = matrix("bf16", 48, 72), rows(20, 72)
    norm = np.random.default_rng(7).random(72, np.float32)
    got = kernels.linear(kernels.pack(weight), x, norm)
    normed = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True) + EPS) * norm
    want = normed @ weight.stored.astype(np.float64).T
    np.testing.assert_allclose(got, want, rtol=0, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize(("gate", "up"), [("w4m", "w4m"), ("w4m", "w8-16+"), ("bf16", "w8")])
@pytest.mark.parametrize("outputs", [1, 24, 64])
def test_gate_and_up(kernels: Kernels, gate: str, up: str, outputs: int) -> None:
    weights = [matrix(gate, outputs, 64, 1), matrix(up, outputs, 64, 2)]
    x, norm = rows(21, 64), np.random.default_rng(3).random(64, np.float32)
    joined = kernels.linear(kernels.pack(*weights), x, norm).astype(np.float64)
    g, u = joined[:, :outputs], joined[:, outputs:]
    got = kernels.gate_up(kernels.pack(*weights), x, norm)
    np.testing.assert_allclose(got, g / (1 + np.exp(-g)) * u, rtol=2e-6, atol=1e-30)
    for count in (1, 9, 16):
        assert same_bits(kernels.gate_up(kernels.pack(*weights), x[:count], norm), got[:count])


@pytest.mark.parametrize("kind", ["w4m", "w8", "bf16"])
def test_many_rows_are_the_rows_one_by_one(kernels: Kernels, kind: str) -> None:
    """Enough rows for several panels of inputs, in another order."""
    weight = matrix(kind, 40, 1536)
    packed = kernels.pack(weight)
    x = rows(300, 1536)
    order = np.random.default_rng(8).permutation(300)
    together = kernels.linear(packed, x[order])
    alone = np.concatenate([kernels.linear(packed, x[i : i + 1]) for i in order[:40]])
    assert same_bits(together[:40], alone)
    assert same_bits(together, kernels.linear(packed, x)[order])


@pytest.mark.parametrize("kind", ["w4m", "w4", "w8m+", "w8-16", "bf16"])
def test_embedded_rows_are_the_files_values(kernels: Kernels, kind: str) -> None:
    weight = matrix(kind, 50, 96)
    if kind == "bf16":
        weight = Matrix(bf16(weight.stored))
    ids = np.int32([49, 0, 17, 17, 16, 15])
    out = kernels.native.Matrix(96)
    kernels.native.embed(kernels.backend, kernels.pack(weight), ids, out)
    assert same_bits(out.numpy().copy(), weight.float32(0, 50)[ids])
    for bad in (-1, 50):
        with pytest.raises(ValueError, match="vocabulary"):
            kernels.native.embed(kernels.backend, kernels.pack(weight), np.int32([bad]), out)


def test_logits_of_chosen_rows(kernels: Kernels) -> None:
    packed = kernels.pack(matrix("w8", 70, 64))
    x, norm = rows(9, 64), np.ones(64, np.float32)
    out = kernels.native.Matrix(70)
    weight = kernels.native.Vector(norm)
    kernels.native.logits(kernels.backend, kernels.rows(x), np.int32([8, 0, 8]), weight, EPS, packed, out)
    assert same_bits(out.numpy().copy(), kernels.linear(packed, x, norm)[[8, 0, 8]])
    with pytest.raises(ValueError, match="out of range"):
        kernels.native.logits(kernels.backend, kernels.rows(x), np.int32([9]), weight, EPS, packed, out)


@pytest.mark.parametrize("kind", ["w4m", "w8", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_spoiled_row_spoils_no_other(kernels: Kernels, kind: str, bad: float) -> None:
    packed = kernels.pack(matrix(kind, 32, 64))
    x = rows(17, 64)
    clean = kernels.linear(packed, x)
    x[5, 3] = bad
    got = kernels.linear(packed, x)
    assert not np.isfinite(got[5]).any()
    keep = np.arange(17) != 5
    assert same_bits(got[keep], clean[keep])


def test_any_number_of_threads_gives_the_same_bits(native_variant: tuple[Any, str]) -> None:
    weights = [matrix("w4m", 100, 96, 1), matrix("w8", 30, 96, 2), matrix("bf16", 5, 96, 3)]
    x = rows(37, 96)
    results = []
    for num_threads in (1, 2, 3, 7):
        kernels = Kernels(*native_variant, num_threads)
        results.append(kernels.linear(kernels.pack(*weights), x))
    assert all(same_bits(a, b) for a, b in itertools.pairwise(results))


def test_shapes_are_checked(kernels: Kernels) -> None:
    packed = kernels.pack(matrix("w4", 16, 64))
    with pytest.raises(ValueError, match="differ in width"):
        kernels.linear(packed, rows(2, 32))
    with pytest.raises(ValueError, match="wrong length"):
        kernels.linear(packed, rows(2, 64), np.ones(63, np.float32))
    with pytest.raises(ValueError, match="one shape"):
        kernels.gate_up(packed, rows(2, 64), np.ones(64, np.float32))
    wide = matrix("w8", 4, 32).stored._replace(codes=np.zeros((4, 48), np.int8))
    with pytest.raises(ValueError, match="multiple of the group"):
        kernels.pack(matrix("w8-16", 4, 48)._replace(stored=wide))
