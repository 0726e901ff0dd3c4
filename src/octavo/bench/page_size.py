"""How long steps take with pages of different sizes: the model's own steps, its weights loaded once.

Owns the pools and their turns. The steps are a token each for sequences of some length, and a prompt; pages lie
scattered in the pool, as they do after a while.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.config import EngineConfig
from octavo.engine.kv_store import KVStore
from octavo.engine.llm import LLM, Engine, assemble
from octavo.engine.runner import ModelRunner
from octavo.kv_format import KVFormat
from octavo.models.weights import open_checkpoint
from octavo.types import Slice, StepPlan

SEQUENCES, CONTEXT, PROMPT = 8, 1024, 512
PATTERN = 0x3F003F00
"""0.5 twice in bf16, or any codes and scales of 0.5."""


def measure(
    path: Path,
    config: EngineConfig,
    sizes: Sequence[int],
    dtypes: Sequence[str],
    repeats: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[int, dict[str, float]]]:
    """Seconds by format and size, the least of `repeats`, in which the sizes take turns.

    decode_s: a step of SEQUENCES sequences of CONTEXT tokens, one token each. prompt_s: a prompt of PROMPT tokens.
    """
    config = replace(config, max_model_len=CONTEXT, enable_prefix_caching=False)
    engine = assemble(open_checkpoint(path), config)
    found: dict[str, dict[int, dict[str, float]]] = {}
    with LLM.from_engine(engine) as llm:
        for dtype in dtypes:
            runs = {}
            for size in sizes:
                progress(f"{dtype}, pages of {size}")
                own = replace(config, kv_cache_dtype=dtype, block_size=size)
                runs[size] = _steps(engine, own.kv_format(llm.model))
            times: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
            for number in range(repeats):
                progress(f"{dtype}, round {number + 1} of {repeats}")
                for size, (decode, prompt) in runs.items():
                    decode()  # the backend notes its ops anew when the pool is another
                    times[size].append((decode(), prompt()))
            found[dtype] = {
                size: dict(zip(("decode_s", "prompt_s"), map(min, zip(*of, strict=True)), strict=True))
                for size, of in times.items()
            }
    return found


def _steps(engine: Engine, format: KVFormat) -> tuple[Callable[[], float], Callable[[], float]]:
    """The two steps, on a pool of their own."""
    in_a_sequence = format.num_pages(CONTEXT)
    num_pages = SEQUENCES * in_a_sequence
    store = KVStore(engine.ops, format, num_pages)
    for page in range(num_pages):
        engine.ops.page(store.pool, page).view(np.uint32)[:] = PATTERN
    runner = ModelRunner(engine.decoder, store, engine.sampler, engine.guides)
    pages = list(range(num_pages))
    random.Random(format.block_size).shuffle(pages)
    tables = [array("i", pages[i * in_a_sequence : (i + 1) * in_a_sequence]) for i in range(SEQUENCES)]
    one, last = array("i", [0]), CONTEXT - 1
    decode = StepPlan(0, (), tuple(Slice(i, last, one, last, table, ()) for i, table in enumerate(tables)))
    prompt = StepPlan(0, (), (Slice(0, 0, array("i", [0] * PROMPT), 0, tables[0][: format.num_pages(PROMPT)], ()),))
    return lambda: runner.execute(decode).seconds, lambda: runner.execute(prompt).seconds
