"""The simulator's clock, figures and short cuts, against sums by hand and against taking every step."""

from __future__ import annotations

import io
import json
import math
import random
from array import array
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.simulator.cost import Load
from octavo.simulator.simulate import ChromeTrace, Histogram, PricedExecutor, Simulation, Timeline, engine
from octavo.simulator.traces import Arrival, tokens_of
from octavo.types import AwaitMove, MovePage, Place, StepPlan, Tier
from tests.simulator.engines import config, cost, requests, simulated


def test_a_request_alone_takes_what_its_steps_take() -> None:
    """Ten tokens of prompt in steps of eight, four tokens of answer."""
    at = 5.0
    simulation, told = simulated(config(16, max_num_batched_tokens=8), [Arrival(at, tokens_of(1, 10), 4, 100)])
    price = cost().step_s
    steps = [
        price(Load(8, 0, 0, 36, 8)),
        price(Load(2, 1, 0, 9 + 10, 10)),
        *(price(Load(1, 1, length)) for length in (11, 12, 13)),
    ]
    assert told["seconds"] == pytest.approx(at + sum(steps))
    assert told["first_token_s"]["max"] == pytest.approx(sum(steps[:2]))
    assert told["inter_token_s"]["max"] == pytest.approx(steps[-1])
    assert told["inter_token_s"]["mean"] == pytest.approx(sum(steps[2:]) / 3)
    assert told["request_s"]["mean"] == pytest.approx(sum(steps))
    assert told["queue_s"]["max"] == 0
    assert (told["num_steps"], told["computed_tokens"], told["output_tokens"]) == (5, 13, 4)
    assert (told["finished"], told["unfinished"], told["prompt_tokens"]) == (1, 0, 10)
    assert simulation.core.cache.pool.num_cached == 3  # 13 of 14 tokens


