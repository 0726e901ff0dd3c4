"""The same bits whatever the size of a page."""

from __future__ import annotations

import pytest

from octavo import SamplingParams
from tests.acceptance.same_bits import BOTH, PROMPTS, Alone, Engine, same


@BOTH
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128, 256])
def test_at_every_page_size(engine: Engine, alone: Alone, params: SamplingParams, block_size: int) -> None:
    llm = engine(block_size=block_size)
    for _ in range(2):  # cold and warm
        assert same(llm.generate(PROMPTS, params), alone, params, PROMPTS)
