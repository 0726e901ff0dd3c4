"""The same bits whoever shares the steps, however a prompt is cut, on any number of threads: the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.acceptance.same_bits import BOTH, PROMPTS, SEEDED, TEXT, Alone, Engine, bits, same


@BOTH
def test_in_a_batch_of_32(engine: Engine, alone: Alone, params: SamplingParams) -> None:
    prompts = PROMPTS * 4
    assert same(engine(enable_prefix_caching=False).generate(prompts, params), alone, params, prompts)
    assert same(engine().generate(prompts, params), alone, params, prompts)


@BOTH
def test_prefilled_in_chunks_of_every_size(engine: Engine, model_path: Path, params: SamplingParams) -> None:
    right = bits(engine(enable_prefix_caching=False).generate(TEXT, params)[0])
    with LLM(model_path, enable_prefix_caching=False, kv_cache_memory_bytes=2**26, max_model_len=512) as llm:
        for chunk in range(1, 41):
            llm._engine.core.scheduler._max_num_batched_tokens = chunk  # opening forty engines would take a minute
            assert bits(llm.generate(TEXT, params)[0]) == right, f"chunks of {chunk}"


@BOTH
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_on_any_number_of_threads(engine: Engine, alone: Alone, params: SamplingParams, num_threads: int) -> None:
    llm = engine(num_threads=num_threads, enable_prefix_caching=False)
    assert same(llm.generate(PROMPTS, params), alone, params, PROMPTS)


def test_after_a_restart(engine: Engine, alone: Alone, model_path: Path) -> None:
    for _ in range(2):
        with LLM(model_path, kv_cache_memory_bytes=2**26, max_model_len=1024) as llm:
            assert same(llm.generate(PROMPTS, SEEDED), alone, SEEDED, PROMPTS)
