"""The metrics page: vLLM's names, and numbers that follow from what was noted."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import REPOSITORY
from tests.models import tiny

from octavo.cache.manager import CacheStats, TierPages
from octavo.cache.tiers import TierStats
from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.process import EngineStats, TierNews
from octavo.errors import ConfigError
from octavo.scheduler.scheduler import SchedulerStats
from octavo.server import metrics as module
from octavo.server.metrics import Metrics, up_to
from octavo.server.settings import ServerConfig
from octavo.types import Tier

VLLM = """
num_requests_running gauge
num_requests_waiting gauge
kv_cache_usage_perc gauge
cache_config_info gauge
prefix_cache_queries counter
prefix_cache_hits counter
num_preemptions counter
prompt_tokens counter
generation_tokens counter
request_success counter
iteration_tokens_total histogram
time_to_first_token_seconds histogram
inter_token_latency_seconds histogram
time_per_output_token_seconds histogram
request_time_per_output_token_seconds histogram
e2e_request_latency_seconds histogram
request_queue_time_seconds histogram
request_inference_time_seconds histogram
request_prefill_time_seconds histogram
request_decode_time_seconds histogram
request_prompt_tokens histogram
request_generation_tokens histogram
request_max_num_generation_tokens histogram
request_params_n histogram
request_params_max_tokens histogram
"""

STATS = EngineStats(
    num_running=2,
    num_waiting=3,
    num_pages=10,
    pages_referenced=4,
    pages_cached=5,
    pages_free=1,
    page_bytes=100,
    slots_filled=60,
    slots_unused=4,
    pages_spared=24,
    scheduler=SchedulerStats(num_preemptions=6, generation_tokens=70),
    cache=CacheStats(queried_tokens=80, hit_tokens=9, resumed_tokens=11, pages_evicted=12),
    moves=TierStats({(Tier.DEVICE, Tier.HOST): 15, (Tier.DISK, Tier.DEVICE): 16}, moves_failed=17, pages_dropped=18),
    tiers=TierNews(
        {Tier.DEVICE: TierPages(10, 4, 5, 1), Tier.HOST: TierPages(20, 2, 15, 3), Tier.DISK: TierPages(30, 0, 29, 1)},
        num_pinned={Tier.DEVICE: 19, Tier.HOST: 21},
        num_kept={Tier.DEVICE: 22, Tier.HOST: 23},
        num_sessions=20,
        load_s={Tier.HOST: 0.25, Tier.DISK: 0.5},
        token_s=0.125,
    ),
    finished={"stop": 13, "abort": 14},
)


class Clock:
    """Stands for the module `time`: a clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def a_page(stats: EngineStats = STATS, namespace: str = "vllm") -> Metrics:
    return Metrics(namespace, 'a "model"', 100, lambda: stats, {"block_size": 16})


