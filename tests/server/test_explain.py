"""Why a request took as long as it did, over HTTP: each cause made on purpose, and what others may know of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.models import tiny
from tests.server.serving import Served, serving, until
from tests.server.test_sessions import CHATS, COMPLETIONS, PAGE_BYTES, do, key, refusal, say, tokens
from tests.server.watcher import look
from tests.surprise import SHORT

PAGES = 24


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two keys and an administrator's, and 24 pages with nothing below them."""
    shape, folder = tiny.config("llama"), tmp_path_factory.mktemp("tight")
    model = tiny.write_folder(folder / "tiny", shape, tiny.tensors(shape))
    keys = ("--api-key", "alpha", "--api-key", "beta", "--admin-api-key", "boss")
    with serving(folder / "log", model, "--kv-cache-memory-bytes", str(PAGES * PAGE_BYTES), *keys) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_runs(tight: Served) -> Iterator[None]:
    yield
    tight.settle()


def why(served: Served, request_id: str, by: str = "alpha") -> Any:
    return look(served, f"/v1/requests/{request_id}/explain", by)


def reasons(told: Any) -> list[tuple[list[int], str]]:
    return [(missed["tokens"], missed["reason"]) for missed in told["missed"]]


def test_a_first_request_and_one_like_it(tight: Served) -> None:
    first = why(tight, say(tight, "s", tokens(40, 1), "alpha", max_tokens=3)["id"])
    assert first["id"].endswith("-0")
    assert (first["session"], first["prompt_tokens"], first["num_pages"], first["generated_tokens"]) == ("s", 40, 3, 3)
    assert first["finished"] == "length"
    assert "phase" not in first
    assert first["cached"] == {"tokens": 0, "by_tier": {"device": 0, "host": 0, "disk": 0}, "copied": 0}
    assert reasons(first) == [([0, 40], "new")]
    assert first["preemptions"] == []
    times = first["times_s"]
    assert set(times) == {"queued", "copying", "prefilling", "decoding", "total"}
    assert min(times.values()) >= 0
    assert times["prefilling"] > 0
    assert sum(times.values()) - times["total"] == pytest.approx(times["total"], rel=0.5, abs=0.05)

    again = why(tight, say(tight, "s", [*tokens(36, 1), *tokens(8, 2)], "alpha")["id"])
    assert again["cached"]["by_tier"]["device"] == 32
    assert reasons(again) == [([32, 44], "tail")]
    assert "a page of 16 tokens" in again["missed"][0]["text"]
    same = why(tight, say(tight, None, tokens(32, 1), "alpha")["id"])
    assert (same["session"], same["cached"]["tokens"], reasons(same)) == (None, 31, [([31, 32], "last_token")])
    part = why(tight, say(tight, None, [*tokens(24, 1), *tokens(24, 3)], "alpha")["id"])
    assert part["cached"] == {"tokens": 24, "by_tier": {"device": 16, "host": 0, "disk": 0}, "copied": 8}
    assert reasons(part) == [([24, 48], "new")]
    assert "48 prompt tokens 24 were found" in part["text"]
    assert "Tokens 24 to 47 were computed" in part["text"]


def test_evicted_for_whom_is_told_to_those_who_may_know(tight: Served) -> None:
    """Two large prompts push a page path out, one of the same key's, one of another's."""
    for by, told in (("alpha", None), ("beta", "another tenant's")):
        say(tight, None, tokens(80, 10), "alpha")
        taker = say(tight, None, tokens((PAGES - 1) * 16, 11 + len(by)), by)["id"]
        mine = say(tight, None, tokens(80, 10), "alpha")["id"]
        seen = why(tight, mine)
        [missed] = [at for at in seen["missed"] if at["reason"] == "evicted"]
        assert missed["evicted"]["by"] == (told or f"{taker}-0")
        assert 0 < missed["evicted"]["ago_s"] < 60
        assert missed["text"].startswith("they were cached, and made room for")
        assert (taker in str(seen)) == (by == "alpha")
        [known] = [at for at in why(tight, mine, "boss")["missed"] if at["reason"] == "evicted"]
        assert known["evicted"]["by"] == f"{taker}-0"


def test_released_by_oneself(tight: Served) -> None:
    say(tight, "goes", tokens(33, 20), "alpha")
    do(tight, "goes", "release", "alpha")
    [missed, _] = why(tight, say(tight, None, tokens(34, 20), "alpha")["id"])["missed"]
    assert (missed["reason"], missed["evicted"]["by"]) == ("evicted", "yours")
    assert "released" in missed["text"]


