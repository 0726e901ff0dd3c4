"""`octavo simulate` and `octavo bench calibrate` as a person meets them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import cli
from octavo.cli.options import TraceKind
from octavo.errors import ConfigError, InvalidRequest
from octavo.simulator.cost import Load, Measured, load_of
from octavo.simulator.simulate import Simulation
from octavo.simulator.traces import READERS
from tests.simulator.engines import cost
from tests.simulator.test_traces import AZURE, MOONCAKE

GPUS = ["--model", "llama-3.1-70b", "--gpu", "h100", "--tensor-parallel-size", "4"]


def simulate(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_names_are_those_of_the_command_line() -> None:
    assert [kind.value for kind in TraceKind] == list(READERS)


def test_figures_are_printed_and_written(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, MOONCAKE)))
    files = ["--json", str(tmp_path / "figures.json"), "--chrome-trace", str(tmp_path / "chrome.json")]
    files += ["--html", str(tmp_path / "it.html")]
    printed = simulate(str(tmp_path / "trace.jsonl"), *GPUS, *files)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["whole"] and figures["finished"] == 3
    assert (figures["model"], figures["on"], figures["rate"]) == ("llama-3.1-70b", "4 × h100", None)
    assert figures["hit_tokens"] == 1024 and figures["hit_rate"] == 1024 / 2150
    assert "3 of 3" in printed and f"{100 * figures['hit_rate']:.1f} % of the prompts' tokens" in printed
    assert figures["num_pages"] == (4 * 80 * 10**9 * 9 // 10 - 2 * 70_552_387_584) // (16 * 327_680)
    assert json.loads((tmp_path / "chrome.json").read_text())
    page = (tmp_path / "it.html").read_text()
    assert "<dd>llama-3.1-70b on 4 × h100<" in page and "<dd>--max-model-len 131072<" in page
    assert page.count("<svg") == 3 and f"{figures['num_pages']:,}; " in page  # the memory, its waste, the sequences


def test_a_workload_at_a_rate(tmp_path: Path) -> None:
    printed = simulate("mixed", "--requests", "20", "--rate", "2", *GPUS)
    assert "20 of 20" in printed


def test_no_request_is_longer_than_the_models_context(tmp_path: Path) -> None:
    row = "2023-11-16 18:15:52,{},10\n"
    (tmp_path / "trace.csv").write_text(AZURE + row.format(4086) + row.format(4087))
    options = ["--model", "Llama-2-7B", "--gpu", "H100"]
    assert "4 of 5" in (printed := simulate(str(tmp_path / "trace.csv"), *options)) and "1 were refused" in printed
    command = ["simulate", "mixed", *options, "--max-model-len", "4097"]
    with pytest.raises(ConfigError, match="max_model_len: 4097 tokens are more than the model's context of 4096"):
        CliRunner().invoke(cli.app, command, catch_exceptions=False)
    with pytest.raises(InvalidRequest, match="mixd is no file, and no workload: those are mixed, "):
        CliRunner().invoke(cli.app, ["simulate", "mixd", *options], catch_exceptions=False)


def test_requests_one_at_a_time_are(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    simulate("single", "--requests", "6", *GPUS, "--json", str(path))
    figures = json.loads(path.read_text())
    assert max(figures["timeline"]["running"]) == figures["engine"]["max_num_seqs"] == 1
    lives = figures["request_s"]["mean"] - figures["queue_s"]["mean"]
    assert figures["seconds"] == pytest.approx(6 * lives, rel=0.01)


def test_layers_that_stay_in_bf16_make_pages_larger(tmp_path: Path) -> None:
    options = ["mixed", "--requests", "2", "--model", "llama-3.1-8b", "--kv-cache-dtype", "int8"]
    kept = [
        "--kv-cache-memory-bytes",
        "1GiB",
        "--kv-cache-dtype-skip-layers",
        "0",
        "--kv-cache-dtype-skip-layers",
        "31",
    ]
    simulate(*options, *kept, "--json", str(tmp_path / "figures.json"))
    page = 16 * (30 * 8 * (2 * 128 + 2 * 2) + 2 * 8 * 128 * 2 * 2)
    assert json.loads((tmp_path / "figures.json").read_text())["num_pages"] == (1 << 30) // page
    cost(16).save(tmp_path / "costs.json")
    for timed, why in (
        (["--calibration", str(tmp_path / "costs.json")], "were not timed"),
        (GPUS, "80 layers, not one"),
    ):
        command = ["simulate", "mixed", *timed, "--kv-cache-dtype-skip-layers", "99"]
        with pytest.raises(ConfigError, match=f"kv_cache_dtype_skip_layers: .*{why}"):
            CliRunner().invoke(cli.app, command, catch_exceptions=False)


def test_a_calibration_says_what_steps_take(tmp_path: Path) -> None:
    cost(16).save(tmp_path / "costs.json")
    (tmp_path / "trace.csv").write_text(AZURE)
    options = ["--calibration", str(tmp_path / "costs.json"), "--json", str(tmp_path / "figures.json")]
    simulate(str(tmp_path / "trace.csv"), *options, "--max-num-batched-tokens", "64")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["num_pages"] == ((1 << 20) - 1000) // 256
    assert figures["computed_tokens"] == 374 + 396 + 1 + 43 + 108
    for words in (["--gpu", "h100"], ["--tensor-parallel-size", "2"]):
        with pytest.raises(ConfigError, match="calibration: is of its own machine"):
            CliRunner().invoke(cli.app, ["simulate", "mixed", *options, *words], catch_exceptions=False)


def test_reservations_are_simulated_as_such(tmp_path: Path) -> None:
    """Two of 1,024 tokens in the memory of 160 pages: two of uniform's 256 tokens at once."""
    path = tmp_path / "figures.json"
    memory = ["--kv-cache-memory-bytes", str(160 * 16 * 327_680), "--json", str(path)]
    options = [*GPUS, *memory, "--kv-layout", "contiguous", "--max-model-len", "1024"]
    simulate("uniform", "--requests", "6", *options)
    figures = json.loads(path.read_text())
    assert (figures["num_pages"], figures["finished"]) == (2, 6)
    assert max(figures["timeline"]["running"]) == 2 and figures["num_preemptions"] == 0
    assert figures["kv_waste"] == pytest.approx(1 - 192 / 1024, abs=0.02)
    cost(16).save(tmp_path / "costs.json")
    timed = ["--calibration", str(tmp_path / "costs.json"), "--kv-layout", "contiguous"]
    simulate("uniform", "--requests", "6", *timed, "--max-model-len", "256", "--json", str(path))
    assert json.loads(path.read_text())["num_pages"] == ((1 << 20) - 1000) // (256 * 16)
    with pytest.raises(ConfigError, match="max_model_len: is what a reservation holds"):
        CliRunner().invoke(cli.app, ["simulate", "mixed", *timed], catch_exceptions=False)


