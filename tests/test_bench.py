"""The workloads are what they are said to be, and the benchmark's figures add up."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench.calibrate import Timed, fit
from octavo.bench.machine import Load as StepLoad
from octavo.bench.machine import Probe, Run, Shape, Step, probe, standing
from octavo.bench.workloads import WORKLOADS, Work, rates
from octavo.cli import WorkloadName, app
from octavo.config import ModelConfig
from octavo.models.llama import Decoder
from octavo.models.weights import open_checkpoint
from octavo.ops.api import Footprint
from octavo.ops.cpu import CpuOps
from octavo.simulator.cost import Load, load_of
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
