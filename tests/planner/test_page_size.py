"""What page sizes cost: pages are those of the engine, objects are counted, and empty slots are those of lives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.config import EngineConfig
from octavo.planner.known import MODELS
from octavo.planner.memory import INDEX_BYTES, Demand
from octavo.planner.page_size import DTYPES, MEANS, SIGMA, SIZES, held, index_bytes, page_costs, usual_lengths

MODEL = MODELS["smollm2-135m"].model


def test_bytes_are_those_of_pages() -> None:
    costs = page_costs(MODEL, EngineConfig(), {"given": [Demand(16)]})
    assert [(cost.dtype, cost.block_size) for cost in costs] == [(dtype, size) for dtype in DTYPES for size in SIZES]
    for cost in costs:
        f = EngineConfig(kv_cache_dtype=cost.dtype, block_size=cost.block_size).kv_format(MODEL)
        assert (cost.data + cost.scales + cost.padding) * cost.block_size == pytest.approx(f.page_bytes)
        assert cost.scales == (0 if cost.dtype == "bf16" else 30 * 3 * 2 * 2)
        assert cost.table == 4 / cost.block_size
        assert cost.bytes["given"] * 16 == pytest.approx(cost.full_bytes * max(cost.block_size, 16))


def test_a_skipped_layer_has_no_scales() -> None:
    [cost] = page_costs(MODEL, EngineConfig(kv_cache_dtype_skip_layers=(0, 7)), {}, [16], ["int8"])
    assert (cost.data, cost.scales) == (28 * 3 * 128 + 2 * 3 * 256, 28 * 3 * 2 * 2)


def test_lives_are_added_up() -> None:
    """A prompt of 3 and an answer of 3 hold 3, 4 and 5 tokens; another holds 1."""
    assert held([Demand(3, 3), Demand(1)], 4) == (3 + 4 + 5 + 1, 4 + 4 + 8 + 4)
    demands = usual_lengths()["alpaca"]
    for size in SIZES:
        tokens, slots = held(demands, size)
        lives = [length for demand in demands for length in range(demand.prompt_tokens, sum(demand[:2]))]
        assert (tokens, slots) == (sum(lives), sum(math.ceil(length / size) * size for length in lives))


def test_usual_lengths_have_the_published_means() -> None:
    for name, demands in usual_lengths().items():
        for column, mean in enumerate(MEANS[name]):
            lengths = [demand[column] for demand in demands]
            assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.05)  # quantiles stop short of the tail
            logs = [math.log(length) for length in lengths]
            spread = math.sqrt(sum((log - sum(logs) / len(logs)) ** 2 for log in logs) / len(logs))
            assert spread == pytest.approx(SIGMA, rel=0.05)


def test_objects_are_counted() -> None:
    fixed, for_each_token = INDEX_BYTES
    for size in (4, 16, 256):
        assert index_bytes(size) == pytest.approx(fixed / size + for_each_token, rel=0.15)


def test_the_command_prints_a_table_and_measures(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = CliRunner().invoke(
        app, ["plan", "llama-3.1-8b", "--page-sizes", "--lengths", "150"], env={"COLUMNS": "160"}
    )
    assert printed.exit_code == 0, printed.output
    row = next(line for line in printed.output.splitlines() if line.split()[:1] == ["16"])
    assert row.split()[1] == "131,072" and row.split()[-1] == "6%"  # ten pages
    monkeypatch.setattr("octavo.planner.page_size.DTYPES", ("int8",))
    monkeypatch.setattr("octavo.planner.page_size.SIZES", (16, 64))
    for name in ("SEQUENCES", "CONTEXT", "PROMPT"):
        monkeypatch.setattr(f"octavo.bench.page_size.{name}", 2 if name == "SEQUENCES" else 100)
    printed = CliRunner().invoke(
        app, ["plan", str(model_path), "--page-sizes", "--measure", "--json", "--kv-cache-memory-bytes", "64MiB"]
    )
    assert printed.exit_code == 0, printed.output
    measured = json.loads(printed.output)["measured"]
    assert list(measured) == ["int8"] and list(measured["int8"]) == ["16", "64"]
    assert all(seconds > 0 for of in measured["int8"].values() for seconds in of.values())
