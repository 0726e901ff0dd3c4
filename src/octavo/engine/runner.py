"""The executor that computes: page operations, the forward pass, logits where they are wanted, tokens.

Owns the translation of a plan's slices to rows. Decides nothing about sequences or pages, and keeps nothing of a plan.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice
from operator import add, attrgetter
from typing import Protocol

import numpy as np

from octavo.engine.guide import Guides, Masks
from octavo.engine.kv_store import KVStore
from octavo.engine.sampler import Sampler, Target
from octavo.ops.api import Floats, Ints, KVPool, StepInputs, Tensor
from octavo.types import Draw, Sampled, Slice, SliceResult, StepPlan, StepResult

LOGIT_ROWS = 128
"""Rows whose logits are in memory at once: 25 MB at a vocabulary of 49,152."""


class Decoder(Protocol):
    """What the runner asks of a model."""

    def forward(self, step: StepInputs, pool: KVPool) -> Tensor:
        """The residual stream after the last layer, one row a token."""

    def logits(self, x: Tensor, rows: Ints) -> Floats:
        """Logits of the given rows: [len(rows), vocab]."""


class ModelRunner:
    """Executes plans with one decoder on one pool."""

    def __init__(self, decoder: Decoder, store: KVStore, sampler: Sampler, guides: Guides) -> None:
        self._decoder = decoder
        self._store = store
        self._sampler = sampler
        self._guides = guides

    def execute(self, plan: StepPlan) -> StepResult:
        self._store.begin(plan.page_ops)
        if not plan.slices:
            return StepResult((), self._store.ended(plan.wait))
        start = time.perf_counter()
        step, rows = step_inputs(plan.slices), wanted_rows(plan.slices)
        masks = self._guides.begin(plan.slices)
        x = self._decoder.forward(step, self._store.pool)
        results = self._results(plan.slices, x, rows, masks)
        seconds = time.perf_counter() - start
        return StepResult(results, self._store.ended(plan.wait), seconds)

    def close(self) -> None:
        self._store.close()

    def _results(self, slices: Sequence[Slice], x: Tensor, rows: Ints, masks: Masks) -> list[SliceResult]:
        """Read the wanted rows' logits block by block, and give each slice what was asked of its own."""
        of_rows = [asks for piece in slices for asks in _asked(piece)]
        sampled: list[Sampled] = []
        for start in range(0, len(rows), LOGIT_ROWS):
            logits = self._decoder.logits(x, rows[start : start + LOGIT_ROWS])
            block = enumerate(of_rows[start : start + LOGIT_ROWS])
            sampled += self._sampler.sample(logits, [(row, ask) for row, asks in block for ask in asks], masks.of)
        answers = iter(sampled)
        results = []
        for piece in slices:
            scores = tuple(islice(answers, len(piece.targets)))
            results.append(SliceResult(tuple(islice(answers, len(piece.draws))), scores))
        return results


def _asked(piece: Slice) -> list[Sequence[Draw | Target]]:
    """What is asked of each of the slice's wanted rows."""
    asks: list[Sequence[Draw | Target]] = []
    if piece.num_prompt_logprobs is not None:
        asks = [(Target(token, piece.num_prompt_logprobs),) for token in piece.targets]
    if piece.draws:
        asks.append(piece.draws)
    return asks


def step_inputs(slices: Sequence[Slice]) -> StepInputs:
    """The slices as arrays. Token ids and pages are copied, so that sequences and page tables may grow at once.

    Not by numpy's arithmetic: when a step has swept the caches, each of its calls takes 5 µs.
    """
    _, starts, token_ids, write_starts, pages, *_ = zip(*slices, strict=True)
    stops = map(add, starts, map(len, token_ids))
    return StepInputs(
        token_ids=_joined(token_ids),
        positions=_ints(chain.from_iterable(map(range, starts, stops))),
        row_start=_offsets(token_ids),
        write_start=_ints(write_starts),
        page_start=_offsets(pages),
        pages=_joined(pages),
    )


def wanted_rows(slices: Sequence[Slice]) -> Ints:
    """The rows whose logits are read: for each slice those that score a target, then the last one if it draws."""
    rows: list[int] = []
    first = 0
    for piece, end in zip(slices, accumulate(map(len, map(attrgetter("token_ids"), slices))), strict=True):
        if piece.targets:
            rows.extend(range(first, first + len(piece.targets)))
        if piece.draws:
            rows.append(end - 1)
        first = end
    return _ints(rows)


def _ints(values: Iterable[int]) -> Ints:
    return np.frombuffer(array("i", values), np.int32)


def _offsets(runs: Iterable[array[int]]) -> Ints:
    """Where each of the runs begins when they lie end to end, and where the last one ends."""
    return _ints(accumulate(map(len, runs), initial=0))


def _joined(arrays: Iterable[array[int]]) -> Ints:
    """Arrays of C ints (typecode "i") end to end."""
    return np.frombuffer(b"".join(arrays), np.int32)
