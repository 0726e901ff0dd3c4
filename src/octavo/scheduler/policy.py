"""Choices that are a matter of policy, each a pure function."""

from __future__ import annotations

from collections import abc

from octavo.scheduler.sequence import Sequence


def victim(running: abc.Iterable[Sequence]) -> Sequence:
    """Who gives its pages up: the last in order of (priority, arrival, choice).

    The first in that order is never preempted, so it finishes, so everyone does.
    """
    return max(running, key=lambda seq: seq.key)


def fair_shares(wanted: abc.Sequence[int], budget: int) -> list[int]:
    """Divide a token budget: whoever gets less than they want gets no less than anyone else (remainders apart).

    A short prompt is thus served whole beside a long one, and the long one still advances every step.
    """
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for done, place in enumerate(order):
        shares[place] = min(wanted[place], -(-budget // (len(order) - done)))
        budget -= shares[place]
    return shares
