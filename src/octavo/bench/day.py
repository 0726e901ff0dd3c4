"""A working day in minutes: what time to first token does while idle conversations fill memory.

Owns the clock, the three configurations and the report. The load is `octavo.bench.conversations`; the engine is used as
the server uses it, in a process of its own. Every configuration is sent the same turns at the same times:

    none    nothing is found again: each turn computes its whole conversation
    prefix  what the pool still holds is found
    tiers   what leaves the pool goes to host memory, and sessions are named

A turn comes when its time has come and the one before it is answered; its time to first token counts from then. Answers
are greedy and part of the conversation; that all configurations give the same ones is checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from octavo.bench.conversations import Day, Turn, draw_day
from octavo.bench.figures import spread
from octavo.bench.workloads import random_tokens
from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.process import EngineStats
from octavo.engine.sizing import GIB
from octavo.errors import ConfigError
from octavo.types import Request, SamplingParams

ABOUT = {
    "none": "nothing is found again",
    "prefix": "what the pool still holds is found",
    "tiers": "what leaves the pool goes to host memory",
}
SHORTEST, LONGEST = 128, 512
"""Tokens that a conversation may have at most, as pool and context allow."""
OVERCOMMIT = 10
"""How often what all conversations hold in the end is to fill the pool."""

Tell = Callable[[str, int, int], None]
"""Hears what is being played, how many of its turns are answered, and of how many."""


class Wish(NamedTuple):
    """The day that is asked for. `utilisation`: the share of the capacity that arrivals take."""

    hours: int
    minutes: float
    sessions: int | None
    scale: float
    utilisation: float


class Plan(NamedTuple):
    """What the turns and the engines follow from. `capacity`: turns a second that are served without any reuse."""

    wish: Wish
    seed: int
    vocab: int
    longest: int
    capacity: float
    kv_cache_memory_bytes: int = 0
    swap_space: float = 0.0

    @property
    def hour_s(self) -> float:
        return 60 * self.wish.minutes / self.wish.hours

    def draw(self) -> Day:
        per_hour = round(self.wish.utilisation * self.capacity * self.hour_s)
        return draw_day(
            hours=self.wish.hours,
            per_hour=max(per_hour, 2),
            hour_s=self.hour_s,
            sessions=self.wish.sessions,
            scale=self.wish.scale,
            longest=self.longest,
            vocab=self.vocab,
            seed=self.seed,
        )


def plan(path: Path, config: EngineConfig, wish: Wish, tell: Tell) -> Plan:
    """Measure the capacity; size the pool and host memory, where that is not given, by what will lie idle."""
    return asyncio.run(_plan(path, config, wish, tell))


async def _plan(path: Path, config: EngineConfig, wish: Wish, tell: Tell) -> Plan:
    async with _running(path, replace(configure(config, "none"), kv_cache_memory_bytes=None)) as llm:
        vocab, token_bytes = llm.model.vocab_size, llm.stats().token_bytes
        longest = min(LONGEST, llm.max_model_len, (config.kv_cache_memory_bytes or 1 << 50) // token_bytes // 2)
        if longest < SHORTEST:
            raise ConfigError("kv_cache_memory_bytes", f"must hold two conversations of {SHORTEST} tokens or more")
        probe = draw_day(
            hours=1,
            per_hour=60,
            hour_s=0,
            sessions=None,
            scale=wish.scale,
            longest=longest,
            vocab=vocab,
            seed=config.seed,
        )
        play = Play(llm, partial(tell, "capacity"))
        await play.run(probe.turns, 0)
        start = time.monotonic()
        await play.run(probe.turns, 1)
        capacity = len(play.served) / (time.monotonic() - start)
    found = Plan(wish, config.seed, vocab, longest, capacity)
    held = found.draw().held[-1] * token_bytes
    return found._replace(
        kv_cache_memory_bytes=config.kv_cache_memory_bytes or max(held // OVERCOMMIT, 2 * longest * token_bytes),
        swap_space=config.swap_space or round(1.5 * held / GIB + 0.005, 2),
    )


def configure(config: EngineConfig, name: str) -> EngineConfig:
    """The engine of a configuration."""
    if name == "tiers":
        return config
    return replace(config, enable_prefix_caching=name == "prefix", swap_space=0.0, kv_offload_dir=None)


def run(path: Path, config: EngineConfig, plan: Plan, name: str, tell: Tell) -> dict[str, Any]:
    """A configuration's figures. Times in seconds."""
    config = replace(config, kv_cache_memory_bytes=plan.kv_cache_memory_bytes, swap_space=plan.swap_space)
    return asyncio.run(_run(path, configure(config, name), plan, name, tell))


