"""How long answers are expected to be, and that no more sequences begin than will fit, unless that pays."""

from __future__ import annotations

import random
from math import ceil

import pytest

from octavo.cache.tiers import Costs
from octavo.errors import AuditError
from octavo.scheduler.forecast import TYPICAL, WINDOW, Ahead, Forecast, Outlook
from octavo.types import Request, SamplingParams
from tests.heart.engines import expected, make_engine, run, tokens_of
from tests.heart.test_scheduler import greedy, prompt

AGAIN = Costs(token_s=0.001)
"""Computing costs something, and a step nothing besides."""


def after(*lengths: int, cut_off: bool = False) -> Forecast:
    forecast = Forecast()
    for length in lengths:
        forecast.ended(length, cut_off=cut_off)
    return forecast


def test_answers_are_as_long_as_those_before() -> None:
    assert Forecast().to_come(0, 0, 10_000) == TYPICAL
    known = after(*[10] * WINDOW)
    assert {known.to_come(number, 4, 10_000) for number in range(50)} == {6}
    assert known.to_come(0, 4, 7) == 3  # it may not have more
    assert known.to_come(0, 10, 10_000) == known.to_come(0, 9, 10_000) + 9 == 10  # longer than any: as long again
    assert known.to_come(0, 10, 15) == 5


def test_expectations_are_spread_as_the_lengths_were() -> None:
    known = after(*range(1, WINDOW + 1))
    found = sorted(known.to_come(number, 0, 10_000) for number in range(1000))
    assert found[500] == pytest.approx(WINDOW / 2, abs=2) and found[900] == pytest.approx(0.9 * WINDOW, abs=2)
    found = sorted(known.to_come(number, 100, 10_000) for number in range(1000))
    assert found[0] == 1 and found[-1] == WINDOW - 100


def test_the_oldest_are_forgotten() -> None:
    known = after(*[900] * WINDOW, *[10] * WINDOW)
    assert {known.to_come(number, 0, 10_000) for number in range(50)} == {10}


