"""/v1/completions: what comes back, streamed and whole, and what is refused."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
from tests.server.serving import Served

from octavo import LLM, SamplingParams

PATH = "/v1/completions"
FRANCE = "The capital of France is"


def joined(events: list[Any]) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = defaultdict(str)
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return dict(texts)


def test_a_prompt_is_continued_as_offline(served: Served, llm: LLM) -> None:
    [output] = llm.generate(FRANCE, SamplingParams(temperature=0, max_tokens=16))
    reply = served.complete(FRANCE)
    [choice] = reply["choices"]
    assert choice == {
        "index": 0,
        "text": output.outputs[0].text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert reply["object"] == "text_completion"
    assert reply["model"] == "smol"
    assert reply["id"].startswith("cmpl-")
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 16, 21)


def test_prompts_come_as_texts_as_tokens_and_in_batches(served: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode(FRANCE)
    one = served.complete(FRANCE, max_tokens=4)["choices"][0]["text"]
    for prompt in (ids, [FRANCE], [ids]):
        [choice] = served.complete(prompt, max_tokens=4)["choices"]
        assert choice["text"] == one
    batch = [FRANCE, llm.tokenizer.encode("One, two,"), "Red, green,"]
    reply = served.complete(batch, max_tokens=4, n=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    alone = [served.complete(prompt, max_tokens=4)["choices"][0]["text"] for prompt in batch]
    assert [choice["text"] for choice in reply["choices"]] == [text for text in alone for _ in range(2)]
    assert joined(served.events(PATH, prompt=batch, max_tokens=4, n=2)) == {
        i: choice["text"] for i, choice in enumerate(reply["choices"])
    }
    assert reply["usage"]["prompt_tokens"] == sum(
        len(llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt) for prompt in batch
    )
    assert reply["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("stream", [False, True])
def test_seeded_choices_differ_and_repeat(served: Served, llm: LLM, stream: bool) -> None:
    """n choices are those of n requests with the seeds that follow; a page that is partly filled is not mixed up."""
    prompt = "Once upon a time there was a small dragon who lived under the old stone bridge and sang,"  # B + 3 tokens
    assert len(llm.tokenizer.encode(prompt)) % 16 == 3, len(llm.tokenizer.encode(prompt))
    body = {"prompt": prompt, "n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 12}

    def texts() -> dict[int, str]:
        if stream:
            return joined(served.events(PATH, **body))
        return {choice["index"]: choice["text"] for choice in served.complete(**body)["choices"]}

    first = texts()
    assert len(set(first.values())) == 4
    assert texts() == first
    alone = [served.complete(**body | {"n": 1, "seed": 7 + i})["choices"][0]["text"] for i in range(4)]
    assert [first[i] for i in range(4)] == alone
    greedy = served.complete(prompt, n=2, max_tokens=12)["choices"]
    assert greedy[0]["text"] == greedy[1]["text"] == served.complete(prompt, max_tokens=12)["choices"][0]["text"]


def test_best_of_returns_the_likeliest(served: Served) -> None:
    body: dict[str, Any] = {"prompt": FRANCE, "seed": 3, "temperature": 1.5, "max_tokens": 6}
    drawn = served.complete(**body, n=5, logprobs=0)["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in drawn]
    best = sorted(range(5), key=lambda i: -means[i])[:2]
    reply = served.complete(**body, n=2, best_of=5)
    assert [choice["text"] for choice in reply["choices"]] == [drawn[i]["text"] for i in best]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] == 30
    assert served.complete(**body, n=1, best_of=1)["choices"][0]["text"] == drawn[0]["text"]
    assert served.refused(PATH, prompt="a", n=3, best_of=2)["param"] == "best_of"
    assert served.refused(PATH, prompt="a", best_of=2, stream=True)["param"] == "best_of"


# ── usage ──


@pytest.mark.parametrize("n", [1, 2])
def test_usage_comes_once_and_only_when_asked_for(served: Served, n: int) -> None:
    body = {"prompt": ["One, two, three,", "The sky is"], "n": n, "max_tokens": 5}
    whole = served.complete(**body)["usage"]
    assert whole["completion_tokens"] == 5 * 2 * n
    *events, last = served.events(PATH, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in counts] == [whole[name] for name in counts]
    assert all(event["usage"] is None and event["choices"] for event in events)
    for options in (None, {"include_usage": False}):
        for event in served.events(PATH, **body, stream_options=options):
            assert event["choices"]
            assert event.get("usage") is None


def test_cached_tokens_are_reported(served: Served) -> None:
    prompt = list(range(1000, 1050))
    assert served.complete(prompt, max_tokens=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    again = served.complete(prompt, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 48 <= again <= 49
    salted = served.complete(prompt, max_tokens=2, cache_salt="pepper")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    salted = served.complete(prompt, max_tokens=2, cache_salt="pepper")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == again


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a_prompt_that_is_cached_whole_gives_the_same(served: Served, length: int) -> None:
    """The last token is always computed: a hit is at most P - 1 tokens, whatever P is to the page."""
    prompt = [2000 + length * 100 + i for i in range(length)]
    first = served.complete(prompt, max_tokens=8)
    for _ in range(2):
        again = served.complete(prompt, max_tokens=8)
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] <= length - 1
    assert length == 1 or again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


# ── why it ended ──


def ends(served: Served, **body: Any) -> tuple[str, Any, str, int]:
    """(finish_reason, stop_reason, text, completion tokens), which the stream's last event has too, and no other."""
    reply = served.complete(**body)
    [choice] = reply["choices"]
    events = served.events(PATH, **body, stream_options={"include_usage": True})
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == choice["finish_reason"]
    assert events[-2]["choices"][0]["stop_reason"] == choice["stop_reason"]
    assert joined(events)[0] == choice["text"]
    assert events[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"]
    return choice["finish_reason"], choice["stop_reason"], choice["text"], reply["usage"]["completion_tokens"]


def test_finish_reasons(served: Served, llm: LLM) -> None:
    assert ends(served, prompt=FRANCE, max_tokens=1) == ("length", None, " Paris", 1)
    assert ends(served, prompt=FRANCE, max_tokens=9, stop=".") == ("stop", ".", " Paris", 2)
    [paris] = llm.tokenizer.encode(" Paris")
    assert ends(served, prompt=FRANCE, max_tokens=9, stop_token_ids=[paris]) == ("stop", paris, "", 1)
    chat = llm.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    reason, stop, text, count = ends(served, prompt=chat, max_tokens=64)
    assert (reason, stop) == ("stop", None)
    assert "<|" not in text
    assert ends(served, prompt=chat, max_tokens=count) == ("stop", None, text, count)  # the end at the very limit
    assert ends(served, prompt=chat, max_tokens=count - 1)[:3] == ("length", None, text)
    assert ends(served, prompt=chat, max_tokens=count + 3, ignore_eos=True)[3] == count + 3
    assert ends(served, prompt=chat, max_tokens=count + 3, min_tokens=count + 3)[3] == count + 3


ALPHABET = "A B C D E F G H I J K L M N O P A B C D E F G H I J K L M N O P A B C D E F G H I J K L M N O P A B C"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([" F G H I"], " D E"),  # over several tokens
        (["F G"], " D E "),
        ([" D"], ""),  # at once
        ([" D E F", " E"], " D"),  # what is complete first
        ([" F G X"], " D E F G H I J K L M N O"),  # begins and does not end: nothing is lost
        (["O"], " D E F G H I J K L M N "),
    ],
)
def test_stop_strings(served: Served, stop: list[str], expected: str) -> None:
    reason, met, text, _ = ends(served, prompt=ALPHABET, max_tokens=12, stop=stop)
    assert text == expected
    assert (reason, met) == (("length", None) if "X" in stop[0] else ("stop", met))
    assert "X" in stop[0] or met in stop
    for event in served.events(PATH, prompt=ALPHABET, max_tokens=12, stop=stop):
        assert all(text not in event["choices"][0]["text"] for text in stop)


