"""Random requests, aborts and pool sizes through the whole engine, audited after every step."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from octavo.types import Output, Request, SamplingParams, StepPlan, StepResult
from tests.heart.engines import executor_of, expected, make_engine, tokens_of


def random_request(chance: random.Random, number: int) -> Request:
    # two tokens and a few lengths, so that prompts collide in whole pages and in parts
    prompt = chance.choices(range(2), k=chance.randint(1, 24))
    n = chance.choice([1, 1, 1, 2, 3])
    params = SamplingParams(
        n=n,
        temperature=chance.choice([0, 1]),
        seed=chance.randrange(4),
        max_tokens=chance.randint(1, 12),
        ignore_eos=True,
        prompt_logprobs=chance.choice([None, None, None, 0]),
    )
    identity = chance.choice([(), (), ("tenant",)])
    return Request(str(number), prompt, params, identity, priority=chance.choice([0, 0, 1]))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_around_it_a_request_gets_its_own_tokens(seed: int) -> None:
    chance = random.Random(seed)
    engine = make_engine(
        chance.choice([10, 14, 30]),
        vocab_size=chance.choice([2, 3, 40]),
        block_size=4,
        max_num_seqs=chance.choice([1, 3, 8, 32]),
        max_num_batched_tokens=chance.choice([1, 4, 17, 64]),
        enable_prefix_caching=chance.random() < 0.8,
        scheduling_policy=chance.choice(["fcfs", "priority"]),
    )
    requests: dict[str, Request] = {}
    dropped: set[str] = set()
    finished_early: set[tuple[str, int]] = set()
    outputs: dict[str, dict[int, list[Output]]] = defaultdict(lambda: defaultdict(list))
    for number in range(250):
        request = random_request(chance, number)
        requests[request.request_id] = request
        engine.add(request)
        for _ in range(chance.randrange(4)):
            for output in engine.step():
                assert output.request_id not in dropped
                outputs[output.request_id][output.index].append(output)
        action, target = chance.random(), str(chance.randrange(number + 1))
        if action < 0.1:
            if any(target == group for group in engine.scheduler._groups):
                dropped.add(target)
            engine.abort(target)
        elif action < 0.2:
            finished_early.add((target, 0))
            engine.finish(target, 0)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id][output.index].append(output)
    for request_id, request in requests.items():
        for choice in range(request.params.n):
            got, right = tokens_of(outputs[request_id][choice]), expected(engine, request, choice)
            if request_id in dropped or (request_id, choice) in finished_early or (request_id, 0) in finished_early:
                assert got == right[: len(got)]
            else:
                assert got == right
                assert outputs[request_id][choice][-1].finish_reason == "length"
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_step_that_fails_is_mended_but_for_what_fails_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of the seed 3 fail once they are long enough, and now and then a whole step does, half done."""
    chance = random.Random(seed)
    engine = make_engine(chance.choice([10, 14, 30]), vocab_size=3, block_size=4, max_num_seqs=8)
    execute = executor_of(engine).execute
    num_failed = 0

    def fail_or_execute(plan: StepPlan) -> StepResult:
        nonlocal num_failed
        result = execute(plan)
        broken = any(draw.seed == 3 and len(draw.token_ids) > 14 for piece in plan.slices for draw in piece.draws)
        if broken or (len(plan.slices) > 1 and chance.random() < 0.2):
            num_failed += 1
            raise ArithmeticError
        return result

    monkeypatch.setattr(executor_of(engine), "execute", fail_or_execute)
    requests = {str(number): random_request(chance, number) for number in range(120)}
    outputs: dict[str, dict[int, list[Output]]] = defaultdict(lambda: defaultdict(list))
    broke: set[str] = set()

    def note(request_id: str, error: Exception) -> None:
        assert isinstance(error, ArithmeticError)
        assert request_id not in broke
        broke.add(request_id)

    for request in requests.values():
        engine.add(request)
        engine._num_lost = 0  # nothing but requests is broken here
        for output in engine.step(broke=note):
            assert output.request_id not in broke
            outputs[output.request_id][output.index].append(output)
    while engine.has_work:
        engine._num_lost = 0
        for output in engine.step(broke=note):
            outputs[output.request_id][output.index].append(output)
    for name, request in requests.items():
        seeds = range(request.params.seed or 0, (request.params.seed or 0) + request.params.n)
        long = len(request.prompt_token_ids) + (request.params.max_tokens or 0) > 15
        assert (name in broke) == (3 in seeds and long), request
        for choice in range(request.params.n if name not in broke else 0):
            assert tokens_of(outputs[name][choice]) == expected(engine, request, choice)
    assert broke
    assert num_failed > len(broke)
    engine.close()


def test_the_same_requests_give_the_same_plans() -> None:
    def plans() -> list[object]:
        chance = random.Random(3)
        engine = make_engine(12, max_num_seqs=6, max_num_batched_tokens=20, vocab_size=2)
        recorded: list[object] = []
        for number in range(60):
            engine.add(random_request(chance, number))
        while engine.has_work:
            engine.step()
            plan = executor_of(engine).plans[-1]
            recorded.append((plan.page_ops, [(s.seq_id, s.start, list(s.token_ids)) for s in plan.slices]))
        return recorded

    assert plans() == plans()


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    engine = make_engine(16, vocab_size=50)
    for number in range(300):
        engine.add(Request(str(number), [number % 50, number // 50], SamplingParams(max_tokens=1, seed=0)))
        engine.step()
        if number % 3 == 0:
            engine.add(Request("dropped", [1, 2, 3], SamplingParams(seed=0)))
            engine.abort("dropped")
            engine.step()
    scheduler = engine.scheduler
    assert not scheduler._groups and not scheduler._running and not scheduler._waiting
    assert not engine.cache.tables and len(engine.cache.index) <= 16
    engine.close()
