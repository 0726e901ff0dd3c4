"""The text of a choice as its tokens come: whole characters only, cut at stop strings, and nothing said too early.

Owns what is held back: half a character until the rest of it comes, and the beginning of what may become a stop string.
Knows no request and no engine; whoever sees a stop has to end the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from octavo.types import FinishReason, SamplingParams


class Detokenizer(Protocol):
    """Turns tokens into text that will not change any more."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str:
        """What is left of a character that was cut off."""


class TextNews(NamedTuple):
    """`text` may be shown. `num_tokens` of those pushed belong to the choice; fewer than all when `stop` was found."""

    text: str
    num_tokens: int
    stop: str | None


class StopString:
    """A string to be found in characters that come one by one (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = _borders(text)
        self.matched = 0  # how much of the string the characters so far end with, short of all

    def complete(self, char: str) -> bool:
        """Whether the next character completes the string."""
        matched = self._extend(self.matched, char)
        complete = matched == len(self.text)
        self.matched = self._borders[-1] if complete else matched
        return complete

    def _extend(self, matched: int, char: str) -> int:
        return _extended(self.text, self._borders, matched, char)


def _extended(text: str, borders: Sequence[int], matched: int, char: str) -> int:
    while matched and text[matched] != char:
        matched = borders[matched - 1]
    return matched + (text[matched] == char)


@lru_cache(maxsize=64)
def _borders(text: str) -> Sequence[int]:
    """[i]: the length of the longest proper prefix of text[: i + 1] that also ends it. All choices share one table."""
    borders = [0] * len(text)
    for i in range(1, len(text)):
        borders[i] = _extended(text, borders, borders[i - 1], text[i])
    return borders


class ChoiceText:
    """One choice's text.

    Of several stop strings the one that is complete first counts, the longest of those complete at once; so the text
    does not depend on how tokens cut it. One that is complete within the first `min_tokens` tokens is ordinary text.
    """

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stops = [StopString(text) for text in params.stop]
        self._held = ""
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> TextNews:
        """Take tokens in. With reason "stop" the last one is a stop token: no text, unless stops are included."""
        shown = ""
        for position, token in enumerate(token_ids, 1):
            self._num_tokens += 1
            silent = finish_reason == "stop" and position == len(token_ids) and not self._include_stop
            text, stop = self._search("" if silent else self._detokenizer.push((token,)))
            shown += text
            if stop is not None:
                return TextNews(shown, position, stop)
        if finish_reason is not None:
            text, stop = self._search(self._detokenizer.flush())
            return TextNews(shown + text + ("" if stop else self._held), len(token_ids), stop)
        return TextNews(shown, len(token_ids), None)

    def _search(self, text: str) -> tuple[str, str | None]:
        """(what may be shown of the text held and this one, the stop string that ends it)."""
        for end, char in enumerate(text if self._stops else "", 1):
            found = [stop.text for stop in self._stops if stop.complete(char)]
            if found and self._num_tokens > self._min_tokens:
                stop = max(found, key=len)
                seen = self._held + text[:end]
                return seen if self._include_stop else seen[: -len(stop)], stop
        seen = self._held + text
        shown = len(seen) - max((stop.matched for stop in self._stops), default=0)
        self._held = seen[shown:]
        return seen[:shown], None
