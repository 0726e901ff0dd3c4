"""Tiers below the pool: the same answers whatever is moved, fails or is aborted; what leaves first; what comes back."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable
from typing import Any

import pytest

from octavo.cache.invariants import check
from octavo.cache.manager import Admission, CacheManager, Wait
from octavo.cache.pages import PagePool
from octavo.cache.tiers import AHEAD, Costs
from octavo.engine.core import MAX_LOST_STEPS, EngineCore
from octavo.errors import PinRefused
from octavo.types import (
    AwaitMove,
    CopyPage,
    Moved,
    MovePage,
    PageLabel,
    Place,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    Tier,
)
from tests.heart.engines import executor_of, expected, make_engine, run, tokens_of
from tests.heart.token_executor import TokenExecutor

BLOCK = 4


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def crowd(seed: int, count: int, longest: int) -> list[Request]:
    """Requests with beginnings in common, some of them asked more than once."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[rng.randrange(50) for _ in range(longest // 2)]]
    requests = []
    for number in range(count):
        base = rng.choice(prompts)
        tail = [rng.randrange(50) for _ in range(rng.randrange(longest // 2))]
        prompt = (base[: rng.randrange(len(base) + 1)] + tail)[:longest] or [7]
        prompts.append(prompt)
        requests.append(Request(str(number), prompt, greedy(rng.randrange(1, 12)), session_id=str(number % 5)))
    return requests


def serve(engine: EngineCore, requests: list[Request], abort_every: int = 0, seed: int = 0) -> set[str]:
    """Serve requests that arrive over time, abort some at any moment, and compare all answers; ids that finished."""
    rng = random.Random(seed)
    waiting, got, aborted = list(requests), dict[str, list[int]](), set[str]()
    live: list[str] = []
    for now in range(100_000):
        while waiting and rng.random() < 0.5:
            engine.add(waiting[0])
            live.append(waiting.pop(0).request_id)
        if live and abort_every and rng.randrange(abort_every) == 0:
            gone = rng.choice(live)
            engine.abort(gone)
            aborted.add(gone)
        for output in engine.step(now=now):
            got.setdefault(output.request_id, []).extend(tokens_of([output]))
            if output.finish_reason:
                live.remove(output.request_id)
        live = [request_id for request_id in live if request_id not in aborted]
        if not waiting and not engine.has_work:
            break
    else:
        raise AssertionError("not finished")
    finished = {request.request_id for request in requests} - aborted
    for request in requests:
        if request.request_id in finished:
            assert got[request.request_id] == expected(engine, request)
    return finished


@pytest.mark.parametrize("disk_pages", [0, 6, 1000])
@pytest.mark.parametrize("host_pages", [0, 4, 1000])
@pytest.mark.parametrize("num_pages", [8, 13, 64])
@pytest.mark.parametrize("moves", [{"delay": 0}, {"delay": 3}, {"delay": 5, "random_delay": 1, "fail_every": 5}])
def test_answers_are_the_same_whatever_is_moved(
    num_pages: int, host_pages: int, disk_pages: int, moves: dict[str, int]
) -> None:
    engine = make_engine(num_pages, host_pages=host_pages, disk_pages=disk_pages, moves=moves, session_ttl=40.0)
    serve(engine, crowd(num_pages + host_pages, 60, 20), abort_every=9)
    stats = engine.cache.tiers.stats
    if host_pages + disk_pages and num_pages < 64:
        assert sum(stats.moved.values()) > 20
        assert any(target is Tier.DEVICE for _, target in stats.moved)
        assert bool(stats.moves_failed) == ("fail_every" in moves)
    engine.close()
    assert executor_of(engine).closed


@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
def test_modes_change_no_answer(mode: str) -> None:
    costs = Costs(mode, token_s=0.001, load_s={Tier.HOST: 0.002, Tier.DISK: 0.02})
    engine = make_engine(10, host_pages=30, disk_pages=30, costs=costs, moves={"delay": 2})
    serve(engine, crowd(3, 80, 24), abort_every=20)
    moved = engine.cache.tiers.stats.moved
    assert bool(moved) == (mode != "recompute")
    engine.close()


def conversation(length: int) -> array[int]:
    return array("i", [(7 * position + 3) % 50 for position in range(length)])


def fill(engine: EngineCore, count: int, length: int = 12) -> None:
    """One-off requests, one after another."""
    for number in range(count):
        prompt = [number % 50, number // 50 % 50, *([11] * length)][:length]
        run(engine, [Request(f"fill {number}", prompt, greedy(2))])


@pytest.mark.parametrize("delay", [0, 1, 4])
@pytest.mark.parametrize("host_pages", [0, 40])
@pytest.mark.parametrize("fail_every", [0, 2])
def test_an_abort_at_every_step_of_a_copy_leaks_nothing(delay: int, host_pages: int, fail_every: int) -> None:
    for steps in range(12):
        moves = {"delay": delay, "fail_every": fail_every}
        engine = make_engine(10, host_pages=host_pages, disk_pages=40, moves=moves)
        run(engine, [Request("first", conversation(24), greedy(4))])
        fill(engine, 8)
        assert engine.cache.index.match((), conversation(24)).nodes or fail_every
        engine.add(Request("again", conversation(24), greedy(4)))
        for _ in range(steps):
            engine.step()
        engine.abort("again")
        check(engine.cache)
        while engine.has_work:
            engine.step()
        assert all(pages.referenced == 0 for pages in engine.cache.tier_pages().values())
        request = Request("once more", conversation(24), greedy(4))
        assert tokens_of(run(engine, [request])["once more"][0]) == expected(engine, request)
        engine.close()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("moves", [{}, {"delay": 2}, {"delay": 1, "fail_every": 3}])
def test_preemption_at_the_edges_of_pages(length: int, moves: dict[str, int]) -> None:
    """Sequences that are preempted when they have that many tokens, resumed from where their pages went."""
    for num_pages in range(4, 10):
        engine = make_engine(num_pages, host_pages=6, disk_pages=6, moves=moves, max_num_seqs=4)
        requests = [Request(str(n), [n, *range(length - 1)], greedy(2 * BLOCK + 1)) for n in range(4)]
        outputs = run(engine, requests)
        for request in requests:
            assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)
        engine.close()


def test_a_page_comes_back_instead_of_being_computed() -> None:
    engine = make_engine(10, host_pages=40, moves={"delay": 1})
    prompt = conversation(25)
    run(engine, [Request("first", prompt, greedy(1))])
    fill(engine, 8)
    executor, before = executor_of(engine), executor_of(engine).num_computed
    [output] = run(engine, [Request("again", prompt, greedy(1))])["again"][0]
    assert output.num_cached_tokens == 24
    assert executor.num_computed - before == 1
    assert engine.cache.tiers.stats.moved[Tier.HOST, Tier.DEVICE] == 6


def test_others_run_while_pages_come_back() -> None:
    engine = make_engine(16, host_pages=40, moves={"delay": 4})
    run(engine, [Request("first", conversation(24), greedy(1))])
    fill(engine, 12)
    engine.add(Request("other", [1, 2, 3], greedy(20)))
    engine.step()
    engine.add(Request("again", conversation(24), greedy(1)))
    seen = []
    for _ in range(4):
        seen += [output.request_id for output in engine.step()]
    assert seen == ["other"] * 4 and engine.scheduler.num_running == 2
    info = engine.scheduler.infos(10)[1]
    assert (info.request_id, info.phase, info.num_cached, info.num_computed) == ("again", "loading", 23, 23)


def test_two_that_want_the_same_page_move_it_once() -> None:
    engine = make_engine(12, host_pages=40, moves={"delay": 3})
    run(engine, [Request("first", conversation(24), greedy(1))])
    fill(engine, 8)
    requests = [Request(name, conversation(24), greedy(3)) for name in ("one", "two")]
    outputs = run(engine, requests)
    assert engine.cache.tiers.stats.moved[Tier.HOST, Tier.DEVICE] == 6
    for request in requests:
        assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)


def test_a_failed_copy_is_a_miss() -> None:
    """Of six pages of the path the fourth to come back is damaged: three are used and counted, the rest is computed."""
    engine = make_engine(10, host_pages=40)
    run(engine, [Request("first", conversation(24), greedy(1))])
    fill(engine, 8)
    executor = executor_of(engine)
    executor.num_moves, executor.fail_every = 0, 4
    before = executor.num_computed
    queried, hit = engine.cache.stats.queried_tokens, engine.cache.stats.hit_tokens
    request = Request("again", conversation(24), greedy(2), session_id="talk")
    engine.add(request)
    outputs, served = [], []
    while engine.has_work:
        outputs += engine.step()
        served += engine.scheduler.newly_scheduled
    assert served == ["again"] and [output.num_cached_tokens for output in outputs] == [12, 12]
    assert tokens_of(outputs) == expected(engine, request)
    stats, talk = engine.cache.stats, engine.session("", "talk")
    assert (stats.queried_tokens - queried, stats.hit_tokens - hit, stats.resumed_tokens) == (24, 12, 0)
    assert (talk.queried_tokens, talk.hit_tokens) == (24, 12)
    assert executor.num_computed - before == 24 - 12 + 1
    assert engine.cache.tiers.stats.moves_failed >= 1


def test_a_tier_that_takes_nothing_keeps_nobody_busy() -> None:
    engine = make_engine(10, host_pages=40, disk_pages=40, moves={"delay": 1, "fail_every": 1})
    for number in range(20):
        request = Request(str(number), [number, *range(8)], greedy(3), session_id="talk")
        assert tokens_of(run(engine, [request], max_steps=200)[request.request_id][0]) == expected(engine, request)
    engine.close()


def forget(plan: StepPlan) -> StepResult:
    """Break off before anything of a plan is begun."""
    raise KeyboardInterrupt


def test_moves_that_a_broken_step_never_began_are_not_waited_for() -> None:
    engine = make_engine(10, host_pages=40, moves={"delay": 1})
    run(engine, [Request("first", conversation(24), greedy(1))])
    fill(engine, 8)
    executor, execute = executor_of(engine), executor_of(engine).execute
    engine.add(Request("again", conversation(24), greedy(1)))
    executor.execute = forget  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.cache.tiers.loads
    executor.execute = execute  # type: ignore[method-assign]
    request = Request("once more", conversation(24), greedy(3))
    assert tokens_of(run(engine, [request], max_steps=100)["once more"][0]) == expected(engine, request)
    engine.close()


def test_moves_that_end_in_a_step_that_is_lost_have_ended() -> None:
    engine = make_engine(10, host_pages=40, moves={"delay": 0})
    executor, execute = executor_of(engine), executor_of(engine).execute

    def moves_only(plan: StepPlan) -> StepResult:
        if plan.slices:
            raise RuntimeError
        return execute(plan)

    run(engine, [Request("first", conversation(24), greedy(1))])
    fill(engine, 8)
    executor.execute = moves_only  # type: ignore[method-assign]
    for number in range(MAX_LOST_STEPS - 1):
        engine.add(Request(str(number), [1], greedy(1)))
        engine.step(broke=lambda request_id, error: None)
    engine.add(Request("again", conversation(24), greedy(1)))
    engine.add(Request("other", [1], greedy(1)))
    with pytest.raises(RuntimeError):
        engine.step(broke=lambda request_id, error: None)
    assert engine.cache.tiers.loads
    executor.execute = execute  # type: ignore[method-assign]
    for _ in range(100):
        engine.step()
    assert not engine.has_work
    engine.close()


@pytest.mark.parametrize("params", [{"n": 4, "temperature": 1.0, "seed": 1}, {"use_beam_search": True}])
def test_no_more_run_than_may_when_pages_have_come_back(params: dict[str, Any]) -> None:
    engine = make_engine(24, host_pages=40, moves={"delay": 3}, max_num_seqs=3)
    run(engine, [Request(f"first {n}", [n, *conversation(24)], greedy(1)) for n in range(2)])
    fill(engine, 16)
    requests = [Request(f"again {n}", [n, *conversation(24)], greedy(8)) for n in range(2)]
    many = Request("many", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True, **params))
    outputs = run(engine, [many, *requests])
    assert any(target is Tier.DEVICE for _, target in engine.cache.tiers.stats.moved)
    assert all(len(plan.slices) <= 3 for plan in executor_of(engine).plans)
    for request in requests:
        assert tokens_of(outputs[request.request_id][0]) == expected(engine, request)


# ── order, by page ───────────────────────────────────────────────────────────────────────────────────────────────


class Cache:
    """A cache whose moves end when told, and what is computed at once."""

    def __init__(self, num_pages: int, host: int = 0, disk: int = 0, **options: float) -> None:
        self.cache = CacheManager(num_pages, BLOCK, num_host_pages=host, num_disk_pages=disk, **options)
        self.labels: dict[int, PageLabel] = {}
        self.ops: list[object] = []

    def settle(self, *, ok: bool = True) -> None:
        while (ops := self.cache.take_page_ops()) or self.cache.busy:
            self.ops += ops
            self.labels |= {op.target.page: op.label for op in ops if isinstance(op, MovePage) and op.label}
            self.cache.ended([Moved(number, ok, 0.001) for number in list(self.cache.tiers.moves)])
        check(self.cache)

    def ask(self, tokens: array[int], now: float = 0.0, session: str | None = None, tenant: str = "") -> int:
        """Admit, compute and release; tokens that were found."""
        self.cache.tick(now)
        talk = self.cache.sessions.begin(tenant, session) if session is not None else None
        admission = self.cache.admit(tokens, (tenant,), owner=tenant, session=talk)
        assert isinstance(admission, Admission)
        self.settle()
        self.cache.found(len(tokens), admission.num_computed, session=talk)
        assert admission.table.load is None or admission.table.load.complete
        admission.table.load = None
        self.cache.commit(admission.table, tokens, len(tokens))
        self.cache.release(admission.table, talk)
        if talk is not None:
            self.cache.sessions.end(talk)
        self.settle()
        return admission.num_computed

    def pages(self, tokens: array[int], tenant: str = "") -> list[list[Place]]:
        return [node.all_places() for node in self.cache.index.match((tenant,), tokens).nodes]


def prompt(number: int, num_pages: int = 1) -> array[int]:
    return array("i", [number] * (BLOCK * num_pages))


def test_pages_leave_least_recently_used_first_and_tails_before_heads() -> None:
    kv = Cache(4, host=8)
    kv.ask(prompt(1, 2))  # pages 0, 1
    kv.ask(prompt(2, 2))  # pages 2, 3
    assert kv.cache.pool.eviction_order() == [1, 0, 3, 2]
    kv.ask(prompt(1, 2))
    assert kv.cache.pool.eviction_order() == [3, 2, 1, 0]
    kv.ops.clear()
    kv.ask(prompt(3, 1))
    assert kv.pages(prompt(2, 2)) == [[Place(Tier.DEVICE, 2), Place(Tier.HOST, 3)], [Place(Tier.HOST, 2)]]
    assert kv.cache.pool.eviction_order() == [2, 1, 0, 3]


def test_what_is_read_by_a_copy_is_awaited_before_it_is_written() -> None:
    kv = Cache(2, host=8)
    kv.ask(prompt(1))
    assert isinstance(kv.cache.admit(prompt(2, 2)), Admission)
    assert kv.cache.take_page_ops() == []  # the copy was made ahead of need
    cache = CacheManager(1, BLOCK, num_host_pages=2)
    first = cache.admit(prompt(1))
    assert isinstance(first, Admission)
    cache.commit(first.table, prompt(1), BLOCK)
    cache.release(first.table)
    assert isinstance(cache.admit(prompt(2)), Admission)
    assert cache.take_page_ops() == [
        MovePage(1, Place(Tier.DEVICE, 0), Place(Tier.HOST, 0)),
        AwaitMove(1),
    ]


def test_what_is_computed_while_it_comes_back_outlives_what_is_below_it() -> None:
    """And the load was for somebody who is gone."""
    kv = Cache(8, host=8)
    kv.ask(prompt(1, 2))
    kv.ask(prompt(2, 8))
    wanted = kv.cache.admit(prompt(1, 2), ("",))
    assert isinstance(wanted, Admission) and wanted.table.load is not None
    other = kv.cache.admit(prompt(1, 1), ("",), use_cache=False)
    assert isinstance(other, Admission)
    kv.cache.commit(other.table, prompt(1, 1), BLOCK)
    kv.cache.release(wanted.table)
    kv.cache.release(other.table)
    kv.settle()
    head, tail = (places[0].page for places in kv.pages(prompt(1, 2)))
    assert kv.cache.pool.eviction_order()[-2:] == [tail, head]


def test_nothing_is_moved_for_an_admission_that_fails() -> None:
    kv = Cache(4, host=4)
    kv.ask(prompt(1, 2))
    held = kv.cache.admit(prompt(2, 1))
    assert isinstance(held, Admission)
    kv.settle()
    before = (kv.cache.pool.eviction_order(), kv.cache.tier_pages())
    assert kv.cache.admit(prompt(3, 4)) is None
    assert before == (kv.cache.pool.eviction_order(), kv.cache.tier_pages()) and not kv.cache.busy


def test_from_host_to_disk_and_back() -> None:
    kv = Cache(2, host=3, disk=40)
    for number in range(10):
        kv.ask(prompt(number, 2))
    assert [places[0].tier for number in range(10) for places in kv.pages(prompt(number, 2))].count(Tier.DISK) >= 15
    assert all(kv.ask(prompt(number, 2)) == 2 * BLOCK - 1 for number in range(10))
    assert kv.cache.tiers.stats.moved[Tier.DISK, Tier.DEVICE] >= 15
    assert kv.cache.tiers.stats.pages_dropped == 0


def test_a_lower_tier_forgets_no_page_that_others_are_found_by() -> None:
    """The host tier's oldest page has a descendant below it: the descendant goes, whatever the order."""
    kv = Cache(3, host=3)
    kv.ask(prompt(1, 3))
    kv.ask(prompt(2, 3))
    assert [place.tier for [place] in kv.pages(prompt(1, 3))] == [Tier.HOST] * 3
    root = kv.cache.index.match(("",), prompt(1, 3)).nodes[0]
    kv.cache.tiers.acquire(Place(Tier.HOST, root.places[Tier.HOST]))
    kv.cache.tiers.release(Place(Tier.HOST, root.places[Tier.HOST]))
    kv.ask(prompt(3, 1))
    assert kv.pages(prompt(1, 3)) and kv.pages(prompt(1, 3))[0]


def test_room_below_is_found_without_going_through_all_ancestors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads come to a disk before their tails, and only tails can be forgotten. Counted: pages that are looked at."""
    kv = Cache(32, disk=256)
    looks, coldest = 0, PagePool.coldest

    def counting(pool: PagePool, now: float) -> int:
        nonlocal looks
        looks += pool is kv.cache.tiers.pools[Tier.DISK]
        return coldest(pool, now)

    monkeypatch.setattr(PagePool, "coldest", counting)
    for number in range(100):
        kv.ask(prompt(number, 32))
    dropped = kv.cache.tiers.stats.pages_dropped
    assert dropped > 2000
    assert looks < 3 * dropped


@pytest.mark.parametrize("session", [None, "talk"])
def test_an_often_used_beginning_survives_ten_thousand_others(session: str | None) -> None:
    kv = Cache(24, host=16, session_ttl=50.0)
    system = prompt(1, 4)
    kv.ask(system)
    for number in range(10_000):
        tail = array("i", [2 + number % 50, 60 + number // 50, 5, 5] * 2)
        assert kv.ask(system + tail, now=number, session=session) >= len(system) or number == 0
    assert [places[0].tier for places in kv.pages(system)] == [Tier.DEVICE] * 4


@pytest.mark.parametrize("num_cached", [1000, 10_000, 100_000])
def test_an_eviction_looks_at_no_more_pages_when_more_are_cached(num_cached: int) -> None:
    """Counted, not timed: dictionary entries that an eviction reads."""
    cache = CacheManager(num_cached, 2, num_host_pages=num_cached, session_ttl=10.0)
    reads = 0

    class Counting(dict[int, object]):
        def __getitem__(self, key: int) -> object:
            nonlocal reads
            reads += 1
            return super().__getitem__(key)

    for number in range(num_cached):
        admission = cache.admit(array("i", [number, number + 1]))
        assert isinstance(admission, Admission)
        cache.commit(admission.table, array("i", [number, number + 1]), 2)
        cache.release(admission.table)
    cache.index._by_page = tuple(Counting(pages) for pages in cache.index._by_page)  # type: ignore[assignment]
    for number in range(100):
        admission = cache.admit(array("i", [-1, number]))
        assert isinstance(admission, Admission)
        cache.ended(
            [Moved(number, True) for op in cache.take_page_ops() if isinstance(op, MovePage) for number in [op.number]]
        )
        cache.release(admission.table)
    assert reads <= 100 * (AHEAD + 4)


# ── swap or recompute ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_cheaper_way_is_taken() -> None:
    host, disk = Tier.HOST, Tier.DISK
    costs = Costs("auto", token_s=0.001, load_s={host: 0.01, disk: 0.03})
    assert costs.num_worth_loading([host] * 3, 0, 16) == 3
    assert costs.num_worth_loading([host, disk, host], 0, 16) == 1
    assert costs.num_worth_loading([host, host, host, disk, host], 0, 16) == 3
    assert costs.num_worth_loading([host, disk, host, host, host], 0, 16) == 5
    assert costs.num_worth_loading([host] * 3, 0, 4) == 0
    far = Costs("auto", token_s=0.001, slope=0.001, load_s={host: 0.01})
    assert far.num_worth_loading([host] * 3, 0, 4) == 0 and far.num_worth_loading([host] * 3, 4000, 4) == 3
    assert Costs("swap", 1e-9, 0.0, {host: 1.0}).num_worth_loading([host], 0, 16) == 1
    assert Costs("recompute", 1.0, 0.0, {host: 1e-9}).num_worth_loading([host], 0, 16) == 0


def test_costs_are_found_again_from_steps_that_they_make() -> None:
    truth, step_s = Costs("auto", token_s=0.0003, slope=1 / 2048), 0.02
    near_s, far_s = (step_s + truth.recompute_s(start, 32) for start in (0, 2048))
    found = Costs.fitted("auto", step_s + truth.recompute_s(0, 1), 32, near_s, 2048, far_s, {})
    for start, count in ((0, 16), (2048, 32), (0, 4000)):
        assert found.recompute_s(start, count) == pytest.approx(truth.recompute_s(start, count), rel=0.03)
    reading = Costs.fitted("auto", 0.02, 32, 0.02, 2048, 0.02, {})  # a step takes as long for 32 tokens as for one
    assert reading.token_s == pytest.approx(0.02 / 10 / 32) and reading.slope == 0
    assert Costs.fitted("auto", 0.02, 1, 0.02, 0, 0.03, {}).recompute_s(100, 10) < 100


def test_preempting_pays_where_a_step_mostly_reads() -> None:
    costs = Costs(token_s=0.001, step_s=0.101)
    assert costs.preempting_pays(10, 100, 1000) and not costs.preempting_pays(10, 99, 1000)
    assert costs.preempting_pays(5, 50, 1000) and not costs.preempting_pays(11, 100, 1000)
    assert Costs().preempting_pays(10, 0, 1000)  # nothing was measured


class Timed(TokenExecutor):
    """A step takes ten milliseconds, and one for each token."""

    def execute(self, plan: StepPlan) -> StepResult:
        num_tokens = sum(len(piece.token_ids) for piece in plan.slices)
        return super().execute(plan)._replace(seconds=0.01 + 0.001 * num_tokens)


def test_what_others_decode_in_a_step_of_prompts_is_not_the_prompts_cost() -> None:
    costs = Costs("auto", 0.001, 0.0, {}, 0.01)
    engine = make_engine(2000, costs=costs, executor=Timed)
    for number in range(60):
        engine.add(Request(f"talk {number}", [number % 50, number // 50, 1], greedy(40)))
    for number in range(30):
        engine.step()
        engine.add(Request(f"prompt {number}", [number, 7, *[2] * 70], greedy(1)))
    assert engine.scheduler.running and costs.num_learned > 20
    assert costs.token_s == pytest.approx(0.001)


def test_costs_follow_what_is_measured() -> None:
    costs = Costs("auto", token_s=1.0, slope=0.01, load_s={Tier.HOST: 1.0})
    for _ in range(200):
        costs.computed([(0, 100), (100, 100)], 200 * 0.002 + 0.002 * 0.01 * (100 * 50 + 100 * 150))
        costs.loaded(Tier.HOST, 0.5)
    assert costs.token_s == pytest.approx(0.002) and costs.load_s[Tier.HOST] == pytest.approx(0.5)


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def left(kv: Cache, numbers: Iterable[int]) -> list[int]:
    return [number for number in numbers if kv.pages(prompt(number)) and kv.pages(prompt(number))[0]]


def test_a_sessions_advantage_fades() -> None:
    """With a ttl of 100, what was idle for 50 and a session's seems as old as what was idle for 25 and is not."""
    for other_idle, gone in ((26.0, 2), (24.0, 1)):
        kv = Cache(2, session_ttl=100.0)
        kv.ask(prompt(1), now=0.0, session="talk")
        kv.ask(prompt(2), now=50.0 - other_idle)
        kv.ask(prompt(3), now=50.0)
        assert left(kv, range(1, 4)) == [number for number in (1, 2, 3) if number != gone]
    kv = Cache(2, session_ttl=100.0)
    kv.ask(prompt(1), now=0.0, session="talk")
    kv.ask(prompt(2), now=1.0)
    kv.ask(prompt(3), now=200.0)
    assert left(kv, range(1, 4)) == [2, 3]  # its time is over: the least recently used


def test_sessions_say_what_they_hold() -> None:
    kv = Cache(12, host=8, session_ttl=100.0)
    kv.ask(prompt(1, 2), now=1.0, session="a", tenant="x")
    kv.ask(prompt(1, 2) + prompt(2, 1), now=2.0, session="a", tenant="x")
    kv.ask(prompt(1, 2) + prompt(3, 2), now=3.0, session="b", tenant="x")
    kv.ask(prompt(1, 2), now=4.0, session="a", tenant="y")
    kv.cache.tick(10.0)
    a, b = kv.cache.sessions.infos("x", 10)
    assert (a.session_id, a.pages, a.shared_pages, a.idle_s) == ("a", (3, 0, 0), 2, 8.0)
    assert (a.num_requests, a.queried_tokens, a.hit_tokens) == (2, 8 + 12, 8)
    assert (b.session_id, b.pages, b.shared_pages, b.idle_s) == ("b", (4, 0, 0), 2, 7.0)
    assert [info.tenant for info in kv.cache.sessions.infos(None, 10)] == ["x", "x", "y"]
    assert len(kv.cache.sessions.infos(None, 1)) == 1


def test_demote_and_release_touch_a_sessions_own_idle_pages_only() -> None:
    kv = Cache(12, host=12, session_ttl=100.0)
    kv.ask(prompt(1, 2) + prompt(2, 2), session="a")
    kv.ask(prompt(1, 2) + prompt(3, 1), session="b")
    sessions = kv.cache.sessions
    sessions.demote(sessions.get("", "a"))
    assert sessions.info(sessions.get("", "a")).pages == (2, 2, 0), "what is on its way counts where it goes"
    kv.settle()
    assert sessions.info(sessions.get("", "a")).pages == (2, 2, 0)
    assert sessions.info(sessions.get("", "b")).pages == (3, 0, 0)
    sessions.release(sessions.get("", "a"))
    kv.settle()
    assert len(kv.pages(prompt(1, 2) + prompt(2, 2))) == 2 and len(sessions) == 1
    assert kv.ask(prompt(1, 2) + prompt(3, 1)) == 11


def test_release_of_a_running_session_leaves_the_request_alone() -> None:
    engine = make_engine(8, host_pages=8, moves={"delay": 2})
    request = Request("one", conversation(9), greedy(12), session_id="talk")
    engine.add(request)
    outputs = [output for _ in range(4) for output in engine.step()]
    assert engine.release_session("", "talk").num_running == 1
    while engine.has_work:
        outputs += engine.step()
    assert tokens_of(outputs) == expected(engine, request)
    engine.close()


def test_a_pin_holds_pages_until_its_time_is_over() -> None:
    kv = Cache(8, session_ttl=1.0, max_pinned_fraction=0.5)
    kv.ask(prompt(1, 3), session="talk")
    sessions = kv.cache.sessions
    talk = sessions.get("", "talk")
    sessions.pin(talk, 10.0)
    for number in range(2, 20):
        kv.ask(prompt(number, 3))
    assert sessions.info(talk).pages == (3, 0, 0) and sessions.info(talk).pinned_s == 10.0
    kv.cache.tick(10.0)
    check(kv.cache)
    for number in range(2, 20):
        kv.ask(prompt(number, 3), now=20.0)
    assert sessions.info(talk).pages == (0, 0, 0) and sessions.info(talk).pinned_s == 0


def test_pins_keep_to_their_budget() -> None:
    kv = Cache(8, max_pinned_fraction=0.5)
    kv.ask(prompt(1, 3), session="a")
    kv.ask(prompt(2, 3), session="b")
    sessions = kv.cache.sessions
    sessions.pin(sessions.get("", "a"), 10.0)
    with pytest.raises(Exception, match="3 pages and the 3 that are pinned exceed the 4"):
        sessions.pin(sessions.get("", "b"), 10.0)
    sessions.pin(sessions.get("", "a"), 0)
    sessions.pin(sessions.get("", "b"), 10.0)
    check(kv.cache)
    kv.ask(prompt(2, 3) + prompt(3, 3), session="b")  # grows past the budget: the first pages stay pinned
    assert sessions.num_pinned[Tier.DEVICE] == 4
    check(kv.cache)


def test_a_pin_takes_in_what_comes_later() -> None:
    kv = Cache(8, max_pinned_fraction=0.5)
    kv.ask(prompt(1, 1)[:2], session="talk")
    sessions = kv.cache.sessions
    sessions.pin(sessions.get("", "talk"), 10.0)
    assert sessions.info(sessions.get("", "talk")).pinned_s == 10.0 and sessions.num_pinned[Tier.DEVICE] == 0
    kv.ask(prompt(1, 2), session="talk")
    assert sessions.num_pinned[Tier.DEVICE] == 2
    check(kv.cache)


def test_a_pin_that_is_refused_leaves_the_one_before() -> None:
    kv = Cache(8, max_pinned_fraction=0.5)
    kv.ask(prompt(1, 3), session="a")
    sessions = kv.cache.sessions
    talk = sessions.get("", "a")
    sessions.pin(talk, 10.0)
    sessions.pin(talk, 20.0)
    kv.ask(prompt(1, 3) + prompt(2, 2), session="a")
    with pytest.raises(PinRefused, match="5 pages and the 0 that"):
        sessions.pin(talk, 30.0)
    assert sessions.num_pinned[Tier.DEVICE] == 4 and sessions.info(talk).pinned_s == 20.0
    kv.ask(prompt(3, 4), session="a")  # what it no longer needs leaves room for what it does
    assert {*talk.pins} == {place for [place] in kv.pages(prompt(3, 4))}
    check(kv.cache)


def test_a_pin_holds_pages_that_are_yet_to_come() -> None:
    kv = Cache(8)
    kv.ask(prompt(1, 1), session="a")
    kv.ask(prompt(2, 8))
    talk = kv.cache.sessions.get("", "a")
    kv.cache.sessions.pin(talk, 10.0)
    assert kv.cache.sessions.info(talk).pages == (0, 0, 0) and kv.cache.sessions.info(talk).pinned_s == 10.0
    kv.ask(prompt(1, 2), session="a")
    assert kv.cache.sessions.num_pinned[Tier.DEVICE] == 2


def test_a_session_holds_on_to_no_page_that_is_forgotten() -> None:
    kv = Cache(4, session_ttl=100.0)
    kv.ask(prompt(1, 1) + prompt(2, 3), session="a")
    kv.ask(prompt(1, 1) + prompt(3, 2), session="b")
    talk = kv.cache.sessions.get("", "a")
    assert kv.cache.sessions.info(talk).pages == (2, 0, 0)
    assert talk.leaf is not None and talk.leaf.tokens == tuple(prompt(2))
    check(kv.cache)
    kv.ask(prompt(4, 4))
    assert talk.leaf is None and kv.cache.sessions.info(talk).pages == (0, 0, 0)
    kv.ask(prompt(1, 4), session="a")
    assert kv.cache.sessions.info(talk).pages == (4, 0, 0)


def test_pins_give_way_to_a_request_that_could_not_run() -> None:
    engine = make_engine(8, max_pinned_fraction=0.5)
    run(engine, [Request("first", conversation(15), greedy(1), session_id="talk")])
    engine.pin("", "talk", 1000.0)
    request = Request("large", [9] * 27, greedy(5))
    assert tokens_of(run(engine, [request])["large"][0]) == expected(engine, request)
    assert engine.session("", "talk").pinned_s == 0


def test_a_tenant_keeps_no_more_idle_pages_than_its_quota() -> None:
    kv = Cache(16, host=16, kv_quota=0.25)
    for number in range(3):
        kv.ask(prompt(number, 2), tenant="greedy")
    kv.ask(prompt(50, 3), tenant="modest")
    idle = [kv.cache.index.node_of(page).owner for page in kv.cache.pool.eviction_order()]
    assert sorted(idle) == ["greedy"] * 4 + ["modest"] * 3
    assert [place.tier for [place, *_] in kv.pages(prompt(0, 2), "greedy")] == [Tier.HOST] * 2
    assert kv.ask(prompt(0, 2), tenant="greedy") == 2 * BLOCK - 1
    check(kv.cache)


def test_a_quota_is_the_owners_whoever_asked_last() -> None:
    kv = Cache(16, host=16, kv_quota=0.25)
    first = kv.cache.admit(prompt(1, 6), owner="x")
    assert isinstance(first, Admission)
    kv.cache.commit(first.table, prompt(1, 6), 6 * BLOCK)
    second = kv.cache.admit(prompt(1, 6), owner="y")
    assert isinstance(second, Admission)
    kv.cache.release(first.table)
    kv.cache.release(second.table)
    assert kv.cache.busy
    kv.settle()
    assert kv.cache.pool.num_cached == 4 and not kv.cache.busy


# ── save and restore ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_saved_is_found_by_another_cache() -> None:
    kv = Cache(12, host=4, disk=12)
    kv.ask(prompt(1, 3), tenant="x")
    kv.ask(prompt(1, 1) + prompt(2, 2), tenant="x")
    kv.ask(prompt(1, 3), tenant="y")
    kv.cache.tiers.save()
    kv.settle()
    assert kv.cache.tiers.num_saving == 0 and kv.cache.tiers.num_unsaved == 0 and len(kv.labels) == 8
    again = Cache(12, host=4, disk=12)
    assert again.cache.restore(sorted(kv.labels.items())) == 8
    check(again.cache)
    assert again.ask(prompt(1, 3), tenant="x") == 11
    assert again.ask(prompt(1, 1) + prompt(2, 2), tenant="x") == 11
    assert again.ask(prompt(1, 3), tenant="y") == 11
    assert again.ask(prompt(1, 3), tenant="z") == 0


def test_records_that_say_what_is_not_so_are_left_out() -> None:
    kv = Cache(12, disk=12)
    kv.ask(prompt(1, 3))
    kv.cache.tiers.save()
    kv.settle()
    labels = sorted(kv.labels.items())
    record, label = labels[1]
    for bad in (
        label._replace(tokens=(9,) * BLOCK),
        label._replace(digest=b"0" * 32),
        label._replace(parent=b"1" * 32),
        _labelled(label.parent, (1, 1)),
        _labelled(label.parent, (1,) * 2 * BLOCK),
    ):
        again = Cache(12, disk=12)
        again.cache.restore([*labels[:1], (record, bad), *labels[2:], (11, labels[0][1]), (99, label)])
        check(again.cache)
        assert again.ask(prompt(1, 1) + array("i", [1, 1])) == BLOCK
        assert again.ask(prompt(1, 3)) == BLOCK


def _labelled(parent: bytes, tokens: tuple[int, ...]) -> PageLabel:
    return PageLabel(hashlib.sha256(parent + array("i", tokens).tobytes()).digest(), parent, tokens)


def test_pages_found_again_count_for_the_quota_of_who_asks_for_them() -> None:
    kv = Cache(12, disk=12)
    kv.ask(prompt(1, 6), tenant="x")
    kv.cache.tiers.save()
    kv.settle()
    again = Cache(16, disk=12, kv_quota=0.25)
    again.cache.restore(sorted(kv.labels.items()))
    assert again.ask(prompt(1, 6), tenant="x") == 6 * BLOCK - 1
    assert again.cache.pool.num_cached == 4
    assert {again.cache.index.node_of(page).owner for page in again.cache.index.pages()} == {"x"}


def test_a_save_larger_than_the_disk_says_what_is_missing() -> None:
    kv = Cache(12, disk=4)
    for number in range(4):
        kv.ask(prompt(number, 3))
    kv.cache.tiers.save()
    assert kv.cache.tiers.num_unsaved > 0
    kv.settle()
    assert kv.cache.tiers.num_saving == 0


@pytest.mark.parametrize("ok", [True, False])
def test_a_save_waits_for_copies_that_were_begun_before(ok: bool) -> None:
    cache = CacheManager(4, BLOCK, num_disk_pages=40)
    admission = cache.admit(prompt(1, 3), ("",))
    assert isinstance(admission, Admission)
    cache.commit(admission.table, prompt(1, 3), 3 * BLOCK)
    cache.release(admission.table)
    cache.take_page_ops()
    assert len(cache.tiers.moves) == 3  # ahead of need
    cache.tiers.save()
    assert cache.take_page_ops() == []
    for left in (2, 1, 0):
        assert cache.tiers.num_saving == left + 1
        cache.ended([Moved(min(cache.tiers.moves), ok)])
        assert cache.tiers.num_saving == left
    assert cache.tiers.num_unsaved == (0 if ok else 3)


def test_a_head_is_on_disk_before_its_tail() -> None:
    """So that a process that is killed at any moment leaves only what can be found."""
    kv = Cache(4, host=2, disk=40)
    for number in range(6):
        kv.ask(prompt(7, 1) + prompt(number, 2))
    written: set[bytes] = {kv.cache.index.root(("",)).digest or b""}
    for op in kv.ops:
        if isinstance(op, MovePage) and op.label is not None:
            assert op.label.parent in written
            written.add(op.label.digest)


def test_waits_end_when_the_copy_has() -> None:
    kv = Cache(4, host=8)
    kv.ask(prompt(1, 3))
    kv.ask(prompt(2, 4))
    first = kv.cache.admit(prompt(1, 3) + prompt(5, 1), ("",))
    assert isinstance(first, Admission) and first.table.load is not None
    second = kv.cache.admit(prompt(1, 3), ("",))
    assert isinstance(second, Wait) and not second.over
    kv.settle()
    assert second.over
    assert not any(isinstance(op, CopyPage) for op in kv.ops)
