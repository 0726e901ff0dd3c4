"""The same request gives the same tokens, bit for bit, whatever else happens: the real model on the native kernels.

Log-probabilities are compared as floats, without tolerance: they would show a difference long before a token does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.llm import RequestOutput
from octavo.engine.runner import ModelRunner

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


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    """Engines by their options, each opened once and closed, with the leak check, at the end."""
    opened: dict[tuple[Any, ...], LLM] = {}

    def open_engine(**options: Any) -> LLM:
        options = {"kv_cache_memory_bytes": 2**28, "max_model_len": 2048, "backend": "cpu"} | options
        key = tuple(sorted(options.items()))
        if key not in opened:
            opened[key] = LLM(model_path, **options)
        return opened[key]

    yield open_engine
    for llm in opened.values():
        llm.close()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Alone:
    """Every prompt by itself, nothing cached: what all other ways must equal."""
    llm = engine(enable_prefix_caching=False)
    return {
        (prompt, params): bits(llm.generate(prompt, params)[0]) for prompt in PROMPTS for params in (GREEDY, SEEDED)
    }


def same(outputs: list[RequestOutput], alone: Alone, params: SamplingParams, prompts: list[str]) -> bool:
    return [bits(output) for output in outputs] == [alone[prompt, params] for prompt in prompts]


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
def test_on_a_prefix_hit_at_every_offset(engine: Engine, params: SamplingParams) -> None:
    plain, caching = engine(enable_prefix_caching=False), engine(num_threads=1)
    first = plain.tokenizer.encode(TEXT)[:40]
    other = plain.tokenizer.encode("def quicksort(values): return sorted(values)")
    for offset in range(1, 33):
        caching.generate([first], params)
        prompt = first[:offset] + other
        output = caching.generate([prompt], params)[0]
        assert output.metrics.num_cached_tokens >= offset, f"offset {offset}"
        assert bits(output) == bits(plain.generate([prompt], params)[0]), f"offset {offset}"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_the_same_prompt_again_and_at_once(engine: Engine, length: int) -> None:
    plain, caching = engine(enable_prefix_caching=False), engine(num_threads=2)
    prompt = plain.tokenizer.encode(TEXT)[5 : 5 + length]
    right = bits(plain.generate([prompt], GREEDY)[0])
    for outputs in (caching.generate([prompt], GREEDY), caching.generate([prompt, prompt], GREEDY)):
        assert all(bits(output) == right for output in outputs)
    assert caching.generate([prompt], GREEDY)[0].metrics.num_cached_tokens == length - 1


def test_after_forks(engine: Engine) -> None:
    llm = engine()
    for prompt in PROMPTS:
        forked = SamplingParams(n=4, temperature=1, seed=7, max_tokens=20, ignore_eos=True, logprobs=1)
        output = llm.generate(prompt, forked)[0]
        assert len({choice.text for choice in output.outputs}) == 4
        for choice in range(4):
            single = SamplingParams(temperature=1, seed=7 + choice, max_tokens=20, ignore_eos=True, logprobs=1)
            assert bits(output, choice) == bits(engine(enable_prefix_caching=False).generate(prompt, single)[0])
    greedy = SamplingParams(n=2, temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    twins = llm.generate(PROMPTS[0], greedy)[0]
    assert bits(twins, 0) == bits(twins, 1)


@BOTH
def test_after_preemptions(engine: Engine, alone: Alone, model_path: Path, params: SamplingParams) -> None:
    page_bytes = engine().stats()["page_bytes"]
    for enable_prefix_caching in (True, False):
        with LLM(
            model_path,
            kv_cache_memory_bytes=14 * page_bytes,
            max_model_len=220,
            max_num_batched_tokens=64,
            enable_prefix_caching=enable_prefix_caching,
        ) as llm:
            # answers of many lengths over prompts that barely fit: pages run out in the middle of answers
            prompts = [prompt for prompt in PROMPTS if len(llm.tokenizer.encode(prompt)) < 60] * 3
            assert same(llm.generate(prompts, params), alone, params, prompts)
            long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=0)
            right = [bits(engine(enable_prefix_caching=False).generate(prompt, long)[0]) for prompt in PROMPTS[:6]]
            outputs = llm.generate(PROMPTS[:6], long)
            assert [bits(output) for output in outputs] == right
            assert llm.stats()["num_preemptions"] > 0


@BOTH
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128, 256])
def test_at_every_page_size(engine: Engine, alone: Alone, params: SamplingParams, block_size: int) -> None:
    llm = engine(block_size=block_size)
    for _ in range(2):  # cold and warm
        assert same(llm.generate(PROMPTS, params), alone, params, PROMPTS)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2", "int4"])
def test_in_every_format_of_keys_and_values(engine: Engine, dtype: str) -> None:
    """Alone, in a batch, on a prefix hit, in chunks, at other page sizes and on one thread."""
    plain = engine(kv_cache_dtype=dtype, enable_prefix_caching=False)
    right = {(prompt, GREEDY): bits(plain.generate(prompt, GREEDY)[0]) for prompt in PROMPTS}
    options: tuple[dict[str, Any], ...] = (
        {},
        {"block_size": 4, "max_num_batched_tokens": 7},
        {"block_size": 48, "num_threads": 1},
    )
    for other in options:
        llm = engine(kv_cache_dtype=dtype, **other)
        for _ in range(2):  # cold and warm
            assert same(llm.generate(PROMPTS, GREEDY), right, GREEDY, PROMPTS)


@BOTH
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_on_any_number_of_threads(engine: Engine, alone: Alone, params: SamplingParams, num_threads: int) -> None:
    llm = engine(num_threads=num_threads, enable_prefix_caching=False)
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


def test_after_a_restart(engine: Engine, alone: Alone, model_path: Path) -> None:
    for _ in range(2):
        with LLM(model_path, kv_cache_memory_bytes=2**26, max_model_len=1024) as llm:
            assert same(llm.generate(PROMPTS, SEEDED), alone, SEEDED, PROMPTS)


def test_a_prompt_shared_by_many_with_choices_takes_the_least_pages(engine: Engine, model_path: Path) -> None:
    answer = 20
    params = SamplingParams(n=4, temperature=1, seed=3, max_tokens=answer, ignore_eos=True)
    with LLM(model_path, kv_cache_memory_bytes=2**28, max_model_len=1024) as llm:
        tokens = (llm.tokenizer.encode(TEXT) * 20)[:512]
        llm.generate([tokens] * 16, params)
        own = -(-(512 + answer - 1) // 16) - 512 // 16
        assert llm.stats()["peak_pages"] <= 512 // 16 + 16 * 4 * own


def test_two_hundred_requests_in_a_pool_for_eight(engine: Engine, model_path: Path) -> None:
    page_bytes = engine().stats()["page_bytes"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(model_path, kv_cache_memory_bytes=8 * 2 * page_bytes, max_model_len=32) as llm:
        prompts = [[(7 * number + place) % 40_000 + 10 for place in range(20)] for number in range(200)]
        outputs = llm.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
        for number in range(0, 200, 25):
            right = engine(enable_prefix_caching=False).generate([prompts[number]], params)[0]
            assert bits(outputs[number]) == bits(right)
