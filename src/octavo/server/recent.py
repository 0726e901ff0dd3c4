"""Latencies of the last seconds: what a live view shows beside the histograms since the start that Prometheus reads."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

WINDOW_S = 10
BOUNDS = tuple(1e-5 * 1.1**step for step in range(200))
"""Upper bounds of the classes in which times are counted, in seconds: up to half an hour, in steps of a tenth."""


class Percentiles(NamedTuple):
    """Of `n` times, in seconds. They are off by 5 % at most."""

    p50: float
    p99: float
    n: int


class Recent:
    """Counts times by class and second, so that neither noting nor asking grows with how many there are."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, dict[int, int]]] = deque(maxlen=WINDOW_S + 1)

    def observe(self, value: float, now: float) -> None:
        """A time, known at `now` (time.monotonic())."""
        second, seconds = int(now), self._seconds
        if not seconds or seconds[-1][0] < second:
            seconds.append((second, {}))
        counts, number = seconds[-1][1], bisect_left(BOUNDS, value)
        counts[number] = counts.get(number, 0) + 1

    def percentiles(self, now: float | None = None, window_s: float = WINDOW_S) -> Percentiles | None:
        """Of the times noted in the last seconds; None if there were none."""
        since = (time.monotonic() if now is None else now) - window_s
        total: dict[int, int] = {}
        for second, counts in self._seconds:
            if second + 1 > since:
                for number, count in counts.items():
                    total[number] = total.get(number, 0) + count
        if not total:
            return None
        n, classes = sum(total.values()), sorted(total)
        return Percentiles(_at(total, classes, n * 0.5), _at(total, classes, n * 0.99), n)


def _at(total: dict[int, int], classes: list[int], rank: float) -> float:
    """The middle of the class that the time of this rank is in."""
    passed = 0
    for number in classes:
        passed += total[number]
        if passed >= rank:
            break
    return float(f"{BOUNDS[min(number, len(BOUNDS) - 1)] / 1.05:.3g}")
