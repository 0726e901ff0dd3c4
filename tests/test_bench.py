"""The workloads are what they are said to be, and the benchmark's figures add up."""

from __future__ import annotations

import json
import random
import signal
import statistics
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo.bench import conversations, day
from octavo.bench.calibrate import Timed, fit
from octavo.bench.conversations import Day, draw_day
from octavo.bench.machine import Load as StepLoad
from octavo.bench.machine import Probe, Run, Shape, Step, probe, standing
from octavo.bench.workloads import WORKLOADS, Work, rates
from octavo.cli import app
from octavo.cli.benchmarks import DayName
from octavo.cli.options import WorkloadName
from octavo.config import ModelConfig
from octavo.errors import ConfigError
from octavo.models.llama import Decoder
from octavo.models.weights import open_checkpoint
from octavo.ops.api import Footprint
from octavo.ops.cpu import CpuOps
from octavo.simulator.cost import Load, load_of
from tests.models import tiny
from tests.simulator.engines import cost


def test_lengths_are_those_stated() -> None:
    work = WORKLOADS["mixed"].make(20_000, 1000, random.Random(1))
    prompts, answers = [len(one.prompt) for one in work], [one.max_tokens for one in work]
    assert (min(prompts), max(prompts), min(answers), max(answers)) == (4, 1024, 4, 512)
    assert statistics.median(prompts) == pytest.approx(161 * 2.718281828 ** (-(0.9**2) / 2), rel=0.03)
    assert statistics.median(answers) == pytest.approx(180 * 2.718281828 ** (-(0.9**2) / 2), rel=0.03)
    for name, prompt, answer in (("uniform", 128, 128), ("prefix", 544, 64), ("long", 1536, 64)):
        work = WORKLOADS[name].make(5, 1000, random.Random(1))
        assert {(len(one.prompt), one.max_tokens) for one in work} == {(prompt, answer)}
    first, second = WORKLOADS["prefix"].make(2, 49_152, random.Random(1))
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512] != second.prompt[512]


def test_the_seed_decides_the_tokens() -> None:
    make = WORKLOADS["mixed"].make
    assert make(4, 1000, random.Random(1)) == make(4, 1000, random.Random(1)) != make(4, 1000, random.Random(2))


def test_names_are_those_of_the_command_line() -> None:
    assert [name.value for name in WorkloadName] == list(WORKLOADS)


@pytest.mark.parametrize("workload", ["prefix", "single"])
def test_figures_add_up(model_path: Path, tmp_path: Path, workload: str) -> None:
    report = tmp_path / "figures.json"
    options = ["--workload", workload, "--requests", "2", "--json", str(report), "--kv-cache-memory-bytes", "256MiB"]
    result = CliRunner().invoke(app, ["bench", "throughput", str(model_path), *options, "--max-model-len", "2048"])
    assert result.exit_code == 0, result.output
    figures = json.loads(report.read_text())
    assert figures["output_tokens_per_s"] * figures["seconds"] == pytest.approx(figures["output_tokens"])
    assert figures["num_steps"] * figures["step_s"] == pytest.approx(figures["seconds"])
    _, work = WORKLOADS[workload].draw(2, vocab_size=49_152, seed=1)  # the peers' default too
    assert figures["prompt_tokens"] == sum(len(one.prompt) for one in work)
    assert figures["output_tokens"] == sum(one.max_tokens for one in work)
    if workload == "prefix":
        assert figures["output_tokens"] == 128 and figures["cached_tokens"] == 512
    assert f"{figures['output_tokens_per_s']:.1f} tokens/s" in result.output
    standing = figures["standing"]
    assert standing["prompts"]["num_steps"] + standing["decode"]["num_steps"] == figures["num_steps"]
    computed = figures["prompt_tokens"] - figures["cached_tokens"] + figures["output_tokens"] - figures["num_requests"]
    assert standing["all"]["num_tokens"] * figures["num_steps"] == pytest.approx(computed)
    assert 0 < standing["all"]["step_s"] * figures["num_steps"] < 1.01 * figures["seconds"]
    assert f"{100 * standing['decode']['share']:.0f} % of the bound" in result.output


