"""The same bits in every format of keys and values."""

from __future__ import annotations

import pytest

from tests.acceptance.same_bits import GREEDY, PROMPTS, Engine, bits, same


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2", "int4"])
def test_in_every_format_of_keys_and_values(engine: Engine, dtype: str) -> None:
    """Alone, in a batch, on a prefix hit, in chunks, at another page size and on one thread."""
    prompts = PROMPTS[::2]
    plain = engine(kv_cache_dtype=dtype, enable_prefix_caching=False)
    right = {(prompt, GREEDY): bits(plain.generate(prompt, GREEDY)[0]) for prompt in prompts}
    llm = engine(kv_cache_dtype=dtype, block_size=4, max_num_batched_tokens=23, num_threads=1)
    for _ in range(2):  # cold and warm
        assert same(llm.generate(prompts, GREEDY), right, GREEDY, prompts)
