"""The rule in every format of keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from tests.acceptance.same_bits import GREEDY, PROMPTS, Engine, bits, same


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2", "int4"])
def test_in_every_format_of_keys_and_values(engine: Engine, dtype: str) -> None:
    """Alone, in a batch, on a prefix hit, in chunks, at other page sizes and on one thread."""
    plain = engine(kv_cache_dtype=dtype, enable_prefix_caching=False)
    right = {(prompt, GREEDY): bits(plain.generate(prompt, GREEDY)[0]) for prompt in PROMPTS}
    options: tuple[dict[str, Any], ...] = (
        {},
        {"block_size": 4, "max_num_batched_tokens": 7},
        {"block_size": 48, "num_threads": 1},
    )
    for other in options:
        llm = engine(kv_cache_dtype=dtype, **other)
        for _ in range(2):  # cold and warm
            assert same(llm.generate(PROMPTS, GREEDY), right, GREEDY, PROMPTS)
