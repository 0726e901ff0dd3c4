"""The simulator makes the plans that the engine makes: replayed with its clock and its results, each is the same."""

import random
import time
from array import array
from dataclasses import replace

import pytest
from tests.engine.test_tiers import PAGE_BYTES, pool
from tests.surprise import let_preempting_pay

from octavo.cache.manager import CacheManager
from octavo.engine.core import EngineCore
from octavo.scheduler.scheduler import Scheduler
from octavo.simulator.simulate import Simulation
from octavo.simulator.traces import Arrival
from octavo.types import Request, SamplingParams, Tier


def frozen(plan):
    """A plan's own copy: its page tables live on."""
    slices = [
        (piece.seq_id, piece.start, piece.token_ids.tolist(), piece.write_start, piece.pages.tolist(), len(piece.draws))
        for piece in plan.slices
    ]
    return plan.step, list(plan.page_ops), slices, plan.wait


class Recorder:
    """Notes an executor's plans and results."""

    def __init__(self, executor):
        self._executor = executor
        self.plans, self.results = [], []

    def execute(self, plan):
        self.plans.append(frozen(plan))
        self.results.append(self._executor.execute(plan))
        return self.results[-1]

    def close(self):
        self._executor.close()


class Replayer:
    """Gives the noted results again, at the noted times, to the noted plans only."""

    def __init__(self, recorder, times):
        self.now = 0.0
        self.num_plans = 0
        self._recorder, self._times = recorder, times

    def execute(self, plan):
        assert self.now == self._times[self.num_plans]
        assert frozen(plan) == self._recorder.plans[self.num_plans]
        self.num_plans += 1
        self.now = self._times[self.num_plans] if self.num_plans < len(self._times) else self.now
        return self._recorder.results[self.num_plans - 1]

    def close(self):
        pass


def prompts(seed, count):
    chance = random.Random(seed)
    made = [[chance.randrange(250) for _ in range(30)]]
    while len(made) < count:
        base = chance.choice(made)
        own = [chance.randrange(250) for _ in range(chance.randrange(1, 20))]
        made.append((base[: chance.randrange(len(base) + 1)] + own)[:40])
    return made


@pytest.mark.parametrize(
    ("num_pages", "options"),
    [
        (200, {}),
        (16, {}),
        (16, {"max_num_batched_tokens": 12, "max_num_seqs": 5}),
        (16, {"enable_prefix_caching": False}),
        (16, {"tiers": True, "preemption_mode": "swap"}),
        (16, {"tiers": True, "preemption_mode": "auto"}),
    ],
    ids=str,
)
def test_the_simulator_plans_as_the_engine_does(make_llm, tmp_path, num_pages, options):
    options = dict(options)
    tiers = options.pop("tiers", False)
    settings = pool(num_pages, 12 if tiers else 0, tmp_path if tiers else None)
    llm = make_llm(**settings, **options)
    core, config = llm._core, llm.config
    assert llm.format.page_bytes == PAGE_BYTES
    if num_pages == 16:
        let_preempting_pay(core)
    costs = replace(core.cache.tiers.costs, load_s=dict(core.cache.tiers.costs.load_s))
    totals = core.cache.tier_pages()

    recorder = core._executor = Recorder(core._executor)
    times, arrivals = [], []
    waiting = list(enumerate(prompts(num_pages, 24), 1))
    while waiting or core.has_work:
        now = time.monotonic()
        while waiting and (not core.has_work or len(times) >= waiting[0][0]):
            number, prompt = waiting.pop(0)
            arrivals.append(Arrival(now, array("i", prompt), 3 + number % 17, number))
            params = SamplingParams(max_tokens=3 + number % 17, seed=number, temperature=0.0, ignore_eos=True)
            core.add(Request(str(number), prompt, params))
        before = len(recorder.plans)
        core.step(now=now)
        times += [now] * (len(recorder.plans) - before)

    cache = CacheManager(
        num_pages,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_pages=totals[Tier.HOST].total,
        num_disk_pages=totals[Tier.DISK].total,
        costs=costs,
        session_ttl=config.session_ttl,
    )
    scheduler = Scheduler(config, cache, max_model_len=llm.max_model_len, vocab_size=llm.model.vocab_size)
    replayer = Replayer(recorder, times)
    simulation = Simulation(EngineCore(scheduler, replayer, audit=True), arrivals)
    simulation.run()
    assert replayer.num_plans == len(recorder.plans) > 24
    assert simulation.figures.num_finished == 24
    assert cache.stats == core.cache.stats and scheduler.stats == core.scheduler.stats
    if num_pages == 16:
        assert scheduler.stats.num_preemptions > 0
    if tiers and options["preemption_mode"] == "swap":
        assert sum(cache.tiers.stats.moved.values()) > 0
