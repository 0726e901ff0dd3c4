"""How long answers are going to be, by those that ended last, and what room sequences need until then.

Admission asks, as in past-future scheduling (Gong et al., 2025): a batch that will not fit is best not begun.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import NamedTuple

WINDOW = 128
"""So many answers are remembered."""
TYPICAL = 338
"""Tokens of an answer while none has ended: the mean of ShareGPT's (Kwon et al., 2023)."""
GOLDEN = 0.6180339887498949


class Forecast:
    """Lengths, in tokens, of the answers that ended last."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, bool]] = deque([(TYPICAL, False)], WINDOW)
        self._in_order = [(TYPICAL, False)]

    def ended(self, length: int, *, cut_off: bool) -> None:
        """An answer had so many tokens, and would have had more if it had not been cut off."""
        if length == 0:
            return
        if len(self._recent) == WINDOW:
            del self._in_order[bisect_left(self._in_order, self._recent[0])]
        known = (length, cut_off)
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
    """What is expected of a sequence: the step before which it ends, and the pages of its own that it holds then.

    Until then it takes `width` slots a step: more than one where it is to be continued in several ways.
    """

    ends: int
    seq_id: int
    pages: int
    width: int


class Outlook:
    """What is expected of all sequences that hold pages.

    It is kept by their ends, and a sequence that goes on as was expected changes nothing in it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._in_order: list[Ahead] = []

    def add(self, one: Ahead) -> None:
        insort(self._in_order, one)

    def remove(self, one: Ahead) -> None:
        del self._in_order[bisect_left(self._in_order, one)]

    @property
    def sequences(self) -> list[int]:
        """Their ids, in order."""
        return sorted(one.seq_id for one in self._in_order)

    def take_overdue(self, step: int) -> list[Ahead]:
        """Remove those that should have ended."""
        count = bisect_left(self._in_order, (step + 1,))
        late = self._in_order[:count]
        del self._in_order[:count]
        return late

    def needed(self, one: Ahead, room: int) -> tuple[int, int]:
        """The most pages that all have of their own at a time, if `one` joins; the step in which that passes `room`."""
        self.add(one)
        size, most, short = self._block_size, 0, 0
        pages = width = total = 0
        for ends, _, own, slots in reversed(self._in_order):  # at its end, those before it are over
            pages += own
            width += slots
            total += slots * ends
            needed = pages - (total - width * ends) // size
            if needed > most:
                most = needed
            if needed > room:
                short = ends - (needed - room) * size // width
        self.remove(one)
        return most, short
