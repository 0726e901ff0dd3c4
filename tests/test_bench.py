"""The workloads are what they are said to be, and the benchmark's figures add up."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench.workloads import WORKLOADS
from octavo.cli import WorkloadName, app


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
    if workload == "prefix":
        assert figures["output_tokens"] == 128 and figures["cached_tokens"] == 512
    assert f"{figures['output_tokens_per_s']:.1f} tokens/s" in result.output
