"""What a run against a server comes to: rates, latencies, failures, goodput, cost. Plain arithmetic on what was seen.

Names and meanings are those of vLLM's `bench serve`, in milliseconds:

    ttft   from sending a request to its first token
    itl    between two events with tokens
    tpot   (end - first token) / (tokens - 1) of a request
    e2el   from sending a request to its last event
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from octavo.errors import InvalidRequest

POINT = ("round", "request_rate", "max_concurrency")
"""What tells runs apart."""
LATENCIES = ("ttft", "tpot", "itl", "e2el")


class Outcome(NamedTuple):
    """What became of a request. Times in seconds from the start of the run; `times` are those of events with tokens.

    `failure` says how it failed, and the tokens of such a request count nowhere.
    """

    sent: float
    times: Sequence[float]
    end: float
    prompt_tokens: int
    output_tokens: int
    asked_tokens: int
    failure: str = ""
    detail: str = ""
    text: str = ""

    @property
    def latencies(self) -> dict[str, list[float]]:
        """In milliseconds, by their names."""
        first, gaps = self.times[0], [1e3 * (b - a) for a, b in pairwise(self.times)]
        more = self.output_tokens - 1
        return {
            "ttft": [1e3 * (first - self.sent)],
            "tpot": [1e3 * (self.end - first) / more] if more > 0 else [],
            "itl": gaps,
            "e2el": [1e3 * (self.end - self.sent)],
        }

    def meets(self, goals: Mapping[str, float]) -> bool:
        """Whether no latency is above its goal; of those between tokens, the longest counts."""
        found = self.latencies
        return all(max(found[name], default=0.0) <= most for name, most in goals.items())


class Price(NamedTuple):
    """What an hour of the server costs, and how many prompt tokens one of an answer is worth."""

    per_hour: float
    output_weight: float = 4.0

    def per_million(self, seconds: float, num_in: int, num_out: int) -> dict[str, float]:
        """Of all tokens alike, and of prompts' and answers' apart: both together give what the time cost."""
        cost = self.per_hour * seconds / 3600
        total, weighed = num_in + num_out, num_in + self.output_weight * num_out
        if not total:
            return {}
        of_input = 1e6 * cost / weighed
        return {
            "cost_per_million_tokens": 1e6 * cost / total,
            "cost_per_million_input_tokens": of_input,
            "cost_per_million_output_tokens": self.output_weight * of_input,
        }


def goals(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500` as people write it, in milliseconds. Raises InvalidRequest("goodput")."""
    found = {}
    for text in texts:
        name, _, most = text.partition(":")
        try:
            found[name] = float(most)
        except ValueError:
            found[name] = -1.0
        if name not in LATENCIES or not found[name] > 0:
            names = ", ".join(LATENCIES)
            raise InvalidRequest("goodput", f"must look like ttft:500, with milliseconds of {names}; got {text!r}")
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and high percentiles, between two values where they fall there; nothing of nothing."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"mean": statistics.fmean(values), "median": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def figures(
    outcomes: Sequence[Outcome], seconds: float, goals: Mapping[str, float], price: Price | None
) -> dict[str, Any]:
    """Of a run that took so long."""
    good = [one for one in outcomes if not one.failure]
    failures = Counter(one.failure for one in outcomes if one.failure)
    details = {one.failure: one.detail for one in reversed(outcomes) if one.failure}
    num_in, num_out = sum(one.prompt_tokens for one in good), sum(one.output_tokens for one in good)
    found: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "failures": {kind: {"count": count, "example": details[kind]} for kind, count in failures.most_common()},
        "short_answers": sum(one.output_tokens < one.asked_tokens for one in good),
        "duration": seconds,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_out / seconds,
        "total_token_throughput": (num_in + num_out) / seconds,
    }
    if goals:
        num_met = sum(one.meets(goals) for one in good)
        found |= {"request_goodput": num_met / seconds, "goodput_share": num_met / max(len(outcomes), 1)}
    if price is not None:
        found |= price.per_million(seconds, num_in, num_out)
    latencies = [one.latencies for one in good]
    for name in LATENCIES:
        values = [value for one in latencies for value in one[name]]
        found |= {f"{part}_{name}_ms": value for part, value in spread(values).items()}
    return found


def summary(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of a server's rounds with the least and the most, and ratios to another's, round by round."""
    names = [name for name in runs[0] if name not in POINT and all(type(one.get(name)) in (int, float) for one in runs)]
    rounds = {other["round"]: other for other in base}
    pairs = [(one, rounds[one["round"]]) for one in runs if one["round"] in rounds]
    compared = [name for name in names if pairs and all(other.get(name) for _, other in pairs)]
    return {
        "figures": {name: _range([one[name] for one in runs]) for name in names},
        "ratios": {name: _range([one[name] / other[name] for one, other in pairs]) for name in compared},
    }


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
