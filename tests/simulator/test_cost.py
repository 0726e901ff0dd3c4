"""Prices: what a plan's load is, what a calibration says between its knots, what a data sheet comes to."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.gpus import GPUS
from octavo.planner.known import MODELS
from octavo.simulator.cost import Load, Measured, Sheet, load_of, load_of_plan
from octavo.types import Draw, SamplingParams, Slice, Tier
from tests.simulator.engines import cost


def test_the_load_is_counted_as_the_model_attends() -> None:
    slices = [(0, 3, 0), (9, 1, 1), (7, 2, 1)]
    pairs = sum(p + 1 for start, count, _ in slices if count > 1 for p in range(start, start + count))
    assert load_of(slices) == Load(6, 2, 10, pairs, 3 + 9)
    tokens, draw = array("i", range(9)), Draw(SamplingParams(), 0, array("i"), 0, 0)
    pieces = [Slice(at, start, tokens[:count], 0, tokens, (draw,) * n) for at, (start, count, n) in enumerate(slices)]
    assert load_of_plan(pieces) == load_of(slices)
    assert load_of(slices) + Load(1, 1, 5) == Load(7, 3, 15, pairs, 12)


def test_between_knots_there_is_a_line_and_it_goes_on() -> None:
    price = cost().step_s
    assert [price(Load(rows)) for rows in (1, 64)] == pytest.approx([0.010, 0.030])
    assert price(Load(22)) == pytest.approx(0.010 + 21 / 63 * 0.020)
    assert price(Load(127)) == pytest.approx(0.050)
    assert price(Load(1, 2, 30, 400, 5)) == pytest.approx(0.010 + 2e-3 + 30e-5 + 400e-6 + 5e-5)


def test_a_calibration_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    cost().save(path, machine={"cores": 2})
    assert Measured.open(path) == cost()
    assert json.loads(path.read_text())["machine"] == {"cores": 2}
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no file of octavo bench calibrate"):
        Measured.open(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draw_s", math.nan),
        ("pair_s", -1.0),
        ("seen_s", "many"),
        ("knots", []),
        ("knots", [[1, 0.1]]),
        ("knots", [[1, 0.1], [1, 0.2]]),
        ("knots", [[1, 0.1], [2, math.inf]]),
        ("load_s", {"host": -1.0}),
        ("load_s", []),
        ("memory_bytes", 0),
    ],
)
def test_figures_that_are_no_times_are_refused(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "costs.json"
    cost().save(path)
    figures = json.loads(path.read_text())
    figures["cost"][name] = value
    path.write_text(json.dumps(figures))
    with pytest.raises(ConfigError, match=r"calibration: .* is no file of octavo bench calibrate"):
        Measured.open(path)


def test_pages_of_another_size_take_other_times() -> None:
    wide = cost(4).at("auto", 16)
    assert wide.format.block_size == 16 and wide.step_s(Load(3)) == cost().step_s(Load(3))
    assert wide.move_s(Tier.HOST) == 4 * cost().move_s(Tier.HOST)
    with pytest.raises(ConfigError, match="fp32 was not timed"):
        cost().at("fp32", 16)


def test_gpus_beyond_the_heads_of_keys_and_values_keep_copies() -> None:
    """As a plan has it: eight heads over sixteen GPUs take twice the bytes, and three GPUs cannot share them."""
    model = MODELS["llama-3.1-70b"].model
    eight, sixteen = (Sheet(model, GPUS["h100"], count, "bf16", 16).format for count in (8, 16))
    assert sixteen.token_bytes == 2 * eight.token_bytes == 655_360
    with pytest.raises(ConfigError, match="tensor_parallel_size: 3 devices cannot share 64 heads over 8"):
        Sheet(model, GPUS["h100"], 3, "bf16", 16)


def test_a_sheet_is_bound_by_reading_or_by_multiplying() -> None:
    """Llama 3.1 70B: 70.55 billion weights, 327,680 bytes of keys and values a token."""
    one, four = (Sheet(MODELS["llama-3.1-70b"].model, GPUS["h100"], count, "bf16", 16) for count in (1, 4))
    assert four.weight_bytes == 2 * 70_552_387_584 + 0 * one.weight_bytes
    assert four.format.token_bytes == 327_680
    # one row reads all weights but the embedding
    read_s = (2 * (70_552_387_584 - 128_256 * 8192)) / (0.8 * 4 * 3.35e12)
    assert four.step_s(Load(1, 1, 1)) == pytest.approx(read_s + 2e-3 + 160 * 10e-6, rel=1e-3)
    # a long prompt multiplies with those of the layers
    multiply_s = 2 * 8192 * 68_451_041_280 / (0.6 * 4 * 989e12)
    attend_s = 4 * 80 * 8192 * (8192 * 8193 // 2) / (0.6 * 4 * 989e12)
    links_s = 8192 * 2 * 80 * 1.5 * 2 * 8192 / (450e9 * 0.7)
    prompt = load_of([(0, 8192, 1)])
    assert four.step_s(prompt) == pytest.approx(multiply_s + attend_s + links_s + 3.6e-3, rel=1e-3)
    assert one.step_s(prompt) == pytest.approx(4 * (multiply_s + attend_s) + 2e-3, rel=1e-3)
    assert four.move_s(Tier.HOST) == pytest.approx(16 * 327_680 / (4 * 64e9 * 0.7))
    assert four.move_s(Tier.DISK) == pytest.approx(16 * 327_680 / 3e9)


def test_models_have_the_weights_they_are_named_for() -> None:
    for name, billions in (("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("llama-3.1-405b", 405.85)):
        sheet = Sheet(MODELS[name].model, GPUS["h200"], 8, "bf16", 16)
        assert sheet.weight_bytes / 2e9 == pytest.approx(billions, rel=1e-3)
