"""The same bits whatever the size of a page and the rubbish in it; and how few pages are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.runner import ModelRunner
from tests.acceptance.same_bits import BOTH, PROMPTS, TEXT, Alone, Engine, same


@BOTH
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128, 256])
def test_at_every_page_size(engine: Engine, alone: Alone, params: SamplingParams, block_size: int) -> None:
    llm = engine(block_size=block_size)
    for _ in range(2):  # cold and warm
        assert same(llm.generate(PROMPTS, params), alone, params, PROMPTS)


@BOTH
@pytest.mark.parametrize("fill", [0xFF, 0x7F], ids=["NaN", "3e38"])
def test_with_rubbish_in_unused_slots(
    engine: Engine, alone: Alone, model_path: Path, params: SamplingParams, fill: int
) -> None:
    with LLM(model_path, kv_cache_memory_bytes=2**26, max_model_len=1024) as llm:
        runner = llm._engine.core._executor
        assert isinstance(runner, ModelRunner)
        runner._store.pool.data.numpy()[:] = fill
        assert same(llm.generate(PROMPTS, params), alone, params, PROMPTS)


def test_a_prompt_shared_by_many_with_choices_takes_the_least_pages(model_path: Path) -> None:
    answer = 20
    params = SamplingParams(n=4, temperature=1, seed=3, max_tokens=answer, ignore_eos=True)
    with LLM(model_path, kv_cache_memory_bytes=2**28, max_model_len=1024) as llm:
        tokens = (llm.tokenizer.encode(TEXT) * 20)[:512]
        llm.generate([tokens] * 16, params)
        own = -(-(512 + answer - 1) // 16) - 512 // 16
        assert llm.stats()["peak_pages"] <= 512 // 16 + 16 * 4 * own