def test_another_salt_is_told_and_another_key_only_to_the_administrator(tight: Served) -> None:
    say(tight, None, tokens(40, 30), "alpha", cache_salt="one")
    salted = why(tight, say(tight, None, tokens(40, 30), "alpha", cache_salt="two")["id"])
    assert reasons(salted) == [([0, 32], "other_identity"), ([32, 40], "tail")]
    assert "cache_salt" in salted["missed"][0]["text"]

    theirs = say(tight, None, tokens(40, 30), "beta")["id"]
    to_beta, to_boss = (why(tight, theirs, by) for by in ("beta", "boss"))
    fresh = why(tight, say(tight, None, tokens(40, 31), "beta")["id"], "beta")
    assert reasons(to_beta) == reasons(fresh) == [([0, 40], "new")]
    assert to_beta["missed"] == fresh["missed"]
    assert reasons(to_boss) == [([0, 32], "other_identity"), ([32, 40], "tail")]
    assert "--share-prefixes" in to_boss["missed"][0]["text"]


def test_scored_prompts_are_computed_whole(tight: Served) -> None:
    say(tight, None, tokens(40, 40), "alpha")
    seen = why(tight, say(tight, None, tokens(40, 40), "alpha", prompt_logprobs=1)["id"])
    assert reasons(seen) == [([0, 40], "prompt_logprobs")]


def test_preempted_and_resumed_with_what_it_cost(tight: Served) -> None:
    """Two keys' requests that do not fit together; the later one gives way and comes back."""

    def together(attempt: int) -> tuple[list[str], Any]:
        """Their ids and what is told of the second, which is sent when the first has its first token."""
        body = {"prompt": tokens(60, 70 + attempt), "max_tokens": 320, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", tight.url + COMPLETIONS, json=body, headers=key("alpha"), timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            second = say(tight, None, tokens(60, 170 + attempt), "beta", max_tokens=200)["id"]
            for _ in lines:
                pass
        return [reply.headers["x-request-id"], second], why(tight, second, "beta")

    for attempt in range(20):  # on a busy machine the first may be over before the second came
        say(tight, None, SHORT, "alpha")
        ids, told = together(attempt)
        if told["preemptions"]:
            break
    assert told["finished"] == "length"
    assert told["preemptions"]
    for at in told["preemptions"]:
        assert at["by"] in ("another tenant's", None)
        assert 0 < at["at_s"] < told["times_s"]["total"]
        assert 0 < at["cost_s"] < told["times_s"]["total"]
        assert at["lost_tokens"] > 0
    assert ids[0] not in str(told)
    assert "it gave its pages to" in told["text"]
    assert {at["by"] for at in why(tight, ids[1], "boss")["preemptions"]} <= {f"{ids[0]}-0", None}
    assert why(tight, ids[0])["preemptions"] == []


def test_a_request_that_runs_has_a_phase_and_one_that_was_left_an_end(tight: Served) -> None:
    body = {"prompt": tokens(30, 50), "max_tokens": 350, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", tight.url + COMPLETIONS, json=body, headers=key("alpha"), timeout=60) as reply:
        request_id = reply.headers["x-request-id"]
        lines = reply.iter_lines()  # whose end would close the connection
        next(lines)
        running = why(tight, request_id)
    assert (running.get("phase"), running.get("finished")) in (("decoding", None), (None, "length"))
    until(lambda: "finished" in why(tight, request_id))
    assert why(tight, request_id)["finished"] in ("abort", "length")


def test_by_which_ids_a_request_is_known(tight: Served) -> None:
    body = {"prompt": [[5] * 20, [6] * 20], "max_tokens": 1}
    both = tight.http.post(COMPLETIONS, json=body, headers=key("alpha"))
    assert both.headers["x-request-id"] == both.json()["id"]
    names = [why(tight, f"{both.json()['id']}{suffix}")["id"] for suffix in ("", "-0", "-1")]
    assert names == [f"{both.json()['id']}-{number}" for number in (0, 0, 1)]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    request_id = tight.http.post(CHATS, json=chat, headers=key("alpha")).json()["id"]
    assert [why(tight, request_id + suffix)["id"] for suffix in ("", "-0")] == [request_id] * 2


def test_what_is_not_known_is_as_if_it_were_anothers(tight: Served) -> None:
    mine = say(tight, None, tokens(8, 60), "alpha")["id"]
    other = refusal(tight.http.get(f"/v1/requests/{mine}/explain", headers=key("beta")), 404)
    unknown = refusal(tight.http.get("/v1/requests/cmpl-none/explain", headers=key("beta")), 404)
    assert other == unknown | {"message": unknown["message"].replace("cmpl-none", mine)}
    assert "X-Request-Id" in unknown["message"]
    for name in ("x" * 5000, "%00", "-0", "\u202e", "-", "0" * 50):
        refusal(tight.http.get(f"/v1/requests/{name}/explain", headers=key("boss")), 404)
    refused = tight.http.post(COMPLETIONS, json={"prompt": [5] * 9999}, headers=key("alpha"))
    request_id = refused.headers["x-request-id"]
    refusal(tight.http.get(f"/v1/requests/{request_id}/explain", headers=key("alpha")), 404)
