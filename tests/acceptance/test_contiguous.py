"""The contiguous baseline gives the bits that pages give: the real model on the native kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, by the sea, " * 6,
    "Q",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
CHOICES = SamplingParams(n=3, temperature=0.9, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True, logprobs=2)
BEAMS = SamplingParams(n=2, use_beam_search=True, beam_width=3, temperature=0, max_tokens=8)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_answers_are_those_of_pages(model_path: Path, dtype: str) -> None:
    prompts = PROMPTS * 2
    params = [GREEDY, CHOICES, GREEDY, CHOICES, BEAMS, GREEDY, CHOICES, BEAMS]
    options = {"max_model_len": 500, "kv_cache_dtype": dtype, "kv_cache_memory_bytes": 5 * 512 * 46_080}
    with LLM(model_path, kv_layout="contiguous", **options) as llm:
        contiguous = llm.generate(prompts, params)
        assert llm.stats()["num_pages"] == (5 if dtype == "fp32" else 10)
    with LLM(model_path, **options) as llm:
        paged = llm.generate(prompts, params)
    assert [output.outputs for output in contiguous] == [output.outputs for output in paged]
