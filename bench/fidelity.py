"""How near the simulator comes to the engine: the same work by both, with costs calibrated on this machine.

    python bench/fidelity.py smollm2-135m --json fidelity.json

The mixed workload is served with pools of several sizes, all requests at once, and is simulated. Each pool is run
several times, in turn with the others. Before each round the machine is calibrated anew, as it may have become faster
or slower, and the simulation takes that round's costs. Medians of both are compared, and all rounds told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.bench.calibrate import calibrate
from octavo.bench.machine import machine
from octavo.bench.throughput import run_work, watched
from octavo.bench.workloads import WORKLOADS
from octavo.config import EngineConfig
from octavo.models.catalog import resolve
from octavo.simulator.cost import Measured
from octavo.simulator.simulate import Simulation, engine
from octavo.simulator.traces import arrivals_of


def config_of(num_pages: int, page_bytes: int, at_once: int) -> EngineConfig:
    return EngineConfig(max_num_seqs=at_once, max_model_len=1600, kv_cache_memory_bytes=num_pages * page_bytes, seed=1)


def real(path: Path, config: EngineConfig, num_requests: int) -> dict[str, Any]:
    llm, _, _ = watched(path, config)
    with llm:
        figures, _ = run_work(llm, WORKLOADS["mixed"], num_requests, config.seed)
    return {
        "output_tokens_per_s": figures["output_tokens_per_s"],
        "first_token_s": figures["time_to_first_token_s"]["median"],
        "num_preemptions": figures["num_preemptions"],
        "num_steps": figures["num_steps"],
    }


def simulated(cost: Measured, config: EngineConfig, num_requests: int) -> dict[str, Any]:
    _, work = WORKLOADS["mixed"].draw(num_requests, 49_152, config.seed)
    simulation = Simulation(engine(config, cost), arrivals_of(work))
    simulation.run()
    report, times = simulation.report(), simulation.figures.first_token
    return {
        "output_tokens_per_s": report["output_tokens_per_s"],
        "first_token_s": (times.percentile(50) + times.percentile(50 + 1e-6)) / 2,
        "num_preemptions": report["num_preemptions"],
        "num_steps": report["num_steps"],
    }


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def compared(model: str, pools: list[int], at_once: int, num_requests: int, repeats: int) -> Iterator[tuple[str, Any]]:
    path, fits = resolve(model), []
    runs: dict[int, list[dict[str, Any]]] = {pages: [] for pages in pools}
    simulations: dict[int, list[dict[str, Any]]] = {pages: [] for pages in pools}
    for _ in range(repeats):
        print("calibrating", file=sys.stderr)
        fit = calibrate(path, model, EngineConfig(max_num_seqs=at_once))
        fits.append({**asdict(fit.cost), "num_steps": fit.num_steps, "error": fit.error})
        for pages in pools:
            print(f"serving with {pages} pages", file=sys.stderr)
            config = config_of(pages, fit.cost.format.page_bytes, at_once)
            runs[pages].append(real(path, config, num_requests))
            simulations[pages].append(simulated(fit.cost, config, num_requests))
    yield "fits", fits
    results = []
    for pages in pools:
        middle, found = medians(runs[pages]), medians(simulations[pages])
        results.append(
            {
                "pages": pages,
                "real": runs[pages],
                "simulated": simulations[pages],
                "median": {"real": middle, "simulated": found},
                "ratio": {name: found[name] / middle[name] for name in found if middle[name]},
            }
        )
    yield "pools", results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pools", default="4096,256,112", help="their pages")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pools = [int(pages) for pages in asked.pools.split(",")]
    figures = {"machine": machine(), **dict(compared(asked.model, pools, asked.at_once, asked.requests, asked.repeats))}
    text = json.dumps(figures, indent=1)
    if asked.json is not None:
        asked.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