MODEL = ModelConfig("llama", 2, 32, 64, 4, 2, 8, 100, 64, 1e-5, 1e4)
SHAPE = Shape(MODEL, Footprint(5000, int8=8000, bf16=1000), Footprint(3000, int8=3200), token_bytes=128)


def test_a_step_must_read_and_multiply_what_its_plan_says() -> None:
    """Rows at positions 0, 1, 2 attend to 1 + 2 + 3 tokens, the row at 9 to 10."""
    assert SHAPE.load([Run(0, 3, 0)]) == StepLoad(3, 5000 + 3 * 128, 2 * 3 * 8000, 2 * 3 * 1000, 4 * 2 * 4 * 8 * 6)
    both = SHAPE.load([Run(0, 3, 1), Run(9, 1, 1)])
    assert both.num_bytes == 5000 + 3000 + (3 + 10) * 128
    assert both[2:] == (2 * (4 * 8000 + 2 * 3200), 2 * 4 * 1000, 4 * 2 * 4 * 8 * (6 + 10))


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
def test_a_window_hides_what_came_before_it(window: int | None) -> None:
    shape = SHAPE._replace(model=replace(MODEL, sliding_window=window))
    for start, count in ((0, 1), (0, 9), (3, 1), (3, 2), (6, 5), (50, 1), (50, 10)):
        seen = [range(max(0, p + 1 - (window or 1000)), p + 1) for p in range(start, start + count)]
        load = shape.load([Run(start, count, 0)])
        assert load.float32 == 4 * 2 * 4 * 8 * sum(map(len, seen))
        assert load.num_bytes == 5000 + 128 * len(set().union(*seen))


def test_steps_are_set_against_the_probe() -> None:
    """A prompt bound by its products and a decode bound by its bytes; the second working set holds more."""
    allowed = Probe("generic", 1, {6000: 6000.0, 9000: 1000.0}, {"int8": 1e3, "bf16": 1e3, "float32": 1e9})
    steps = [Step([Run(0, 4, 0)], 10.5, 112.0), Step([Run(4, 1, 1)], 113.0, 152.0)]
    found = standing(steps, 10.0, SHAPE, allowed)
    prompts, decode = found["prompts"], found["decode"]
    assert (prompts["num_steps"], prompts["step_s"], prompts["control_s"]) == (1, 102.0, 0.5)
    assert prompts["read_s"] == (5000 + 4 * 128) / 6000
    assert prompts["bound_s"] == prompts["multiply_s"] == pytest.approx(72.0, abs=1e-3)
    assert (decode["step_s"], decode["control_s"]) == (40.0, 1.0)
    assert decode["read_s"] == (8000 + 5 * 128) / 1000
    assert decode["operations"] == {"int8": 22400, "bf16": 2000, "float32": 4 * 2 * 4 * 8 * 5}
    assert decode["share"] == pytest.approx(24.4 / 40, abs=1e-3)
    assert found["all"]["num_tokens"] == 2.5
    assert found["all"]["share"] == pytest.approx((72.0 + 24.4) / 142, abs=1e-3)


def test_a_fit_finds_what_made_the_times() -> None:
    """Times made of known costs and a little noise, three of them disturbed."""
    chance = random.Random(1)
    true = cost()
    steps = []
    for _ in range(400):
        slices = [(chance.randrange(500), 1, 1) for _ in range(chance.randrange(17))]
        slices += [(chance.randrange(50), chance.randrange(2, 24), chance.randrange(2)) for _ in range(2)]
        load = load_of(slices)
        steps.append(Timed(load, true.step_s(load) * chance.uniform(0.98, 1.02)))
    for at in (7, 70, 170):
        steps[at] = steps[at]._replace(seconds=9 * steps[at].seconds)
    found = fit(steps, true)
    assert (found.num_steps, found.num_disturbed) == (400, 3) and found.error < 0.012
    for load, _ in steps:
        assert found.cost.step_s(load) == pytest.approx(true.step_s(load), rel=0.03)
    assert found.cost.seen_s == pytest.approx(true.seen_s, rel=0.1)