def test_the_stop_can_be_kept_and_an_empty_one_is_refused(served: Served) -> None:
    kept = served.complete(ALPHABET, stop=" F", include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == " D E F"
    for stop in ("", ["a", ""], [1], {}):
        assert served.refused(PATH, prompt="a", stop=stop)["param"] == "stop"


# ── max_tokens ──


@pytest.mark.parametrize("value", [-1, 1.5, "5", 1e9, 2**31 - 1, 2**63, True, [], 0])
def test_max_tokens_that_make_no_sense(served: Served, value: Any) -> None:
    error = served.refused(PATH, prompt=FRANCE, max_tokens=value)
    assert error["param"] == "max_tokens"


def test_without_a_limit_the_context_is_the_limit(served: Served, small: Served) -> None:
    reply = small.complete(list(range(100, 150)), max_tokens=None, ignore_eos=True)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 10 * 16 + 1
    error = served.refused(PATH, prompt=FRANCE, max_tokens=8192)
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]


# ── echo and log-probabilities ──


def test_echo_scores_the_prompt(served: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode(FRANCE)
    [output] = llm.generate(FRANCE, SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=1))
    reply = served.complete(FRANCE, echo=True, logprobs=1, max_tokens=3)
    [choice] = reply["choices"]
    text, scores = choice["text"], choice["logprobs"]
    assert text == FRANCE + output.outputs[0].text
    assert "".join(scores["tokens"]) == text
    offsets = scores["text_offset"]
    assert [text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)] == scores["tokens"]
    assert len(scores["tokens"]) == len(ids) + 3
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    all_ids = ids + output.outputs[0].token_ids
    expected = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    for token, logprob, wanted in zip(all_ids[1:], scores["token_logprobs"][1:], expected[1:], strict=True):
        assert wanted is not None
        assert logprob == wanted[token].logprob
    assert served.complete(FRANCE, echo=True, logprobs=1, max_tokens=3)["choices"] == reply["choices"]  # warm


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_join_to_the_whole(served: Served, echo: bool) -> None:
    body = {"prompt": ["안녕하세요 🙂", FRANCE], "echo": echo, "logprobs": 2, "max_tokens": 6, "n": 2}
    whole = served.complete(**body)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    collected: dict[int, dict[str, list[Any]]] = defaultdict(lambda: {name: [] for name in names})
    events = served.events(PATH, **body)
    for event in events:
        for choice in event["choices"]:
            for name in names:
                collected[choice["index"]][name] += choice["logprobs"][name]
    for choice in whole["choices"]:
        assert collected[choice["index"]] == choice["logprobs"]
        assert joined(events)[choice["index"]] == choice["text"]
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])