async def _run(path: Path, config: EngineConfig, plan: Plan, name: str, tell: Tell) -> dict[str, Any]:
    day = plan.draw()
    async with _running(path, config) as llm:
        play = Play(llm, partial(tell, name), named=name == "tiers")
        await play.fill(plan.longest, random.Random(plan.seed))
        await play.run(day.turns, 0)
        await play.run(day.turns, plan.wish.hours, plan.hour_s)
        stats = llm.stats()
        pool_tokens = stats.num_pages * stats.page_bytes // stats.token_bytes
    return {
        "hours": list(_by_hour(play, day, pool_tokens)),
        "pool_tokens": pool_tokens,
        "answers": play.digest(),
    }


@asynccontextmanager
async def _running(path: Path, config: EngineConfig) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.start(path, config)
    try:
        yield llm
    finally:
        await llm.close()


class Served(NamedTuple):
    """What became of a turn. `late_s`: how long it had to wait for the one before."""

    hour: int
    returning: bool
    first_s: float
    late_s: float
    prompt_tokens: int
    cached_tokens: int
    num_preemptions: int


class Play:
    """Conversations with an engine: what was said, and how soon it was answered."""

    def __init__(self, llm: AsyncLLM, tell: Callable[[int, int], None], *, named: bool = False) -> None:
        self.served: list[Served] = []
        self.pages: list[dict[str, Any]] = []
        self._llm = llm
        self._tell = tell
        self._named = named
        self._said: dict[int, list[int]] = {}
        self._num_requests = 0
        self._total = 0

    async def fill(self, length: int, chance: random.Random) -> None:
        """Fill the pool with what nobody comes back to, as it is on any day but an engine's first."""
        num_tokens = self._llm.stats().num_pages * self._llm.config.block_size
        for _ in range(num_tokens // length + 1):
            await self._ask(random_tokens(chance, self._llm.model.vocab_size, length - 1), 1, None)

    async def run(self, turns: list[Turn], hours: int, hour_s: float = 0.0) -> None:
        """Take the turns of hours 1 to `hours` at their times, and look at the pages after each; 0 is the warm-up."""
        turns = [turn for turn in turns if (turn.hour > 0) == (hours > 0)]
        self.served.clear()
        self._total = len(turns)
        latest: dict[int, asyncio.Task[float]] = {}
        start = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for turn in turns:
                    before = latest.get(turn.session)
                    latest[turn.session] = group.create_task(self._take(turn, start + turn.at, before))
                for hour in range(1, hours + 1):
                    await asyncio.sleep(max(start + hour * hour_s - time.monotonic(), 0))
                    self.pages.append(pages_of(self._llm.stats()))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _take(self, turn: Turn, due: float, before: asyncio.Task[float] | None) -> float:
        """Returns when the answer was whole."""
        await asyncio.sleep(max(due - time.monotonic(), 0))
        ready = due if before is None else max(due, await before)
        said = self._said.setdefault(turn.session, [])
        returning = bool(said)
        said += turn.message
        length = len(said)
        session = f"conversation {turn.session}" if self._named else None
        answer, first_at, cached, preemptions = await self._ask(said, turn.max_tokens, session)
        said += answer
        first_s = first_at - ready
        self.served.append(Served(turn.hour, returning, first_s, ready - due, length, cached, preemptions))
        self._tell(len(self.served), self._total)
        return time.monotonic()

    async def _ask(self, prompt: list[int], max_tokens: int, session: str | None) -> tuple[list[int], float, int, int]:
        self._num_requests += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(f"{self._num_requests}", list(prompt), params, session_id=session)
        stream = await self._llm.submit(request)
        answer: list[int] = []
        async for output in stream:
            answer += [token.token_id for token in output.new_tokens]
        assert stream.first_token_at is not None
        return answer, stream.first_token_at, output.num_cached_tokens, output.num_preemptions

    def digest(self) -> str:
        """Of everything that was said."""
        found = hashlib.sha256()
        for session in sorted(self._said):
            found.update(repr(self._said[session]).encode())
        return found.hexdigest()


def pages_of(stats: EngineStats) -> dict[str, dict[str, int]]:
    """Pages by tier, as far as there are any, and by what they are."""
    return {
        tier.name.lower(): {"in_use": pages.referenced, "cached": pages.cached, "free": pages.free}
        for tier, pages in stats.tiers.pages.items()
        if pages.total
    }


def _by_hour(play: Play, day: Day, pool_tokens: int) -> Iterator[dict[str, Any]]:
    hours: dict[int, list[Served]] = defaultdict(list)
    for turn in play.served:
        hours[turn.hour].append(turn)
    for hour, pages in enumerate(play.pages, 1):
        served = hours[hour]
        returning = [turn for turn in served if turn.returning]
        num_tokens = sum(turn.prompt_tokens for turn in served)
        yield {
            "hour": hour,
            "n": len(served),
            "ttft_s": spread([turn.first_s for turn in served]),
            "returning": {"n": len(returning), "ttft_s": spread([turn.first_s for turn in returning])},
            "prompt_tokens": num_tokens,
            "context_tokens": statistics.mean(turn.prompt_tokens for turn in returning) if returning else 0,
            "cached_tokens": sum(turn.cached_tokens for turn in served),
            "hit_rate": sum(turn.cached_tokens for turn in served) / num_tokens,
            "num_late": sum(turn.late_s > 0 for turn in served),
            "num_preemptions": sum(turn.num_preemptions for turn in served),
            "held_tokens": day.held[hour],
            "held_in_pools": day.held[hour] / pool_tokens,
            "pages": pages,
        }


# ── what is said of it ───────────────────────────────────────────────────────────────────────────────────────────


def report(configurations: dict[str, Any]) -> Iterator[str]:
    """A table for each configuration, and what the last hour is to the first."""
    for name, found in configurations.items():
        hours = found["hours"]
        yield f"{name}: {ABOUT[name]}; the pool has {found['pool_tokens']:,} tokens"
        yield "hour     n  first token: median      p99  hit rate  preempted  idle / pool  pages: in use, cached, free"
        for of in hours:
            first = of["ttft_s"] or {"median": math.nan, "p99": math.nan}
            pages = "; ".join(f"{tier} {', '.join(map(str, n.values()))}" for tier, n in of["pages"].items())
            yield (
                f"{of['hour']:>4} {of['n']:>5} {first['median']:>19.3f} s {first['p99']:>6.3f} s {of['hit_rate']:>8.0%}"
                f" {of['num_preemptions']:>10} {of['held_in_pools']:>12.1f}  {pages}"
            )
        if len(hours) > 1 and hours[0]["ttft_s"] and hours[-1]["ttft_s"]:
            median, p99 = (hours[-1]["ttft_s"][of] / hours[0]["ttft_s"][of] for of in ("median", "p99"))
            yield f"the last hour is {median:.2f} times the first by the median, {p99:.2f} times by the 99th percentile"
        yield ""
    if len(configurations) > 1:
        same = len({found["answers"] for found in configurations.values()}) == 1
        yield "All answers are the same in each configuration" if same else "THE ANSWERS DIFFER between configurations"


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def draw(configurations: dict[str, Any], path: Path) -> None:
    """A PNG: times to first token, hit rates, and what lies idle and where, by hour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (first, hits, idle) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for name in (name for name in ABOUT if name in configurations):
        hours = [of for of in configurations[name]["hours"] if of["ttft_s"]]
        x = [of["hour"] for of in hours]
        [line] = first.plot(x, [of["ttft_s"]["median"] for of in hours], "o-", label=f"{name}, median")
        first.plot(x, [of["ttft_s"]["p99"] for of in hours], "^--", color=line.get_color(), label=f"{name}, p99")
        hits.plot(x, [of["hit_rate"] for of in hours], "o-", label=name)
    idle.plot(x, [of["held_in_pools"] for of in hours], "o-", color="black", label="what conversations hold")
    for tier in hours[-1]["pages"]:
        kept = [sum(of["pages"][tier].values()) - of["pages"][tier]["free"] for of in hours]
        pool = sum(hours[-1]["pages"]["device"].values())
        idle.plot(x, [pages / pool for pages in kept], ".--", label=f"{name}: pages on the {tier} tier")
    first.set(ylabel="time to first token, s", yscale="log")
    hits.set(ylabel="share of prompts found", ylim=(-0.02, 1))
    idle.set(ylabel="times the pool", ylim=(0, None))
    for panel in (first, hits, idle):
        panel.set(xlabel="hour", xticks=range(1, len(hours) + 1))
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3 if panel is first else 2)
    figure.tight_layout()
    figure.savefig(path, dpi=100, format="png")
    pyplot.close(figure)
