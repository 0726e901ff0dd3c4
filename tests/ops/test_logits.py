"""From logits to tokens: every variant against the reference, and the same bits whatever else is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.ops.api import Draws, Ints
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps

from .paged import MakeOps

VOCABULARIES = [1, 2, 15, 16, 17, 63, 64, 65, 1000, 1024, 1025, 5003]
REFERENCE = ReferenceOps()


def some(rows: int, vocabulary: int, spread: float = 3.0) -> Any:
    """Some of them equal, one impossible."""
    logits = np.random.default_rng(vocabulary).standard_normal((rows, vocabulary), np.float32) * np.float32(spread)
    logits[:, ::5] = np.round(logits[:, ::5])
    if vocabulary > 2:
        logits[:, 1] = -np.inf
    return logits


def ints(values: Any) -> Ints:
    return np.array(values, np.int32)


def some_draws(rows: int) -> Draws:
    """Every combination of filters, on every row."""
    noise = np.random.default_rng(rows)
    filters = [(t, k, p, m) for t in (0.3, 1.0, 4.0) for k in (0, 1, 7, 700) for p in (0.8, 1.0) for m in (0.0, 0.1)]
    temperatures, top_ks, top_ps, min_ps = (np.tile(values, rows) for values in zip(*filters, strict=True))
    of_row = ints(np.repeat(np.arange(rows), len(filters)))
    return Draws(of_row, temperatures, ints(top_ks), top_ps, min_ps, noise.random(len(of_row)))


def everything(ops: CpuOps, logits: Any) -> list[Any]:
    rows = len(logits)
    tokens, num_tops = ints(np.arange(rows) % logits.shape[1]), ints(np.arange(rows) * 3)
    return [
        ops.best(logits),
        ops.choose(logits, some_draws(rows)),
        *ops.score(logits, ints(range(rows)), tokens, num_tops),
    ]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_what_the_reference_says(make_ops: MakeOps, vocabulary: int) -> None:
    logits = some(6, vocabulary)
    best, chosen, log_totals, ranks, tops = everything(make_ops(), logits)
    right = everything(REFERENCE, logits)  # type: ignore[arg-type]
    assert (best == right[0]).all()
    assert (chosen != right[1]).mean() < 0.01  # a point may fall on either side of a boundary
    np.testing.assert_allclose(log_totals, right[2], rtol=1e-6, atol=1e-6)
    assert (ranks == right[3]).all()
    assert (tops == right[4]).all()


def test_variants_threads_and_company_give_the_same_bits(make_ops: MakeOps) -> None:
    """Against the generic variant on one thread, one row at a time."""
    logits, alone = some(9, 5003), CpuOps(1, "generic")
    right = everything(alone, logits)
    for num_threads in (1, 2, 3):
        for ours, theirs in zip(everything(make_ops(num_threads), logits), right, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for row in range(9):
        one = logits[row : row + 1]
        assert alone.best(one)[0] == right[0][row]
        draws = some_draws(9)
        mine = np.flatnonzero(draws.rows == row)
        own = Draws(*(values[mine] for values in draws))._replace(rows=ints([0] * len(mine)))
        assert (alone.choose(one, own) == right[1][mine]).all()
        assert alone.score(one, ints([0]), ints([row]), ints([0])).log_totals[0] == right[2][row]


@pytest.mark.parametrize("place", [0, 16, 64, 999])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_rows_are_named(make_ops: MakeOps, place: int, value: float) -> None:
    logits = some(4, 1000)
    right = REFERENCE.best(logits).tolist()
    logits[1, place] = value
    logits[2] = -np.inf
    assert make_ops().best(logits).tolist() == [right[0], -1, -1, right[3]] == REFERENCE.best(logits).tolist()


def test_the_first_of_equals_is_the_best(make_ops: MakeOps) -> None:
    for vocabulary in VOCABULARIES:
        logits = np.full((1, vocabulary), -3.0, np.float32)
        logits[0, vocabulary // 2 :] = 0.0
        logits[0, vocabulary // 2] = -0.0
        assert make_ops().best(logits)[0] == vocabulary // 2
        order = make_ops().score(logits, ints([0]), ints([0]), ints([vocabulary])).tops[0]
        assert order.tolist() == [*range(vocabulary // 2, vocabulary), *range(vocabulary // 2)]


def test_what_is_out_of_range_is_refused(make_ops: MakeOps) -> None:
    ops, logits = make_ops(), some(2, 50)
    for rows, tokens in (([2], [0]), ([-1], [0]), ([0], [50]), ([0], [-1])):
        with pytest.raises(ValueError, match=r"out of range|outside"):
            ops.score(logits, ints(rows), ints(tokens), ints([0]))
    one = np.ones(1)
    with pytest.raises(ValueError, match="out of range"):
        ops.choose(logits, Draws(ints([2]), one, ints([0]), one, one, one))