def test_the_chosen_token_is_always_reported(served: Served) -> None:
    reply = served.complete(FRANCE, temperature=2.0, seed=1, max_tokens=8, logprobs=0)
    scores = reply["choices"][0]["logprobs"]
    assert [list(top) for top in scores["top_logprobs"]] == [[token] for token in scores["tokens"]]
    reply = served.complete(FRANCE, max_tokens=2, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = reply["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert len(choice["prompt_token_ids"]) == 5


def test_max_tokens_0_with_echo_only_scores(served: Served) -> None:
    reply = served.complete(FRANCE, echo=True, max_tokens=0, logprobs=1)
    [choice] = reply["choices"]
    assert choice["text"] == FRANCE
    assert len(choice["logprobs"]["tokens"]) == 5
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    whole = served.complete(FRANCE, echo=True, max_tokens=1, logprobs=1)["choices"][0]["logprobs"]
    assert choice["logprobs"]["token_logprobs"] == whole["token_logprobs"][:5]
    [event] = served.events(PATH, prompt=FRANCE, echo=True, max_tokens=0, logprobs=1)
    assert event["choices"][0]["text"] == FRANCE
    assert event["choices"][0]["logprobs"] == choice["logprobs"]


def test_prompt_logprobs_have_vllms_form(served: Served) -> None:
    reply = served.complete(FRANCE, prompt_logprobs=1, max_tokens=1)
    scores = reply["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == 5
    for score in scores[1:]:
        for token, entry in score.items():
            assert int(token) >= 0
            assert math.isfinite(entry["logprob"])
            assert entry["rank"] >= 1
            assert entry["decoded_token"]


# ── sampling ──


def test_every_sampling_parameter_reaches_the_engine(served: Served, llm: LLM) -> None:
    [paris] = llm.tokenizer.encode(" Paris")
    cases: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 5, "top_k": 3},
        {"temperature": 0.9, "seed": 5, "top_p": 0.4},
        {"temperature": 1.4, "seed": 5, "min_p": 0.2},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"logit_bias": {str(paris): -100}},
        {"use_beam_search": True, "n": 3, "beam_width": 3},
    ]
    for case in cases:
        offline = {name: ({paris: -100.0} if name == "logit_bias" else value) for name, value in case.items()}
        [output] = llm.generate(FRANCE, SamplingParams(**{"temperature": 0, "max_tokens": 8, **offline}))
        reply = served.complete(FRANCE, max_tokens=8, **case)
        assert [choice["text"] for choice in reply["choices"]] == [choice.text for choice in output.outputs], case


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 1e9),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", -1),
        ("n", 100_000),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("stop_token_ids", [49152]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"49152": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [49152]),
        ("allowed_token_ids", [-1]),
        ("bad_words", ["x"]),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("beam_width", 65),
        ("suffix", "end"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("priority", 1),
        ("cache_salt", ""),
        ("model", 5),
    ],
)
def test_fields_out_of_range_are_named(served: Served, field: str, value: Any) -> None:
    assert served.refused(PATH, **{"prompt": FRANCE, field: value})["param"] == field


