"""A working day of conversations: when each turn comes, who takes it, and how many tokens it brings.

Owns the loads of `octavo bench day` and of `octavo bench serve --turns`; knows no engine. What published traces say,
and what is taken from them:

    Mooncake, conversation trace: 12,031 requests of one hour with the prompts' blocks of 512 tokens
    (Qin et al., arXiv:2407.00079). A request that begins with the blocks of an earlier one continues it; 3,830 do.
        gap between two turns      log-normal, median 123 s, sigma 0.97; 90 % are below 477 s
        first prompt               log-normal, median 4,961 tokens, sigma 1.26
        new tokens when returning  1,300 on average (sigma 2.6, too wide for some hundred samples: 1 is used)
        answer                     343 tokens on average
        system prompt              all share the first block, and 61 % no other
    Azure LLM inference trace 2023, conversations: 19,366 requests of one hour; answers are log-normal, sigma 0.86.
    TraceLab, 4,265 sessions of coding agents (University of Washington, 2026): a session has 9.2 requests on average.
    KVCache in the wild (Wang et al., arXiv:2506.02634) agrees on the gaps: 80 % of reuses come within ten minutes.

Lengths are divided by a scale, since one small machine stands for a cluster, and clipped. An hour lasts seconds, and
the engine is no faster for it: so gaps keep their shape, and their scale follows from how many conversations share the
returns of an hour.

Every hour has the same arrivals (one draw of a Poisson process), and messages and answers of the same lengths in the
same places; of these, one in 9.2 begins a conversation. So any hour costs the same when nothing is lost, but for who
returns. No conversation ends: every hour adds as many idle ones. Those that are open at the start have had a geometric
number of turns; with constant arrivals, returns that fall on all alike keep that distribution, and so the contexts'.
"""

from __future__ import annotations

import math
import random
from heapq import heapify, heappop, heappush
from statistics import NormalDist
from typing import NamedTuple

from octavo.bench.workloads import Work, random_tokens

GAP_SIGMA = 0.97
FIRST_MEDIAN, FIRST_SIGMA = 4961, 1.26
NEW_MEAN, NEW_SIGMA = 1300, 1.0
ANSWER_MEAN, ANSWER_SIGMA = 343, 0.86
REQUESTS_A_SESSION = 9.2
SYSTEM_TOKENS = 32
MOST = 1024
"""Of a message or an answer, in `draw_talks`."""
OPEN_HOURS = 0.5
"""How many hours' conversations are open at the start."""


class Turn(NamedTuple):
    """`message` is what the user adds to the conversation so far. `at`: seconds after the start of hour 1.

    Turns of hour 0 are the warm-up: each is the whole conversation up to then.
    """

    hour: int
    at: float
    session: int
    message: list[int]
    max_tokens: int


class Day(NamedTuple):
    """Turns in order. `held[h]`: tokens of all conversations after hour h, the warm-up being hour 0."""

    turns: list[Turn]
    held: list[int]
    num_sessions: int


