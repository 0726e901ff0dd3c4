"""The executor that computes: page operations, the forward pass, logits where they are wanted, tokens.

Owns the translation of a plan's slices to rows. Decides nothing about sequences or pages, and keeps nothing of a plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from octavo.engine.guide import Guides, Masks
from octavo.engine.kv_store import KVStore
from octavo.engine.sampler import Sampler
from octavo.ops.api import Floats, Ints, KVPool, StepInputs, Tensor
from octavo.types import Sampled, Slice, SliceResult, StepPlan, StepResult

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
        self._store.apply(plan.page_ops)
        if not plan.slices:
            return StepResult(())
        step = step_inputs(plan.slices)
        masks = self._guides.begin(plan.slices)
        x = self._decoder.forward(step, self._store.pool)
        logits = self._logits(x, wanted_rows(plan.slices, step.row_start))
        return StepResult([self._read(piece, logits, masks) for piece in plan.slices])

    def _logits(self, x: Tensor, rows: Ints) -> Iterator[Floats]:
        """The rows' logits one by one; a block is computed when its first row is asked for."""
        for start in range(0, len(rows), LOGIT_ROWS):
            yield from self._decoder.logits(x, rows[start : start + LOGIT_ROWS])

    def _read(self, piece: Slice, logits: Iterator[Floats], masks: Masks) -> SliceResult:
        """Take the slice's rows from `logits`, in the order of `wanted_rows`."""
        scores: Sequence[Sampled] = ()
        if piece.num_prompt_logprobs is not None:
            num_top = piece.num_prompt_logprobs
            scores = [self._sampler.score(next(logits), target, num_top) for target in piece.targets]
        if not piece.draws:
            return SliceResult((), scores)
        row = next(logits)
        return SliceResult([self._sampler.draw(row, draw, masks.of(draw)) for draw in piece.draws], scores)


def step_inputs(slices: Sequence[Slice]) -> StepInputs:
    """The slices as arrays. Token ids and pages are copied, so that sequences and page tables may grow at once."""
    num_rows = np.fromiter((len(piece.token_ids) for piece in slices), np.int32, len(slices))
    num_pages = np.fromiter((len(piece.pages) for piece in slices), np.int32, len(slices))
    start = np.fromiter((piece.start for piece in slices), np.int32, len(slices))
    write_start = np.fromiter((piece.write_start for piece in slices), np.int32, len(slices))
    row_start = _offsets(num_rows)
    return StepInputs(
        token_ids=_joined(piece.token_ids for piece in slices),
        positions=np.arange(row_start[-1], dtype=np.int32) + np.repeat(start - row_start[:-1], num_rows),
        row_start=row_start,
        write_start=write_start,
        page_start=_offsets(num_pages),
        pages=_joined(piece.pages for piece in slices),
    )


def wanted_rows(slices: Sequence[Slice], row_start: Ints) -> Ints:
    """The rows whose logits are read: for each slice those that score a target, then the last one if it draws."""
    rows: list[int] = []
    for piece, first, end in zip(slices, row_start[:-1].tolist(), row_start[1:].tolist(), strict=True):
        if piece.num_prompt_logprobs is not None:
            rows.extend(range(first, first + len(piece.targets)))
        if piece.draws:
            rows.append(end - 1)
    return np.array(rows, np.int32)


def _offsets(lengths: Ints) -> Ints:
    """Where each of the runs begins when they lie end to end, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _joined(arrays: Iterable[array[int]]) -> Ints:
    """Arrays of C ints (typecode "i") end to end."""
    return np.frombuffer(b"".join(arrays), np.int32)
