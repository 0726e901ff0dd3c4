"""Random lives of engines with tiers: whatever happens, every answer is right and every page is accounted for.

A life has its own pool, tiers, policies and ways of moves, and does at random whatever an operator and clients may do.
The audit runs after every act. A life has a number, so that one that fails can be lived again.
"""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import suppress

import pytest

from octavo.cache.invariants import check
from octavo.cache.tiers import Costs
from octavo.engine.core import EngineCore
from octavo.errors import OctavoError, PinRefused, UnknownSession
from octavo.types import Request, SamplingParams, StepPlan, StepResult, Tier
from tests.heart.engines import executor_of, expected, make_engine, run, tokens_of
from tests.heart.token_executor import TokenExecutor

TENANTS = ["", "x", "y"]


class Clumsy(TokenExecutor):
    """Every now and then fails to compute, or does not even begin."""

    clumsiness = 0.0
    chance = random.Random()

    def execute(self, plan: StepPlan) -> StepResult:
        if self.chance.random() < self.clumsiness:
            if self.chance.random() < 0.5:
                raise KeyboardInterrupt
            if plan.slices:
                super().begin(plan.page_ops)
                raise RuntimeError
        return super().execute(plan)


class Life:
    """One engine after another, each finding what the one before has left on disk."""

    def __init__(self, number: int) -> None:
        self.rng = rng = random.Random(number)
        self.now = 0.0
        self.num_requests = 0
        self.prompts: list[list[int]] = [[]]
        self.live: dict[str, Request] = {}
        self.cut: set[tuple[str, int]] = set()
        self.done: set[tuple[str, int]] = set()
        self.got: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.vocab_size = rng.choice([2, 3, 50])
        self.rates = [rng.choice([0, 0.02, 0.2]) for _ in ACTS]
        self.shares = rng.random() < 0.5
        self.clumsiness = rng.choice([0.0, 0.0, 0.0, 0.1])
        self.engine = self.begin()

    def begin(self) -> EngineCore:
        rng = self.rng
        load_s = {Tier.HOST: rng.choice([0.0, 0.002, 1.0]), Tier.DISK: rng.choice([0.004, 0.01])}
        moves = {
            "delay": rng.choice([0, 1, 4, 9]),
            "random_delay": rng.random() < 0.5,
            "fail_every": rng.choice([0, 0, 0, 1, 2, 5, 11]),
        }
        engine = make_engine(
            rng.choice([6, 9, 14, 25, 60]),
            vocab_size=self.vocab_size,
            host_pages=rng.choice([0, 1, 4, 12, 200]),
            disk_pages=rng.choice([0, 1, 6, 20, 400]),
            costs=Costs(rng.choice(["swap", "swap", "auto", "recompute"]), 0.001, 0.0, load_s),
            session_ttl=rng.choice([0.0, 20.0, 1e6]),
            kv_quota=rng.choice([0.0, 0.1, 0.5, 1.0, 1.0]),
            max_pinned_fraction=rng.choice([0.0, 0.3, 1.0]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            max_num_seqs=rng.choice([1, 2, 5, 16]),
            max_num_batched_tokens=rng.choice([2, 7, 30, 2048]),
            moves=moves,
            executor=Clumsy,
        )
        executor = executor_of(engine)
        assert isinstance(executor, Clumsy)
        executor.clumsiness, executor.chance = self.clumsiness, random.Random(rng.random())
        return engine

    # ── acts ──

    def add(self) -> None:
        rng, engine = self.rng, self.engine
        base = rng.choice(self.prompts[-12:])
        prompt = base[: rng.choice([len(base), rng.randrange(len(base) + 1)])]
        prompt = prompt + [rng.randrange(self.vocab_size) for _ in range(rng.randrange(14))] or [0]
        tenant, kind = rng.choice(TENANTS), rng.random()
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(3),
            max_tokens=rng.randrange(1, 12),
            ignore_eos=True,
            n=rng.choice([1, 1, 1, 2, 4]),
            prompt_logprobs=0 if kind < 0.15 else None,
            use_beam_search=kind > 0.9,
            beam_width=4,
        )
        request = Request(
            str(self.num_requests),
            prompt,
            params,
            () if self.shares else (tenant,),
            priority=rng.randrange(3),
            tenant=tenant,
            session_id=rng.choice([None, "a", "b", "c"]),
        )
        self.num_requests += 1
        try:
            engine.add(request)
        except OctavoError:
            self.prompts.append([])
            return
        self.prompts.append(prompt + expected(engine, request) if not params.use_beam_search else prompt)
        self.live[request.request_id] = request

    def abort(self) -> None:
        if self.live:
            self.gone(request_id := self.rng.choice(list(self.live)))
            self.engine.abort(request_id)

    def finish(self) -> None:
        if self.live:
            key = self.rng.choice(list(self.live)), self.rng.randrange(4)
            if self.got[key]:  # a choice that is not begun has no text to stop at
                self.engine.finish(*key)
                self.cut.add(key)

    def govern(self) -> None:
        engine, rng = self.engine, self.rng
        key = rng.choice(TENANTS), rng.choice(["a", "b", "c"])
        with suppress(UnknownSession, PinRefused):
            match rng.randrange(5):
                case 0 | 1:
                    engine.pin(*key, rng.choice([0, 1, 30, 1e6]))
                case 2:
                    engine.demote_session(*key)
                case 3:
                    engine.release_session(*key)
                case 4:
                    engine.list_sessions(None, 10)

    def save(self) -> None:
        if self.engine.cache.tier_pages()[Tier.DISK].total:
            self.engine.save()

    def drop_cached(self) -> None:
        self.engine.cache.drop_cached()

    def jump(self) -> None:
        self.now += self.rng.choice([-5.0, 0.5, 10.0, 1000.0])

    def restart(self) -> None:
        before = executor_of(self.engine)
        self.end()
        self.engine = self.begin()
        after = executor_of(self.engine)
        after.contents |= {place: content for place, content in before.contents.items() if place.tier is Tier.DISK}
        after.labels = dict(before.labels)
        self.engine.cache.restore(sorted(before.labels.items()))

    # ── and what becomes of them ──

    def audit(self) -> None:
        cache, scheduler = self.engine.cache, self.engine.scheduler
        check(cache)
        assert len(scheduler._running) + len(scheduler._loading) <= scheduler._max_running
        live = [sequence for group in scheduler._groups.values() for sequence in group.live.values()]
        assert scheduler.slots[0] == sum(sequence.num_computed for sequence in live if sequence.table is not None)
        idle = {page: owner for owner, pages in cache.tiers._idle.items() for page in pages}
        cached = {page: cache.index.node_of(page).owner for page in cache.pool.eviction_order(cache.tiers.now)}
        assert idle == (cached if cache.tiers._quota is not None else {})

    def gone(self, request_id: str) -> None:
        self.live.pop(request_id, None)

    def step(self) -> None:
        self.now += self.rng.random()
        try:
            outputs = self.engine.step(now=self.now, broke=lambda request_id, error: self.gone(request_id))
        except (RuntimeError, KeyboardInterrupt):
            outputs = []
        for output in outputs:
            key = output.request_id, output.index
            self.got[key] += tokens_of([output])
            if output.finish_reason is not None:
                self.done.add(key)
            if output.prompt_logprobs is not None:
                scored = [token.token_id for token in output.prompt_logprobs]
                assert scored == list(self.live[output.request_id].prompt_token_ids)[1:]
        for request_id in [at for at in self.live if at not in self.engine.scheduler._groups]:
            self.compare(self.live.pop(request_id))

    def compare(self, request: Request) -> None:
        if request.params.use_beam_search:
            alone = make_engine(1000, vocab_size=self.vocab_size)
            answers = {
                index: tokens_of(outputs) for index, outputs in run(alone, [request])[request.request_id].items()
            }
        else:
            answers = {index: expected(self.engine, request, index) for index in range(request.params.n)}
        for index, answer in answers.items():
            key = request.request_id, index
            assert key in self.done or key in self.cut or self.clumsiness
            assert self.got[key] == (answer if key in self.done else answer[: len(self.got[key])])

    def rest(self) -> None:
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.step()
            self.audit()
        raise AssertionError("not finished")

    def end(self) -> None:
        if self.rng.random() < 0.8:
            self.rest()
            for key in [(tenant, name) for tenant in TENANTS for name in "abc"]:
                with suppress(UnknownSession):
                    self.engine.pin(*key, 0)
            assert not any(pages.referenced for pages in self.engine.cache.tier_pages().values())
        self.live.clear()
        executor = executor_of(self.engine)
        assert isinstance(executor, Clumsy)
        executor.clumsiness = 0.0
        self.engine.close()

    def live_on(self, num_acts: int) -> None:
        for _ in range(num_acts):
            for act, rate in zip(ACTS, self.rates, strict=True):
                if self.rng.random() < rate:
                    act(self)
                    self.audit()
            if self.rng.random() < 0.3 and len(self.live) < 12:
                self.add()
            if self.rng.random() < 0.003:
                self.restart()
            self.step()
        self.end()


ACTS = (Life.abort, Life.finish, Life.govern, Life.govern, Life.save, Life.drop_cached, Life.jump, Life.add)


@pytest.mark.parametrize("number", range(24))
def test_a_random_life(number: int) -> None:
    Life(number).live_on(150)