def test_a_fit_has_what_steps_take_on_average() -> None:
    """Every third step takes half as long again, whatever it computes."""
    steps = [
        Timed(Load(rows, rows, 0), 0.01 * rows * (1.5 if at % 3 == 0 else 1)) for at in range(300) for rows in (1, 2, 4)
    ]
    found = fit(steps, cost())
    assert found.num_disturbed == 0
    for rows in (1, 2, 4):
        assert found.cost.step_s(Load(rows, rows, 0)) == pytest.approx(0.01 * rows * 3.5 / 3, rel=0.001)


def test_no_cost_is_negative() -> None:
    """More tokens to attend to take less time here, which nothing explains."""
    steps = [Timed(Load(rows, rows, 1000 - rows), 0.01 * rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8)]
    found = fit(steps, cost()).cost
    assert min(found.draw_s, found.seen_s, found.pair_s, found.stored_s, *(s for _, s in found.knots)) >= 0
    assert all(found.step_s(load) == pytest.approx(seconds, rel=1e-6) for load, seconds in steps)


def test_the_better_of_two_probes_counts() -> None:
    first = Probe("generic", 1, {10: 1.0, 20: 4.0}, {"int8": 5.0})
    assert first.best(Probe("generic", 1, {10: 2.0, 20: 3.0}, {"int8": 4.0})) == Probe(
        "generic", 1, {10: 2.0, 20: 4.0}, {"int8": 5.0}
    )


def test_the_probe_has_the_threads_and_the_instructions_asked_for() -> None:
    found = probe(2, "generic", [1 << 20, 1 << 16])
    assert (found.variant, found.num_threads, list(found.reads)) == ("generic", 2, [1 << 16, 1 << 20])
    assert sorted(found.operations) == ["bf16", "float32", "int8"]