OPTIONS: list[dict[str, Any]] = [
    {"num_pages": 400},
    {"num_pages": 40},
    {"num_pages": 32, "max_num_batched_tokens": 16},
    {"num_pages": 32, "enable_prefix_caching": False},
    {"num_pages": 200, "max_num_seqs": 3},
    {"num_pages": 200, "max_num_seqs": 6, "max_num_batched_tokens": 6},
    {"num_pages": 20, "block_size": 16},
    {"num_pages": 32, "scheduling_policy": "priority"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_strides_come_to_the_same_as_steps(options: dict[str, Any], seed: int) -> None:
    """All figures, every request's times, and which page is where."""
    settings, arrivals = config(**options), requests(seed, 60, rate=40.0)
    without, by_steps = simulated(settings, arrivals, strides=False)
    with_strides, by_strides = simulated(settings, arrivals)
    assert by_strides == by_steps
    assert with_strides.core.cache.tiers.costs == without.core.cache.tiers.costs
    assert by_steps["finished"] == 60
    assert with_strides._stride is not None
    if options["num_pages"] == 32 and seed == 0:
        assert by_steps["num_preemptions"] > 0


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_requests_are_read_only_as_the_queue_has_room(options: dict[str, Any]) -> None:
    settings, arrivals = config(max_num_seqs=4, **options), requests(7, 200, rate=1000.0)
    read = 0

    def counted() -> Any:
        nonlocal read
        for arrival in arrivals:
            read += 1
            yield arrival

    simulation = Simulation(engine(settings, cost()), counted())
    for _ in range(20):
        simulation.step()
    assert read < 60
    wide = Simulation(engine(settings, cost()), arrivals)
    wide._enough = 1 << 30
    for one in (simulation, wide):
        one.run()
    told, told_wide = simulation.report(), wide.report()
    for report in (told, told_wide):
        del report["wall_s"], report["times_real_time"]
    told_wide["timeline"]["waiting"] = told["timeline"]["waiting"]  # those that have been read
    assert told == told_wide


def test_pages_come_back_from_below_at_their_price() -> None:
    settings = config(24, swap_space=100, preemption_mode="swap", session_ttl=0.0)
    first, others = tokens_of(1, 41), [tokens_of(run, 60) for run in range(2, 6)]
    arrivals = [Arrival(0.0, first, 1, 0)]
    arrivals += [Arrival(10.0 + at, prompt, 1, 0) for at, prompt in enumerate(others)]
    arrivals += [Arrival(100.0, first, 1, 0)]
    simulation, told = simulated(settings, arrivals)
    assert told["moves"]["host to device"] == 10
    assert told["hit_tokens"] == 40 and told["hit_rate"] == 40 / (2 * 41 + 4 * 60)
    [*_, last] = [event["ts"] for event in told["events"] if event.get("id") == "6"]
    # two pages go down before, to make room: the others had been copied ahead of need
    assert last / 1e6 - 100.0 == pytest.approx((2 + 10) * 0.001 + cost().step_s(Load(1, 1, 41)))
    assert simulation._stride is None


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_tiers_under_pressure(mode: str, seed: int) -> None:
    settings = config(32, swap_space=40, kv_offload_dir="x", kv_offload_space=60, preemption_mode=mode)
    _, told = simulated(settings, requests(seed, 80))
    assert told["finished"] == 80
    assert (told["moves"] == {}) == (mode == "recompute")


def test_moves_are_made_one_at_a_time_beside_the_steps() -> None:
    executor = PricedExecutor(cost(load_s=0.5))
    ops = [MovePage(at, Place(Tier.DEVICE, at), Place(Tier.HOST, at)) for at in (1, 2)]
    assert executor.execute(StepPlan(1, ops, ())).moved == []
    result = executor.execute(StepPlan(2, (), (), wait=True))
    assert [(moved.number, moved.seconds) for moved in result.moved] == [(1, 0.5)] and executor.now == 0.5
    executor.now = 0.75
    assert executor.execute(StepPlan(3, [AwaitMove(2)], ())).moved[0].number == 2
    assert executor.now == 1.0
    executor.execute(StepPlan(4, [MovePage(3, Place(Tier.HOST, 1), Place(Tier.DISK, 1))], ()))
    assert executor.execute(StepPlan(5, (), (), wait=True)).moved[0].seconds == 1.5
    executor.close()


def test_who_can_never_be_served_is_refused() -> None:
    arrivals = [Arrival(0.0, tokens_of(1, 100), 5, 0), Arrival(0.0, tokens_of(2, 8), 5, 0)]
    _, told = simulated(config(16), arrivals)
    assert (told["requests"], told["refused"], told["finished"], told["prompt_tokens"]) == (2, 1, 1, 8)


def test_nothing_is_lost_by_an_interruption() -> None:
    def interrupt(simulation: Simulation) -> None:
        raise KeyboardInterrupt

    simulation = Simulation(engine(config(64, max_num_seqs=4), cost()), requests(1, 200))
    with pytest.raises(KeyboardInterrupt):
        simulation.run(interrupt)
    told = simulation.report()
    assert told["finished"] + told["unfinished"] == told["requests"] < 200
    simulation.run()
    assert simulation.report()["finished"] == 200
    simulation.core.close()


def test_an_empty_trace_takes_no_time() -> None:
    _, told = simulated(config(4), [])
    assert told["seconds"] == 0 and told["first_token_s"] is None and told["events"] == []


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(ConfigError, match=r"one page takes 64 bytes and 63 are given: the weights take 1,000 of 1,048"):
        engine(config(1, block_size=4).__class__(block_size=4, kv_cache_memory_bytes=63), cost())


def test_what_weights_leave_is_for_pages() -> None:
    settings = config(1).__class__(block_size=4)
    assert engine(settings, cost()).cache.num_pages == ((1 << 20) - 1000) // 64


@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_percentiles_are_right_to_half_a_percent(count: int) -> None:
    chance = random.Random(count)
    times = sorted(chance.lognormvariate(-3, 2) for _ in range(count))
    histogram = Histogram()
    for at in times[::2]:
        histogram.add(at)
    for at in times[1::2]:
        histogram.add(at)
    for percent in (1, 50, 90, 99, 100):
        right = times[max(math.ceil(count * percent / 100) - 1, 0)]
        assert histogram.percentile(percent) == pytest.approx(right, rel=0.0051)
    spread = histogram.spread()
    assert spread is not None and spread["mean"] == pytest.approx(sum(times) / count) and spread["max"] == times[-1]


def test_a_time_may_count_often_or_not_at_all() -> None:
    histogram = Histogram()
    assert histogram.spread() is None
    histogram.add(0.0, 3)
    histogram.add(2.0)
    assert histogram.percentile(50) == pytest.approx(0, abs=1e-8) and histogram.percentile(99) == pytest.approx(
        2, rel=0.0051
    )


def test_samples_thin_out_and_stay_even() -> None:
    core, timeline = engine(config(4), cost()), Timeline()
    for step in range(100_000):
        now = 0.013 * step
        if now >= timeline.next_at:
            timeline.take(core, now, None)
    times = [sample.at for sample in timeline.samples]
    gaps = [after - before for before, after in pairwise(times)]
    assert 200 < len(times) <= Timeline.MAX_SAMPLES
    assert times[-1] > 1290 and max(gaps) < 2.1 * min(gaps)


def test_a_chrome_trace_has_every_step_and_request() -> None:
    file = io.StringIO()
    chrome = ChromeTrace(file)
    simulation = Simulation(engine(config(64), cost()), requests(3, 20), chrome)
    simulation.run()
    chrome.close()
    events = json.loads(file.getvalue())
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == simulation.report()["num_steps"]
    assert sum(step["args"]["tokens"] for step in steps) == simulation.report()["output_tokens"]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(steps))
    spans = Counter((event["id"], event["name"], event["ph"]) for event in events if event.get("cat") == "request")
    assert len(spans) == 20 * 3 * 2 and set(spans.values()) == {1}
    assert {event["name"] for event in events if event["ph"] == "C"} == {"pages", "sequences"}


def test_a_conversation_is_found_again_with_its_answer() -> None:
    """The second turn begins with the first prompt and the tokens that the simulator drew."""
    arrivals = [Arrival(0.0, tokens_of(1, 10), 11, 0), Arrival(60.0, tokens_of(1, 33), 2, 0)]
    _, told = simulated(config(64), arrivals)
    assert told["hit_tokens"] == 20  # of 21: the last token drawn was never computed


def test_answers_are_the_same_in_the_index_and_on_paper() -> None:
    simulation = Simulation(engine(config(64), cost()), [Arrival(0.0, array("i", [5, 6, 7]), 9, 40)])
    simulation.run()
    match = simulation.core.cache.index.match((), [5, 6, 7, *range(43, 52)])
    assert len(match.nodes) == 2 and match.num_partial == 0
