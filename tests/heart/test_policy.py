"""Who gives way, and that nobody waits for ever."""

from __future__ import annotations

import random
from array import array

import pytest

from octavo.scheduler.policy import victim
from octavo.scheduler.sequence import Group, Sequence
from octavo.types import Request, SamplingParams
from tests.heart.engines import expected, make_engine, tokens_of


def sequence(arrival: int, computed: int, priority: int = 0, *, preempted: bool = False, further: int = 1) -> Sequence:
    """One that has `computed` tokens, `further` of them since it was admitted."""
    group = Group(Request(str(arrival), [1]), priority, arrival, 100, frozenset())
    made = Sequence(arrival, group, 0, array("i", [1] * computed), 0)
    made.num_computed = computed
    made.num_at_admission = computed - further
    made.num_preemptions = int(preempted)
    return made


def test_the_least_work_is_lost() -> None:
    first, large, small, middle = (sequence(n, computed) for n, computed in enumerate((5, 900, 30, 200)))
    running = [middle, first, small, large]
    assert victim(running, first) is small
    assert victim(running, large) is small
    assert victim(running, small) is small
    assert victim(running, middle) is middle  # nobody gives way to one that came later


def test_of_equals_the_latest_gives_way() -> None:
    running = [sequence(n, 50) for n in range(4)]
    assert victim(running, running[0]) is running[3]


def test_lower_priorities_give_way_first_however_much_they_lose() -> None:
    urgent, other, late = sequence(0, 9, 0), sequence(1, 3, 0), sequence(2, 5000, 1)
    assert victim([urgent, other, late], urgent) is late
    assert victim([urgent, other, late], late) is late


def test_who_just_came_back_is_spared() -> None:
    first, back, other = sequence(0, 9), sequence(1, 10, preempted=True, further=0), sequence(2, 500)
    assert victim([first, back, other], first) is other
    assert victim([first, back], first) is back  # there is nobody else
    assert victim([first, sequence(1, 10, preempted=True, further=1), other], first).group.arrival == 1


def test_the_first_gives_way_only_when_alone() -> None:
    first, other = sequence(0, 1), sequence(1, 900)
    assert victim([first, other], first) is other
    assert victim([first], first) is first


@pytest.mark.parametrize("host_pages", [0, 60])
def test_a_large_request_is_not_passed_for_ever_by_small_ones(host_pages: int) -> None:
    """It needs the whole pool, and small ones never stop coming."""
    engine = make_engine(16, host_pages=host_pages, moves={"delay": 2}, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    large = Request("large", list(range(50)), SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    rng, outputs, after = random.Random(0), [], 0
    for number in range(40):
        engine.add(Request(f"before {number}", [rng.randrange(50) for _ in range(7)], params))
    engine.add(large)
    for number in range(3000):
        engine.add(Request(f"after {number}", [rng.randrange(50) for _ in range(7)], params))
        news = engine.step()
        outputs += [output for output in news if output.request_id == "large"]
        after += sum(output.request_id.startswith("after") and output.finish_reason is not None for output in news)
        if outputs and outputs[-1].finish_reason:
            break
    assert tokens_of(outputs) == expected(engine, large)
    assert after <= 16, "first come, first served: few of those that came later may be done"
    engine.close()


@pytest.mark.parametrize("fail_every", [0, 4])
def test_everyone_advances_though_all_of_them_fit_only_in_turn(fail_every: int) -> None:
    """Eight that need six pages each, in a pool of nine: between two turns of one, others have got tokens."""
    moves = {"delay": 2, "fail_every": fail_every}
    engine = make_engine(9, host_pages=40, moves=moves, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    requests = [Request(str(n), [n, 2, 3, 4, 5], params) for n in range(8)]
    for request in requests:
        engine.add(request)
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps = idle = 0
    while engine.has_work and steps < 4000:
        news = engine.step()
        idle = 0 if news else idle + 1
        assert idle < 20, "nobody has got a token for long"
        for output in news:
            got[output.request_id] += tokens_of([output])
        steps += 1
    assert all(got[request.request_id] == expected(engine, request) for request in requests)
    assert engine.scheduler.stats.num_preemptions < 8 * 18
    engine.close()
