"""Engines that run out of pages on every machine: whether they do otherwise depends on what they measured."""

from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.scheduler.forecast import WINDOW

SHORT = [[1]] * WINDOW
"""Prompts whose answers, of one token each, are all that an engine then remembers: longer ones surprise it."""


def expect_short_answers(llm: LLM) -> None:
    llm.generate(SHORT, SamplingParams(max_tokens=1))


def let_preempting_pay(core: EngineCore) -> None:
    """A step without a row takes a minute, so that a larger batch saves more than anything costs."""
    core.cache.tiers.costs.step_s = 60.0
