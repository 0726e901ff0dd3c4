"""The paper's figures of memory, again: how much of it holds tokens, how many sequences it serves, what sharing saves.

    python bench/paper_table.py
    python bench/paper_table.py --requests 2000 --spread 1.2 --json paper.json

Kwon and others (SOSP 2023) compare pages with three ways to reserve a contiguous piece for each sequence: of the
longest length (max), of the prompt and a power of two that holds the answer (pow2), and of exactly what it will need
(oracle); the pieces come from a buddy allocator. Here the engine's own scheduler serves all four with an executor that
computes nothing, from the paper's memory: 12 GiB for OPT-13B on a GPU of 40 GB, 15,728 tokens. All requests are queued
at once.

Lengths are made up. They are quantiles of log-normal distributions, clipped, that have the paper's means (ShareGPT 161
in and 338 out, Alpaca 19 and 58) to the token; their sigmas are SIGMAS times --spread. That of ShareGPT's answers
follows from the paper: 20.4 % of the memory held tokens and 13.3 % was for tokens to come.

Beams choose among random continuations: probabilities break a stick over and over, where each piece takes a uniform
share of what is left, so that the likeliest token has 0.62 on average.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from array import array
from collections.abc import Callable, Sequence
from itertools import dropwhile
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any, NamedTuple

from octavo.bench.compare import Gauge
from octavo.cache.manager import Admission, CacheManager, Wait
from octavo.cache.page_table import PageTable
from octavo.cache.sessions import Session
from octavo.cache.tiers import Costs
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.scheduler.scheduler import Scheduler
from octavo.simulator.traces import VOCAB_SIZE, own_token, tokens_of
from octavo.types import Draw, Request, Sampled, SamplingParams, SliceResult, StepPlan, StepResult

TOKEN_BYTES = 2 * 40 * 5120 * 2  # OPT-13B: 40 layers, 5,120 wide, 16 bits
NUM_SLOTS = (12 << 30) // TOKEN_BYTES
LONGEST = 2048
PAGE = 16
MEANS = {"sharegpt": (161, 338), "alpaca": (19, 58)}
SIGMAS = {"sharegpt": (1.0, 0.75), "alpaca": (0.5, 0.9)}
CLIP = (4, 1024)
WIDTHS = (2, 4, 6)
PAPER = {
    "sharegpt": {"max": (20.4, 7.00), "pow2": (26.8, 9.81), "oracle": (38.2, 13.62), "paged": (96.3, 30.42)},
    "alpaca": {"max": (None, 7.00), "pow2": (None, 43.24), "oracle": (None, 72.75), "paged": (None, 132.44)},
}
"""Per cent of the memory that hold tokens (figure 2); sequences at once (figure 13: 2 and 30 requests a second)."""
PAPER_SHARING = {"parallel": "6 to 10", "beam": "38 to 55"}  # per cent, figure 15: Alpaca, 2 to 6 sequences


class Length(NamedTuple):
    prompt: int
    answer: int


def lengths(name: str, count: int, spread: float = 1.0, seed: int = 1) -> list[Length]:
    """Prompts and answers in random order."""
    chance = random.Random(seed)
    columns = []
    for mean, sigma in zip(MEANS[name], SIGMAS[name], strict=True):
        column = quantiles(mean, sigma * spread, *CLIP, count)
        chance.shuffle(column)
        columns.append(column)
    return [Length(*one) for one in zip(*columns, strict=True)]


def quantiles(mean: float, sigma: float, low: int, high: int, count: int) -> list[int]:
    """So many equally likely lengths of a log-normal distribution, clipped to low…high, of which this is the mean."""
    normal = NormalDist(0, sigma)
    scores = [normal.inv_cdf((at + 0.5) / count) for at in range(count)]
    below, above = math.log(low), math.log(high)
    for _ in range(50):
        mu = (below + above) / 2
        found = [min(max(round(math.exp(mu + score)), low), high) for score in scores]
        below, above = (mu, above) if fmean(found) < mean else (below, mu)
    return found


# ── memory in pieces ─────────────────────────────────────────────────────────────────────────────────────────────


class Piece(NamedTuple):
    start: int
    size: int


class Buddy:
    """Memory in pieces of powers of two, split when they are too large and joined with their other half when free."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {1 << bit: set() for bit in range(num_slots.bit_length())}
        start = 0
        for size in sorted(self._free, reverse=True):
            if num_slots & size:
                self._free[size].add(start)
                start += size

    def take(self, count: int) -> Piece | None:
        """The first of the smallest pieces that hold so many; None if there is none."""
        wanted = 1 << (count - 1).bit_length()
        size = next((size for size in sorted(self._free) if size >= wanted and self._free[size]), 0)
        if not size:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        return Piece(start, size)

    def give(self, piece: Piece) -> None:
        start, size = piece
        while start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = start & ~size, 2 * size
        self._free[size].add(start)


