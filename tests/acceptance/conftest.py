"""Engines of the real model, and what each prompt gives by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from tests.acceptance.same_bits import GREEDY, PROMPTS, SEEDED, Alone, Engine, bits


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    """Engines by their options, each opened once and closed, with the leak check, at the end."""
    opened: dict[tuple[Any, ...], LLM] = {}

    def open_engine(**options: Any) -> LLM:
        options = {
            "kv_cache_memory_bytes": 2**28,
            "max_model_len": 2048,
            "backend": "cpu",
            "allow_kv_quality_loss": True,
        } | options
        key = tuple(sorted(options.items()))
        if key not in opened:
            opened[key] = LLM(model_path, **options)
        return opened[key]

    yield open_engine
    for llm in opened.values():
        llm.close()


@pytest.fixture(scope="session")
def alone(model_path: Path) -> Alone:
    """Every prompt by itself, nothing cached: what all other ways must equal."""
    with LLM(model_path, enable_prefix_caching=False, kv_cache_memory_bytes=2**26, max_model_len=1024) as llm:
        return {
            (prompt, params): bits(llm.generate(prompt, params)[0]) for prompt in PROMPTS for params in (GREEDY, SEEDED)
        }
