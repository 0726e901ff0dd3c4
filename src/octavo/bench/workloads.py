"""The workloads that engines are compared on: random tokens of given lengths, the same for everyone.

Owns lengths and tokens; knows no engine. Prompts are token ids, so that no tokenizer decides a length.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

FIRST_TOKEN = 100
"""Lower ids are often control tokens, which some engines treat as text and some do not."""


class Work(NamedTuple):
    """One request: its prompt and how many tokens to answer, the end of text ignored."""

    prompt: list[int]
    max_tokens: int


class Workload(NamedTuple):
    """Requests in order of arrival, all queued at once. `at_once`: how many may run together, None as many as fit."""

    name: str
    about: str
    make: Callable[[int, int, random.Random], list[Work]]
    num_requests: int = 64
    at_once: int | None = None

    def draw(self, num_requests: int | None, vocab_size: int, seed: int) -> tuple[list[Work], list[Work]]:
        """(warm-up, work): a seed's requests, as many as usual if None, and up to four short ones to begin with."""
        count = num_requests or self.num_requests
        warm_up = self.make(min(4, count), vocab_size, random.Random(seed + 1_000_003))
        return [one._replace(max_tokens=4) for one in warm_up], self.make(count, vocab_size, random.Random(seed))

    def together(self, work: Sequence[Work]) -> Iterator[Sequence[Work]]:
        """The requests in parts that may run together."""
        return (work[at : at + (self.at_once or len(work))] for at in range(0, len(work), self.at_once or len(work)))


def rates(work: list[Work], seconds: float) -> dict[str, float]:
    """What every engine reports of a run, a prompt's tokens counted whether or not they were found in a cache."""
    num_in, num_out = sum(len(one.prompt) for one in work), sum(one.max_tokens for one in work)
    return {
        "num_requests": len(work),
        "prompt_tokens": num_in,
        "output_tokens": num_out,
        "seconds": seconds,
        "output_tokens_per_s": num_out / seconds,
        "total_tokens_per_s": (num_in + num_out) / seconds,
    }


def random_tokens(chance: random.Random, vocab_size: int, count: int) -> list[int]:
    """Any tokens but control tokens."""
    return [chance.randrange(FIRST_TOKEN, vocab_size) for _ in range(count)]


def log_normal(chance: random.Random, mean: float, low: int, high: int, sigma: float = 0.9) -> int:
    """A length; the mean is that before clipping."""
    mu = math.log(mean) - sigma**2 / 2
    return min(max(round(chance.lognormvariate(mu, sigma)), low), high)


def _mixed(num_requests: int, vocab_size: int, chance: random.Random) -> list[Work]:
    lengths = [(log_normal(chance, 161, 4, 1024), log_normal(chance, 180, 4, 512)) for _ in range(num_requests)]
    return [Work(random_tokens(chance, vocab_size, prompt), answer) for prompt, answer in lengths]


def fixed(prompt: int, answer: int, shared: int = 0) -> Callable[[int, int, random.Random], list[Work]]:
    """Prompts and answers of one length, after so many tokens that all prompts share."""

    def make(num_requests: int, vocab_size: int, chance: random.Random) -> list[Work]:
        common = random_tokens(chance, vocab_size, shared)
        return [Work(common + random_tokens(chance, vocab_size, prompt), answer) for _ in range(num_requests)]

    return make


WORKLOADS = {
    work.name: work
    for work in (
        Workload("mixed", "log-normal lengths, means 161 in and 180 out", _mixed),
        Workload("uniform", "128 in, 128 out", fixed(128, 128)),
        Workload("prefix", "512 shared and 32 own in, 64 out", fixed(32, 64, shared=512)),
        Workload("single", "mixed requests one at a time", _mixed, num_requests=8, at_once=1),
        Workload("long", "1,536 in, 64 out", fixed(1536, 64)),
    )
}