def test_a_model_takes_what_its_format_says(model_path: Path) -> None:
    """Q4_1 layers, 4 bits and two f16 in a group of 32, and a Q8_0 vocabulary, 8 bits and one of them."""
    checkpoint = open_checkpoint(model_path)
    layers, head = Decoder(checkpoint, CpuOps(1), 64).footprints
    c = checkpoint.config
    a_layer = c.hidden_size * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size)
    weights, vocabulary = c.num_layers * a_layer, c.vocab_size * c.hidden_size
    assert layers == Footprint(weights * 5 // 8, int8=weights)
    assert head == Footprint(vocabulary * 17 // 16, int8=vocabulary)


def test_a_run_is_drawn_with_a_warm_up_that_shares_no_prompt() -> None:
    workload = WORKLOADS["prefix"]
    warm_up, work = workload.draw(None, 1000, seed=3)
    assert len(work) == workload.num_requests and work == workload.make(64, 1000, random.Random(3))
    assert [one.max_tokens for one in warm_up] == [4] * 4
    assert all(one.prompt[:8] != work[0].prompt[:8] for one in warm_up)
    assert [len(part) for part in workload.draw(2, 1000, seed=3)] == [2, 2]


def test_rates_count_prompts_and_answers() -> None:
    found = rates([Work([1, 2, 3], 5), Work([4], 7)], seconds=4.0)
    assert (found["num_requests"], found["prompt_tokens"], found["output_tokens"]) == (2, 4, 12)
    assert (found["output_tokens_per_s"], found["total_tokens_per_s"]) == (3.0, 4.0)


# ── a working day ────────────────────────────────────────────────────────────────────────────────────────────────


def a_day(seed: int = 1, **changes: int | None) -> Day:
    options = {"hours": 8, "per_hour": 60, "sessions": None, "longest": 768, "vocab": 1000} | changes
    return draw_day(hour_s=25.0, scale=64, seed=seed, **options)  # type: ignore[arg-type]


def contexts(day: Day) -> tuple[list[list[int]], list[list[float]]]:
    """By hour: tokens that conversations had when they returned, and after how long they did."""
    said: Counter[int] = Counter()
    latest: dict[int, float] = {}
    lengths: list[list[int]] = [[] for _ in day.held]
    gaps: list[list[float]] = [[] for _ in day.held]
    for turn in day.turns:
        if turn.session in said:
            lengths[turn.hour].append(said[turn.session])
            gaps[turn.hour].append(turn.at - latest[turn.session])
        said[turn.session] += len(turn.message) + turn.max_tokens
        latest[turn.session] = turn.at
        assert said[turn.session] <= 768
    assert day.held[-1] == said.total() and day.num_sessions == len(said)
    return lengths, gaps


def test_every_hour_asks_for_the_same() -> None:
    day = a_day()
    begun: set[int] = set()
    hours: list[list[tuple[float, bool, int, int]]] = [[] for _ in day.held]
    for turn in day.turns:
        new = turn.session not in begun
        begun.add(turn.session)
        length = len(turn.message) - new * conversations.SYSTEM_TOKENS
        hours[turn.hour].append((turn.at - (turn.hour - 1) * 25.0, new, length, turn.max_tokens))
    assert len(hours[1]) == 60 and all(0 <= at < 25 for at, *_ in hours[1])
    for hour in hours[2:]:
        assert [turn[1:] for turn in hour] == [turn[1:] for turn in hours[1]]
        assert [at for at, *_ in hour] == pytest.approx([at for at, *_ in hours[1]])
    assert sum(new for _, new, _, _ in hours[1]) == round(60 / conversations.REQUESTS_A_SESSION)
    assert all(new for _, new, _, _ in hours[0])
    growth = [after - before for before, after in zip(day.held[1:], day.held[2:], strict=False)]
    assert len(set(growth)) == 1 and growth[0] > 0


def test_a_day_has_the_lengths_of_the_traces() -> None:
    turns = [turn for turn in a_day(per_hour=2000, hours=1, longest=100_000).turns if turn.hour]
    new = [
        len(turn.message) - 32
        for turn in turns
        if len(turn.message) > 32 and turn.message[:32] == turns[0].message[:32]
    ]
    assert statistics.mean(turn.max_tokens for turn in turns) == pytest.approx(343 / 64, rel=0.05)
    assert all(length >= 1 for length in new)


def test_contexts_stay_while_gaps_grow() -> None:
    """Over twenty seeds: the load is stationary but for how many lie idle."""
    found = [contexts(a_day(seed)) for seed in range(20)]
    means = [statistics.mean(chain.from_iterable(lengths[hour] for lengths, _ in found)) for hour in range(1, 9)]
    assert means == pytest.approx([statistics.mean(means)] * 8, rel=0.1)
    gaps = [statistics.median(chain.from_iterable(gaps[hour] for _, gaps in found)) for hour in range(1, 9)]
    assert gaps == sorted(gaps) and gaps[-1] > 5 * gaps[0]


def test_a_day_follows_from_its_seed_and_ends_with_the_conversations_asked_for() -> None:
    assert a_day(1) == a_day(1) != a_day(2)
    assert a_day(sessions=40).num_sessions == 40
    assert all(turn.message[:32] == a_day().turns[0].message[:32] for turn in a_day().turns if turn.hour == 0)
    full = a_day(per_hour=400, sessions=10)
    assert len(contexts(full)[0]) == 9 and full.num_sessions > 10  # others begin when all are full


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.config("llama")
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", shape, tiny.tensors(shape))


def play(model: Path, folder: Path, *options: str) -> Result:
    files = ["--json", str(folder / "day.json"), "--plot", str(folder / "day.png")]
    load = ["--hours", "2", "--minutes", "0.02", "--scale", "200", "--utilisation", "0.1", "--sessions", "12"]
    engine = ["--num-threads", "1", "--block-size", "4", "--kv-cache-memory-bytes", "800KiB"]
    return CliRunner().invoke(app, ["bench", "day", str(model), *files, *load, *engine, *options])


def test_a_tiny_day(tiny_model: Path, tmp_path: Path) -> None:
    result = play(tiny_model, tmp_path)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "day.json").read_text())
    found = figures["configurations"]
    assert list(found) == [name.value for name in DayName] == list(day.ABOUT)
    assert len({of["answers"] for of in found.values()}) == 1 and "All answers are the same" in result.output
    hours = {name: of["hours"] for name, of in found.items()}
    assert [len(of) for of in hours.values()] == [2, 2, 2]
    plan = day.Plan(**figures["plan"] | {"wish": day.Wish(*figures["plan"]["wish"])})
    drawn = plan.draw()
    for number in (0, 1):
        one, *others = (
            {key: of[number][key] for key in ("n", "prompt_tokens", "held_tokens")} for of in hours.values()
        )
        assert others == [one, one]
        assert one["n"] == sum(turn.hour == number + 1 for turn in drawn.turns)
        assert one["held_tokens"] == drawn.held[number + 1]
        assert hours["none"][number]["cached_tokens"] == 0 < hours["prefix"][number]["cached_tokens"]
        for of in hours.values():
            assert of[number]["pages"]["device"].keys() == {"in_use", "cached", "free"}
            assert 0 < of[number]["ttft_s"]["median"] <= of[number]["ttft_s"]["p99"]
    assert (tmp_path / "day.png").read_bytes().startswith(b"\x89PNG")


