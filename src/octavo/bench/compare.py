"""Paged and contiguous KV memory of the same size on the same work: which serves more, and what the memory holds.

Owns the variants, their turns and the samples. The engines differ in their pages and in nothing else; each has its own
copy of the weights. They take turns, round after round, so that what else the machine does hits all of them; what a
round left in the prefix cache is dropped before the next.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from octavo.bench.throughput import serve
from octavo.bench.workloads import Work, Workload, rates
from octavo.config import EngineConfig, ModelConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor
from octavo.engine.llm import LLM, assemble
from octavo.kv_format import KVFormat
from octavo.models.weights import Checkpoint, open_checkpoint
from octavo.planner.memory import Demand, room
from octavo.scheduler.scheduler import Scheduler
from octavo.types import StepPlan, StepResult

RESERVATIONS = 8
"""The pool, unless told: so many sequences of the maximum length."""

FIGURES = ("output_tokens_per_s", "kv_use", "kv_held", "running", "num_steps", "num_preemptions", "cached_tokens")


class Sample(NamedTuple):
    """A step: sequences running and waiting, pages held, tokens in them."""

    running: int
    waiting: int
    pages: int
    tokens: int


class Gauge:
    """An executor that notes, before another one computes a step, what its memory will hold after it."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor, self._scheduler = executor, scheduler
        self.samples: list[Sample] = []

    def execute(self, plan: StepPlan) -> StepResult:
        scheduler, size = self._scheduler, self._scheduler.cache.block_size
        pages = scheduler.cache.pool.num_referenced
        empty = sum(len(piece.pages) * size - piece.start - len(piece.token_ids) for piece in plan.slices)
        self.samples.append(Sample(scheduler.num_running, scheduler.num_waiting, pages, pages * size - empty))
        return self._executor.execute(plan)

    def close(self) -> None:
        self._executor.close()


