"""A forward pass that was recorded: the same bits as op by op, for any step, and the same refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.kv_format import KVFormat
from octavo.ops.api import Floats, Ints, KVPool, StepInputs
from octavo.ops.cpu import CpuOps

from .test_cpu import Stored

HIDDEN, FFN, VOCABULARY, EPS = 64, 96, 50, 1e-5


class Layer:
    """One layer of random weights, two query heads and one KV head of 16 and a tied embedding."""

    def __init__(self, num_threads: int = 2) -> None:
        self.ops = ops = CpuOps(num_threads)
        self.num_runs = 0
        self.table, self.qkv, self.down = (ops.linear([Stored(*shape)]) for shape in ((50, 64), (64, 64), (64, 96)))
        self.gate_up = ops.linear([Stored(FFN, HIDDEN), Stored(FFN, HIDDEN)])
        self.output = ops.linear([Stored(HIDDEN, 32)])
        self.norm = ops.vector(np.full(HIDDEN, 0.01, np.float32))
        self.rope = ops.rope_table(np.float32(1.0) / np.arange(1, 9, dtype=np.float32), 100)
        self.compiled = ops.compiled(self.forward)

    def pool(self, num_pages: int = 10) -> KVPool:
        return self.ops.allocate_pages(KVFormat("bf16", 1, 1, 16, 4), num_pages)

    def forward(self, step: StepInputs, pool: KVPool) -> Any:
        self.num_runs += 1
        ops = self.ops
        x = ops.embed(self.table, step)
        qkv = ops.norm_linear(x, self.norm, EPS, self.qkv)
        ops.rope_write(qkv, 0, 2, pool, self.rope, step)
        ops.add_linear(x, ops.attention(qkv, 0, 2, pool, step), self.output)
        ops.add_linear(x, ops.norm_gate_up(x, self.norm, EPS, self.gate_up), self.down)
        return x


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def step_of(*tokens: int, pages: Ints, start: int = 0) -> StepInputs:
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    return StepInputs(ints(*tokens), positions, ints(0, len(tokens)), ints(0), ints(0, len(pages)), pages)


STEPS = [
    step_of(5, 6, 7, pages=ints(3)),
    step_of(8, pages=ints(3), start=3),
    step_of(*range(20), pages=ints(9, 1, 2, 7, 8)),
    step_of(9, pages=ints(3, 0), start=4),
]


def bits(x: Any) -> Floats:
    out: Floats = x.numpy().copy()
    return out


def test_a_recorded_pass_is_the_pass_itself() -> None:
    model, other = Layer(1), Layer(2)
    pool, other_pool = model.pool(), other.pool()
    for step in STEPS:
        np.testing.assert_array_equal(bits(model.compiled(step, pool)), bits(other.forward(step, other_pool)))
    np.testing.assert_array_equal(pool.data.numpy(), other_pool.data.numpy())
    assert model.num_runs == 1


def test_another_pool_is_recorded_anew() -> None:
    model = Layer()
    pools = [model.pool(), model.pool(20), model.pool()]
    right = [bits(model.forward(step, model.pool())) for step in STEPS[:1]]
    for pool in (*pools, *pools):
        assert (bits(model.compiled(STEPS[0], pool)) == right[0]).all()
    assert all((pool.data.numpy()[3] == pools[0].data.numpy()[3]).all() for pool in pools)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        step_of(50, pages=ints(1)),
        step_of(1, pages=ints(10)),
        step_of(1, pages=ints(1), start=4),
        step_of(1, pages=ints(*range(9)), start=-1),
    ],
    ids=["token", "page", "too few pages", "position"],
)
def test_a_bad_step_is_refused_and_the_next_one_served(recorded: bool, bad: StepInputs) -> None:
    model = Layer()
    pool = model.pool()
    if recorded:
        model.compiled(STEPS[0], pool)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"outside|out of range|too few|negative"):
            model.compiled(bad, pool)
    for step in STEPS:
        np.testing.assert_array_equal(bits(model.compiled(step, pool)), bits(model.forward(step, pool)))
