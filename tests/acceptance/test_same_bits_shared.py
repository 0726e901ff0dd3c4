"""The same bits on pages that others computed or hold: prefix hits, forks, choices."""

from __future__ import annotations

import pytest

from octavo import SamplingParams
from tests.acceptance.same_bits import BOTH, GREEDY, PROMPTS, TEXT, Engine, bits


@BOTH
def test_on_a_prefix_hit_at_every_offset(engine: Engine, params: SamplingParams) -> None:
    plain, caching = engine(enable_prefix_caching=False), engine(num_threads=1)
    first = plain.tokenizer.encode(TEXT)[:40]
    other = plain.tokenizer.encode("def quicksort(values): return sorted(values)")
    prompts = [first[:offset] + other for offset in range(1, 33)]
    right = [bits(output) for output in plain.generate(prompts, params)]
    caching.generate([first], params)
    for offset, prompt in enumerate(prompts, 1):
        output = caching.generate([prompt], params)[0]
        assert output.metrics.num_cached_tokens >= offset, f"offset {offset}"
        assert bits(output) == right[offset - 1], f"offset {offset}"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_the_same_prompt_again_and_at_once(engine: Engine, length: int) -> None:
    plain, caching = engine(enable_prefix_caching=False), engine(num_threads=2)
    prompt = plain.tokenizer.encode(TEXT)[5 : 5 + length]
    right = bits(plain.generate([prompt], GREEDY)[0])
    for outputs in (caching.generate([prompt], GREEDY), caching.generate([prompt, prompt], GREEDY)):
        assert all(bits(output) == right for output in outputs)
    assert caching.generate([prompt], GREEDY)[0].metrics.num_cached_tokens == length - 1


def test_after_forks(engine: Engine) -> None:
    llm, plain = engine(), engine(enable_prefix_caching=False)
    forked, *single = (
        SamplingParams(n=n, temperature=1, seed=seed, max_tokens=20, ignore_eos=True, logprobs=1)
        for n, seed in [(4, 7), *((1, 7 + choice) for choice in range(4))]
    )
    for prompt in PROMPTS:
        output = llm.generate(prompt, forked)[0]
        assert len({choice.text for choice in output.outputs}) == 4
        right = [bits(one) for one in plain.generate([prompt] * 4, single)]
        assert [bits(output, choice) for choice in range(4)] == right
    greedy = SamplingParams(n=2, temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    twins = llm.generate(PROMPTS[0], greedy)[0]
    assert bits(twins, 0) == bits(twins, 1)
