"""RMS norm of every variant, seen through the two ops that begin with it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.ops import cpu
from octavo.ops.api import Floats
from octavo.ops.reference import rms_norm

from .paged import LAYER, Heads, MakeOps, Piece, matrix, step_of


class Identity:
    """A `Weight` that hands its inputs through; the kernels round them to bf16."""

    bits, group = 32, 0

    def __init__(self, size: int) -> None:
        self.shape = size, size

    def float32(self, start: int, stop: int) -> Floats:
        return np.eye(*self.shape, dtype=np.float32)[start:stop]


def head_norm(ops: cpu.CpuOps, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x normalised as the one query head of a row at position 0, where the rotation does nothing."""
    dim = len(x)
    heads = Heads(1, 1, dim, "fp32")
    rope = ops.rope_table(np.ones(dim // 2, np.float32), 1)
    qkv = matrix(np.concatenate([x, np.zeros(2 * dim, np.float32)])[None])
    pool = ops.allocate_pages(heads.format(4), 1)
    step = step_of([Piece(0, 0, 1)], 4, 1, np.random.default_rng(0))
    ops.rope_write(qkv, LAYER, 1, pool, rope, step, ops.vector(weight), eps=eps)
    return qkv.numpy()[0, :dim].copy()


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 112, 128, 144, 256])
def test_to_a_few_roundings(make_ops: MakeOps, dim: int) -> None:
    rng, ops = np.random.default_rng(dim), make_ops()
    for scale in (1e-6, 1.0, 1e6):
        x = (rng.standard_normal(dim) * scale).astype(np.float32)
        weight = rng.standard_normal(dim).astype(np.float32)
        np.testing.assert_allclose(head_norm(ops, x, weight, 1e-5), rms_norm(x, weight, 1e-5), rtol=4e-7)


def test_a_zero_row_stays_zero(make_ops: MakeOps) -> None:
    got = head_norm(make_ops(), np.zeros(64, np.float32), np.full(64, 3, np.float32), 1e-5)
    np.testing.assert_array_equal(got, np.zeros(64, np.float32))


@pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 40, 64, 65, 100, 576])
def test_rows_of_any_length(make_ops: MakeOps, size: int) -> None:
    """What lies past a row's end has no part in it."""
    rng, ops = np.random.default_rng(size), make_ops()
    x = rng.standard_normal((3, size)).astype(np.float32)
    x[1] *= 1000
    weight = rng.uniform(0.5, 2, size).astype(np.float32)
    got = ops.norm_linear(matrix(x), ops.vector(weight), 1e-5, ops.linear([Identity(size)])).numpy()
    np.testing.assert_allclose(got, rms_norm(x, weight, 1e-5), rtol=2**-8)
