"""Pages and places, seen through HTTP: hits give what a miss gives, the pool's limits hold, and nobody is starved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.server.serving import PAGE_BYTES, Served, error_of, serving, until

PATH = "/v1/completions"


def cached(reply: Any) -> int:
    count = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(count, int)
    return count


# ── hits ──


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("max_tokens", [1, 8])
def test_two_of_a_kind_at_once_are_as_one_alone(served: Served, length: int, max_tokens: int) -> None:
    prompt = [20_000 + 1000 * max_tokens + 50 * length + i for i in range(length)]
    body: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 2}
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda _: served.complete(prompt, **body), range(2)))
    again = served.complete(prompt, **body)
    alone = served.complete(prompt, cache_salt="alone", **body)
    assert cached(alone) == 0
    assert all(reply["choices"] == alone["choices"] for reply in (*replies, again))
    assert cached(again) <= length - 1


def test_a_hit_scores_as_a_miss_does(served: Served) -> None:
    prompt = [15_000 + i for i in range(40)]
    body: dict[str, Any] = {"max_tokens": 1, "logprobs": 5}
    replies = [served.complete(prompt, **body) for _ in range(5)]
    assert [cached(reply) > 0 for reply in replies] == [False, True, True, True, True]
    assert all(reply["choices"] == replies[0]["choices"] for reply in replies)
    for shared in (1, 2, 7, 15, 16, 17, 23, 31, 32, 33):
        branch = [*prompt[:shared], 77, 78, 79]
        warm, cold = (served.complete(branch, cache_salt=salt, **body) for salt in (None, f"cold{shared}"))
        assert warm["choices"] == cold["choices"]
        assert (cached(warm), cached(cold)) == (min(shared, 32), 0)  # of the prompt, two pages are full


def test_a_prompt_is_scored_whole_though_it_is_cached(served: Served) -> None:
    prompt = [16_000 + i for i in range(3 * 16 + 5)]
    body: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1}
    cold, warm = (served.complete(prompt, **body)["choices"][0]["logprobs"] for _ in range(2))
    assert warm == cold
    assert len(cold["token_logprobs"]) == len(prompt) + 1
    assert [score is None for score in cold["token_logprobs"]] == [True] + [False] * len(prompt)


def test_what_is_used_stays_and_a_tail_goes_before_its_head(small: Served) -> None:
    """Ten pages: four of a beginning that is used again and again outlive fifty prompts that are not."""
    start = [300 + i for i in range(64)]
    small.complete([*start, 1], max_tokens=1)
    for i in range(50):
        small.complete([1000 + 50 * i + j for j in range(40)], max_tokens=1)
        assert cached(small.complete([*start, 2 + i], max_tokens=1)) == 64
    chain = [500 + i for i in range(48)]
    small.complete(chain, max_tokens=1)  # three pages
    small.complete([700 + i for i in range(128)], max_tokens=1)  # eight, so one of the chain's has to go
    assert cached(small.complete([*chain, 1], max_tokens=1)) == 32


# ── limits ──


def test_a_request_that_would_outgrow_the_pool_is_refused_at_once(small: Served) -> None:
    prompt = [5] * (10 * 16 - 3)
    error = small.refused(PATH, prompt=prompt, max_tokens=24, ignore_eos=True)
    assert error["code"] == "context_length_exceeded"
    before = small.metric("num_preemptions_total")
    reply = small.complete(prompt, max_tokens=None, ignore_eos=True)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 10 * 16 + 1
    assert small.metric("num_preemptions_total") == before


@pytest.mark.parametrize("most", [33, 47, 48])
def test_a_context_of_any_length_is_filled_to_its_last_token(model_path: Path, tmp_path: Path, most: int) -> None:
    options = ("--max-model-len", str(most), "--kv-cache-memory-bytes", str(8 * PAGE_BYTES))
    with serving(tmp_path / "log", model_path, *options) as server:
        for length in (1, 16, most - 1):
            for asked in (most - length, None):
                reply = server.complete([9] * length, max_tokens=asked, ignore_eos=True)
                assert reply["choices"][0]["finish_reason"] == "length"
                assert reply["usage"]["total_tokens"] == most
            assert server.refused(PATH, prompt=[9] * length, max_tokens=most - length + 1)["param"] == "max_tokens"
        for length in (most, most + 1):
            reply = server.post(PATH, prompt=[9] * length, max_tokens=1)
            assert (reply.status_code, error_of(reply)["code"]) == (400, "context_length_exceeded")
        server.settle()


def test_choices_that_outgrow_the_pool_all_come(small: Served) -> None:
    bodies = [{"prompt": [40 + i] * 20, "n": 4, "seed": i, "temperature": 1, "max_tokens": 24} for i in range(4)]
    alone = [small.complete(**body, ignore_eos=True)["choices"] for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: small.complete(**body, ignore_eos=True)["choices"], bodies))
    assert together == alone


# ── turns ──


def test_large_and_small_ones_wait_their_turn(small: Served) -> None:
    """First come, first served: what does not fit yet is not passed for ever, and those behind it come too."""
    with ThreadPoolExecutor(12) as pool:
        running = pool.submit(small.complete, [8] * 100, max_tokens=50, ignore_eos=True)
        until(lambda: small.metric("num_requests_running") == 1)
        large = pool.submit(small.complete, [9] * 140, max_tokens=10, ignore_eos=True)
        tiny = [pool.submit(small.complete, [10 + i] * 3, max_tokens=1) for i in range(6)]
        assert all(len(job.result()["choices"]) == 1 for job in (running, large, *tiny))


def test_every_step_serves_a_stream_while_prompts_come(small: Served) -> None:
    def steps() -> float:
        return small.metric("iteration_tokens_total_count")

    with ThreadPoolExecutor(4) as pool:
        before = steps()
        stream = pool.submit(small.events, PATH, prompt="Count: 1, 2,", max_tokens=100, ignore_eos=True)
        until(lambda: small.metric("num_requests_running") >= 1)
        others = [pool.submit(small.complete, [90 + i] * 20, max_tokens=1) for i in range(6)]
        assert all(len(job.result()["choices"]) == 1 for job in others)
        assert not stream.done()
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert steps() - before == 100


def test_a_short_prompt_does_not_wait_for_a_long_one(served: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(served.complete, [30_000 + i for i in range(2000)], max_tokens=1)
        until(lambda: served.metric("num_requests_running") == 1)
        for i in range(3):
            served.complete([60 + i] * 20, max_tokens=2, ignore_eos=True)
        assert not long.done()  # of its sixteen steps and more
        assert long.result()["usage"]["completion_tokens"] == 1
