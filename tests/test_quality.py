"""What a format costs, measured on a tiny model: the figures add up, and bf16 against itself costs nothing."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from octavo.bench.quality import DTYPES, measure
from octavo.config import EngineConfig


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
