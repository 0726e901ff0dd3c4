"""The scheduler's promises, with a token executor in place of a model."""

from __future__ import annotations

import random

import pytest

from octavo.errors import InvalidRequest, RequestTooLarge
from octavo.scheduler.policy import fair_shares
from octavo.scheduler.scheduler import MAX_SKIPPED
from octavo.types import Request, SamplingParams
from tests.heart.engines import GREEDY, executor_of, expected, make_engine, run, tokens_of


def prompt(length: int, seed: int = 0, vocab: int = 50) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def greedy(max_tokens: int = 8, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 16, 64])
def test_any_chunk_size_gives_the_same_tokens(budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    requests = [Request(str(i), prompt(5 + 9 * i, i), GREEDY) for i in range(5)]
    outputs = run(engine, requests)
    for request in requests:
        assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)
    assert all(sum(len(piece.token_ids) for piece in plan.slices) <= budget for plan in executor_of(engine).plans)
    engine.close()


def test_a_small_pool_serves_many_in_turn() -> None:
    engine = make_engine(8 * 6, max_num_seqs=64)
    requests = [Request(str(i), prompt(9 + i % 7, i), greedy(10)) for i in range(200)]
    outputs = run(engine, requests)
    for request in requests:
        assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)
    assert engine.scheduler.stats.num_preemptions < 200
    engine.close()


def test_preempted_sequences_resume_where_they_were() -> None:
    engine = make_engine(12, max_num_seqs=8, max_num_batched_tokens=32)
    requests = [Request(str(i), prompt(6, i), greedy(30)) for i in range(6)]
    outputs = run(engine, requests)
    for request in requests:
        assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)
    assert engine.scheduler.stats.num_preemptions > 0
    assert engine.cache.stats.resumed_tokens > 0
    engine.close()


def test_a_request_that_fills_the_pool_alone_is_served() -> None:
    engine = make_engine(6)
    request = Request("all", prompt(6 * 4 - 3), greedy(4))  # 21 + 4 - 1 = 24 slots
    assert tokens_of(run(engine, [request])["all"][0]) == expected(engine, request)
    with pytest.raises(RequestTooLarge, match="7 pages and the pool has 6"):
        engine.add(Request("more", prompt(6 * 4 - 3), greedy(5)))
    engine.close()


def test_slots_are_counted_as_each_running_sequence_fills_its_pages() -> None:
    engine = make_engine(64, max_num_batched_tokens=6)  # pages of 4 tokens
    assert engine.scheduler.slots == (0, 0)
    engine.add(Request("a", prompt(10), greedy(3)))
    engine.step()
    assert engine.scheduler.slots == (6, 6)  # three pages were reserved for the prompt
    engine.step()
    assert engine.scheduler.slots == (10, 2)
    engine.add(Request("b", prompt(5, 1), greedy(2)))
    engine.step()
    assert engine.scheduler.slots == (11 + 5, 1 + 3)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.slots == (0, 0)
    engine.close()


def test_without_max_tokens_the_answer_ends_with_the_last_storable_token() -> None:
    engine = make_engine(6)
    outputs = run(engine, [Request("open", prompt(20), greedy(None))])["open"][0]  # type: ignore[arg-type]
    assert len(tokens_of(outputs)) == 5 and outputs[-1].finish_reason == "length"
    engine.close()


@pytest.mark.parametrize("length", [33, 47, 48])
def test_the_context_is_used_to_the_last_token(length: int) -> None:
    engine = make_engine(64, block_size=16, max_model_len=length)
    request = Request("r", prompt(length - 5), greedy(5))
    outputs = run(engine, [request])["r"][0]
    assert len(tokens_of(outputs)) == 5 and outputs[-1].finish_reason == "length"
    for bad, tokens in (("prompt", prompt(length)), ("prompt", prompt(length + 1)), ("max_tokens", prompt(length - 4))):
        with pytest.raises(RequestTooLarge) as error:
            engine.add(Request("bad", tokens, greedy(5)))
        assert error.value.field == bad and str(length) in str(error.value)
    assert not engine.has_work
    engine.close()


@pytest.mark.parametrize("token", [-1, 50, 2**31, 2**63, 1.5, True])
def test_token_ids_out_of_range_are_refused(token: int) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="prompt"):
        engine.add(Request("r", [1, token]))
    assert not engine.has_work
    with pytest.raises(InvalidRequest, match="logit_bias"):
        engine.add(Request("r", [1], SamplingParams(logit_bias={50: 1.0})))
    with pytest.raises(InvalidRequest, match="prompt"):
        engine.add(Request("r", []))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9])
def test_the_same_prompt_again_computes_one_token(num_tokens: int) -> None:
    engine = make_engine()
    first = run(engine, [Request("a", prompt(num_tokens), GREEDY)])["a"][0]
    before = executor_of(engine).num_computed
    second = run(engine, [Request("b", prompt(num_tokens), greedy(1))])["b"][0]
    assert tokens_of(second) == tokens_of(first)[:1]
    assert second[0].num_cached_tokens == num_tokens - 1
    assert executor_of(engine).num_computed - before == 1
    engine.close()


