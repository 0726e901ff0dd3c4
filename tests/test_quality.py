"""What a format costs, measured on a tiny model: the figures add up, and bf16 against itself costs nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench.quality import DTYPES, PLACES, Scores, _figures, measure
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from tests.models import tiny


def test_quality_of_every_format(model_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 6
    config = EngineConfig(kv_cache_memory_bytes=2**26, max_model_len=600)
    told: list[str] = []
    found = measure(model_path, config, [text], DTYPES, [300, 8192], told.append)
    assert list(found["dtypes"]) == list(DTYPES) and not found["own_text"]
    assert len(told) == len(DTYPES) * 2  # one window and one length that the context has room for
    base = found["dtypes"]["bf16"]
    assert base["perplexity_percent"] == base["drift"] == 0 and base["top1_percent"] == 100
    assert "verdict" not in base
    for dtype in DTYPES[1:]:
        figures = found["dtypes"][dtype]
        assert 0 < figures["drift"] < 1
        assert figures["perplexity"] > 1 and list(figures["found"]) == [300]
    assert found["dtypes"]["int4"]["token_bytes"] * 3.5 < base["token_bytes"]
    assert all("bound" in found["dtypes"][dtype]["verdict"] for dtype in ("int8", "int4"))


def test_a_format_that_there_is_not_is_refused_before_any_is_measured(model_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: must be one of .*'int3'"):
        measure(model_path, EngineConfig(), ["text"], ["int8", "int3"], [], told.append)
    assert told == []


def test_the_command_prints_a_table_and_writes_json(model_path: Path, tmp_path: Path) -> None:
    from octavo.cli import app

    text, figures = tmp_path / "text", tmp_path / "figures.json"
    text.write_text("One, two, three, four, five, six, seven, eight, nine, ten. " * 4)
    options = ["--dtypes", "int8", "--lengths", "", "--max-model-len", "256", "--kv-cache-memory-bytes", "64MiB"]
    result = CliRunner().invoke(
        app, ["bench", "quality", str(model_path), "--text", str(text), "--json", str(figures), *options]
    )
    assert result.exit_code == 0, result.output
    assert "int8" in result.output and "bound" in result.output
    assert set(json.loads(figures.read_text())["dtypes"]) == {"bf16", "int8"}


def test_figures_are_those_of_the_same_tokens() -> None:
    """Losses of 0.1 and 0.3: a rise of e^0.2; of four facts one is lost, one won, and one neither ever found."""
    base = Scores([-1.0, -2.0], [5, 6], {512: [True, True], 1024: [False, False]})
    found = Scores([-1.1, -2.3], [5, 7], {512: [True, False], 1024: [True, False]})
    figures = _figures("int4", 6480.0, found, base)
    assert figures["perplexity_percent"] == pytest.approx(100 * math.expm1(0.2))
    assert figures["perplexity_error_percent"] == pytest.approx(2 * 10 / math.sqrt(2))
    assert (figures["top1_percent"], figures["drift"]) == (50, pytest.approx(0.2))
    assert figures["found"] == {512: "1/2", 1024: "1/2"}
    assert (figures["facts_lost"], figures["facts_won"]) == (1, 1)
    assert figures["verdict"] == "above the bound, 1 facts lost and 1 won"


def test_with_the_reference_only_keys_and_values_are_rounded(tmp_path: Path) -> None:
    """Bytes of float32 change nothing there but bf16's own rounding, while on the native kernels inputs are int8."""
    shape = tiny.config("llama")
    folder = tiny.write_folder(tmp_path, shape, tiny.tensors(shape))
    config = EngineConfig(kv_cache_memory_bytes=2**22, backend="reference")
    found = measure(folder, config, ["hello world " * 20], ["fp32", "int8"], [])["dtypes"]
    assert 0 < found["fp32"]["drift"] < found["int8"]["drift"] < 0.02
    assert all(len(PLACES) == 24 and of["found"] == {} for of in found.values())
