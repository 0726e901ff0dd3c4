"""What the tests of the rule share: the same request gives the same tokens, bit for bit, whatever else happens.

Log-probabilities are compared as floats, without tolerance: they would show a difference long before a token does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.llm import RequestOutput

TEXT = (
    "We hold these truths to be self-evident, that all men are created equal, that they are endowed by their Creator "
    "with certain unalienable Rights, that among these are Life, Liberty and the pursuit of Happiness."
)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    TEXT,
    "서울은 대한민국의 수도이며",
    "1, 2, 3, 4, 5,",
    "Once upon a time, in a village by the sea,",
    "Q",
    TEXT + " " + TEXT[::-1],
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=11, max_tokens=12, ignore_eos=True, logprobs=2)
BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])

Bits = tuple[Any, ...]
Engine = Callable[..., LLM]
Alone = dict[tuple[str, SamplingParams], Bits]


def bits(output: RequestOutput, choice: int = 0) -> Bits:
    """Tokens and exact log-probabilities."""
    found = output.outputs[choice]
    assert found.logprobs is not None
    scores = [[(token, entry.logprob) for token, entry in position.items()] for position in found.logprobs]
    return (found.token_ids, found.text, scores)


def same(outputs: list[RequestOutput], alone: Alone, params: SamplingParams, prompts: list[str]) -> bool:
    return [bits(output) for output in outputs] == [alone[prompt, params] for prompt in prompts]
