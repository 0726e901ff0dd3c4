"""How long answers are going to be, by those that ended last, and what room sequences need until then.

Admission asks, as in past-future scheduling (Gong et al., 2025): a batch that will not fit is best not begun.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import abc, deque
from math import ceil
from typing import NamedTuple

WINDOW = 128
"""So many answers are remembered."""
TYPICAL = 338
"""Tokens of an answer while none has ended: the mean of ShareGPT's (Kwon et al., 2023)."""
GOLDEN = 0.6180339887498949
ROUNDING = 1e-6


class Forecast:
    """Lengths, in tokens, of the answers that ended last."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, bool]] = deque([(TYPICAL, False)], WINDOW)
        self._in_order = [(TYPICAL, False)]

    def ended(self, length: int, most: int) -> None:
        """An answer had so many tokens, and might have had `most`."""
        if len(self._recent) == WINDOW:
            del self._in_order[bisect_left(self._in_order, self._recent[0])]
        known = (length, length >= most)
        self._recent.append(known)
        insort(self._in_order, known)

    def to_come(self, number: int, generated: int, most: int) -> int:
        """Tokens that an answer of so many is yet to get, if it may have `most`.

        It is taken to be as long as one of those that got longer than it is. Which one, `number` decides, so that
        different ones are spread over them all. One that was cut off might have been as long as any that got longer
        still (Efron, 1967). Beyond all that is known an answer gets twice as long.
        """
        known = self._in_order
        first, chance = bisect_right(known, (generated, True)), number * GOLDEN % 1.0
        while first < len(known):
            place = (len(known) - first) * chance
            first, chance = first + int(place), place % 1.0
            length, cut_off = known[first]
            if not cut_off:
                return min(length, most) - generated
            first += 1
        return min(max(2 * generated, known[-1][0]), most) - generated


class Ahead(NamedTuple):
    """What lies ahead of a sequence: it takes pages, evenly over its steps, and then gives them and its own back."""

    steps: int
    taken: int
    owned: int


class Outlook(NamedTuple):
    """The most pages that will be needed beyond those held now; if that is too much, the steps until it is."""

    most: int
    steps: int


def outlook(sequences: abc.Iterable[Ahead], room: int) -> Outlook:
    """What sequences need while there is `room` for so many pages more."""
    in_order = sorted(sequences)
    rate, given_back, most, short = sum(taken / max(steps, 1) for steps, taken, _ in in_order), 0, 0, 0
    for steps, taken, owned in in_order:
        needed = ceil(rate * steps - given_back - ROUNDING)
        if most <= room < needed:
            short = int((room + given_back) / rate)
        most = max(most, needed)
        rate -= taken / max(steps, 1)
        given_back += owned
    return Outlook(most, short)
