"""Runs a trace through the very EngineCore, Scheduler and CacheManager that serve, on a clock that jumps.

Owns the clock, the loop and the figures. What a step or a move takes is for a Cost to say, who runs for the scheduler.
Memory does not grow with the trace: requests are read as the queue has room for them, and latencies are only counted.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from octavo.cache.manager import CacheManager
from octavo.cache.tiers import Costs
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor
from octavo.engine.sizing import GIB
from octavo.errors import ConfigError, InvalidRequest
from octavo.scheduler.limits import Limits
from octavo.scheduler.scheduler import MAX_WAITS, Scheduler
from octavo.simulator.cost import Cost, Load, load_of, load_of_plan
from octavo.simulator.stride import Stride
from octavo.simulator.traces import VOCAB_SIZE, Arrival
from octavo.types import (
    CopyPage,
    Moved,
    MovePage,
    Output,
    PageOp,
    Request,
    Sampled,
    SamplingParams,
    Slice,
    SliceResult,
    StepPlan,
    StepResult,
    Tier,
)

NO_ANSWER = SliceResult(())
NOTHING = Load(0)


class Timed(Executor, Protocol):
    """An executor that says when it is: `now` is set before a plan, and afterwards it is when that ended."""

    now: float


class PricedExecutor:
    """Prices plans instead of carrying them out. One copy between tiers is made at a time, beside the steps.

    The token drawn at a position is the request's seed + the position. `aside` is computed besides the plan.
    """

    def __init__(self, cost: Cost) -> None:
        self.now = 0.0
        self.aside = NOTHING
        self._cost = cost
        self._moves: deque[tuple[float, Moved]] = deque()  # with their ends, in order
        self._ends: dict[int, float] = {}  # of the same, by their numbers

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.page_ops:
            self._begin(plan.page_ops)
        seconds = 0.0
        if plan.slices or self.aside.num_rows:
            load = load_of_plan(plan.slices)
            seconds = self._cost.step_s(load + self.aside if self.aside.num_rows else load)
        self.now += seconds
        if not self._moves:
            return StepResult([_answer(piece) for piece in plan.slices], (), seconds)
        if plan.wait:
            self.now = max(self.now, self._moves[0][0])
        ended = []
        while self._moves and self._moves[0][0] <= self.now:
            ended.append(moved := self._moves.popleft()[1])
            del self._ends[moved.number]
        return StepResult([_answer(piece) for piece in plan.slices], ended, seconds)

    def glide(self, load: Load) -> float:
        """Price a step without a plan; the time when it ends."""
        self.now += self._cost.step_s(load)
        return self.now

    def close(self) -> None:
        self._moves.clear()
        self._ends.clear()

    def _begin(self, page_ops: Sequence[PageOp]) -> None:
        for op in page_ops:
            if isinstance(op, MovePage):
                seconds = self._cost.move_s(max(op.source.tier, op.target.tier))
                end = max(self.now, self._moves[-1][0] if self._moves else 0.0) + seconds
                self._moves.append((end, Moved(op.number, True, seconds)))
                self._ends[op.number] = end
            elif not isinstance(op, CopyPage):  # a copy inside the pool is a small part of reading it
                self.now = max(self.now, self._ends.get(op.number, 0.0))


def _answer(piece: Slice) -> SliceResult:
    if not piece.draws:
        return NO_ANSWER
    return SliceResult([Sampled(draw.seed + len(draw.token_ids), 0.0, 0, ()) for draw in piece.draws])


# ── an engine of it ──────────────────────────────────────────────────────────────────────────────────────────────


class _Trusting(Limits):
    """No token is looked at: they are made up, within the vocabulary."""

    __slots__ = ()

    def check_ids(self, field: str, tokens: Collection[Any]) -> None:
        pass


def engine(config: EngineConfig, cost: Cost, *, audit: bool = False) -> EngineCore:
    """What `config` makes of a deployment with these costs, whose pages are its. Raises ConfigError.

    Unless `kv_cache_memory_bytes` says otherwise, pages get the memory that the weights leave. A contiguous `config` is
    one that `EngineConfig.for_model` gave.
    """
    page_bytes = cost.format.page_bytes
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = cost.memory_bytes - cost.weight_bytes
    num_pages = budget // page_bytes
    if num_pages < 1:
        raise ConfigError(
            "kv_cache_memory_bytes",
            f"one page takes {page_bytes:,} bytes and {max(budget, 0):,} are given: the weights take "
            f"{cost.weight_bytes:,} of {cost.memory_bytes:,}",
        )
    cache = CacheManager(
        num_pages,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_pages=int(config.swap_space * GIB) // page_bytes,
        num_disk_pages=int(config.kv_offload_space * GIB) // page_bytes if config.kv_offload_dir else 0,
        costs=_costs(config, cost),
        session_ttl=config.session_ttl,
        max_pinned_fraction=config.max_pinned_fraction,
        kv_quota=config.kv_quota,
    )
    longest = config.block_size if config.kv_layout == "contiguous" else num_pages * config.block_size + 1
    scheduler = Scheduler(config, cache, max_model_len=config.max_model_len or longest, vocab_size=VOCAB_SIZE)
    scheduler.limits = _Trusting(*scheduler.limits)
    return EngineCore(scheduler, PricedExecutor(cost), audit=audit)


def _costs(config: EngineConfig, cost: Cost, count: int = 32, far: int = 2048) -> Costs:
    """What an engine would measure at its start."""
    step_s, near_s, far_s = (cost.step_s(load_of([at])) for at in ((0, 1, 0), (0, count, 0), (far, count, 0)))
    tiers = {Tier.HOST: config.swap_space > 0, Tier.DISK: bool(config.kv_offload_dir)}
    load_s = {tier: cost.move_s(tier) for tier, wanted in tiers.items() if wanted}
    far_s = far_s if load_s else near_s
    return Costs.fitted(config.preemption_mode, step_s, count, near_s, far, far_s, load_s)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Histogram:
    """How often which times came: percentiles to half a percent, whatever their number."""

    _BUCKETS = 100.0  # to a factor of e
    __slots__ = ("_counts", "count", "largest", "total")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count, self.total, self.largest = 0, 0.0, 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[round(math.log(seconds if seconds > 1e-9 else 1e-9) * self._BUCKETS)] += count
        self.count += count
        self.total += seconds * count
        if seconds > self.largest:
            self.largest = seconds

    def percentile(self, percent: float) -> float:
        """The smallest time that so many are not above."""
        left = self.count * percent / 100
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return min(math.exp(bucket / self._BUCKETS), self.largest)
        return self.largest

    def spread(self) -> dict[str, float] | None:
        """Mean, percentiles and maximum; None of nothing."""
        if not self.count:
            return None
        spread = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)}
        return {"mean": self.total / self.count, **spread, "max": self.largest}


class Sample(NamedTuple):
    """What an engine holds at a time: sequences; pages of the pool; slots in held pages without tokens; pages below."""

    at: float
    running: int
    waiting: int
    pages_held: int
    pages_cached: int
    slots_empty: int
    host_pages: int
    disk_pages: int


class Timeline:
    """Samples at even distances, at most MAX_SAMPLES: when there are more, every second one goes."""

    MAX_SAMPLES = 512

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.next_at = 0.0
        self._distance = 0.01

    def take(self, core: EngineCore, now: float, stride: Stride | None) -> Sample:
        scheduler = core.scheduler
        pool, host, disk = core.cache.tier_pages().values()
        empty = scheduler.slots[1] if stride is None else stride.slots_empty
        waiting = scheduler.num_waiting
        sample = Sample(
            now, scheduler.num_running, waiting, pool.referenced, pool.cached, empty,
            host.total - host.free, disk.total - disk.free,
        )  # fmt: skip
        self.samples.append(sample)
        if len(self.samples) > self.MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._distance *= 2
        self.next_at = max(now, self.next_at) + self._distance
        return sample


class ChromeTrace:
    """Steps, requests and pages as chrome://tracing and Perfetto show them, written as they come."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._write = json.JSONEncoder(separators=(",", ":")).encode
        self._separator = "["

    def step(self, start: float, end: float, **about: float) -> None:
        self._event(name="step", ph="X", pid=0, tid=0, ts=1e6 * start, dur=1e6 * (end - start), args=about)

    def request(self, name: str, times: Sequence[float]) -> None:
        """When it came, was first scheduled, got its first token, its last."""
        for at, part in enumerate(("waiting", "prompt", "answer")):
            for ph, moment in zip("be", times[at : at + 2], strict=True):
                self._event(name=part, cat="request", ph=ph, id=name, pid=1, ts=1e6 * moment)

    def pages(self, sample: Sample) -> None:
        args = {"held": sample.pages_held, "cached": sample.pages_cached}
        self._event(name="pages", ph="C", pid=0, ts=1e6 * sample.at, args=args)
        args = {"running": sample.running, "waiting": sample.waiting}
        self._event(name="sequences", ph="C", pid=0, ts=1e6 * sample.at, args=args)

    def close(self) -> None:
        self._file.write("[]" if self._separator == "[" else "\n]\n")

    def _event(self, **event: Any) -> None:
        self._file.write(self._separator + "\n" + self._write(event))
        self._separator = ","


