"""How many requests the simulator takes, how fast, and in how much memory; print JSON.

    python bench/scale.py --requests 1000000

Short requests of log-normal lengths come 60 a second, each one made when it is due, to Llama 3.1 70B on four H100.
`process_s` is processor time, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress

from octavo.bench.machine import machine
from octavo.bench.workloads import log_normal
from octavo.config import EngineConfig
from octavo.gpus import GPUS
from octavo.planner.known import MODELS
from octavo.simulator.cost import Sheet
from octavo.simulator.simulate import Simulation, engine
from octavo.simulator.traces import Arrival, tokens_of


def arrivals(count: int, rate: float, seed: int) -> Iterator[Arrival]:
    chance, now = random.Random(seed), 0.0
    for number in range(count):
        prompt, answer = log_normal(chance, 160, 4, 4000, 1.0), log_normal(chance, 40, 1, 500, 0.8)
        yield Arrival(now, tokens_of(number, prompt), answer, 0)
        now += chance.expovariate(rate)


def measure(count: int, rate: float, prefix_caching: bool) -> dict[str, Any]:
    cost = Sheet(MODELS["llama-3.1-70b"].model, GPUS["h100"], 4, "bf16", 16)
    core = engine(EngineConfig(enable_prefix_caching=prefix_caching), cost)
    simulation = Simulation(core, arrivals(count, rate, 1))
    before = time.process_time()
    aside = Console(stderr=True)
    with Progress(console=aside, transient=True, disable=not aside.is_terminal) as bar:
        task = bar.add_task("Requests", total=count)
        simulation.run(lambda now: bar.update(task, completed=now.figures.num_finished))
    seconds, told = time.process_time() - before, simulation.report()
    wanted = ("finished", "seconds", "output_tokens", "prompt_tokens", "num_steps", "num_preemptions")
    return {
        **{name: told[name] for name in wanted},
        "process_s": seconds,
        "times_real_time": told["seconds"] / seconds,
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=60)
    parser.add_argument("--prefix-caching", action="store_true")
    asked = parser.parse_args()
    figures = measure(asked.requests, asked.rate, asked.prefix_caching)
    print(json.dumps({"machine": machine(), "arguments": vars(asked), **figures}, indent=1))


if __name__ == "__main__":
    main()
