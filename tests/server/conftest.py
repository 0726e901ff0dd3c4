"""Servers that tests share: one with room, and one whose pool and batch are tiny."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.serving import PAGE_BYTES, Served, serving

from octavo import LLM

KEYS = ("alpha-key", "beta-key")
SMALL_PAGES = 10


@pytest.fixture(scope="session")
def served(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With the model's whole context, and steps so short that they end soon on any machine."""
    log = tmp_path_factory.mktemp("served") / "log"
    options = ("--kv-cache-memory-bytes", "256MiB", "--served-model-name", "smol", "--served-model-name", "alias")
    options += ("--max-num-batched-tokens", "128")
    with serving(log, model_path, *options) as server:
        yield server


@pytest.fixture(scope="session")
def small(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With ten pages of sixteen tokens, four sequences at once, and limits to run into."""
    log = tmp_path_factory.mktemp("small") / "log"
    options = ("--kv-cache-memory-bytes", str(SMALL_PAGES * PAGE_BYTES), "--max-num-seqs", "4")
    limits = ("--max-queued-requests", "8", "--max-body-bytes", "64KiB", "--max-prompts-per-request", "8")
    waits = ("--header-timeout", "0.5", "--body-timeout", "0.5", "--timeout-keep-alive", "0.5")
    with serving(log, model_path, *options, *limits, *waits, "--scheduling-policy", "priority") as server:
        yield server


@pytest.fixture(scope="session")
def llm(model_path: Path) -> Iterator[LLM]:
    """The same model, offline."""
    with LLM(model_path, kv_cache_memory_bytes=256 << 20) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing runs, and every page is free or cached."""
    yield
    for name in ("served", "small"):
        if name in request.fixturenames:
            server: Served = request.getfixturevalue(name)
            assert server.process.poll() is None, server.log.read_text()[-2000:]
            server.settle()