@pytest.mark.parametrize("offset", range(1, 9))
def test_a_prefix_that_ends_inside_a_page_is_reused_to_the_token(offset: int) -> None:
    engine = make_engine()
    run(engine, [Request("a", prompt(12, 1), GREEDY)])
    tail = [(token + 1) % 50 for token in prompt(12, 1)[offset : offset + 1]] + prompt(5, 3)
    request = Request("b", prompt(12, 1)[:offset] + tail, GREEDY)
    outputs = run(engine, [request])["b"][0]
    assert outputs[0].num_cached_tokens == offset
    assert tokens_of(outputs) == expected(engine, request)
    engine.close()


def test_simultaneous_requests_compute_a_common_prefix_once() -> None:
    engine = make_engine(400, max_num_batched_tokens=48)
    common = prompt(32)
    requests = [Request(str(i), common + prompt(3, 100 + i), greedy(4)) for i in range(16)]
    outputs = run(engine, requests)
    for request in requests:
        assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)
    # the common pages once; three tail tokens and three fed-back answers for each
    assert executor_of(engine).num_computed == 32 + 16 * (3 + 3)
    engine.close()


def test_an_aborted_leader_hands_the_common_prefix_on() -> None:
    engine = make_engine(400, max_num_batched_tokens=8)
    requests = [Request(str(i), prompt(32) + prompt(3, i), greedy(4)) for i in range(4)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.abort("0")
    outputs = run(engine, [])
    for request in requests[1:]:
        assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)
    assert "0" not in outputs
    engine.close()


@pytest.mark.parametrize("length", [30, 32])
def test_forks_and_sharing_use_the_arithmetic_minimum_of_pages(length: int) -> None:
    engine = make_engine(1000)
    answer = 9
    params = SamplingParams(n=4, seed=5, temperature=1, max_tokens=answer, ignore_eos=True)
    requests = [Request(str(i), prompt(length), params) for i in range(16)]
    outputs = run(engine, requests)
    for request in requests:
        for choice in range(4):
            assert tokens_of(outputs[request.request_id][choice]) == expected(engine, request, choice)
    shared, total = length // 4, -(-(length + answer - 1) // 4)
    assert engine.cache.stats.peak_pages <= shared + 16 * 4 * (total - shared)
    engine.close()


def test_forks_of_different_prompts_share_their_own_prompt() -> None:
    engine = make_engine(1000)
    params = SamplingParams(n=4, seed=5, temperature=1, max_tokens=2, ignore_eos=True)
    requests = [Request(str(i), prompt(18, i), params) for i in range(3)]
    outputs = run(engine, requests)
    assert [tokens_of(outputs["1"][c]) for c in range(4)] == [expected(engine, requests[1], c) for c in range(4)]
    # four whole pages each; the half-filled one is written by four branches, the last of them in place
    assert engine.cache.stats.peak_pages == 3 * (4 + 4)
    assert engine.cache.stats.pages_copied == 3 * 3
    engine.close()


@pytest.mark.parametrize("n", [4, 5, 64])
def test_more_choices_than_places_run_in_waves(n: int) -> None:
    engine = make_engine(100, max_num_seqs=4)
    request = Request("r", prompt(7), SamplingParams(n=n, seed=1, max_tokens=6, ignore_eos=True))
    outputs = run(engine, [request])["r"]
    assert sorted(outputs) == list(range(n))
    for choice in range(n):
        assert tokens_of(outputs[choice]) == expected(engine, request, choice)
        assert outputs[choice][-1].finish_reason == "length"
    engine.close()


def test_a_running_answer_advances_every_step_while_prompts_arrive() -> None:
    engine = make_engine(2000, max_num_batched_tokens=64)
    engine.add(Request("stream", prompt(5), greedy(60)))
    engine.step()
    for i in range(20):
        engine.add(Request(f"long{i}", prompt(300, i + 1), greedy(1)))
    for _ in range(50):
        assert any(output.request_id == "stream" for output in engine.step())
    run(engine, [])
    engine.close()


def test_a_late_short_prompt_does_not_wait_for_a_giant_one() -> None:
    engine = make_engine(5000, max_num_batched_tokens=256)
    engine.add(Request("giant", prompt(9000), greedy(1)))
    engine.step()
    engine.add(Request("short", prompt(20, 7), greedy(1)))
    assert [output.request_id for output in engine.step()] == ["short"]
    run(engine, [])
    engine.close()


def test_fair_shares() -> None:
    assert fair_shares([9000, 20], 256) == [236, 20]
    assert fair_shares([100, 100, 100], 100) == [34, 33, 33]
    assert fair_shares([5, 5], 100) == [5, 5]
    assert fair_shares([5, 5, 5], 2) == [1, 1, 0]
    assert fair_shares([], 7) == []


