"""Whether the prefix cache pays for some work on this machine: what it finds, what it costs, what is gained.

Two engines serve the same requests in turns, one with the cache and one without; every round has tokens of its own, so
that nothing is found but what a round's own requests share. What the cache costs where it finds nothing is far below
what a clock can tell of whole runs: it is timed apart, as the difference between two page managers doing the same
books, both in a pool so full that the cache has to evict for every page.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from octavo.bench.throughput import serve
from octavo.bench.workloads import Work, Workload
from octavo.cache.manager import Admission, CacheManager
from octavo.config import EngineConfig
from octavo.engine.llm import LLM, assemble
from octavo.models.weights import open_checkpoint

SPARE_PAGES = 64
"""Pages of the pool in which the books are timed, beyond those of the longest request."""
BOOKS = 5
"""How often they are timed; the least counts."""


class Books(NamedTuple):
    """Seconds of a page manager for some work: to admit prompts, which looks them up, and for all that comes after."""

    admit_s: float
    keep_s: float


class Turn(NamedTuple):
    """One engine's part of a round."""

    seconds: float
    queried_tokens: int
    hit_tokens: int


def measure(
    path: Path,
    config: EngineConfig,
    workloads: Sequence[Workload],
    num_requests: int | None = None,
    repeats: int = 7,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Figures for each workload; see `figures`."""
    checkpoint = open_checkpoint(path)
    found = []
    with ExitStack() as stack:
        engines = {
            enabled: stack.enter_context(
                LLM.from_engine(assemble(checkpoint, replace(config, enable_prefix_caching=enabled)))
            )
            for enabled in (True, False)
        }
        seed = config.seed
        for workload in workloads:
            warm_up, work = workload.draw(num_requests, checkpoint.config.vocab_size, seed)
            for llm in engines.values():
                turn(llm, workload, warm_up)
            rounds: list[tuple[Turn, Turn]] = []
            for number in range(repeats):
                seed += 1  # for ever: what a seed draws for one workload may begin what it draws for another
                _, own = workload.draw(num_requests, checkpoint.config.vocab_size, seed)
                turns = {}
                for enabled in (True, False) if number % 2 else (False, True):
                    progress(f"{workload.name}, round {number + 1} of {repeats}: {'with' if enabled else 'without'}")
                    turns[enabled] = turn(engines[enabled], workload, own)
                rounds.append((turns[True], turns[False]))
            progress(f"{workload.name}: the books")
            found.append(
                {"workload": workload.name, "about": workload.about, **figures(work, config.block_size, rounds)}
            )
    return found


def turn(llm: LLM, workload: Workload, work: Sequence[Work]) -> Turn:
    before = llm.stats()
    seconds = serve(llm, workload, work)
    after = llm.stats()
    return Turn(seconds, *(after[name] - before[name] for name in ("queried_tokens", "hit_tokens")))


def figures(work: Sequence[Work], block_size: int, rounds: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    """Of rounds with and without the cache.

    hit_percent: prompt tokens that were found. gain_percent: by how much less time a round takes with the cache, the
    median of the rounds, with the quartiles of their spread. lookup_ns, keep_ns: what the cache adds to the books for a
    token of a prompt, and for any token. cost_percent: all it adds, of the time that a round takes without it.
    """
    prompt_tokens = sum(len(one.prompt) for one in work)
    tokens = prompt_tokens + sum(one.max_tokens for one in work)
    timed = {enabled: [books(work, block_size, enabled=enabled) for _ in range(BOOKS)] for enabled in (True, False)}
    with_cache, without = (Books(*map(min, zip(*timed[enabled], strict=True))) for enabled in (True, False))
    lookup_s, keep_s = with_cache.admit_s - without.admit_s, with_cache.keep_s - without.keep_s
    gains = [100 * (1 - on.seconds / off.seconds) for on, off in rounds]
    low, median, high = statistics.quantiles(gains, n=4, method="inclusive") if len(gains) > 1 else gains * 3
    seconds = statistics.median(off.seconds for _, off in rounds)
    queried = sum(on.queried_tokens for on, _ in rounds)
    return {
        "num_requests": len(work),
        "num_rounds": len(rounds),
        "hit_percent": 100 * sum(on.hit_tokens for on, _ in rounds) / max(queried, 1),
        "seconds_without": seconds,
        "seconds_with": statistics.median(on.seconds for on, _ in rounds),
        "gain_percent": median,
        "gain_quartiles": [low, high],
        "lookup_ns": 1e9 * lookup_s / prompt_tokens,
        "keep_ns": 1e9 * keep_s / tokens,
        "token_us": 1e6 * seconds / tokens,
        "cost_percent": 100 * (lookup_s + keep_s) / seconds,
    }


def books(work: Sequence[Work], block_size: int, *, enabled: bool) -> Books:
    """What a page manager does for these requests, one after the other: admit, a page at a time, commit, release."""
    longest = max(len(one.prompt) + one.max_tokens for one in work)
    cache = CacheManager(-(-longest // block_size) + SPARE_PAGES, block_size, enable_prefix_caching=enabled)
    admit_s = keep_s = 0.0
    filling = [Work([-1 - i for i in range(cache.num_pages * block_size - 1)], 1)]  # tokens that nobody else has
    for one in [*filling, *work]:
        tokens, answer = array("i", one.prompt), range(one.max_tokens)
        start = time.perf_counter()
        admission = cache.admit(tokens)
        assert isinstance(admission, Admission)
        cache.found(len(tokens), admission.num_computed)
        admitted = time.perf_counter()
        table = admission.table
        cache.commit(table, tokens, len(tokens))
        for token in answer:
            tokens.append(token)
            cache.reserve(table, len(tokens) - 1, len(tokens))
            cache.commit(table, tokens, len(tokens))
        cache.release(table)
        if one is not filling[0]:
            admit_s += admitted - start
            keep_s += time.perf_counter() - admitted
    return Books(admit_s, keep_s)


def report(found: dict[str, Any]) -> Iterator[str]:
    """A workload's figures for a terminal."""
    low, high = found["gain_quartiles"]
    times = f"{found['num_requests']} requests, {found['num_rounds']} rounds in turns"
    yield f"{found['workload']}: {found['about']}; {times}"
    yield f"  found      {found['hit_percent']:.1f} % of the prompts' tokens"
    yield (
        f"  books      {found['lookup_ns']:.0f} ns more for a token looked up, {found['keep_ns']:.0f} ns for one kept; "
        f"a token takes {found['token_us']:,.0f} µs: {found['cost_percent']:.3f} %"
    )
    less = f"{found['gain_percent']:.1f} % less with it (half of the rounds {low:.1f} … {high:.1f} %)"
    yield f"  time       {found['seconds_without']:.2f} s a round without the cache, {less}"
    yield f"  {verdict(found)}"


def verdict(found: dict[str, Any]) -> str:
    low, high = found["gain_quartiles"]
    if low > 0 and found["hit_percent"]:
        return "The cache pays."
    if not found["hit_percent"]:
        return f"Nothing to find: the cache costs {found['cost_percent']:.3f} % here."
    if high < 0:
        return "The cache does not pay."
    return "What the cache gains is within the noise; more requests or rounds may tell."