def families(metrics: Metrics) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(metrics.page().decode())}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The one sample of this name with these labels."""
    found = [
        sample.value
        for family in families(metrics).values()
        for sample in family.samples
        if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
    ]
    [only] = found
    return only


def test_names_and_kinds_are_those_of_vllm() -> None:
    page = families(a_page())
    for line in VLLM.split("\n")[1:-1]:
        name, kind = line.split()
        assert page[f"vllm:{name}"].type == kind, name
        for sample in page[f"vllm:{name}"].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ('a "model"', "0")


def test_what_the_engine_says_is_shown_as_it_is_now() -> None:
    stats = [STATS]
    metrics = Metrics("vllm", "m", 100, lambda: stats[0], {"block_size": 16, "num_gpu_blocks": 10})
    expected: dict[tuple[Any, ...], float] = {
        ("num_requests_running",): 2,
        ("num_requests_waiting",): 3,
        ("kv_cache_usage_perc",): 0.4,
        ("kv_pages", ("state", "referenced")): 4,
        ("kv_pages", ("state", "cached")): 5,
        ("kv_pages", ("state", "free")): 1,
        ("kv_cache_bytes", ("holder", "running")): 400,
        ("kv_cache_bytes", ("holder", "cached")): 500,
        ("kv_cache_bytes", ("holder", "free")): 100,
        ("kv_tier_pages", ("tier", "device"), ("state", "referenced")): 4,
        ("kv_tier_pages", ("tier", "host"), ("state", "referenced")): 2,
        ("kv_tier_pages", ("tier", "host"), ("state", "cached")): 15,
        ("kv_tier_pages", ("tier", "host"), ("state", "free")): 3,
        ("kv_tier_pages", ("tier", "disk"), ("state", "cached")): 29,
        ("kv_tier_bytes", ("tier", "disk"), ("state", "cached")): 2900,
        ("kv_pages_pinned", ("tier", "device")): 19,
        ("kv_pages_pinned", ("tier", "host")): 21,
        ("kv_pages_idle_sessions", ("tier", "device")): 22,
        ("kv_pages_idle_sessions", ("tier", "host")): 23,
        ("kv_slots", ("state", "filled")): 60,
        ("kv_slots", ("state", "unused")): 4,
        ("kv_pages_spared",): 24,
        ("num_sessions",): 20,
        ("kv_load_page_seconds", ("tier", "host")): 0.25,
        ("kv_load_page_seconds", ("tier", "disk")): 0.5,
        ("kv_recompute_token_seconds",): 0.125,
        ("kv_pages_moved_total", ("from", "device"), ("to", "host")): 15,
        ("kv_pages_moved_total", ("from", "disk"), ("to", "device")): 16,
        ("kv_page_moves_failed_total",): 17,
        ("kv_pages_dropped_total",): 18,
        ("num_preemptions_total",): 6,
        ("generation_tokens_total",): 70,
        ("prefix_cache_queries_total",): 80,
        ("prefix_cache_hits_total",): 9,
        ("prefix_cache_resumed_tokens_total",): 11,
        ("kv_pages_evicted_total",): 12,
        ("request_success_total", ("finished_reason", "stop")): 13,
        ("request_success_total", ("finished_reason", "length")): 0,
        ("request_success_total", ("finished_reason", "abort")): 14,
        ("request_success_total", ("finished_reason", "error")): 0,
    }
    shown = {key: value(metrics, key[0], **dict(key[1:])) for key in expected}
    assert shown == expected
    assert value(metrics, "cache_config_info", block_size="16", num_gpu_blocks="10") == 1
    stats[0] = EngineStats(num_pages=10, pages_free=10)
    assert value(metrics, "num_requests_running") == value(metrics, "kv_cache_usage_perc") == 0


def test_times_of_a_request(clock: Clock) -> None:
    metrics = a_page()
    noted = metrics.request_started(7, 1, 20, arrived=99.5)
    clock.now = 101.5
    noted.tokens(0, 1, clock.now, queue_s=0.5)
    for gap in (0.25, 0.5):
        clock.now += gap
        noted.tokens(0, 1, clock.now)
    clock.now += 1.0
    noted.finished(0, "stop")
    noted.close()
    sums = {
        "time_to_first_token_seconds": 2.0,
        "inter_token_latency_seconds": 0.75,
        "time_per_output_token_seconds": 0.75,
        "request_time_per_output_token_seconds": 0.375,
        "e2e_request_latency_seconds": 2.75,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "request_decode_time_seconds": 0.75,
        "request_inference_time_seconds": 2.25,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 3,
        "request_max_num_generation_tokens": 3,
        "request_params_n": 1,
        "request_params_max_tokens": 20,
    }
    assert {name: value(metrics, f"{name}_sum") for name in sums} == sums
    counts = dict.fromkeys(sums, 1) | {"inter_token_latency_seconds": 2, "time_per_output_token_seconds": 2}
    assert {name: value(metrics, f"{name}_count") for name in sums} == counts
    assert value(metrics, "prompt_tokens_total") == 7
    assert [value(metrics, "inter_token_latency_seconds_bucket", le=le) for le in ("0.2", "0.3", "0.5", "+Inf")] == [
        *(0, 1, 2, 2)
    ]


def test_choices_are_counted_one_by_one_and_their_prompt_once(clock: Clock) -> None:
    metrics = a_page()
    noted = metrics.request_started(7, 2, None)
    noted.tokens(0, 1, clock.now)
    noted.tokens(1, 1, clock.now)
    noted.tokens(1, 4, clock.now)
    noted.finished(0, "length")
    noted.finished(0, "length")
    noted.finished(1, "stop")
    names = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens")
    assert [value(metrics, f"{name}_count") for name in names] == [2, 2, 2]
    assert value(metrics, "request_generation_tokens_sum") == 6
    assert value(metrics, "request_max_num_generation_tokens_sum") == 5
    assert [value(metrics, f"request_params_n_{part}") for part in ("count", "sum")] == [1, 2]
    assert value(metrics, "request_params_max_tokens_count") == 0
    assert value(metrics, "prompt_tokens_total") == 7


def test_an_abandoned_request_has_no_latency(clock: Clock) -> None:
    metrics = a_page()
    before = metrics.request_started(7, 1, 5)
    before.close()
    midway = metrics.request_started(7, 1, 5)
    midway.tokens(0, 1, clock.now)
    midway.close()
    assert value(metrics, "e2e_request_latency_seconds_count") == 0
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "prompt_tokens_total") == 7


def test_responses_are_counted_by_code() -> None:
    metrics = a_page()
    for code in (200, 400, 200):
        metrics.responded(code)
    assert [value(metrics, "http_responses_total", code=code) for code in ("200", "400")] == [2, 1]


def test_the_namespace_is_chosen() -> None:
    page = a_page(namespace="octavo").page().decode()
    assert re.search(r"^octavo:num_requests_running\{.*\} 2\.0$", page, re.MULTILINE)
    assert "vllm" not in page
    for wrong in ("", "a b", "7up", "a:b", 'x"'):
        with pytest.raises(ConfigError, match=r"^metrics_namespace: "):
            a_page(namespace=wrong)


def test_bounds_of_lengths() -> None:
    assert up_to(1) == (1,)
    assert up_to(99) == (1, 2, 5, 10, 20, 50)
    assert up_to(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def test_the_documentation_names_every_metric() -> None:
    text = (REPOSITORY / "docs" / "serving.md").read_text()
    told = {
        (name.removesuffix("_total") if kind == "counter" else name, kind)
        for name, kind in re.findall(r"^\| `(\w+)(?:\{[\w,]+\})?` \| (\w+) \|", text, re.MULTILINE)
    }
    shown = {
        (name.removeprefix("vllm:"), family.type)
        for name, family in families(a_page()).items()
        if name.startswith("vllm:")
    }
    assert told == shown


def test_the_documentation_gives_the_limits_that_hold() -> None:
    text = (REPOSITORY / "docs" / "serving.md").read_text()
    defaults = {field.name: field.default for field in fields(ServerConfig)}
    told = re.findall(r"`--([a-z-]+)` ([\d.]+)( MiB)?", text)
    assert len(told) == 9
    for flag, number, mebibytes in told:
        assert float(number) * (1 << 20 if mebibytes else 1) == defaults[flag.replace("-", "_")], flag


@pytest.mark.parametrize(("layout", "page_tokens"), [("paged", 16), ("contiguous", 208)])
def test_the_capacity_is_that_of_the_pages_that_there_are(tmp_path: Path, layout: str, page_tokens: int) -> None:
    """200 tokens are reserved in a page of 208; three such pages, or the same memory in pages of 16."""
    shape = tiny.config("llama")
    model = tiny.write_folder(tmp_path / "tiny", shape, tiny.tensors(shape))
    token_bytes = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, their size, bf16

    async def page() -> str:
        options = {"kv_layout": layout, "max_model_len": 200, "kv_cache_memory_bytes": 3 * 208 * token_bytes}
        llm = await AsyncLLM.start(model, EngineConfig(**options, num_threads=1))
        try:
            return Metrics.of(llm, "vllm", "m").page().decode()
        finally:
            await llm.close()

    [line] = [line for line in asyncio.run(page()).splitlines() if line.startswith("vllm:cache_config_info{")]
    told = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert (told["block_size"], told["num_gpu_blocks"]) == (str(page_tokens), str(624 // page_tokens))
    assert told["kv_cache_size_tokens"] == "624" and told["kv_cache_max_concurrency"] == str(624 / 200)
    assert told["kv_cache_memory_bytes"] == str(624 * token_bytes)
