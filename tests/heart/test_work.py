"""How much work a step is: function calls are counted, not seconds, so that a busy machine changes nothing."""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import pytest

from octavo.cache.manager import CacheManager
from octavo.config import EngineConfig
from octavo.engine.runner import step_inputs, wanted_rows
from octavo.scheduler.scheduler import Scheduler
from octavo.types import Request, Sampled, SamplingParams, SliceResult, StepResult

VOCAB = 50_000
PAGE = 16


def prompt(seed: int, length: int) -> list[int]:
    return Random(seed).choices(range(VOCAB), k=length)


class Busy:
    """A scheduler with `num_cached` pages in its cache and `num_running` sequences that draw a token each step."""

    def __init__(self, num_running: int, num_cached: int = 0) -> None:
        cache = CacheManager(num_cached + 5_000, PAGE)
        self.scheduler = Scheduler(EngineConfig(), cache, max_model_len=8192, vocab_size=VOCAB)
        for number in range(num_cached // 500):
            self.scheduler.add(Request(f"c{number}", prompt(number, 500 * PAGE + 1), SamplingParams(max_tokens=1)))
            while self.scheduler.has_work:
                self.step()
        assert cache.pool.num_cached == num_cached
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        for number in range(num_running):
            self.scheduler.add(Request(str(number), prompt(10_000 + number, 40), params))
        while self.scheduler.num_waiting:
            self.step()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        step_inputs(plan.slices), wanted_rows(plan.slices)
        token = [Sampled(7, 0.0, 0, ())]
        self.scheduler.commit(plan, StepResult([SliceResult(token * len(piece.draws)) for piece in plan.slices]))

    def calls(self) -> int:
        """Of functions, Python's and C's, while every sequence fills a page."""
        count = 0

        def note(frame: Any, event: str, _: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            for _ in range(PAGE):
                self.step()
        finally:
            sys.setprofile(before)
        return count


def test_a_step_costs_a_few_calls_a_sequence() -> None:
    assert Busy(256).calls() < 22 * 256 * PAGE


def test_a_step_is_linear_in_the_sequences() -> None:
    few, many = Busy(16).calls(), Busy(256).calls()
    assert few < many < 16 * few


@pytest.mark.parametrize("num_cached", [500, 20_000])
def test_cached_pages_cost_nothing(num_cached: int) -> None:
    more = Busy(32, num_cached).calls() - Busy(32).calls()
    assert more < 32, "a page that was given back is popped, one that was never taken is not"