POLICIES: dict[str, Callable[[Length], int]] = {
    "max": lambda length: LONGEST,
    "pow2": lambda length: min(length.prompt + (1 << (length.answer - 1).bit_length()), LONGEST),
    "oracle": lambda length: length.prompt + length.answer - 1,
}
"""Tokens that are reserved for a sequence."""
PAGED = {"paged": Costs(), "foreseen": Costs(token_s=1.0)}
"""Ways with pages: as many begin as fit, or no more than are expected to fit to their ends."""


class Reserving(CacheManager):
    """The cache of an engine whose sequences lie in one piece each: one page holds any, if there is a piece for it."""

    def __init__(self, wanted: Callable[[array[int]], int]) -> None:
        super().__init__(NUM_SLOTS, LONGEST, enable_prefix_caching=False)
        self._wanted = wanted
        self._buddy = Buddy(NUM_SLOTS)
        self._pieces: dict[PageTable, Piece] = {}

    def admit(self, tokens: array[int], *about: Any, **options: Any) -> Admission | Wait | None:
        piece = self._buddy.take(self._wanted(tokens))
        if piece is None:
            return None
        admission = super().admit(tokens, *about, **options)
        assert isinstance(admission, Admission)
        self._pieces[admission.table] = piece
        return admission

    def release(self, table: PageTable, session: Session | None = None) -> None:
        self._buddy.give(self._pieces.pop(table))
        super().release(table, session)


# ── an engine that computes nothing ──────────────────────────────────────────────────────────────────────────────


class Chance:
    """Draws random tokens, and for beams random continuations; notes what tables name and what lies in memory."""

    def __init__(self, cache: CacheManager, seed: int) -> None:
        self.named = self.held = 0
        self._cache = cache
        self._chance = random.Random(seed)

    def execute(self, plan: StepPlan) -> StepResult:
        self.named += sum(len(table.pages) for table in self._cache.tables)
        self.held += self._cache.pool.num_referenced
        return StepResult([SliceResult([self._sampled(draw) for draw in piece.draws]) for piece in plan.slices])

    def close(self) -> None:
        pass

    def _sampled(self, draw: Draw) -> Sampled:
        first = self._chance.randrange(1 << 30)
        if not draw.num_top:
            return Sampled(first, 0.0, 0, ())
        left, shares = 1.0, []
        for _ in range(draw.num_top):
            shares.append(left * self._chance.random())
            left -= shares[-1]
        top = [(first + rank, math.log(max(share, 1e-12))) for rank, share in enumerate(sorted(shares, reverse=True))]
        return Sampled(*top[0], 1, top)


