"""Advice comes near the best of a sweep, says why, and says so where pages gain nothing."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo import cli
from octavo.bench import trials
from octavo.bench.trials import ARCHETYPES, Archetype, arrivals_of, prompts_of
from octavo.bench.workloads import WORKLOADS
from octavo.cli.planning import GoalName
from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest
from octavo.planner.advisor import GOALS, Advice, Result, Workload, advise, command, nothing_to_page
from octavo.planner.known import MODELS
from octavo.planner.memory import Demand
from octavo.simulator.cost import Measured, processor
from octavo.types import Tier
from tests.simulator.engines import KNOTS

GIB = 1 << 30
SHAPE = MODELS["smollm2-135m"]._replace(weight_bytes=96_500_000)
TOKEN_BYTES = 23_040
COST = trials.sheet(SHAPE, processor(2, 8 * GIB), 1)


def config_of(kind: Archetype) -> EngineConfig:
    return EngineConfig(max_model_len=kind.max_model_len, kv_cache_memory_bytes=kind.pool_tokens * TOKEN_BYTES)


@pytest.fixture(scope="module")
def advised() -> dict[str, Advice]:
    return {
        kind.name: trials.advice(
            kind.name, SHAPE, config_of(kind), arrivals_of(kind.turns), 8 * GIB, COST, goal=kind.goal
        )
        for kind in ARCHETYPES.values()
    }


def sweep(kind: Archetype) -> list[Result]:
    """Pages and reservations, small and large pages and batches, with and without a prefix cache and a host tier."""
    base, arrivals = config_of(kind), arrivals_of(kind.turns)
    host_gib = 4 * kind.pool_tokens * TOKEN_BYTES / GIB
    both: list[dict[str, Any]] = [
        {"max_num_seqs": count, "kv_cache_dtype": dtype} for count in (16, 256) for dtype in ("auto", "int8")
    ]
    caches: list[dict[str, Any]] = [{"enable_prefix_caching": False}, {}, {"swap_space": host_gib}]
    pages = [{"block_size": size} | cache for size in (16, 64) for cache in caches]
    layouts: list[dict[str, Any]] = [*pages, {"kv_layout": "contiguous"}, {"max_num_batched_tokens": 512}]
    found = [replace(base, **one, **other) for one, other in itertools.product(both, layouts)]
    return [trials.simulated(one, COST, arrivals, 8192) for one in found]


@pytest.mark.parametrize("name", ARCHETYPES)
def test_advice_is_within_five_percent_of_the_best_of_a_sweep(name: str, advised: dict[str, Advice]) -> None:
    kind, found = ARCHETYPES[name], advised[name]
    seconds = [GOALS[kind.goal](result) for result in sweep(kind)]
    assert GOALS[kind.goal](found.result) <= 1.05 * min(seconds)
    assert (max(seconds) > 1.05 * min(seconds)) == (name not in ("documents", "uniform"))  # in these nothing matters
    assert found.gain >= 1
    assert not found.result.num_refused


@pytest.mark.parametrize(
    ("name", "pays", "why"),
    [
        ("chat", False, "one request runs at a time.* What gains is reuse"),
        ("mixed", True, r"goal would be 1\.\d+ times as many seconds.* Memory holds 3 reservations"),
        ("uniform", False, "Lengths are uniform: sequences fill 90%"),
        ("system", True, "Reservations cannot share: 90% of the prompts' tokens"),
        ("documents", False, "More sequences run at once, but their steps take as much longer"),
        ("agents", True, "Reservations cannot share"),
    ],
)
def test_it_says_whether_paging_pays(name: str, pays: bool, why: str, advised: dict[str, Advice]) -> None:
    found = advised[name]
    assert found.pays == pays
    assert re.search(why, " ".join(found.paging)), found.paging


def test_sessions_get_a_host_tier_and_nobody_else(advised: dict[str, Advice]) -> None:
    assert [name for name, found in advised.items() if found.config.swap_space] == ["agents"]
    [tier] = [one for one in advised["agents"].recommendations if one.option == "swap_space"]
    assert tier.gain is not None and tier.gain > 2 and tier.other == 0.0
    assert re.fullmatch(r"66% of the prompts' tokens are found, without it \d+%", tier.reason)
    assert {found.config.kv_cache_dtype for found in advised.values()} <= {"auto", "int8"}


def test_where_memory_is_plenty_paging_buys_nothing() -> None:
    """Also for a strict tail at low concurrency."""
    arrivals = trials.of_lengths("200+30,40+60", 0, 16, 1.5, 1)
    config = EngineConfig(max_model_len=512, kv_cache_memory_bytes=64 * 512 * TOKEN_BYTES)
    found = trials.advice("few", SHAPE, config, arrivals, 8 * GIB, COST, goal="tail")
    assert not found.pays and 1 < found.result.most_running <= 4
    told = " ".join(found.paging)
    assert "Memory is plenty: it holds 64 reservations of 512 tokens" in told
    assert "A strict tail at low concurrency gains nothing" in told and "stay with them" in told
    assert found.config == config


@pytest.mark.parametrize("rate", [None, 1.0])
def test_embeddings_run_though_each_takes_a_single_step(rate: float | None) -> None:
    """Answers of one token: a request that begins and ends within a step was running in it, reserved or paged."""
    arrivals = trials.of_lengths("100+1", 0, 20, rate, 1)
    config = EngineConfig(max_model_len=512, kv_cache_memory_bytes=8 * 512 * TOKEN_BYTES, max_num_batched_tokens=400)
    found = trials.advice("embeddings", SHAPE, config, arrivals, 8 * GIB, COST)
    assert found.paging_gain == pytest.approx(1, abs=0.02) and not found.pays
    assert found.result.most_running >= 1 and found.result.running > 0.05
    assert not any("cannot be had" in said for said in found.paging)


def test_sequences_at_once_are_a_mean_over_time() -> None:
    """Two one after the other: as one is there from its start to its end, there is one at all times."""
    arrivals = trials.of_lengths("10+20", 0, 2, None, 1)
    one_by_one = EngineConfig(max_num_seqs=1, max_model_len=64, kv_cache_memory_bytes=64 * TOKEN_BYTES)
    found = trials.simulated(one_by_one, COST, arrivals, 8192)
    assert found.most_running == 1 and found.running == pytest.approx(1)


def test_answers_that_fill_what_prompts_leave_need_no_advice() -> None:
    """All begin together: no more run than will fit, as computing again costs more than a larger batch gains."""
    arrivals = trials.of_lengths("128+128", 0, 48, None, 1)
    config = EngineConfig(max_model_len=256, kv_cache_memory_bytes=8 * 256 * TOKEN_BYTES)
    found = trials.advice("full", SHAPE, config, arrivals, 8 * GIB, COST)
    assert found.config == config and not found.pays
    assert found.result.most_running == 8 and found.result.num_preemptions == 0
    assert not any("plenty" in said for said in found.paging)


# ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────


def searched(
    seconds: Callable[[EngineConfig], float | None], config: EngineConfig | None = None, **options: Any
) -> Advice:
    """Advice where a configuration takes so long; None for one that cannot be."""

    def measure(config: EngineConfig) -> Result:
        found = seconds(config)
        if found is None:
            raise ConfigError("kv_cache_memory_bytes", "too small")
        return Result(1 / found, found, found, found, 4.0, 8, 0.5, 0, 0)

    work = Workload("fake", [Demand(100, 100)] * 300, True)
    config = replace(config or EngineConfig(), max_model_len=1024, kv_cache_memory_bytes=GIB)
    return advise(work, SHAPE, config, 8 * GIB, measure, **options)


def test_a_tie_changes_nothing() -> None:
    found = searched(lambda config: 1.0 - 0.005 * (config.max_num_seqs == 64))
    assert found.config == EngineConfig(max_model_len=1024, kv_cache_memory_bytes=GIB)
    assert found.gain == 1 and not found.pays
    assert {one.option: one.other for one in found.recommendations}["max_num_seqs"] == 64


def test_knobs_that_only_gain_together_are_found() -> None:
    """Reservations beat pages unless there is a host tier, which gains only with larger pages."""

    def seconds(config: EngineConfig) -> float:
        tier = config.swap_space >= 4 and config.block_size == 64
        return 1.0 if tier else 2.0 if config.kv_layout == "contiguous" else 3.0

    found = searched(seconds, host_gib=[1.0, 4.0])
    assert (found.config.swap_space, found.config.block_size, found.config.kv_layout) == (4.0, 64, "paged")
    assert found.gain == 3 and found.paging_gain == 2 and found.pays


def test_bits_are_given_up_for_a_gain_and_four_only_when_allowed() -> None:
    gains = {"auto": 3.0, "int8": 2.0, "int4": 1.0}
    by_memory = {
        loss: searched(lambda config: gains[config.kv_cache_dtype], quality_loss=loss) for loss in (False, True)
    }
    assert [found.config.kv_cache_dtype for found in by_memory.values()] == ["int8", "int4"]
    slight = searched(lambda config: 1.0 + 0.02 * (config.kv_cache_dtype == "auto"))
    assert slight.config.kv_cache_dtype == "auto"
    given = searched(lambda config: gains[config.kv_cache_dtype], config=EngineConfig(kv_cache_dtype="int4"))
    assert given.config.kv_cache_dtype == "int4"


def test_what_cannot_be_is_not_recommended() -> None:
    found = searched(
        lambda config: None if config.block_size < 64 and config.block_size != 16 else 1 / config.block_size
    )
    assert found.config.block_size == 128
    told = {one.option: one.tried for one in found.recommendations}["block_size"]
    assert told == {"16": 8.0, "32": None, "64": 2.0, "128": 1.0}
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: too small"):
        searched(lambda config: None)
    with pytest.raises(ConfigError, match="goal: must be one of throughput, latency, tail; got 'speed'"):
        searched(lambda config: 1.0, goal="speed")


def test_a_command_has_what_differs_from_the_defaults() -> None:
    config = EngineConfig(block_size=32, enable_prefix_caching=False, max_model_len=4096)
    words = "octavo serve m --block-size 32 --no-enable-prefix-caching --max-model-len 4096"
    assert " ".join(command("m", config)) == words
    assert command("m", EngineConfig(swap_space=1.5))[3:] == ["--swap-space", "1.5"]
    assert command("m", EngineConfig(kv_layout="contiguous"))[3:] == ["--kv-layout", "contiguous"]


# ── work ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ARCHETYPES)
def test_archetypes_are_the_same_for_the_simulator_and_an_engine(name: str) -> None:
    turns = ARCHETYPES[name].turns
    arrivals, prompt = arrivals_of(turns), prompts_of(turns, 1000)
    before: dict[int, list[int]] = {}
    for number, (turn, arrival) in enumerate(zip(turns, arrivals, strict=True)):
        answered = [7] * turn.answer if turn.session in before else []
        made = prompt(number, answered)
        assert len(made) == len(arrival.prompt) and turn.answer == arrival.num_output
        assert made[: len(before.get(turn.session, []))] == before.get(turn.session, [])
        before[turn.session] = made
        assert len(made) + turn.answer <= ARCHETYPES[name].max_model_len
    shared = turns[0].shared
    assert (
        len({tuple(made[:shared]) for made in before.values()})
        == len({tuple(one.prompt[:shared]) for one in arrivals})
        == 1
    )
    assert len({tuple(made[: shared + 16]) for made in before.values()}) == len(before)


def test_a_calibration_prices_other_pages_by_their_bytes() -> None:
    config = EngineConfig()
    wide, narrow = (replace(config, kv_cache_dtype=dtype).kv_format(SHAPE.model) for dtype in ("auto", "int8"))
    measured = Measured("x", wide, KNOTS, 1e-3, 1e-5, 1e-6, 1e-5, {Tier.HOST: 1.0}, 1000, 1 << 20)
    found = trials.timed(SHAPE, measured)(replace(config, kv_cache_dtype="int8"))
    assert found.format == narrow
    assert found.move_s(Tier.HOST) == pytest.approx(narrow.page_bytes / wide.page_bytes)
    with pytest.raises(ConfigError, match="calibration: is of another model, x"):
        trials.timed(MODELS["llama-3.1-8b"], measured)
    with pytest.raises(ConfigError, match="model: has 8 experts"):
        trials.sheet(MODELS["mixtral-8x7b"], processor(2, GIB), 1)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "bert is an encoder"),
        ({"model_type": "new", "architectures": ["NewForSequenceClassification"]}, "new is an encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 has an encoder and a decoder"),
        ({"_class_name": "StableDiffusionPipeline"}, "StableDiffusionPipeline is a diffusion model"),
        ({"model_type": "llada"}, "llada is a diffusion model"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, None),
    ],
)
def test_models_without_a_cache_are_told_apart(raw: dict[str, Any], said: str | None) -> None:
    found = nothing_to_page(raw)
    assert found is None if said is None else found is not None and found.startswith(said)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["advise", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


GPU = ["--model", "llama-3.1-8b", "--gpu", "l4", "--max-model-len", "4096"]


def test_the_command_says_what_to_do_and_why() -> None:
    told = run("mixed", "--requests", "40", *GPU)
    _, work = WORKLOADS["mixed"].draw(40, 49_152, 0)
    means = [fmean(len(one.prompt) for one in work), fmean(one.max_tokens for one in work)]
    assert "mixed: {:.0f} tokens in and {:.0f} out on average; goal: throughput".format(*means) in told
    assert "Paging pays" in told
    assert re.search(r"--kv-layout paged +instead of contiguous, \d\.\d\d ×: \d+ such sequences fit into memory", told)
    assert told.splitlines()[-1].startswith("octavo serve llama-3.1-8b --max-model-len 4096")
    found = json.loads(run("mixed", "--requests", "40", *GPU, "--json"))
    assert found["command"] == told.splitlines()[-1].split()
    assert found["pays"] and found["paging_gain"] > 1.02
    assert {one["option"] for one in found["recommendations"]} == {
        *("kv_layout", "block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype"),
        *("enable_prefix_caching", "swap_space"),
    }


def test_goals_are_those_of_the_command_line() -> None:
    assert [goal.value for goal in GoalName] == list(GOALS)


def test_requests_one_at_a_time_gain_nothing_from_pages() -> None:
    found = json.loads(run("single", "--requests", "4", *GPU, "--json"))
    assert not found["pays"] and found["goal"] == "latency" and found["predicted"]["most_running"] == 1
    assert "One request runs at a time, and one sequence fits either way." in found["paging"]


def test_lengths_instead_of_a_trace() -> None:
    told = run("--lengths", "600+20,400+40", "--shared-tokens", "384", "--requests", "12", "--rate", "0.2", *GPU)
    assert "600+20,400+40: 500 tokens in and 30 out on average; goal: latency" in told
    assert re.search(
        r"--enable-prefix-caching true +instead of false, 1\.\d\d ×: 70% of the prompts' tokens are found", told
    )  # 11 · 384 of 6,000


@pytest.mark.parametrize("as_json", [False, True])
def test_an_encoder_is_advised_not_to_page(tmp_path: Path, as_json: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    told = run("--model", str(tmp_path), *(["--json"] if as_json else []))
    assert "bert is an encoder: it reads its input in one pass" in told
    assert not as_json or json.loads(told)["pays"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model: name one"),
        (GPU, "lengths: give either a TRACE or --lengths"),
        (["mixed", "--lengths", "1+1", *GPU], "lengths: give either a TRACE or --lengths"),
        (["--lengths", "100", *GPU], r"lengths: must look like 161\+338,1000\+20, got '100'"),
        (["--lengths", "100+0", *GPU], "lengths: must be numbers of tokens above 0"),
        (["--lengths", "100+1", "--shared-tokens", "101", *GPU], "shared_tokens: 101 are more than a prompt has"),
        (["mixed", "--model", "llama-3.1-8b", "--gpu", "l5"], "gpu: 'l5' is not known: there are t4, v100"),
        (["mixed", "--model", "llama-3.1-70b", "--gpu", "l4"], "memory: 141,107,412,992 bytes of weights"),
        (["mixed", "--model", "llama-3.2-1b", "--tensor-parallel-size", "2"], "tensor_parallel_size: needs --gpu"),
        (["mixed", *GPU, "--calibration", "x"], "calibration: is of its own machine"),
        (["--lengths", "9000+1", *GPU], "max_model_len: no request of this workload fits into 4,096 tokens"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises((ConfigError, InvalidRequest), match=message):
        CliRunner().invoke(cli.app, ["advise", *arguments], catch_exceptions=False)
