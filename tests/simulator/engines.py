"""Small engines to simulate, requests for them, and all that can be told of what became of them."""

from __future__ import annotations

import io
import json
import random
from array import array
from typing import Any

from octavo.config import EngineConfig
from octavo.kv_format import KVFormat
from octavo.simulator.cost import Measured
from octavo.simulator.simulate import ChromeTrace, Simulation, engine
from octavo.simulator.traces import Arrival
from octavo.types import Tier

KNOTS = ((1, 0.010), (64, 0.030))


def cost(block_size: int = 4, load_s: float = 0.001) -> Measured:
    """A page takes block_size · 16 bytes. One row alone takes 10 ms, 64 take 30."""
    loads = {Tier.HOST: load_s, Tier.DISK: 3 * load_s}
    kv_format = KVFormat("bf16", 1, 2, 2, block_size)
    return Measured("tiny", kv_format, KNOTS, 1e-3, 1e-5, 1e-6, 1e-5, loads, 1000, 1 << 20)


def config(num_pages: int, *, block_size: int = 4, **options: Any) -> EngineConfig:
    page_bytes = cost(block_size).format.page_bytes
    for name in ("swap_space", "kv_offload_space"):
        if name in options:
            options[name] *= page_bytes / (1 << 30)
    return EngineConfig(block_size=block_size, kv_cache_memory_bytes=num_pages * page_bytes, **options)


def requests(seed: int, count: int, *, longest: int = 60, rate: float = 8.0) -> list[Arrival]:
    """With beginnings in common, in bursts; every fifth is as long as can be."""
    chance, now = random.Random(seed), 0.0
    made: list[Arrival] = []
    for number in range(count):
        base = chance.choice(made).prompt if made and chance.random() < 0.5 else array("i")
        kept = base[: chance.randrange(len(base) + 1)]
        own = [1000 * (number + 1) + at for at in range(chance.randrange(1, longest if number % 5 == 0 else 20))]
        answer = chance.randrange(1, longest if number % 5 == 1 else 12)
        made.append(Arrival(now, (kept + array("i", own))[:longest], answer, 10_000_000 * number))
        now += chance.expovariate(rate) if chance.random() < 0.6 else 0.0
    return made


def simulated(config: EngineConfig, arrivals: list[Arrival], **options: Any) -> tuple[Simulation, dict[str, Any]]:
    """A simulation that is over and audited, and everything about it that does not depend on the machine."""
    file = io.StringIO()
    chrome = ChromeTrace(file)
    simulation = Simulation(engine(config, cost(config.block_size), audit=True), arrivals, chrome, **options)
    simulation.run()
    chrome.close()
    told = simulation.report()
    assert told["wall_s"] > 0 and told.pop("times_real_time") == told["seconds"] / told.pop("wall_s")
    pool = simulation.core.cache.pool
    told |= {"free": pool.free_pages(), "cached": pool.eviction_order(simulation.now)}
    told["events"] = [event for event in json.loads(file.getvalue()) if event["name"] != "step"]
    simulation.core.close()
    return simulation, told
