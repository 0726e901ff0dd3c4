"""Why no more of a prompt was found: each reason, made on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.cache.explain import Explainer
from octavo.cache.look import Forest
from octavo.cache.tiers import Costs
from octavo.engine.core import EngineCore
from octavo.types import Found, Missed, Note, Place, Request, SamplingParams, Tier
from tests.heart.engines import executor_of, make_engine
from tests.heart.token_executor import TokenExecutor

SIZE = 4
ALPHA, BETA = ("key", "alpha"), ("key", "beta")
SWAP = Costs("swap")


def engine(num_pages: int = 64, **options: Any) -> EngineCore:
    made = make_engine(num_pages, **options)
    Explainer(made.cache)
    return made


def prompt(first: int, length: int) -> list[int]:
    """Tokens that no other `first` has in common."""
    return [first, *((first + 3 * i) % 50 for i in range(1, length))]


def serve(made: EngineCore, name: str, tokens: list[int], identity: tuple[str, ...] = ALPHA, **more: Any) -> list[Note]:
    """The notes of all steps until nothing is left to do."""
    tenant, session = more.pop("tenant", identity[1]), more.pop("session", None)
    params = SamplingParams(temperature=0, ignore_eos=True, **{"max_tokens": 1, **more})
    made.add(Request(name, tokens, params, identity, tenant=tenant, session_id=session))
    return rest(made)


def rest(made: EngineCore) -> list[Note]:
    notes: list[Note] = []
    while made.has_work:
        made.step(now=made.cache.tiers.now + 1)
        notes += made.scheduler.notes
    return notes


def found(notes: list[Note]) -> Found:
    [admitted] = [note.found for note in notes if note.what == "admitted"]
    assert admitted is not None
    return admitted


def test_new_and_then_found_whole_but_for_the_last_token() -> None:
    made = engine()
    assert found(serve(made, "a", prompt(1, 8))) == Found((0, 0, 0), 0, [Missed(0, 8, "new")])
    assert found(serve(made, "b", prompt(1, 8))) == Found((7, 0, 0), 0, [Missed(7, 8, "last_token")])


def test_a_tail_fills_no_page() -> None:
    made = engine()
    serve(made, "a", prompt(1, 10))
    assert found(serve(made, "b", prompt(1, 11))) == Found((8, 0, 0), 0, [Missed(8, 11, "tail")])
    assert found(serve(made, "c", [*prompt(1, 8), 40, 41])) == Found((8, 0, 0), 0, [Missed(8, 10, "tail")])
    assert found(serve(made, "d", prompt(2, 3))) == Found((0, 0, 0), 0, [Missed(0, 3, "tail")])


def test_a_part_of_a_page_is_copied() -> None:
    made = engine()
    serve(made, "a", prompt(1, 8))
    branch = [*prompt(1, 6), 48, 49]
    assert found(serve(made, "b", branch)) == Found((4, 0, 0), 2, [Missed(6, 8, "new")])
    # the page that was copied whole but for its last token
    assert found(serve(made, "c", prompt(1, 6))) == Found((4, 0, 0), 1, [Missed(5, 6, "last_token")])


@pytest.mark.parametrize(("tier", "tiers"), [(Tier.HOST, {"host_pages": 50}), (Tier.DISK, {"disk_pages": 50})])
def test_found_on_a_tier_below(tier: Tier, tiers: dict[str, int]) -> None:
    made = engine(8, costs=SWAP, **tiers)
    serve(made, "a", prompt(1, 14))
    made.cache.drop_cached()
    rest(made)
    notes = serve(made, "b", prompt(1, 14))
    expected = [0, 0, 0]
    expected[tier] = 12
    assert found(notes) == Found(tuple(expected), 0, [Missed(12, 14, "tail")])
    assert [note.what for note in notes] == ["admitted", "arrived"]


def test_not_worth_loading() -> None:
    made = engine(8, host_pages=50, costs=Costs("auto", 1.0, 0.0, {Tier.HOST: 0.5}))
    serve(made, "a", prompt(1, 14))
    made.cache.drop_cached()
    rest(made)
    made.cache.tiers.costs = Costs("auto", 0.001, 0.0, {Tier.HOST: 0.5})
    missed = [Missed(0, 12, "not_worth_loading"), Missed(12, 14, "tail")]
    assert found(serve(made, "b", prompt(1, 14))) == Found((0, 0, 0), 0, missed)


def test_a_copy_that_is_damaged_is_computed_again() -> None:
    made = engine(8, host_pages=50, costs=SWAP)
    serve(made, "a", prompt(1, 14))
    made.cache.drop_cached()
    rest(made)
    executor = executor_of(made)
    executor.fail_every, executor.num_moves = 3, 0  # the last of three
    first, second = [note.found for note in serve(made, "b", prompt(1, 14)) if note.what == "admitted"]
    assert first == Found((0, 12, 0), 0, [Missed(12, 14, "tail")])
    assert second is not None
    assert (second.by_tier, second.copied) == ((8, 0, 0), 0)
    lost, tail = second.missed
    assert lost[:4] == (8, 12, "load_failed", "lost")
    assert tail == Missed(12, 14, "tail")


def test_evicted_by_whom_and_when() -> None:
    made = engine(8)
    serve(made, "a", prompt(1, 16))
    began = made.cache.tiers.now
    serve(made, "b", prompt(2, 24), BETA)  # takes the tail, and the page before it
    notes = serve(made, "c", prompt(1, 18))
    assert found(notes).by_tier == (8, 0, 0)
    gone, tail = found(notes).missed
    assert gone[:6] == (8, 16, "evicted", "evicted", "b", "beta")
    assert gone.ago_s == made.cache.tiers.now - began - 1
    assert tail == Missed(16, 18, "tail")


def test_released_with_its_session() -> None:
    made = engine()
    serve(made, "a", prompt(1, 9), session="s")
    made.release_session("alpha", "s")
    [gone] = found(serve(made, "b", prompt(1, 8))).missed
    assert gone[:6] == (0, 8, "evicted", "released", "", "alpha")


def test_a_quota_takes_them() -> None:
    made = engine(10, kv_quota=0.1)
    serve(made, "a", prompt(1, 13))
    gone, _ = found(serve(made, "b", prompt(1, 14))).missed
    assert gone[:6] == (4, 12, "evicted", "quota", "", "alpha")


def test_what_is_forgotten_is_remembered_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cache.explain.MAX_FORGOTTEN", 2)
    made = engine()
    serve(made, "a", prompt(1, 16))
    made.cache.drop_cached()
    assert [at[:4] for at in found(serve(made, "b", prompt(1, 16))).missed] == [
        (0, 8, "evicted", "dropped"),
        (8, 16, "new", ""),
    ]


def test_under_another_salt_or_key() -> None:
    made = engine()
    serve(made, "a", prompt(1, 13))
    serve(made, "b", prompt(1, 9), BETA)
    salted = (*ALPHA, "salt", "x")
    own = Missed(0, 12, "other_identity", tenant="alpha")
    assert found(serve(made, "c", prompt(1, 14), salted)) == Found((0, 0, 0), 0, [own, Missed(12, 14, "tail")])
    theirs = found(serve(made, "d", prompt(1, 14), ("key", "gamma")))
    assert theirs.missed[0][:3] == (0, 12, "other_identity")
    assert theirs.missed[0].tenant in ("alpha", "beta")


def test_prompts_that_are_not_looked_up() -> None:
    made = engine()
    serve(made, "a", prompt(1, 8))
    assert found(serve(made, "b", prompt(1, 8), prompt_logprobs=0)).missed == [Missed(0, 8, "prompt_logprobs")]
    off = engine(enable_prefix_caching=False)
    assert found(serve(off, "a", prompt(1, 8))).missed == [Missed(0, 8, "caching_off")]


def test_preempted_by_whom_and_what_it_cost() -> None:
    made = engine(9)
    for name, length in (("a", 8), ("b", 9)):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=14)
        made.add(Request(name, prompt(length, length), params, ALPHA, tenant="alpha"))
    gave, back = (note for note in rest(made) if note.what in ("preempted", "resumed"))
    assert gave == Note("b", "preempted", 0, 17, by="a")
    # its last token was in no whole page: that one went first, and the page before it when the other had 21 tokens
    assert back == Note("b", "resumed", 0, 17 - 12)


class LosesLoads(TokenExecutor):
    """Whatever comes back is damaged."""

    def _end_move(self) -> None:
        self.fail_every = int(self._under_way[0][0].target.tier is Tier.DEVICE)
        super()._end_move()


def test_what_did_not_come_back_after_a_preemption_is_computed_again_and_explains_no_prompt() -> None:
    made = engine(9, host_pages=50, costs=SWAP, executor=LosesLoads)
    for name, length in (("a", 8), ("b", 9)):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=14)
        made.add(Request(name, prompt(length, length), params, ALPHA, tenant="alpha"))
    notes = [note for note in rest(made) if note.request_id == "b"]
    assert [note.what for note in notes] == ["admitted", "preempted", "resumed"]
    # all were to come back: the last page, which went first, did not
    assert made.cache.tiers.stats.moves_failed > 0
    assert (notes[1].num_tokens, notes[2].num_tokens) == (17, 17 - 12)
    assert made.cache.stats.resumed_tokens == 12


def test_who_needs_a_page_and_came_last_gives_way_to_nobody_in_particular() -> None:
    made = engine(9)
    for name in "ab":
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=14)
        made.add(Request(name, prompt(ord(name) % 40, 7), params, ALPHA, tenant="alpha"))
    gave, back = (note for note in rest(made) if note.what in ("preempted", "resumed"))
    assert (gave[:3], gave.by) == (("b", "preempted", 0), None)
    assert (back.request_id, back.what) == ("b", "resumed")


def test_nothing_is_noted_unless_it_is_wanted() -> None:
    made = make_engine()
    assert serve(made, "a", prompt(1, 8)) == []


def test_a_page_and_its_tokens_before_they_are_computed() -> None:
    made = engine(max_num_batched_tokens=4)
    tokens = prompt(1, 10)
    made.add(Request("a", tokens, SamplingParams(max_tokens=2), ALPHA, tenant="alpha"))
    made.step()
    pages = [made.look_at(Place(Tier.DEVICE, page)) for page in range(4)]
    assert [page.tokens for page in pages] == [tuple(tokens[:4]), tuple(tokens[4:8]), tuple(tokens[8:]), ()]
    assert [page.start for page in pages] == [0, 4, 8, None]
    assert [page.requests for page in pages] == [[("alpha", "a")]] * 3 + [[]]


# ── what is shared ──


def test_what_is_shared_is_a_tree_of_chains() -> None:
    made = engine()
    for number in range(3):
        serve(made, f"a{number}", prompt(1, 16) + prompt(20 + number, 8))  # of no session: two ways on are two users
    serve(made, "b", prompt(2, 16), BETA)
    forest = Forest(made.cache)
    [one] = forest.tree("alpha", 10).branches
    assert (one.parent, one.start, one.num_pages, one.tiers) == (None, 0, 4, (4, 0, 0))
    assert (one.num_sessions, one.num_requests, one.num_branches, one.num_saved) == (0, 0, 3, 4 * 2)
    assert one.tokens == tuple(prompt(1, 4))
    assert forest.tree("beta", 10) == ([], 0, 0)
    assert forest.tree(None, 10) == forest.tree("alpha", 10)


def test_where_most_is_saved_comes_first_and_below_it_what_goes_on_from_there() -> None:
    made = engine(200)
    small, large = prompt(1, 8), prompt(2, 24)
    for number in range(2):
        serve(made, f"s{number}", small + prompt(20 + number, 4), session=f"s{number}")
        serve(made, f"l{number}", large + prompt(30 + number, 8), session=f"l{number}")
        serve(made, f"m{number}", large + prompt(40, 8) + prompt(41 + number, 4), session=f"m{number}")
    serve(made, "end", large, session="end")  # of which the last token is computed again, in a page that is there
    tree = Forest(made.cache).tree(None, 10)
    assert [(at.start, at.num_tokens, at.num_sessions, at.num_saved) for at in tree.branches] == [
        (0, 24, 5, 6 * 4),
        (24, 8, 2, 2 * 1),
        (0, 8, 2, 2 * 1),
    ]
    top, below, other = tree.branches
    assert (top.parent, below.parent, other.parent) == (None, top.id, None)
    assert (top.num_branches, below.num_branches, other.num_branches) == (2, 2, 2)
    assert tree.num_saved == 28
    short = Forest(made.cache).tree(None, 1)
    assert (len(short.branches), short.num_left_out, short.num_saved) == (1, 2, 28)
    assert short.branches[0].num_branches == 3