def draw_day(
    *, hours: int, per_hour: int, hour_s: float, sessions: int | None, scale: float, longest: int, vocab: int, seed: int
) -> Day:
    """A seed's day. `longest`: tokens of a conversation; one that would pass that does not return.

    `sessions`: how many conversations there are in the end, None for as many as the traces' turns a session give.
    """
    chance = random.Random(seed)
    wanted = per_hour / REQUESTS_A_SESSION if sessions is None else sessions // (hours + OPEN_HOURS)
    num_new = min(max(round(wanted), 1), per_hour - 1)
    num_open = max(round(OPEN_HOURS * num_new) if sessions is None else sessions - hours * num_new, 1)

    times = sorted(chance.random() * hour_s for _ in range(per_hour))
    begins = [True] * num_new + [False] * (per_hour - num_new)
    chance.shuffle(begins)
    most = longest // 2
    first = _lengths(chance, num_new, math.log(FIRST_MEDIAN / scale), FIRST_SIGMA, most)
    new = _lengths(chance, per_hour - num_new, _mu(NEW_MEAN / scale, NEW_SIGMA), NEW_SIGMA, most // 4)
    answers = _lengths(chance, per_hour, _mu(ANSWER_MEAN / scale, ANSWER_SIGMA), ANSWER_SIGMA, most // 4)
    places = list(zip(times, begins, answers, strict=True))

    system = random_tokens(chance, vocab, SYSTEM_TOKENS)
    turns: list[Turn] = []
    held = [0]
    lengths: list[int] = []
    due: list[tuple[float, int]] = []  # who returns next, by a clock that runs as fast as arrivals make it
    clock = 0.0

    def say(hour: int, at: float, session: int, count: int, answer: int) -> None:
        message = random_tokens(chance, vocab, count)
        if session == len(lengths):
            message = system + message
            lengths.append(0)
        turns.append(Turn(hour, at, session, message, answer))
        lengths[session] += len(message) + answer
        heappush(due, (clock + chance.lognormvariate(0, GAP_SIGMA), session))

    ends = math.log(1 - num_new / per_hour)
    num_later = [int(math.log(1 - (i + 0.5) / num_open) / ends) for i in range(num_open)]
    chance.shuffle(num_later)
    a_turn = (NEW_MEAN + ANSWER_MEAN) / scale
    for count in num_later:
        so_far = min(round(chance.choice(first) + count * a_turn), longest - SYSTEM_TOKENS - most // 2)
        say(0, 0.0, len(lengths), so_far, round(ANSWER_MEAN / scale) or 1)
    held[0] = sum(lengths)
    for hour in range(1, hours + 1):
        beginning, adding = iter(first), iter(new)
        for at, is_new, answer in places:
            at += (hour - 1) * hour_s
            if is_new:
                say(hour, at, len(lengths), next(beginning), answer)
                continue
            count, full = next(adding), []
            while due and lengths[due[0][1]] + count + answer > longest:
                full.append(heappop(due))
            if due:
                clock, session = heappop(due)
                say(hour, at, session, count, answer)
            else:  # everything is full
                say(hour, at, len(lengths), count, answer)
            due += full
            heapify(due)
        held.append(sum(lengths))
    return Day(turns, held, len(lengths))


def draw_talks(
    count: int, turns: int, scale: float, think_s: float, vocab: int, seed: int
) -> list[tuple[list[Work], list[float]]]:
    """So many conversations of a number of turns: what is new in each, and the seconds before it.

    Lengths and the spread of the pauses are those above, `think_s` their mean; none before the first turn.
    """
    chance = random.Random(seed)
    system = random_tokens(chance, vocab, SYSTEM_TOKENS)
    first = _lengths(chance, count, math.log(FIRST_MEDIAN / scale), FIRST_SIGMA, MOST)
    new = iter(_lengths(chance, count * max(turns - 1, 1), _mu(NEW_MEAN / scale, NEW_SIGMA), NEW_SIGMA, MOST))
    answers = iter(_lengths(chance, count * turns, _mu(ANSWER_MEAN / scale, ANSWER_SIGMA), ANSWER_SIGMA, MOST))
    talks = []
    for length in first:
        beginning = system + random_tokens(chance, vocab, length)
        messages = [beginning, *(random_tokens(chance, vocab, next(new)) for _ in range(turns - 1))]
        pauses = [0.0, *(think_s * chance.lognormvariate(-(GAP_SIGMA**2) / 2, GAP_SIGMA) for _ in messages[1:])]
        talks.append(([Work(message, next(answers)) for message in messages], pauses))
    return talks


def _mu(mean: float, sigma: float) -> float:
    return math.log(mean) - sigma**2 / 2


def _lengths(chance: random.Random, count: int, mu: float, sigma: float, most: int) -> list[int]:
    """Equally likely quantiles of a log-normal distribution, clipped, in random order."""
    normal = NormalDist(mu, sigma)
    found = [min(max(round(math.exp(normal.inv_cdf((i + 0.5) / count))), 1), most) for i in range(count)]
    chance.shuffle(found)
    return found
