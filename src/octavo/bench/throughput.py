"""Offline throughput of a workload: tokens a second, latencies, and how near the steps came to what the machine allows.

Owns the clock and the report; the engine is used as anyone would use it, through `LLM`, its steps watched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.figures import spread
from octavo.bench.machine import Shape, Watch, probe, standing
from octavo.bench.workloads import Work, Workload, rates
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.llm import LLM, assemble
from octavo.models.weights import open_checkpoint
from octavo.types import SamplingParams


def measure(path: Path, config: EngineConfig, workload: Workload, num_requests: int | None) -> dict[str, Any]:
    """Run the workload once, after a warm-up that shares no prompt with it. Times in seconds, rates in tokens a second.

    time_to_first_token counts from the start of the run: all requests are queued at once. inter_token is the time
    between two events of one answer, divided by the tokens that came. probe, standing: see octavo.bench.machine; the
    probe is the best of one before and one after the run.
    """
    llm, watch, shape = watched(path, config)
    with llm:
        before = probe(config.num_threads)
        figures, start = run_work(llm, workload, num_requests, config.seed)
        allowed = before.best(probe(config.num_threads))
    return {
        **figures,
        "probe": allowed._asdict(),
        "standing": standing([step for step in watch.steps if step.start >= start], start, shape, allowed),
    }


def watched(path: Path, config: EngineConfig) -> tuple[LLM, Watch, Shape]:
    """An LLM whose steps are noted, and what decides how much a step has to do."""
    engine = assemble(open_checkpoint(path), config)
    watch = Watch(engine.core.executor)
    llm = LLM.from_engine(engine._replace(core=EngineCore(engine.core.scheduler, watch)))
    return llm, watch, Shape(engine.model, *engine.decoder.footprints, engine.format.token_bytes)


def serve(llm: LLM, workload: Workload, work: Sequence[Work]) -> float:
    """Seconds that requests take, as many of them at once as the workload says."""
    parts = list(workload.together(work))
    params = {n: SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work}
    start = time.perf_counter()
    for part in parts:
        llm.generate([one.prompt for one in part], [params[one.max_tokens] for one in part])
    return time.perf_counter() - start


def run_work(llm: LLM, workload: Workload, num_requests: int | None, seed: int) -> tuple[dict[str, Any], float]:
    """The figures, and when the run began after the warm-up."""
    warm_up, work = workload.draw(num_requests, llm.model.vocab_size, seed)
    llm.generate([one.prompt for one in warm_up], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))

    first: dict[int, float] = {}
    latest: dict[int, float] = {}
    gaps: list[float] = []
    before = llm.stats()
    params = [SamplingParams(temperature=0, max_tokens=one.max_tokens, ignore_eos=True) for one in work]
    start = time.perf_counter()
    for event in llm.stream([one.prompt for one in work], params):
        if not event.token_ids:
            continue
        now = time.perf_counter()
        if event.prompt_index in latest:
            gaps.append((now - latest[event.prompt_index]) / len(event.token_ids))
        else:
            first[event.prompt_index] = now - start
        latest[event.prompt_index] = now
    seconds = time.perf_counter() - start

    after = llm.stats()
    computed, steps = (after[name] - before[name] for name in ("computed_tokens", "num_steps"))
    figures = {
        "workload": workload.name,
        **rates(work, seconds),
        "computed_tokens_per_s": computed / seconds,
        "num_steps": steps,
        "step_s": seconds / steps,
        "time_to_first_token_s": spread(list(first.values())),
        "inter_token_s": spread(gaps),
        "cached_tokens": after["hit_tokens"] - before["hit_tokens"],
        "num_preemptions": after["num_preemptions"] - before["num_preemptions"],
    }
    return figures, start