def test_who_was_cut_off_might_have_gone_on() -> None:
    known = after(*[16] * WINDOW, cut_off=True)
    assert {known.to_come(number, 0, 10_000) for number in range(50)} == {16}  # nothing longer is known
    known = after(*[16] * (WINDOW // 2), cut_off=True)
    for _ in range(WINDOW // 2):
        known.ended(100, cut_off=False)
    assert {known.to_come(number, 0, 10_000) for number in range(50)} == {100}
    assert {known.to_come(number, 0, 60) for number in range(50)} == {60}


def outlook(sequences: list[Ahead], size: int) -> Outlook:
    made = Outlook(size)
    for one in sequences:
        made.add(one)
    return made


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_outlook_is_what_comes_when_steps_are_taken_one_by_one(size: int) -> None:
    rng = random.Random(size)
    for _ in range(300):
        sequences = [
            Ahead(rng.randrange(60), number, rng.randrange(4, 30), rng.choice([1, 1, 1, 3]))
            for number in range(rng.randrange(1, 9))
        ]
        room = rng.randrange(100)
        needed = {
            step: ceil(sum(one.pages - one.width * (one.ends - step) / size for one in sequences if one.ends >= step))
            for step in range(max(one.ends for one in sequences) + 1)
        }
        most, step = outlook(sequences[1:], size).needed(sequences[0], room)
        assert most == max(max(needed.values()), 0)
        if most > room:
            first = next(step for step, pages in needed.items() if pages > room)
            assert step <= first <= step + size or first == 0


def test_those_that_should_have_ended_are_thought_of_again() -> None:
    made = outlook([Ahead(5, 1, 1, 1), Ahead(7, 2, 1, 1), Ahead(9, 3, 1, 1)], 4)
    assert made.take_overdue(4) == []
    assert made.take_overdue(7) == [Ahead(5, 1, 1, 1), Ahead(7, 2, 1, 1)]
    assert made.take_overdue(9) == [Ahead(9, 3, 1, 1)] and made.take_overdue(9) == []


@pytest.mark.parametrize(
    ("costs", "most", "preempts"),
    [
        (AGAIN, 4, False),
        (Costs(), 6, True),
        (Costs(token_s=0.001, step_s=1.0), 6, True),
        (Costs(token_s=0.001, step_s=0.002), 4, False),
    ],
)
def test_no_more_begin_than_will_fit_unless_a_larger_batch_saves_more(costs: Costs, most: int, preempts: bool) -> None:
    engine = make_engine(16, costs=costs)
    params = greedy(12)
    requests = [Request(str(number), prompt(5, number), params) for number in range(12)]
    for request in requests:
        engine.add(request)
    running = []
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(one.token_id for one in output.new_tokens)
        running.append(engine.scheduler.num_running)
    assert max(running) == most
    assert (engine.scheduler.stats.num_preemptions > 0) == preempts
    assert all(outputs[request.request_id] == expected(engine, request) for request in requests)


def test_pages_that_others_hold_as_well_are_not_counted_twice() -> None:
    """Eight pages are common to all, so that 18 sequences of two more fit into 44."""
    engine = make_engine(44, costs=AGAIN)
    params = greedy(7)
    requests = [Request(str(number), [*prompt(32, 0), 1, number + 2], params) for number in range(24)]
    run(engine, [Request("first", [*prompt(32, 0), 1, 1], params)])
    for request in requests:
        engine.add(request)
    running = []
    while engine.has_work:
        engine.step()
        running.append(engine.scheduler.num_running)
    assert max(running) == 18 and engine.scheduler.stats.num_preemptions == 0


def test_pages_that_nobody_holds_are_found_for_nothing_but_themselves() -> None:
    """A grows to eight pages, and B to twelve, ten of which are there: all of 20."""
    engine = make_engine(20, costs=AGAIN)
    run(engine, [Request("first", prompt(40), greedy(1))])
    engine.add(Request("A", prompt(20, 7), greedy(12)))
    engine.step()
    engine.add(Request("B", [*prompt(40), 1, 2], greedy(6)))
    engine.step()
    assert engine.scheduler.num_running == 2
    run(engine, [])
    assert engine.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize(("num_pages", "n", "max_tokens"), [(12, 2, 4), (24, 4, 4), (14, 8, 2), (40, 3, 11)])
def test_each_choice_is_expected_to_take_a_tail_of_its_own(num_pages: int, n: int, max_tokens: int) -> None:
    engine = make_engine(num_pages, costs=AGAIN)
    params = SamplingParams(seed=1, n=n, max_tokens=max_tokens, ignore_eos=True)
    run(engine, [Request(str(number), prompt(5, number), params) for number in range(9)])
    assert engine.scheduler.stats.num_preemptions == 0
    assert engine.cache.stats.peak_pages > num_pages // 2


def test_what_is_spared_is_told_while_somebody_waits_for_it() -> None:
    engine = make_engine(16, costs=AGAIN)
    params = greedy(12)
    for number in range(5):
        engine.add(Request(str(number), prompt(5, number), params))
    assert engine.scheduler.num_spared == 0
    engine.step()
    # each of the four, and the fifth, would take two pages more
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting, engine.scheduler.num_spared) == (4, 1, 10)
    engine.abort("4")
    assert engine.scheduler.num_spared == 0


@pytest.mark.parametrize("delay", [0, 3])
def test_those_whose_pages_are_on_their_way_are_thought_of(delay: int) -> None:
    """Each takes three pages, all but a token of which lie below, and seven in the end."""
    engine = make_engine(24, costs=Costs(token_s=0.001), host_pages=40, moves={"delay": delay})
    prompts = [prompt(9, number) for number in range(10)]
    run(engine, [Request(f"before {number}", tokens, greedy(1)) for number, tokens in enumerate(prompts)])
    engine.cache.drop_cached()
    run(engine, [])
    for number, tokens in enumerate(prompts):
        engine.add(Request(str(number), tokens, greedy(20)))
    running = []
    while engine.has_work:
        engine.step()
        running.append(engine.scheduler.num_running)
    assert running[0] == 3 and engine.scheduler.stats.num_preemptions == 0


def test_what_the_others_have_taken_since_is_not_spared_again() -> None:
    """Beside pins there is no room for A's eleven pages and B's five; when they end there is, though A has not."""
    engine = make_engine(14, costs=AGAIN)
    run(engine, [Request("first", prompt(16, 5), greedy(1), session_id="talk")])
    engine.tick(0.0)
    engine.pin("", "talk", 100.0)
    engine.add(Request("A", prompt(4), greedy(40)))
    engine.step(now=1.0)
    engine.add(Request("B", prompt(16, 9), greedy(5)))
    for _ in range(25):
        engine.step(now=2.0)
    assert engine.scheduler.num_running == 1
    engine.step(now=100.0)
    assert engine.scheduler.num_running == 2
    run(engine, [])
    assert engine.scheduler.stats.num_preemptions == 0


def test_answers_teach_and_what_was_dropped_does_not() -> None:
    """Beams that did not win, and answers that never began; who was aborted might have gone on."""
    engine = make_engine(64, costs=AGAIN)
    forecast = engine.scheduler._forecast
    run(engine, [Request("beams", prompt(5), SamplingParams(use_beam_search=True, beam_width=3, max_tokens=6))])
    run(engine, [Request("choices", prompt(5), SamplingParams(seed=1, n=2, max_tokens=4, ignore_eos=True))])
    for name in ("running", "waiting"):
        engine.add(Request(name, prompt(5), greedy(9)))
    for _ in range(3):
        engine.step()
    engine.add(Request("late", prompt(5), greedy(9)))
    engine.scheduler.finish("running", 0)
    engine.abort("waiting")
    engine.abort("late")
    assert list(forecast._recent)[1:] == [(6, True), (4, True), (4, True), (3, False), (3, True)]


@pytest.mark.parametrize("below", [False, True])
def test_pages_that_only_their_finder_holds_come_back_with_its_own(below: bool) -> None:
    """A resumes on what it left, and gives all of it back before B has grown."""
    engine = make_engine(20, costs=Costs(token_s=0.001), host_pages=20 * below)
    run(engine, [Request("first", prompt(40), greedy(1))])
    if below:
        engine.cache.drop_cached()
        run(engine, [])
    engine.add(Request("A", [*prompt(40), 1, 2], greedy(4)))  # ten pages found, and one more
    while not engine.scheduler.running:
        engine.step()
    engine.add(Request("B", prompt(8, 7), greedy(50)))  # two pages, and 15 in the end
    engine.step()
    assert engine.scheduler.num_running == 2
    run(engine, [])
    assert engine.scheduler.stats.num_preemptions == 0


def test_the_books_are_even_whatever_became_of_the_requests() -> None:
    engine = make_engine(24, costs=AGAIN, max_num_seqs=5)
    choices = SamplingParams(seed=1, n=3, max_tokens=9, ignore_eos=True)
    beams = SamplingParams(use_beam_search=True, beam_width=3, max_tokens=6, ignore_eos=True)
    requests = [Request(str(number), prompt(5, number), (choices, beams)[number % 2]) for number in range(8)]
    for request in requests:
        engine.add(request)
    for _ in range(7):
        engine.step()
    engine.abort("0")
    engine.abort("1")
    outputs = run(engine, [Request("last", prompt(6, 9), choices)])
    assert tokens_of(outputs["last"][0]) == expected(engine, Request("last", prompt(6, 9), choices))
    engine.scheduler.check()
    assert engine.scheduler._num_allowed == engine.scheduler._num_found == engine.scheduler._num_filled == 0


def test_the_check_finds_books_that_are_not_even() -> None:
    for book in ("_num_allowed", "_num_found", "_num_filled"):
        engine = make_engine(24)
        engine.add(Request("one", prompt(5), greedy()))
        engine.step()
        engine.scheduler.check()
        setattr(engine.scheduler, book, getattr(engine.scheduler, book) + 1)
        with pytest.raises(AuditError, match=book.removeprefix("_num_")):
            engine.scheduler.check()
