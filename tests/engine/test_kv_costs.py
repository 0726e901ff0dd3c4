"""A format that costs too much, or that nobody has measured, is not taken without a word about it; others are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.models import tiny
from typer.testing import CliRunner

from octavo import LLM, kv_costs
from octavo.cli import app, main
from octavo.config import EngineConfig, ModelConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.errors import ConfigError
from octavo.kv_costs import BOUNDS, KNOWN, Cost
from octavo.kv_format import KV_BITS
from octavo.models.weights import open_checkpoint
from octavo.planner.known import MODELS

SMOLLM2 = MODELS["smollm2-135m"].model
OTHER = replace(SMOLLM2, vocab_size=32000)


def refusal(dtype: str, model: ModelConfig = SMOLLM2, **options: bool) -> str:
    try:
        kv_costs.check(EngineConfig(kv_cache_dtype=dtype, **options), model)
    except ConfigError as error:
        return str(error)
    return ""


def takes(dtype: str, model: ModelConfig = SMOLLM2, **options: bool) -> bool:
    return not refusal(dtype, model, **options)


def test_the_model_of_the_catalogue_was_measured(model_path: Path) -> None:
    [known] = [known for known in KNOWN if known.name == "SmolLM2-135M"]
    assert set(known.costs) == set(BOUNDS) == set(KV_BITS) - {"bf16", "fp32"}
    assert open_checkpoint(model_path).config.vocab_size == SMOLLM2.vocab_size
    assert kv_costs.told(EngineConfig(kv_cache_dtype="int8"), open_checkpoint(model_path).config) is not None
    for dtype in KV_BITS:
        cost = known.costs.get(dtype, Cost(0, 0))
        assert takes(dtype) == (cost.percent <= BOUNDS.get(dtype, cost.percent))


def test_what_was_measured_above_its_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KNOWN[0]._replace(costs={"int8": Cost(0.2, 0.1), "fp8_e5m2": Cost(1.5, 0.2), "int4": Cost(3.9, 0.5)})
    monkeypatch.setattr(kv_costs, "KNOWN", (known,))
    assert [takes(dtype) for dtype in ("int8", "fp8_e5m2", "int4")] == [True, False, True]
    assert takes("fp8_e5m2", allow_kv_quality_loss=True)
    assert refusal("fp8_e5m2") == (
        "kv_cache_dtype: fp8_e5m2 raises the perplexity of SmolLM2-135M by 1.5 %, above its bound of 1 %: "
        "take int8, which holds half as many tokens and costs next to nothing, or set allow_kv_quality_loss"
    )


def test_of_an_unknown_model_int4_has_to_be_measured_first() -> None:
    assert [dtype for dtype in KV_BITS if not takes(dtype, OTHER)] == ["int4"]
    assert takes("int4", OTHER, allow_kv_quality_loss=True)
    about = "has not been measured on a model of this shape (octavo bench quality MODEL does that): take int8"
    assert about in refusal("int4", OTHER)


def test_the_cost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_costs, "KNOWN", (KNOWN[0]._replace(costs={"int8": Cost(0.14, 0.1)}),))
    told = [kv_costs.told(EngineConfig(kv_cache_dtype=dtype), SMOLLM2) for dtype in ("auto", "fp32", "int8", "fp8")]
    assert told[:3] == [None, None, "keys and values in int8: perplexity +0.14 ± 0.1 % on SmolLM2-135M"]
    assert told[3] is not None and "fp8_e4m3: what that costs this model was not measured" in told[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.config("llama")
    return tiny.write_folder(tmp_path_factory.mktemp("llama"), shape, tiny.tensors(shape))


def test_no_engine_that_serves_takes_it_unasked(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: int4 has not been measured"):
        LLM(folder, kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match="kv_cache_dtype: int4 has not been measured"):
        asyncio.run(AsyncLLM.start(folder, EngineConfig(kv_cache_dtype="int4")))
    with LLM(folder, kv_cache_dtype="int4", allow_kv_quality_loss=True, kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.format.dtype == "int4"


def test_the_engine_in_its_process_tells_the_cost(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> None:
        llm = await AsyncLLM.start(folder, EngineConfig(kv_cache_dtype="int8", kv_cache_memory_bytes=1 << 20))
        await llm.close()

    with caplog.at_level("INFO"):
        asyncio.run(start())
    told = [(record.name, record.message) for record in caplog.records if "keys and values" in record.message]
    about = "keys and values in int8: what that costs this model was not measured (octavo bench quality MODEL)"
    assert told == [("octavo.engine.process", about)]


def test_the_command_line_names_the_flag(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["octavo", "generate", str(folder), "hello", "--kv-cache-dtype", "int4"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "--kv-cache-dtype: int4 has not been measured" in capsys.readouterr().err
    options = ["--kv-cache-dtype", "int4", "--allow-kv-quality-loss", "--max-tokens", "1"]
    result = CliRunner().invoke(app, ["generate", str(folder), "hello", "--kv-cache-memory-bytes", "1MiB", *options])
    assert result.exit_code == 0, result.output
