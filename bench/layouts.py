"""How many sequences pages and contiguous reservations of the same memory hold at once; print JSON.

    python bench/layouts.py --requests 400

The engine's own scheduler and cache serve the workloads with an executor that computes nothing, so that a minute's work
takes a second: what is counted does not depend on the clock. Beside each figure stands what the planner expects. The
same is measured, with its speed, by `octavo bench compare`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from octavo.bench.compare import Gauge, expected, held, pool_bytes, variants
from octavo.bench.workloads import WORKLOADS, Work
from octavo.cache.manager import CacheManager
from octavo.config import EngineConfig, ModelConfig
from octavo.engine.core import EngineCore
from octavo.planner.known import MODELS
from octavo.scheduler.scheduler import Scheduler
from octavo.types import Request, Sampled, SamplingParams, SliceResult, StepPlan, StepResult

SEED = 1


class Idle:
    """Draws the same token for everyone."""

    def execute(self, plan: StepPlan) -> StepResult:
        token = Sampled(7, 0.0, 0, ())
        return StepResult([SliceResult([token] * len(piece.draws)) for piece in plan.slices])

    def close(self) -> None:
        pass


def count(work: list[Work], model: ModelConfig, config: EngineConfig, reserving: EngineConfig) -> dict[str, Any]:
    """What one layout holds while it serves the work."""
    config, reserving = (one.for_model(model.context_length) for one in (config, reserving))
    pages, longest = config.kv_format(model), config.max_model_len or model.context_length
    num_pages = pool_bytes(config, model) // pages.page_bytes
    cache = CacheManager(num_pages, pages.block_size, enable_prefix_caching=config.enable_prefix_caching)
    scheduler = Scheduler(config, cache, max_model_len=longest, vocab_size=model.vocab_size)
    gauge = Gauge(Idle(), scheduler)
    core = EngineCore(scheduler, gauge)
    for number, one in enumerate(work):
        params = SamplingParams(max_tokens=one.max_tokens, ignore_eos=True)
        core.add(Request(str(number), tuple(one.prompt), params))
    while core.has_work:
        core.step()
    core.close()
    planned = expected(work, config, pages, num_pages, reserving.kv_format(model))
    return {
        **{name: round(value, 3) for name, value in held(gauge.samples, num_pages, pages).items()},
        **{f"planned_{name}": round(value, 3) for name, value in planned.items()},
        "num_preemptions": scheduler.stats.num_preemptions,
        "computed_tokens": scheduler.stats.computed_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", choices=MODELS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["mixed", "uniform", "prefix"])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64, 256])
    args = parser.parse_args()
    model, results = MODELS[args.model].model, []
    base = EngineConfig(max_model_len=args.max_model_len)
    base = replace(base, kv_cache_memory_bytes=pool_bytes(base, model))
    for workload in args.workloads:
        _, work = WORKLOADS[workload].draw(args.requests, model.vocab_size, SEED)
        engines = variants(base, args.block_sizes, without_cache=True)
        for name, config in engines.items():
            results.append({"workload": workload, "layout": name, **count(work, model, config, engines["contiguous"])})
    print(json.dumps({"arguments": vars(args), "seed": SEED, "results": results}, indent=1))


if __name__ == "__main__":
    main()
