"""Whether the prefix cache pays: what it finds is counted, and the verdict is that of the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.bench.prefix_cache import Turn, books, figures, report, verdict
from octavo.bench.workloads import WORKLOADS, Work, fixed
from octavo.cache.manager import CacheManager
from octavo.cli import app

WORK = [Work(list(range(100 * i, 100 * i + 40)), 5) for i in range(3)]


def test_rounds_are_compared_one_by_one() -> None:
    """Gains of 50, 20 and 0 %, whatever the machine did from round to round."""
    rounds = [(Turn(1.0, 120, 60), Turn(2.0, 120, 0)), (Turn(8.0, 120, 0), Turn(10.0, 120, 0))]
    rounds.append((Turn(3.0, 120, 30), Turn(3.0, 120, 0)))
    found = figures(WORK, 16, rounds)
    assert (found["gain_percent"], found["gain_quartiles"]) == (pytest.approx(20), pytest.approx([10, 35]))
    assert found["hit_percent"] == 100 * 90 / 360
    assert (found["seconds_with"], found["seconds_without"]) == (3.0, 3.0)
    assert found["token_us"] == 3e6 / 135
    added = found["lookup_ns"] * 120 + found["keep_ns"] * 135
    assert found["cost_percent"] == pytest.approx(100 * added / 1e9 / 3)


def test_the_verdict() -> None:
    found = {"hit_percent": 40.0, "gain_quartiles": [1.0, 5.0], "cost_percent": 0.0123}
    assert verdict(found) == "The cache pays."
    assert verdict(found | {"gain_quartiles": [-2.0, -1.0]}) == "The cache does not pay."
    assert "within the noise" in verdict(found | {"gain_quartiles": [-1.0, 1.0]})
    assert verdict(found | {"hit_percent": 0.0}) == "Nothing to find: the cache costs 0.012 % here."


def test_the_books_are_those_of_a_full_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache, every page that a request takes has to be evicted first."""
    caches: list[CacheManager] = []
    start = CacheManager.__init__

    def noted(self: CacheManager, *args: object, **options: object) -> None:
        caches.append(self)
        start(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(CacheManager, "__init__", noted)
    for enabled in (True, False):
        assert min(books(WORK, 4, enabled=enabled)) > 0
    cached, plain = caches
    assert cached.num_pages == 12 + 64
    assert cached.pool.num_free <= 1 and plain.pool.num_free == 76
    assert cached.stats.pages_evicted >= 3 * 11 and plain.stats.pages_evicted == 0
    assert cached.stats.hit_tokens == 0


def test_the_command(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of 48 tokens, 32 of which are alike, then three that have nothing in common."""
    chance: dict[str, Any] = {"prefix": fixed(16, 2, shared=32), "uniform": fixed(32, 2)}
    short = {name: WORKLOADS[name]._replace(make=make) for name, make in chance.items()}
    monkeypatch.setattr("octavo.bench.workloads.WORKLOADS", short)
    file = tmp_path / "figures.json"
    options = ["--requests", "3", "--repeats", "2", "--json", str(file), "--kv-cache-memory-bytes", "16MiB"]
    options += ["--workload", "prefix", "--workload", "uniform", "--max-model-len", "100"]
    printed = CliRunner().invoke(app, ["bench", "prefix-cache", str(model_path), *options])
    assert printed.exit_code == 0, printed.output
    shared, nothing = json.loads(file.read_text())["results"]
    assert shared["hit_percent"] == pytest.approx(100 * 2 * 32 / (3 * 48))
    assert nothing["hit_percent"] == 0
    for found in (shared, nothing):
        assert (found["num_requests"], found["num_rounds"]) == (3, 2)
        for line in report(found):
            assert line in printed.output
