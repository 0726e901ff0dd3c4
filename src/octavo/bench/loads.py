"""What `octavo bench serve` sends to servers, and when: conversations, most of a single turn.

Owns times, lengths and texts; knows no server. A load is drawn anew from a seed for each run, so that no run finds the
prompts of another in a cache, while all servers are asked the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from octavo.bench.conversations import draw_talks
from octavo.bench.workloads import FIRST_TOKEN, Work, Workload, random_tokens
from octavo.simulator.traces import Arrival, read, times_at

VOCAB_SIZE = 32_000
"""Where a server does not tell: no common vocabulary has fewer tokens."""
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education good new first last long great little own other old big "
    "high different small large next early young important few public bad same able red blue green black white"
)
WORDS = _TEXT.split()
"""Each is a token of its own, with the blank before it, in the vocabularies of common models."""


class Talk(NamedTuple):
    """Requests of which each continues the one before it and its answer. `at`: seconds from the start.

    A turn is sent so many seconds (`pauses`) after the answer before it. Tokens are those that are new in a turn.
    """

    at: float
    turns: list[Work]
    pauses: list[float]

    @classmethod
    def single(cls, work: Work, at: float = 0.0) -> Talk:
        return cls(at, [work], [0.0])


class Load(NamedTuple):
    """`draw(seed, vocab)` are a run's requests in order; `paced`: they come at times of their own."""

    name: str
    about: str
    draw: Callable[[int, int], list[Talk]]
    paced: bool = False
    at_once: int | None = None


def of_workload(workload: Workload, num_requests: int | None) -> Load:
    def draw(seed: int, vocab: int) -> list[Talk]:
        return [Talk.single(work) for work in workload.draw(num_requests, vocab, seed)[1]]

    return Load(workload.name, workload.about, draw, at_once=workload.at_once)


def of_trace(path: Path, kind: str | None, num_requests: int | None) -> Load:
    """A trace of octavo.simulator.traces, whose made-up runs become runs of random tokens."""

    def draw(seed: int, vocab: int) -> list[Talk]:
        arrivals = islice(read(path, kind), num_requests)
        return [Talk.single(Work(drawn(one, seed, vocab), one.num_output), one.at) for one in arrivals]

    return Load(path.name, "a trace's times and lengths", draw, paced=True)


def of_conversations(turns: int, num_requests: int, scale: float, think_s: float) -> Load:
    """As many conversations as have `num_requests` turns together, with the lengths of octavo.bench.conversations."""

    def draw(seed: int, vocab: int) -> list[Talk]:
        count = max(num_requests // turns, 1)
        return [Talk(0.0, *one) for one in draw_talks(count, turns, scale, think_s, vocab, seed)]

    return Load("conversations", f"{turns} turns each, pauses of about {think_s:g} s", draw)


def drawn(arrival: Arrival, seed: int, vocab: int) -> list[int]:
    """A prompt with a run of random tokens for each of the trace's, equal ones for equal ones."""
    tokens: list[int] = []
    prompt = arrival.prompt
    at = 0
    while at < len(prompt):
        end = at + 1
        while end < len(prompt) and prompt[end] == end - at:
            end += 1
        tokens += random_tokens(random.Random(f"{seed} {prompt[at]}"), vocab, end - at)
        at = end
    return tokens


def at_rate(talks: Iterable[Talk], rate: float, seed: int) -> list[Talk]:
    """The same conversations as independent people begin them: `rate` a second on average."""
    return [talk._replace(at=at) for talk, at in zip(talks, times_at(rate, seed), strict=False)]


def words(tokens: Sequence[int]) -> str:
    """A text of about as many tokens: a common word for each."""
    return "".join(f" {WORDS[(token - FIRST_TOKEN) % len(WORDS)]}" for token in tokens)
