"""Engines that run out of pages on every machine: whether they do otherwise depends on what they measured."""

from octavo import LLM, SamplingParams
from octavo.scheduler.forecast import WINDOW

SHORT = [[1]] * WINDOW
"""Prompts whose answers, of one token each, are all that an engine then remembers: longer ones surprise it."""


def expect_short_answers(llm: LLM) -> None:
    llm.generate(SHORT, SamplingParams(max_tokens=1))
