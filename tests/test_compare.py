"""Both layouts get the same memory and the same work, and what is told of them adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench.compare import RESERVATIONS, compare_layouts, pool_bytes, summary, variants
from octavo.bench.workloads import Workload, fixed
from octavo.cli import app
from octavo.config import EngineConfig
from octavo.planner.known import MODELS
from tests.models import tiny


def test_variants_differ_in_their_pages_only() -> None:
    config = EngineConfig(max_model_len=512, seed=3)
    found = variants(config, [16, 64, 16], without_cache=True)
    assert list(found) == ["contiguous", "paged 16", "paged 64", "paged 16, no prefix cache"]
    assert found["contiguous"] == EngineConfig(max_model_len=512, seed=3, kv_layout="contiguous")
    assert found["paged 64"] == EngineConfig(max_model_len=512, seed=3, block_size=64)
    also = variants(config, [16, 64], without_cache=False, dtypes=["int8", "int4"])
    assert list(also) == ["contiguous", "paged 16", "paged 64", "paged 16, int8", "paged 16, int4"]
    assert also["paged 16, int8"] == EngineConfig(max_model_len=512, seed=3, kv_cache_dtype="int8")
    assert found["paged 16, no prefix cache"] == EngineConfig(max_model_len=512, seed=3, enable_prefix_caching=False)


def test_memory_for_eight_unless_told() -> None:
    model = MODELS["smollm2-135m"].model
    assert pool_bytes(EngineConfig(max_model_len=2048), model) == RESERVATIONS * 2048 * 23_040
    assert pool_bytes(EngineConfig(kv_cache_memory_bytes=5), model) == 5


def test_layouts_are_compared(tmp_path: Path) -> None:
    """Three prompts of 544 tokens, 512 of them shared, in memory for two reservations."""
    shape = tiny.config("llama", max_position_embeddings=1024, head_dim=64)
    path, token_bytes = tiny.write_folder(tmp_path, shape, tiny.tensors(shape)), 2 * 2 * 2 * 64 * 2
    report = tmp_path / "figures.json"
    options = ["--workload", "prefix", "--requests", "3", "--repeats", "2", "--json", str(report), "--dtypes", "int8"]
    options += ["--html", str(tmp_path / "it.html")]
    options += [
        "--max-model-len",
        "640",
        "--kv-cache-memory-bytes",
        str(2 * 640 * token_bytes),
        "--without-prefix-caching",
    ]
    printed = CliRunner().invoke(app, ["bench", "compare", str(path), *options])
    assert printed.exit_code == 0, printed.output
    [result] = json.loads(report.read_text())["results"]
    contiguous, paged, small, plain = result["variants"]
    assert small["name"] == "paged 16, int8" and small["num_pages"] > 80 * 1.8
    assert [one["cached_tokens"] for one in small["rounds"]] == [2 * 512] * 2
    result["variants"].remove(small)
    assert [variant["num_pages"] for variant in result["variants"]] == [2, 80, 80]
    for variant in result["variants"]:
        assert variant["num_pages"] * variant["page_bytes"] == 2 * 640 * token_bytes
        for one in variant["rounds"]:
            assert (one["prompt_tokens"], one["output_tokens"]) == (3 * 544, 3 * 64)
            assert 0 < one["kv_use"] <= one["kv_held"] <= 1
    assert [one["cached_tokens"] for one in contiguous["rounds"] + plain["rounds"]] == [0] * 4
    assert [one["cached_tokens"] for one in paged["rounds"]] == [2 * 512] * 2  # what a round left behind was dropped
    for one in contiguous["rounds"]:
        assert (one["most_running"], one["num_preemptions"]) == (2, 0)
        assert 544 / 640 <= one["kv_use"] <= 607 / 640
    assert all(one["most_running"] == 3 for one in paged["rounds"])
    assert contiguous["planned"]["running"] == 2
    assert contiguous["planned"]["kv_use"] == pytest.approx((544 + 607) / 2 / 640)
    assert paged["planned"]["running"] == 3
    assert plain["planned"]["running"] == pytest.approx(
        80 / ((16 * 34 + 16 * 35 + 16 * 36 + 16 * 37) / 64 + 0.5), rel=0.02
    )
    assert "--max-model-len 640 " in (tmp_path / "it.html").read_text()
    for line in result["summary"]:
        assert (
            line["name"] in printed.output
            and line["name"] in (tmp_path / "it.html").read_text()
            and f"{line['kv_use']:.0%}" in printed.output
        )


@pytest.mark.parametrize("at_once", [1, None])
def test_requests_run_together_as_the_workload_says(tmp_path: Path, at_once: int | None) -> None:
    shape = tiny.config("llama")
    path = tiny.write_folder(tmp_path, shape, tiny.tensors(shape))
    workload = Workload("some", "of 8 in and 4 out", fixed(8, 4), at_once=at_once)
    config = EngineConfig(max_model_len=32, kv_cache_memory_bytes=1 << 20, seed=1)
    [result], whole = compare_layouts(path, config, [workload], num_requests=3, repeats=1)
    assert whole
    for variant in result["variants"]:
        assert variant["planned"]["running"] == variant["rounds"][0]["most_running"] == (at_once or 3)


def test_a_summary_has_medians_and_ratios_round_by_round() -> None:
    def rounds(*speeds: float, running: float) -> list[dict[str, float]]:
        same = {
            "kv_use": 0.5,
            "kv_held": 1,
            "running": running,
            "num_steps": 9,
            "num_preemptions": 0,
            "cached_tokens": 0,
        }
        return [same | {"running": running, "output_tokens_per_s": speed} for speed in speeds]

    variants = [
        {"name": "contiguous", "rounds": rounds(10, 20, 40, running=2), "planned": {"running": 2, "kv_use": 0.4}},
        {"name": "paged 16", "rounds": rounds(20, 60, 40, running=6), "planned": {"running": 8, "kv_use": 0.9}},
    ]
    base, paged = summary({"variants": variants})
    assert (base["speed"], base["gain"], base["planned_gain"]) == (1, 1, 1)
    assert (paged["speed"], paged["least_speed"], paged["most_speed"]) == (2, 1, 3)
    assert (paged["output_tokens_per_s"], paged["gain"], paged["planned_gain"]) == (40, 3, 4)
