"""What steps take on this machine, fitted to steps of the real engine, for the simulator.

The engine serves a small grid of prompts and answers through `LLM`, as anyone would use it; each step is timed from the
end of the one before, so that scheduling and texts count. What a step takes is then fitted, by least squares weighted
until they are least absolute relative errors, so that steps that were disturbed count little: a line between knots for
its rows, and a constant each for a draw, a token attended to by a single row, a pair of a row and a token in longer
slices, and a token stored before those. See octavo.simulator.cost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.bench.throughput import watched
from octavo.bench.workloads import Work, random_tokens
from octavo.config import EngineConfig
from octavo.engine.llm import LLM
from octavo.simulator.cost import Load, Measured, load_of
from octavo.types import SamplingParams

MAX_ERROR = 0.5
"""Steps that took so much more or less than the fit says, relatively, were disturbed."""
LEAST_ERROR = 0.01
"""Errors below it count alike."""


class Timed(NamedTuple):
    """What a step computed, and how long it took."""

    load: Load
    seconds: float


class Fit(NamedTuple):
    """`error`: the median relative error of the steps; `num_disturbed`: those that are far off."""

    cost: Measured
    num_steps: int
    num_disturbed: int
    error: float


def calibrate(path: Path, name: str, config: EngineConfig, repeats: int = 2) -> Fit:
    """Time the engine's steps and fit them. Takes about a minute for a small model."""
    llm, watch, shape = watched(path, config)
    steps: list[Timed] = []
    with llm:
        for work in grid(llm, repeats):
            watch.steps.clear()
            params = [SamplingParams(temperature=0, max_tokens=one.max_tokens, ignore_eos=True) for one in work]
            llm.generate([one.prompt for one in work], params)
            since = watch.steps[0].start
            for runs, _, end in watch.steps:
                steps.append(Timed(load_of(runs), end - since))
                since = end
        load_s = llm._core.cache.tiers.costs.load_s
        weights = shape.layers.num_bytes + shape.head.num_bytes
        pool = llm.stats()["num_pages"] * llm.format.page_bytes
        blank = Measured(name, llm.format, (), 0.0, 0.0, 0.0, 0.0, load_s, weights, weights + pool)
    return fit(steps[4:], blank)  # the first ones map memory


def grid(llm: LLM, repeats: int) -> Iterator[list[Work]]:
    """Requests that are served together: one prompt alone, many at once, near the beginning and far from it, a mix."""
    chance = random.Random(1)
    budget, longest = llm.config.max_num_batched_tokens, llm.max_model_len - 16
    room = llm.stats()["num_pages"] * llm.config.block_size

    def some(count: int, length: int, answer: int) -> list[Work]:
        length = max(min(length, longest), 1)
        prompts = [random_tokens(chance, llm.model.vocab_size, length) for _ in range(count)]
        return [Work(prompt, min(answer, llm.max_model_len - length)) for prompt in prompts]

    yield some(1, 8, 8)
    for _ in range(repeats):
        for length in _doubling(1, min(budget, longest)):
            yield some(1, length, 2)
        for count in _doubling(1, llm.config.max_num_seqs):
            for length in (16, 256, 1024):
                if count * length <= max(2 * budget, 256) and count * (length + 16) <= room:
                    yield some(count, length, 12)
        mix: list[Work] = []
        while len(mix) < llm.config.max_num_seqs and sum(len(one.prompt) + 64 for one in mix) < room - longest:
            mix += some(1, round(2 ** chance.uniform(3, 10)), chance.randrange(4, 64))
        yield mix


def _doubling(start: int, stop: int) -> list[int]:
    return [1 << at for at in range(start.bit_length() - 1, stop.bit_length())]


def fit(steps: Sequence[Timed], blank: Measured) -> Fit:
    """`blank` with what fits the steps best.

    Its shape is robust, so it is near the quicker half; then it is raised to what undisturbed steps take on average, as
    throughput is a matter of sums.
    """
    most = max(step.load.num_rows for step in steps)
    knots = [rows for rows in _doubling(1, most) if any(step.load.num_rows <= rows for step in steps)]
    if knots[-1] < most:
        knots.append(most)
    if len(knots) < 2:
        knots = [1, 2]
    seconds = np.array([step.seconds for step in steps])
    features = np.array([[*_hats(step.load.num_rows, knots), *step.load[1:]] for step in steps], float)
    relative, weights = features / seconds[:, None], np.ones(len(steps))
    for _ in range(20):
        found = _least_squares(relative * weights[:, None], weights)
        errors = np.abs(relative @ found - 1)
        weights = np.maximum(errors, LEAST_ERROR) ** -0.5
    if (sound := errors <= MAX_ERROR).any():
        found *= np.mean(1 / (relative @ found)[sound])
        errors = np.abs(relative @ found - 1)
    lines = tuple(zip(knots, found[: len(knots)].tolist(), strict=True))
    draw_s, seen_s, pair_s, stored_s = found[len(knots) :].tolist()
    cost = replace(blank, knots=lines, draw_s=draw_s, seen_s=seen_s, pair_s=pair_s, stored_s=stored_s)
    return Fit(cost, len(steps), int((errors > MAX_ERROR).sum()), float(np.median(errors)))


def _hats(rows: int, knots: list[int]) -> list[float]:
    """How much each knot counts for so many rows: two of them, unless it is one itself."""
    return [float(np.interp(rows, knots, np.eye(len(knots))[at])) for at in range(len(knots))]


def _least_squares(features: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The best coefficients of which none is negative: those that would be are left out, the worst first."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-30)
    active, found = np.ones(features.shape[1], bool), np.zeros(features.shape[1])
    while True:
        found[:] = 0
        found[active] = np.linalg.lstsq(features[:, active] / scale[active], wanted, rcond=None)[0]
        if (found >= 0).all():
            found /= scale
            return found
        active[found.argmin()] = False