@pytest.mark.parametrize(("policy", "order"), [("priority", ["sooner", "later"]), ("fcfs", ["later", "sooner"])])
def test_lower_priority_value_is_served_first_if_that_is_the_policy(policy: str, order: list[str]) -> None:
    engine = make_engine(100, max_num_seqs=1, scheduling_policy=policy)
    engine.add(Request("later", prompt(5), greedy(1), priority=5))
    engine.add(Request("sooner", prompt(5, 1), greedy(1), priority=-5))
    assert [engine.step()[0].request_id, engine.step()[0].request_id] == order
    engine.close()


def test_a_request_is_newly_scheduled_in_the_first_step_that_serves_it() -> None:
    engine = make_engine(6, max_num_seqs=2, max_num_batched_tokens=4)
    for name in "abc":
        engine.add(Request(name, prompt(6, ord(name)), greedy(8)))
    seen: list[list[str]] = []
    while engine.has_work:
        engine.step()
        seen.append(engine.scheduler.newly_scheduled)
    assert [step for step in seen if step] == [["a"], ["b"], ["c"]]
    assert seen[0] == ["a"]
    assert engine.scheduler.stats.num_preemptions > 0  # coming back is not being new
    engine.close()


def test_identities_never_share_pages() -> None:
    engine = make_engine()
    for identity, cached in ((("a",), 0), (("b",), 0), ((), 0), (("a", "b"), 0), (("b",), 8)):
        outputs = run(engine, [Request("r", prompt(9), GREEDY, identity=identity)])["r"][0]
        assert outputs[0].num_cached_tokens == cached
    engine.close()


def test_eos_ends_an_answer_unless_ignored_or_too_early() -> None:
    engine = make_engine(eos=frozenset(range(50)))
    plain = SamplingParams(temperature=0, max_tokens=6)
    for params, length, reason in (
        (plain, 1, "stop"),
        (SamplingParams(temperature=0, max_tokens=6, min_tokens=3), 4, "stop"),
        (SamplingParams(temperature=0, max_tokens=1), 1, "stop"),
        (SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), 6, "length"),
    ):
        outputs = run(engine, [Request("r", prompt(5), params)])["r"][0]
        assert (len(tokens_of(outputs)), outputs[-1].finish_reason) == (length, reason)
        assert all(output.finish_reason is None for output in outputs[:-1])


def test_prompt_scores_are_complete_with_a_warm_cache_and_under_preemption() -> None:
    engine = make_engine(14, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    requests = [Request(str(i), prompt(13, i), params) for i in range(6)]
    for _ in range(2):
        outputs = run(engine, requests)
        for request in requests:
            scored = outputs[request.request_id][0][0].prompt_logprobs
            assert scored is not None and [entry.token_id for entry in scored] == request.prompt_token_ids[1:]
            assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)
    assert engine.scheduler.stats.num_preemptions > 0
    engine.close()


def test_who_leaves_the_queue_is_not_kept_in_it() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(Request("first", prompt(5), greedy(20)))
    served = []
    for number in range(1000):
        engine.add(Request(str(number), prompt(5, number), greedy(1)))
        if number % 100 == 50:
            served += [output.request_id for output in engine.step()]
        else:
            engine.abort(str(number))
        assert len(engine.scheduler._waiting) <= 2 * engine.scheduler.num_waiting + MAX_SKIPPED
    while engine.has_work:
        served += [output.request_id for output in engine.step()]
    assert list(dict.fromkeys(served)) == ["first", *(str(number) for number in range(50, 1000, 100))]


def test_finish_and_abort_free_pages_at_once() -> None:
    engine = make_engine(enable_prefix_caching=False)
    engine.add(Request("r", prompt(9), SamplingParams(n=3, seed=1, max_tokens=50, ignore_eos=True)))
    engine.step()
    engine.step()
    engine.finish("r", 1)
    assert {output.index for output in engine.step()} == {0, 2}
    engine.abort("r")
    assert not engine.has_work and engine.cache.pool.num_free == engine.cache.num_pages
    engine.close()


def test_an_executor_fault_costs_only_its_own_step() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(Request("unlucky", prompt(5), GREEDY))
    engine.add(Request("lucky", prompt(5, 1), GREEDY))
    executor = executor_of(engine)
    execute, executor.execute = executor.execute, lambda plan: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    executor.execute = execute  # type: ignore[method-assign]
    outputs = run(engine, [])
    assert list(outputs) == ["lucky"] and len(tokens_of(outputs["lucky"][0])) == 8
    engine.close()


@pytest.mark.parametrize("num_pages", [200, 12, 8])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 16])
def test_beams_find_the_same_answers_however_little_room_there_is(num_pages: int, max_num_seqs: int) -> None:
    params = SamplingParams(use_beam_search=True, beam_width=4, n=3, max_tokens=12, ignore_eos=True)
    request = Request("r", prompt(7), params)
    roomy = make_engine(500)
    right = {index: tokens_of(outputs) for index, outputs in run(roomy, [request])["r"].items()}
    engine = make_engine(num_pages, max_num_seqs=max_num_seqs)
    outputs = run(engine, [request])["r"]
    assert {index: tokens_of(found) for index, found in outputs.items()} == right
    scores = [outputs[index][0].score for index in range(3)]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len({tuple(tokens) for tokens in right.values()}) == 3
    engine.close()