@contextmanager
def chrome_trace(path: Path | None) -> Iterator[ChromeTrace | None]:
    """A trace file, whole even if what it is of was cut short; None for no path."""
    if path is None:
        yield None
        return
    with path.open("w") as file:
        trace = ChromeTrace(file)
        try:
            yield trace
        finally:
            trace.close()


class _Open:
    """A request under way: when it came, was first scheduled, got its first and its latest token."""

    __slots__ = ("at", "first", "latest", "scheduled")

    def __init__(self, at: float) -> None:
        self.at = at
        self.scheduled = self.first = self.latest = -1.0


@dataclass(slots=True)
class Figures:
    """What is counted while a trace runs. Times in seconds; `most_running`: sequences that a step served at most."""

    num_arrived: int = 0
    num_finished: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    most_running: int = 0
    queue: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)
    timeline: Timeline = field(default_factory=Timeline)


@lru_cache(maxsize=1 << 12)
def _params(num_output: int, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, seed=seed, temperature=0.0, ignore_eos=True)


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Simulation:
    """A trace on its way through an engine. `run` it; after an interruption what has been counted is right as well.

    With `strides`, and if nothing forbids them, steps that need no scheduler are made without it.
    """

    def __init__(
        self,
        core: EngineCore,
        arrivals: Iterable[Arrival],
        chrome: ChromeTrace | None = None,
        *,
        strides: bool = True,
    ) -> None:
        self.core = core
        self.figures = Figures()
        self.now = 0.0
        self._executor: Timed = core.executor  # type: ignore[assignment]
        self._arrivals = iter(arrivals)
        self._next = next(self._arrivals, None)
        self._open: dict[str, _Open] = {}
        self._chrome = chrome
        self._wall_s = 0.0
        tiers = sum(pool.num_pages for pool in core.cache.tiers.pools[1:])
        priced = isinstance(core.executor, PricedExecutor)
        self._stride = Stride(core.scheduler) if strides and priced and not tiers else None
        # The scheduler looks no further into its queue in one step, so that later requests need not be in it.
        self._enough = min(core.scheduler.max_running + MAX_WAITS, 1 << 20)

    def run(self, shown: Callable[[Simulation], None] | None = None) -> None:
        """Serve everything; `shown` is called now and then."""
        began, collects = time.perf_counter(), gc.isenabled()
        gc.disable()  # a tree of a million pages is slow to search, and nothing here hangs on itself
        try:
            for turn in itertools.count(1):
                if not self.step():
                    break
                if shown is not None and turn % 64 == 0:
                    shown(self)
        finally:
            if collects:
                gc.enable()
            self._wall_s += time.perf_counter() - began

    def step(self) -> bool:
        """A step of the engine, a stride, or a jump to the next request; False when there is nothing left."""
        self._feed()
        if not self.core.has_work:
            if self._next is None:
                return False
            self.now = self._next.at
            return True
        start = self._executor.now = self.now
        if self._stride is None:
            outputs = self.core.step(now=start)
            self.now = self._executor.now
            self._scheduled(start)
            self._count(outputs, 0, start)
        elif self._stride.glides():
            self._glide(self._stride)
        else:
            self._step(self._stride, start)
        return True

    def _glide(self, stride: Stride) -> None:
        """Steps without the scheduler, until one needs it or a request comes."""
        executor = self._executor
        assert isinstance(executor, PricedExecutor)
        comes = self._next is not None and self.core.scheduler.num_waiting < self._enough
        until = self._next.at if self._next is not None and comes else math.inf
        while True:
            start, load = self.now, stride.load
            stride.glide(start)
            self.now = executor.glide(load)
            self._ended(start, load.num_rows, load.num_rows)
            if self.now >= until or not stride.glides():
                break

    def _step(self, stride: Stride, start: float) -> None:
        """A step with the scheduler, which sees those to whom something happens."""
        executor = self._executor
        assert isinstance(executor, PricedExecutor)
        called = stride.call_back()
        for sequence in called:
            self._open[sequence.group.request.request_id].latest = start
        executor.aside = stride.load
        before = self.core.scheduler.stats.computed_tokens
        outputs = self.core.step(now=start)
        self.now = executor.now
        stride.stepped(called, self.core.scheduler.stats.computed_tokens == before)
        self._scheduled(start)
        self._count(outputs, executor.aside.num_rows, start)

    def _feed(self) -> None:
        """Hand over the requests that have come, as many as it takes for the scheduler to see no difference."""
        scheduler = self.core.scheduler
        while (arrival := self._next) is not None and arrival.at <= self.now and scheduler.num_waiting < self._enough:
            self._next = next(self._arrivals, None)
            figures = self.figures
            figures.num_arrived += 1
            if self._stride is not None:
                self._stride.came()
            name = str(figures.num_arrived)
            try:
                self.core.add(Request(name, arrival.prompt, _params(arrival.num_output, arrival.seed)))
            except InvalidRequest:
                figures.num_refused += 1
            else:
                self._open[name] = _Open(arrival.at)
                figures.prompt_tokens += len(arrival.prompt)

    def _scheduled(self, start: float) -> None:
        for name in self.core.scheduler.newly_scheduled:
            one = self._open[name]
            one.scheduled = start
            self.figures.queue.add(start - one.at)

    def _count(self, outputs: list[Output], steady: int, start: float) -> None:
        """Take outputs in, and `steady` more from those who got a token in the step before as well."""
        figures, now, requests = self.figures, self.now, self._open
        num_tokens, before = steady + len(outputs), figures.num_finished
        for output in outputs:
            one = requests[output.request_id]
            if one.latest == start:
                steady += 1
            elif one.latest < 0:
                one.first = now
                figures.first_token.add(now - one.at)
            else:
                figures.inter_token.add(now - one.latest)
            one.latest = now
            if output.finish_reason is not None:
                del requests[output.request_id]
                figures.num_finished += 1
                figures.whole.add(now - one.at)
                if self._chrome is not None:
                    self._chrome.request(output.request_id, (one.at, one.scheduled, one.first, now))
        ran = self.core.scheduler.num_running + figures.num_finished - before
        figures.most_running = max(figures.most_running, ran)
        self._ended(start, num_tokens, steady)

    def _ended(self, start: float, num_tokens: int, steady: int) -> None:
        """A step ended in which so many tokens came, `steady` of them from those who got one in the step before."""
        figures, now = self.figures, self.now
        figures.output_tokens += num_tokens
        if steady:
            figures.inter_token.add(now - start, steady)
        if self._chrome is not None:
            self._chrome.step(start, now, tokens=num_tokens)
        if now >= figures.timeline.next_at:
            sample = figures.timeline.take(self.core, now, self._stride)
            if self._chrome is not None:
                self._chrome.pages(sample)

    def report(self) -> dict[str, Any]:
        """The figures so far. Times in seconds, rates a second, shares of one."""
        figures, now = self.figures, max(self.now, 1e-9)
        scheduler, cache = self.core.stats
        pages, samples = self.core.cache.pool.num_pages, figures.timeline.samples
        held = sum(at.pages_held for at in samples)
        moved = self.core.cache.tiers.stats.moved
        return {
            "requests": figures.num_arrived,
            "finished": figures.num_finished,
            "refused": figures.num_refused,
            "unfinished": len(self._open),
            "seconds": self.now,
            "wall_s": self._wall_s,
            "times_real_time": self.now / max(self._wall_s, 1e-9),
            "prompt_tokens": figures.prompt_tokens,
            "output_tokens": figures.output_tokens,
            "requests_per_s": figures.num_finished / now,
            "output_tokens_per_s": figures.output_tokens / now,
            "total_tokens_per_s": (figures.prompt_tokens + figures.output_tokens) / now,
            "computed_tokens": scheduler.computed_tokens,
            "num_steps": scheduler.num_steps,
            "queue_s": figures.queue.spread(),
            "first_token_s": figures.first_token.spread(),
            "inter_token_s": figures.inter_token.spread(),
            "request_s": figures.whole.spread(),
            "hit_rate": cache.hit_tokens / max(cache.queried_tokens, 1),
            "hit_tokens": cache.hit_tokens,
            "resumed_tokens": cache.resumed_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "pages_evicted": cache.pages_evicted,
            "pages_copied": cache.pages_copied,
            "moves": {f"{a.name.lower()} to {b.name.lower()}": count for (a, b), count in sorted(moved.items())},
            "num_pages": pages,
            "peak_pages": cache.peak_pages,
            "kv_use": held / max(len(samples), 1) / pages,
            "kv_waste": sum(at.slots_empty for at in samples) / max(held * self.core.cache.block_size, 1),
            "timeline": {name: [getattr(at, name) for at in samples] for name in Sample._fields},
        }
