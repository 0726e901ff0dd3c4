"""The same bits in pools that are too small: preempted, evicted, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.acceptance.same_bits import BOTH, PROMPTS, Alone, Engine, bits, same
from tests.surprise import expect_short_answers


@pytest.fixture(scope="module", params=[True, False], ids=["cache", "no cache"])
def cramped(request: pytest.FixtureRequest, engine: Engine, model_path: Path) -> Iterator[LLM]:
    """An engine with 14 pages."""
    page_bytes = engine(enable_prefix_caching=False).stats()["page_bytes"]
    options = {"max_model_len": 220, "max_num_batched_tokens": 64, "enable_prefix_caching": request.param}
    with LLM(model_path, kv_cache_memory_bytes=14 * page_bytes, **options) as llm:
        yield llm


@BOTH
def test_when_prompts_barely_fit(cramped: LLM, alone: Alone, params: SamplingParams) -> None:
    prompts = [prompt for prompt in PROMPTS if len(cramped.tokenizer.encode(prompt)) < 60] * 3
    assert same(cramped.generate(prompts, params), alone, params, prompts)


def test_after_preemptions(cramped: LLM, engine: Engine) -> None:
    """Pages run out in the middle of long answers."""
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=0)
    right = [bits(output) for output in engine(enable_prefix_caching=False).generate(PROMPTS[:6], long)]
    expect_short_answers(cramped)
    before = cramped.stats()["num_preemptions"]
    assert [bits(output) for output in cramped.generate(PROMPTS[:6], long)] == right
    assert cramped.stats()["num_preemptions"] > before


def test_two_hundred_requests_in_a_pool_for_eight(engine: Engine, model_path: Path) -> None:
    page_bytes = engine(enable_prefix_caching=False).stats()["page_bytes"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(model_path, kv_cache_memory_bytes=8 * 2 * page_bytes, max_model_len=32) as llm:
        prompts = [[(7 * number + place) % 40_000 + 10 for place in range(20)] for number in range(200)]
        outputs = llm.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
        for number in range(0, 200, 25):
            right = engine(enable_prefix_caching=False).generate([prompts[number]], params)[0]
            assert bits(outputs[number]) == bits(right)
