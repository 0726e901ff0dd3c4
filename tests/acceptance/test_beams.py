"""Beam search against Hugging Face Transformers: the same beams in the same order, and their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

SEARCHES = json.loads(
    (Path(__file__).parent / "golden" / "beams.json").read_text()
)  # written by make_beams.py beside it


@pytest.mark.parametrize("num_pages", [64, 5])
def test_beams_are_those_of_transformers(model_path: Path, num_pages: int) -> None:
    def search(row: dict[str, Any], llm: LLM) -> None:
        params = SamplingParams(
            use_beam_search=True,
            beam_width=row["width"],
            n=row["width"],
            length_penalty=row["length_penalty"],
            max_tokens=24,
            stop_token_ids=[30],
        )
        output = llm.generate([row["prompt"]], params)[0]
        assert [choice.token_ids for choice in output.outputs] == row["beams"]
        assert [choice.score for choice in output.outputs] == pytest.approx(row["scores"], abs=1e-3)

    page_bytes = 16 * 2 * 30 * 3 * 64 * 4
    options = {"kv_cache_dtype": "fp32", "kv_cache_memory_bytes": num_pages * page_bytes, "max_model_len": 64}
    with LLM(model_path, backend="reference", **options) as llm:
        for row in SEARCHES if num_pages > 5 else SEARCHES[:1]:
            search(row, llm)
        assert (llm.stats()["num_preemptions"] > 0) == (num_pages == 5)