def test_an_interruption_leaves_the_figures_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = itertools.count()

    def step(self: Simulation) -> bool:
        if next(turns) == 5:
            raise KeyboardInterrupt
        return whole(self)

    whole = Simulation.step
    monkeypatch.setattr(Simulation, "step", step)
    files = ["--json", str(tmp_path / "figures.json"), "--chrome-trace", str(tmp_path / "chrome.json")]
    result = CliRunner().invoke(cli.app, ["simulate", "uniform", *GPUS, *files])
    assert result.exit_code == 130
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert not figures["whole"] and figures["num_steps"] >= 5 and figures["unfinished"]
    assert json.loads((tmp_path / "chrome.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "model: name either a well-known model, or a --calibration file"),
        (["--model", "llama-9"], "model: 'llama-9' is not known: there are .*llama-3.1-8b, "),
        (["--model", "llama-3.1-8b", "--gpu", "h1000"], "gpu: 'h1000' is not known: there are t4, v100-32gb, "),
        (["--model", "llama-3.1-70b"], "kv_cache_memory_bytes: one page takes 5,242,880 bytes and 0 are given"),
        (["--calibration", "nowhere.json"], "calibration: nowhere.json is no file of octavo bench calibrate"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(cli.app, ["simulate", "mixed", *options], catch_exceptions=False)


def test_calibrate(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    options = ["--json", str(path), "--repeats", "1", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    options += ["--max-model-len", "128", "--kv-cache-memory-bytes", "64MiB"]
    result = CliRunner().invoke(cli.app, ["bench", "calibrate", str(model_path), *options])
    assert result.exit_code == 0, result.output
    found = Measured.open(path)
    assert [rows for rows, _ in found.knots] == [1, 2, 4, 8, 16, 32, 64]
    assert found.step_s(Load(1, 1, 10)) > 0 and found.step_s(load_of([(0, 64, 1)])) > found.step_s(Load(1, 1, 10))
    assert found.memory_bytes - found.weight_bytes == (64 << 20) // found.format.page_bytes * found.format.page_bytes
    assert f"{json.loads(path.read_text())['num_steps']} steps" in result.output
    printed = simulate("single", "--requests", "2", "--calibration", str(path))
    assert "2 of 2" in printed