class Variant:
    """One of the engines, and what it did in each round."""

    def __init__(self, name: str, checkpoint: Checkpoint, config: EngineConfig) -> None:
        engine = assemble(checkpoint, config)
        scheduler = engine.core.scheduler
        self.name, self.format, self.config = name, engine.format, engine.config
        self.num_pages = scheduler.cache.num_pages
        self._gauge = Gauge(engine.core.executor, scheduler)
        self._cache = scheduler.cache
        self.llm = LLM.from_engine(engine._replace(core=EngineCore(scheduler, self._gauge)))

    def serve(self, workload: Workload, work: Sequence[Work]) -> dict[str, Any]:
        """One round's figures."""
        self._cache.drop_cached()
        self._gauge.samples.clear()
        before = self.llm.stats()
        seconds = serve(self.llm, workload, work)
        after = self.llm.stats()
        return {
            **rates(list(work), seconds),
            **held(self._gauge.samples, self.num_pages, self.format),
            "num_preemptions": after["num_preemptions"] - before["num_preemptions"],
            "cached_tokens": after["hit_tokens"] - before["hit_tokens"],
        }

    def told(
        self, workload: Workload, work: Sequence[Work], reservation: Variant, rounds: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """What it is, what was expected of it, and what it did."""
        config = replace(self.config, max_num_seqs=workload.at_once or self.config.max_num_seqs)
        return {
            "name": self.name,
            "num_pages": self.num_pages,
            "page_bytes": self.format.page_bytes,
            "block_size": self.format.block_size,
            "planned": expected(work, config, self.format, self.num_pages, reservation.format),
            "rounds": rounds,
        }


def held(samples: Sequence[Sample], num_pages: int, format: KVFormat) -> dict[str, float]:
    """kv_use: the share of the pool that holds tokens of running sequences; kv_held: that of the pages they hold.

    Means are over the steps at which requests wait, or over all steps, where those are the fewer.
    """
    loaded = [sample for sample in samples if sample.waiting]
    if 2 * len(loaded) < len(samples):  # all but the beginning fits into memory
        loaded = list(samples)
    return {
        "kv_use": statistics.fmean(sample.tokens for sample in loaded) / (num_pages * format.block_size),
        "kv_held": statistics.fmean(sample.pages for sample in loaded) / num_pages,
        "running": statistics.fmean(sample.running for sample in loaded),
        "most_running": max(sample.running for sample in loaded),
        "num_steps": len(samples),
    }


def expected(
    work: Sequence[Work], config: EngineConfig, format: KVFormat, num_pages: int, reservation: KVFormat
) -> dict[str, float]:
    """What the planner expects while requests wait: sequences at once, and the pool's share that holds tokens."""
    shared = _num_common(work) if config.enable_prefix_caching else 0
    demands = [Demand(len(one.prompt), one.max_tokens, shared) for one in work]
    found = room(format, reservation, num_pages, demands)
    running = min(found.paged_typically, config.max_num_seqs, len(work))
    tokens = shared + running * (found.mean_tokens - shared)
    return {"running": running, "kv_use": tokens / (num_pages * format.block_size)}


def _num_common(work: Sequence[Work]) -> int:
    """Tokens with which all prompts begin."""
    columns = zip(*(one.prompt for one in work), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def variants(
    config: EngineConfig, block_sizes: Iterable[int], without_cache: bool, dtypes: Iterable[str] = ()
) -> dict[str, EngineConfig]:
    """The engines to compare, by name; contiguous is the first. What is no page size has the first of them."""
    paged = {f"paged {size}": replace(config, block_size=size) for size in dict.fromkeys(block_sizes)}
    name, first = next(iter(paged.items()))
    paged |= {f"{name}, {dtype}": replace(first, kv_cache_dtype=dtype) for dtype in dict.fromkeys(dtypes)}
    if without_cache:
        paged[f"{name}, no prefix cache"] = replace(first, enable_prefix_caching=False)
    return {"contiguous": replace(config, kv_layout="contiguous"), **paged}


def pool_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """As much as was asked for, or RESERVATIONS of the longest sequences."""
    layout = replace(config, kv_layout="contiguous").for_model(model.context_length)
    return config.kv_cache_memory_bytes or RESERVATIONS * layout.kv_format(model).page_bytes


def compare_layouts(
    path: Path,
    config: EngineConfig,
    workloads: Sequence[Workload],
    *,
    num_requests: int | None = None,
    repeats: int = 3,
    block_sizes: Iterable[int] = (16,),
    without_cache: bool = False,
    dtypes: Iterable[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], bool]:
    """(results, whole). For each workload the figures of every variant's rounds, and what the planner expected.

    Ctrl-C ends the comparison with the rounds that are complete; then it is not whole.
    """
    checkpoint = open_checkpoint(path)
    config = replace(config, kv_cache_memory_bytes=pool_bytes(config, checkpoint.config))
    results: list[dict[str, Any]] = []
    whole = True
    with ExitStack() as stack:
        engines = []
        for name, own in variants(config, block_sizes, without_cache, dtypes).items():
            progress(f"Loading {name}")
            engines.append(Variant(name, checkpoint, own))
            stack.enter_context(engines[-1].llm)
        for workload in workloads:
            warm_up, work = workload.draw(num_requests, checkpoint.config.vocab_size, config.seed)
            rounds: list[list[dict[str, Any]]] = []
            try:
                for engine in engines:
                    engine.serve(workload, warm_up)
                for number in range(repeats):
                    turns = []
                    for engine in engines:
                        progress(f"{workload.name}, round {number + 1} of {repeats}: {engine.name}")
                        turns.append(engine.serve(workload, work))
                    rounds.append(turns)
            except KeyboardInterrupt:
                whole = False
            if rounds:
                columns = zip(engines, zip(*rounds, strict=True), strict=True)
                told = [engine.told(workload, work, engines[0], list(done)) for engine, done in columns]
                results.append({"workload": workload.name, "about": workload.about, "variants": told})
            if not whole:
                break
    return results, whole


def summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Of one workload, a line for each variant: medians of its rounds, and ratios to contiguous, round by round."""
    base, lines = result["variants"][0], []
    for variant in result["variants"]:
        rounds = variant["rounds"]
        pairs = zip(rounds, base["rounds"], strict=True)
        ratios = [one["output_tokens_per_s"] / other["output_tokens_per_s"] for one, other in pairs]
        line = {name: statistics.median(one[name] for one in rounds) for name in FIGURES}
        lines.append(
            {
                "name": variant["name"],
                **line,
                "planned_kv_use": variant["planned"]["kv_use"],
                "planned_running": variant["planned"]["running"],
                "planned_gain": variant["planned"]["running"] / base["planned"]["running"],
                "gain": line["running"] / statistics.median(one["running"] for one in base["rounds"]),
                "speed": statistics.median(ratios),
                "least_speed": min(ratios),
                "most_speed": max(ratios),
            }
        )
    return lines


def gains(result: dict[str, Any]) -> Iterator[str]:
    """What each variant gains over contiguous memory, in words."""
    for line in result["summary"][1:]:
        yield f"{line['name']}: {line['gain']:.1f} × the sequences at once; planned {line['planned_gain']:.1f} ×"