def test_a_day_is_gone_on_with(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second configuration keeps the first; only the same day can be resumed."""
    run = day.Play.run

    async def interrupted(self: day.Play, turns: list[conversations.Turn], hours: int, hour_s: float = 0) -> None:
        if hours and self._llm.config.enable_prefix_caching:
            signal.raise_signal(signal.SIGINT)
        await run(self, turns, hours, hour_s)

    with monkeypatch.context() as patch:
        patch.setattr(day.Play, "run", interrupted)
        patch.setattr(day, "plan", lambda *_: day.Plan(day.Wish(2, 0.02, 12, 200, 0.1), 1, 270, 512, 60.0, 800 << 10))
        result = play(tiny_model, tmp_path)
    assert result.exit_code == 130, result.output
    before = json.loads((tmp_path / "day.json").read_text())
    assert list(before["configurations"]) == ["none"] and "nothing is found again" in result.output
    assert play(tiny_model, tmp_path, "--resume", "--seed", "2").exit_code != 0
    assert play(tiny_model, tmp_path, "--resume", "--only", "prefix").exit_code == 0
    after = json.loads((tmp_path / "day.json").read_text())
    assert after["plan"] == before["plan"] and list(after["configurations"]) == ["none", "prefix"]
    assert after["configurations"]["none"] == before["configurations"]["none"]


def test_a_day_goes_without_a_plot(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "can_plot", lambda: False)
    monkeypatch.setattr(day, "plan", lambda *_: day.Plan(day.Wish(1, 0.01, 4, 200, 0.1), 1, 270, 512, 60.0, 800 << 10))
    result = play(tiny_model, tmp_path, "--only", "prefix")
    assert result.exit_code == 0 and "pip install matplotlib" in result.output
    assert not (tmp_path / "day.png").exists()


def test_a_day_needs_a_pool_for_two(tiny_model: Path, tmp_path: Path) -> None:
    result = play(tiny_model, tmp_path, "--kv-cache-memory-bytes", "20KiB")
    assert isinstance(result.exception, ConfigError) and "two conversations of 128 tokens" in str(result.exception)