def test_only_allowed_tokens_are_drawn(served: Served, llm: LLM) -> None:
    [paris] = llm.tokenizer.encode(" Paris")
    allowed = [paris, *llm.tokenizer.encode(" or Rome")]
    reply = served.complete(
        FRANCE, allowed_token_ids=allowed, max_tokens=30, temperature=2, seed=1, return_token_ids=True
    )
    tokens = reply["choices"][0]["token_ids"]
    assert len(tokens) == 30  # the end is not allowed either
    assert {paris} < set(tokens) <= set(allowed)
    assert served.complete(FRANCE, allowed_token_ids=[paris], max_tokens=3)["choices"][0]["text"] == " Paris" * 3
    end = served.complete(
        FRANCE, allowed_token_ids=[paris, *llm.tokenizer.eos_token_ids], logit_bias={str(paris): -100}
    )
    assert (end["choices"][0]["finish_reason"], end["choices"][0]["text"]) == ("stop", "")
    assert served.refused(PATH, prompt="a", allowed_token_ids=[1], guided_regex="a")["param"] == "allowed_token_ids"


def test_a_prompt_is_cut_to_its_end(served: Served, small: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode(FRANCE)
    expected = served.complete(ids[-2:], echo=True, logprobs=0, max_tokens=4)
    for prompt in (FRANCE, ids):
        reply = served.complete(prompt, truncate_prompt_tokens=2, echo=True, logprobs=0, max_tokens=4)
        assert reply["choices"] == expected["choices"]
        assert reply["choices"][0]["text"].startswith(" France is")
        assert reply["usage"]["prompt_tokens"] == 2
    for most in (5, 99, -1):
        assert served.complete(FRANCE, truncate_prompt_tokens=most)["choices"] == served.complete(FRANCE)["choices"]
    reply = small.complete([7] * 300, truncate_prompt_tokens=-1, max_tokens=5, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == small.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert served.refused(PATH, prompt=FRANCE, truncate_prompt_tokens=0)["param"] == "prompt"


def test_a_vanishing_temperature_is_greedy(served: Served) -> None:
    assert served.complete(FRANCE, temperature=1e-9)["choices"] == served.complete(FRANCE)["choices"]


def test_null_means_the_default(served: Served) -> None:
    fields = ("n", "best_of", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "stream", "stream_options")
    fields += ("echo", "suffix", "logprobs", "presence_penalty", "frequency_penalty", "user", "ignore_eos")
    assert served.complete(FRANCE, **dict.fromkeys(fields))["choices"] == served.complete(FRANCE)["choices"]
    for nothing in ([], {}, ""):
        assert served.complete(FRANCE, suffix=nothing, bad_words=nothing, logits_processors=nothing, max_tokens=1)
    assert served.complete(FRANCE, unknown_field={"is": "ignored"})["choices"] == served.complete(FRANCE)["choices"]


# ── prompts ──


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["a", ""], [1, "a"], [[1], 2], None, 5, {"a": 1}, [None], [[[1]]]],
)
def test_prompts_that_are_none(served: Served, prompt: Any) -> None:
    assert served.refused(PATH, prompt=prompt)["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, 49152, 2**31, 2**63, 2**64, 1.5, True, None])
def test_tokens_out_of_range(served: Served, token: Any) -> None:
    assert served.refused(PATH, prompt=[token])["param"] == "prompt"
    assert served.refused(PATH, prompt=[[5, token]])["param"] == "prompt"


def test_the_last_token_of_the_vocabulary_is_one(served: Served) -> None:
    assert served.complete([49151], max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_beyond_the_context(served: Served, stream: bool) -> None:
    for prompt in ([5] * 8192, [5] * 16384, "word " * 20_000, ["a", [5] * 8192], "a" * 5_000_000):
        error = served.refused(PATH, prompt=prompt, stream=stream, max_tokens=1)
        assert error["code"] == "context_length_exceeded"
        assert "8192" in error["message"]
        assert error["message"].startswith("prompt")


def test_models_have_names(served: Served) -> None:
    for name in ("smol", "alias"):
        assert served.complete("a", model=name, max_tokens=1)["model"] == name
    reply = served.post(PATH, model="gpt-4", prompt="a")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert reply.json()["error"]["param"] == "model"