def serve(work: Sequence[Length], cache: CacheManager, **params: Any) -> tuple[Gauge, Chance, int]:
    """Serve everything, and audit the pages at the end. Tells the number of preemptions too."""
    scheduler = Scheduler(EngineConfig(max_num_seqs=1024), cache, max_model_len=LONGEST, vocab_size=VOCAB_SIZE)
    chance = Chance(cache, 1)
    gauge = Gauge(chance, scheduler)
    core = EngineCore(scheduler, gauge)
    for number, one in enumerate(work):
        answer = SamplingParams(max_tokens=one.answer, seed=number, ignore_eos=True, **params)
        core.add(Request(str(number), tokens_of(number, one.prompt), answer))
    while core.has_work:
        core.step()
    core.close()
    return gauge, chance, scheduler.stats.num_preemptions


def utilisation(work: Sequence[Length], policy: str) -> dict[str, float]:
    """Means over the steps at which requests wait, from the first that holds as much as the median one."""
    if policy in PAGED:
        cache = CacheManager(NUM_SLOTS // PAGE, PAGE, enable_prefix_caching=False, costs=PAGED[policy])
    else:
        reserved = {own_token(number): POLICIES[policy](one) for number, one in enumerate(work)}
        cache = Reserving(lambda tokens: reserved[tokens[0]])
    gauge, _, num_preemptions = serve(work, cache)
    samples = [sample for sample in gauge.samples if sample.waiting]
    usual = median(sample.tokens for sample in samples)
    samples = list(dropwhile(lambda sample: sample.tokens < usual, samples))
    tokens = fmean(sample.tokens for sample in samples)
    found = {"percent": 100 * tokens / NUM_SLOTS, "at_once": fmean(sample.running for sample in samples)}
    found["num_preemptions"] = num_preemptions
    if policy in PAGED:
        found["percent_of_pages"] = 100 * tokens / (PAGE * fmean(sample.pages for sample in samples))
    return found


def saved(work: Sequence[Length], kind: str, width: int) -> float:
    """Per cent of the pages that its tables name which sharing spares."""
    params = {"n": width} if kind == "parallel" else {"use_beam_search": True, "beam_width": width}
    cache = CacheManager(NUM_SLOTS // PAGE, PAGE)
    _, chance, _ = serve(work, cache, **params)
    return 100 * (1 - chance.held / chance.named)


def table(num_requests: int, num_shared: int, spread: float, seed: int) -> dict[str, Any]:
    works = {name: lengths(name, num_requests, spread, seed) for name in MEANS}
    few = {name: lengths(name, num_shared, spread, seed) for name in MEANS}
    return {
        "memory": {name: {way: utilisation(work, way) for way in (*POLICIES, *PAGED)} for name, work in works.items()},
        "sharing": {
            name: {kind: {str(width): saved(work, kind, width) for width in WIDTHS} for kind in PAPER_SHARING}
            for name, work in few.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--shared", type=int, default=100, help="requests with which sharing is counted")
    parser.add_argument("--spread", type=float, default=1.0, help="of lengths: times the sigmas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    figures = table(asked.requests, asked.shared, asked.spread, asked.seed)
    if asked.json is not None:
        about = {name: value for name, value in vars(asked).items() if name != "json"}
        asked.json.write_text(json.dumps({"asked": about, "paper": PAPER, **figures}, indent=1) + "\n")
    for name, ways in figures["memory"].items():
        for way, found in ways.items():
            percent, at_once = PAPER[name].get(way, (None, None))
            told = f"{found['percent']:5.1f} % of the memory ({percent or '–'})"
            told += f", {found['at_once']:6.1f} at once ({at_once or '–'})"
            pages = f"; {found['percent_of_pages']:.1f} % of the pages held" if way in PAGED else ""
            print(f"{name:<9} {way:<8} {told}{pages}, {found['num_preemptions']} preemptions")
    for name, kinds in figures["sharing"].items():
        for kind, widths in kinds.items():
            told = ", ".join(f"{width}: {percent:.1f} %" for width, percent in widths.items())
            print(f"{name:<9} {kind:<9} {told}" + (f" ({PAPER_SHARING[kind]} %)" if name == "alpaca" else ""))


if __name__ == "__main__":
    main()
