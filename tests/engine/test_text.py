"""Stop strings and held-back text: what is shown in pieces is what is shown at once, whatever cuts the pieces."""

import numpy as np
import pytest

from octavo.engine.text import ChoiceText
from octavo.types import SamplingParams


class Pieces:
    """A detokeniser whose token i is the i-th piece; "½" stands for half a character, which only a flush shows."""

    def __init__(self, pieces):
        self.pieces, self.half = pieces, ""

    def push(self, token_ids):
        text = self.half + "".join(self.pieces[token] for token in token_ids)
        self.half = "½" if text.endswith("½") else ""
        return text.removesuffix("½")

    def flush(self):
        return "\N{REPLACEMENT CHARACTER}" if self.half else ""


def shown(pieces, reason="length", burst=1, **params):
    """(what each push shows, tokens taken, the stop that was found)."""
    text = ChoiceText(Pieces(pieces), SamplingParams(max_tokens=None, **params))
    said, taken = [], 0
    for start in range(0, len(pieces), burst):
        ids = range(start, min(len(pieces), start + burst))
        news = text.push(ids, reason if ids[-1] == len(pieces) - 1 else None)
        said.append(news.text)
        taken += news.num_tokens
        if news.stop is not None:
            return said, taken, news.stop
    return said, taken, None


def test_without_stops_everything_is_shown_at_once():
    assert shown(["Hel", "lo", " you"]) == (["Hel", "lo", " you"], 3, None)


def test_a_stop_across_tokens_never_shows_its_beginning():
    assert shown(["A", "BC", "D", "EF", "GH", "IJK"], stop="DEFGHIJ") == (["A", "BC", "", "", "", ""], 6, "DEFGHIJ")


def test_a_stop_inside_a_token_cuts_it():
    assert shown(["A", "BCDEF", "G"], stop="DE") == (["A", "BC"], 2, "DE")


def test_a_stop_at_the_very_start_leaves_nothing():
    assert shown(["AB", "C"], stop="A") == ([""], 1, "A")


def test_a_stop_that_is_not_completed_loses_no_text():
    assert shown(["C", "DE", "F", "Y", "Z"], stop="DEFX") == (["C", "", "", "DEFY", "Z"], 5, None)


def test_text_held_at_the_end_is_shown():
    assert shown(["AB", "CD"], stop="CDE") == (["AB", "CD"], 2, None)
    assert shown(["AB", "CD", "!"], reason="stop", stop="CDE") == (["AB", "", "CD"], 3, None)


def test_the_stop_that_is_complete_first_counts():
    assert shown(["abcde"], stop=["abcde", "cd"])[0:3:2] == (["ab"], "cd")
    assert shown(["ab", "cd"], stop=["d", "bcd", "cd"])[0:3:2] == (["a", ""], "bcd")


def test_stops_that_overlap_themselves():
    assert shown(list("aabaabaaab"), stop="aabaaab") == (["", "", "", "", "", "aab", "", "", "", ""], 10, "aabaaab")


def test_the_stop_may_stay():
    assert shown(["A", "BCDEF"], stop="DE", include_stop_str_in_output=True) == (["A", "BCDE"], 2, "DE")


def test_a_stop_token_has_no_text_unless_stops_are_included():
    assert shown(["A", "B", "<end>"], reason="stop") == (["A", "B", ""], 3, None)
    assert shown(["A", "B", "<end>"], reason="stop", include_stop_str_in_output=True) == (["A", "B", "<end>"], 3, None)


def test_half_a_character_is_shown_once_and_at_the_end():
    assert shown(["A", "½", "B"]) == (["A", "", "½B"], 3, None)
    assert shown(["A", "½"]) == (["A", "\N{REPLACEMENT CHARACTER}"], 2, None)
    assert shown(["A", "½", "<end>"], reason="stop") == (["A", "", "\N{REPLACEMENT CHARACTER}"], 3, None)


def test_a_stop_within_min_tokens_is_text():
    assert shown(["xy", "xy", "xy"], min_tokens=2, stop="xy") == (["xy", "xy", ""], 3, "xy")
    assert shown(["xx", "y", "x"], min_tokens=1, stop="xxy") == (["", ""], 2, "xxy")
    assert shown(["xx", "xx", "."], min_tokens=2, stop="xx") == (["x", "xx", "x."], 3, None)


def plain(text, stops):
    """The definition: of all stops, the one that ends first; of those, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@pytest.mark.parametrize("seed", range(200))
def test_pieces_do_not_matter(seed):
    noise = np.random.default_rng(seed)

    def word(low, high):
        return "".join(noise.choice(list("ab"), noise.integers(low, high)))

    pieces = [word(1, 5) for _ in range(12)]
    stops = [word(2, 8) for _ in range(noise.integers(1, 4))]
    text, stop = plain("".join(pieces), stops)
    for burst in (1, 2, 5, 12):
        said, taken, found = shown(pieces, burst=burst, stop=stops)
        assert ("".join(said), found) == (text, stop)
        if stop is not None:  # the tokens up to the one that completed the stop, and no more
            assert stop in "".join(pieces[:taken])
            assert plain("".join(pieces[: taken - 1]), stops)[1] is None
        so_far = ""
        for step, part in enumerate(said, 1):  # what is shown at any time could still be the whole of the answer
            so_far += part
            assert text.startswith(so_far)
            known = "".join(pieces[: step * burst])
            if found is None or step < len(said):
                held = known[len(so_far) :]
                assert step == len(said) or any(s.startswith(held) and s != held for s in stops) or not held
