"""The contiguous baseline: one reservation a sequence, the same tokens, and nothing that a reservation cannot do."""

import logging

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.types import SamplingParams

PROMPTS = ["the thin DE", "in the end", "a", "what is the FG in the DE, and what in the other one?", "the thin DE"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    "choices": SamplingParams(n=3, temperature=1, seed=5, max_tokens=20, ignore_eos=True, logprobs=2),
    "beams": SamplingParams(n=2, use_beam_search=True, beam_width=3, max_tokens=12, temperature=0, logprobs=1),
}


@pytest.fixture
def make_contiguous(make_llm):
    """Makes an LLM of `num` reservations of 100 tokens."""
    page_bytes = make_llm(kv_layout="contiguous", max_model_len=100).stats()["page_bytes"]

    def make(num, **options):
        budget = num * page_bytes
        return make_llm(kv_layout="contiguous", max_model_len=100, kv_cache_memory_bytes=budget, **options)

    return make


@pytest.mark.parametrize("num", [1, 2, 20])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_answers_are_those_of_pages(llm, make_contiguous, params, num):
    contiguous = make_contiguous(num)
    assert contiguous.stats()["num_pages"] == num
    for ours, theirs in zip(contiguous.generate(PROMPTS, params), llm.generate(PROMPTS, params), strict=True):
        assert ours.outputs == theirs.outputs
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        assert ours.metrics.num_cached_tokens == 0


def test_every_reservation_is_used_and_none_grows(make_contiguous):
    contiguous = make_contiguous(3)
    running = []
    for _ in contiguous.stream(PROMPTS * 2, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)):
        stats = contiguous.stats()
        assert stats["pages_referenced"] == stats["num_running"] <= 3
        running.append(stats["num_running"])
    assert max(running) == 3
    stats = contiguous.stats()
    assert (stats["pages_allocated"], stats["num_preemptions"]) == (10, 0)
    assert (stats["pages_copied"], stats["pages_cached"], stats["pages_free"]) == (0, 0, 3)


def test_choices_are_copies_of_a_reservation(make_contiguous):
    contiguous = make_contiguous(4)
    contiguous.generate(PROMPTS[0], PARAMS["choices"])
    assert contiguous.stats()["pages_copied"] == 2


@pytest.mark.parametrize(("longest", "reserved"), [(3, 4), (5, 8), (9, 16), (100, 112), (112, 112)])
def test_a_reservation_holds_the_longest_sequence(make_llm, longest, reserved, caplog):
    with caplog.at_level(logging.INFO):
        llm = make_llm(kv_layout="contiguous", max_model_len=longest, block_size=32)
    assert (llm.config.block_size, llm.max_model_len) == (reserved, longest)
    assert llm.stats()["page_bytes"] == -(-reserved * llm.stats()["token_bytes"] // 64) * 64
    assert f"each sequence reserves {reserved} tokens; block_size is ignored" in caplog.text


def test_without_a_length_the_models_context_is_reserved(make_llm):
    assert make_llm(kv_layout="contiguous").config.block_size == 256


def test_what_a_reservation_cannot_do_is_refused(make_llm):
    for option in ({"swap_space": 1.0}, {"kv_offload_dir": "x"}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))}: needs kv_layout paged"):
            EngineConfig(kv_layout="contiguous", **option)
    with pytest.raises(ConfigError, match="kv_layout: must be paged or contiguous; got 'ring'"):
        EngineConfig(kv_layout="ring")
    assert not EngineConfig(kv_layout="contiguous").enable_prefix_caching
    with pytest.raises(ConfigError, match=r"max_model_len: 131,072 tokens are too many: .* at most 65,536"):
        EngineConfig(kv_layout="contiguous").for_model(131_072)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: one page takes"):
        make_llm(kv_layout="contiguous", kv_cache_memory_bytes=1 << 14)
