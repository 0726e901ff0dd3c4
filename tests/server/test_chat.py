"""/v1/chat/completions, through the official client where it can say it; and the other small endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.serving import Served, error_of, serving, until

from octavo import LLM, SamplingParams, __version__

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# ── the official client ──


def test_the_client_drives_every_endpoint(client: openai.OpenAI, llm: LLM) -> None:
    assert [model.id for model in client.models.list()] == ["smol", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    [offline] = llm.chat(HI, SamplingParams(temperature=0, max_tokens=8))  # type: ignore[arg-type]
    chat = client.chat.completions.create(model="smol", messages=HI, temperature=0, max_completion_tokens=8)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == offline.outputs[0].text
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8
    assert chat.usage.prompt_tokens == len(offline.prompt_token_ids)
    pieces = client.chat.completions.create(
        model="smol",
        messages=HI,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(pieces)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == offline.outputs[0].text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage == chat.usage or (last.usage and last.usage.total_tokens == chat.usage.total_tokens)
    text = client.completions.create(model="smol", prompt="One, two,", max_tokens=3, temperature=0, logprobs=1)
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.tokens or ()) == 3
    streamed = client.completions.create(model="smol", prompt="One, two,", max_tokens=3, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


def test_the_async_client_too(served: Served, llm: LLM) -> None:
    words = ["red", "green", "blue", "one", "two", "three"]
    conversations = [[{"role": "user", "content": f"Say {word}."}] for word in words]
    offline = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=6))  # type: ignore[arg-type]

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(messages: Any, stream: bool) -> str:
                options: Any = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 6}
                if not stream:
                    chat = await client.chat.completions.create(**options)
                    return chat.choices[0].message.content or ""
                chunks = await client.chat.completions.create(**options, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            jobs = [ask(messages, i % 2 == 0) for i, messages in enumerate(conversations)]
            return await asyncio.gather(*jobs)

    assert asyncio.run(main()) == [output.outputs[0].text for output in offline]


def test_the_clients_errors_are_of_their_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="smol", messages=HI, temperature=-1)  # type: ignore[arg-type]
    assert wrong.value.param == "temperature"


# ── log-probabilities ──


@pytest.mark.parametrize("top", [None, 0, 2, 20])
def test_logprobs_have_openais_form(served: Served, top: int | None) -> None:
    body: dict[str, Any] = {"logprobs": True, "max_tokens": 4}
    if top is not None:
        body["top_logprobs"] = top
    reply = served.chat("hi", **body)
    content = reply["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == reply["choices"][0]["message"]["content"]
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == (top or 0)
        if top:
            assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
    streamed = []
    for event in served.events(PATH, messages=HI, **body):
        if event["choices"][0]["logprobs"]:
            streamed += event["choices"][0]["logprobs"]["content"]
    assert streamed == content


def test_logprobs_that_contradict_themselves(served: Served) -> None:
    assert served.refused(PATH, messages=HI, top_logprobs=2)["param"] == "top_logprobs"
    assert served.refused(PATH, messages=HI, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"
    assert served.refused(PATH, messages=HI, logprobs=3)["param"] == "logprobs"
    assert served.chat("hi", max_tokens=1)["choices"][0]["logprobs"] is None


# ── conversations ──


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        {},
        [[]],
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["text"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "tool_calls": 5}],
    ],
)
def test_conversations_that_are_none(served: Served, messages: Any) -> None:
    assert served.refused(PATH, messages=messages)["param"] == "messages"


def tokens(served: Served, **body: Any) -> str:
    """What the template makes of messages, as text."""
    reply = served.post("/tokenize", **body)
    assert reply.status_code == 200, reply.text
    text = served.post("/detokenize", tokens=reply.json()["tokens"]).json()["prompt"]
    assert isinstance(text, str)
    return text


def test_the_template_is_the_models(served: Served, llm: LLM) -> None:
    conversation = [*HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "<|im_end|>?"}]
    assert tokens(served, messages=conversation) == llm.tokenizer.render_chat(conversation)
    reply = served.post("/tokenize", messages=conversation).json()
    assert reply["tokens"] == llm.tokenizer.encode_chat(conversation)
    assert reply["count"] == len(reply["tokens"])
    assert served.chat(conversation, max_tokens=1)["usage"]["prompt_tokens"] == reply["count"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert tokens(served, messages=parts) == tokens(served, messages=HI)
    assert tokens(served, messages=HI, add_generation_prompt=False) == llm.tokenizer.render_chat(HI, False)


def test_a_developer_is_a_system(served: Served) -> None:
    developer, system = ([{"role": role, "content": "Be brief."}, *HI] for role in ("developer", "system"))
    assert tokens(served, messages=developer) == tokens(served, messages=system)
    assert "developer" not in tokens(served, messages=developer)


def test_a_final_message_is_continued(served: Served) -> None:
    begun = [*HI, {"role": "assistant", "content": "The colours are red, green and"}]
    assert tokens(served, messages=begun, continue_final_message=True).endswith(
        "assistant\nThe colours are red, green and"
    )
    text = served.chat(begun, continue_final_message=True, max_tokens=2)["choices"][0]["message"]["content"]
    assert text.startswith(" ")
    error = served.refused(PATH, messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "messages"


def test_what_is_continued_is_shown_with_echo(served: Served) -> None:
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "The colours are red, green and"}]}]
    body: dict[str, Any] = {"continue_final_message": True, "max_tokens": 3}
    text = served.chat(begun, **body)["choices"][0]["message"]["content"]
    assert (
        served.chat(begun, echo=True, **body)["choices"][0]["message"]["content"]
        == begun[-1]["content"][0]["text"] + text
    )  # type: ignore[index]
    events = served.events(PATH, messages=begun, echo=True, **body)
    assert events[0]["choices"][0]["delta"]["content"] == "The colours are red, green and"
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events).endswith(text)
    assert served.chat(HI, echo=True, max_tokens=3)["choices"] == served.chat(HI, max_tokens=3)["choices"]


def test_the_prompt_is_told_and_scored_as_vllm_does(served: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode_chat(HI)  # type: ignore[arg-type]
    reply = served.chat("hi", max_tokens=3, return_token_ids=True, prompt_logprobs=1)
    assert reply["prompt_token_ids"] == ids
    assert len(reply["prompt_logprobs"]) == len(ids)
    assert reply["prompt_logprobs"][0] is None
    for token, scores in zip(ids[1:], reply["prompt_logprobs"][1:], strict=True):
        assert scores[str(token)]["rank"] >= 1
    assert "prompt_logprobs" not in reply["choices"][0]
    first, *rest = served.events(PATH, messages=HI, max_tokens=3, return_token_ids=True)
    assert first["prompt_token_ids"] == ids
    assert [token for event in rest for token in event["choices"][0]["token_ids"]] == reply["choices"][0]["token_ids"]
    assert all("prompt_token_ids" not in event for event in rest)
    assert served.refused(PATH, messages=HI, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_beyond_the_context_is_refused_whole(served: Served, stream: bool) -> None:
    messages = [{"role": "user", "content": "Say yes."}, {"role": "user", "content": "filler " * 16_384}]
    error = served.refused(PATH, messages=messages, stream=stream)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "8192" in error["message"]
    assert "16" in error["message"]
    error = served.refused(PATH, messages=HI, max_completion_tokens=8192)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_completion_tokens")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", 1e9])
def test_max_tokens_that_make_no_sense(served: Served, field: str, value: Any) -> None:
    assert served.refused(PATH, messages=HI, **{field: value})["param"] == field


def test_choices_each_have_their_own_end(served: Served) -> None:
    body: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1.2, "max_tokens": 10}
    whole = served.chat("Name a colour.", **body)
    texts, reasons = [""] * 3, [[] for _ in range(3)]
    for event in served.events(PATH, messages=[{"role": "user", "content": "Name a colour."}], **body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    for choice, seen in zip(whole["choices"], reasons, strict=True):
        assert [reason for reason in seen if reason] == [choice["finish_reason"]]
        assert seen[-1] is not None


# ── another template ──

STRICT = """{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
[{{ message.role }}]{{ message.content }}{{ mood }}{% endfor %}"""


def test_a_template_of_ones_own(model_path: Path, tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(STRICT)
    options = ("--kv-cache-memory-bytes", "8MiB", "--chat-template", str(template))
    with serving(tmp_path / "log", model_path, *options) as server:
        assert tokens(server, messages=HI, chat_template_kwargs={"mood": "!"}).endswith("[user]hi!")
        assert server.chat("hi", max_tokens=1)["usage"]["completion_tokens"] == 1
        for messages, words in (
            ([*HI, *HI], "roles must alternate"),
            ([{"role": "system", "content": "x"}, *HI], "no system here"),
            ([{"role": "developer", "content": "x"}, *HI], "no system here"),
        ):
            error = server.refused(PATH, messages=messages)
            assert words in error["message"]
            assert error["param"] == "messages"
        server.settle()


# ── the small endpoints ──


def test_tokenize_and_detokenize(served: Served, llm: LLM) -> None:
    text = "안녕 🙂 def f(x):\n    return x"
    reply = served.post("/tokenize", prompt=text, model="smol", return_token_strs=True).json()
    ids = llm.tokenizer.encode(text)
    assert reply["tokens"] == ids
    assert (reply["count"], reply["max_model_len"]) == (len(ids), 8192)
    assert reply["token_strs"] == [llm.tokenizer.token_text(token) for token in ids]
    assert served.post("/detokenize", tokens=ids).json() == {"prompt": text}
    assert served.post("/tokenize", prompt="").json()["tokens"] == []
    assert served.refused("/detokenize", tokens=[49152])["param"] == "tokens"
    assert served.refused("/detokenize", tokens=[-1])["param"] == "tokens"
    assert served.refused("/tokenize")["param"] == "prompt"
    assert served.refused("/tokenize", prompt="a", messages=HI)["param"] == "prompt"
    for path in ("/tokenize", "/detokenize"):
        assert served.post(path, model="other", prompt="a", tokens=[1]).status_code == 404


def test_health_version_models_and_metrics(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.http.get("/version").json() == {"version": __version__}
    card = served.http.get("/v1/models/alias").json()
    assert (card["id"], card["max_model_len"]) == ("alias", 8192)
    assert error_of(served.http.get("/v1/models/none"))["code"] == "model_not_found"
    before = served.metric("generation_tokens_total")
    served.complete("a", max_tokens=3, ignore_eos=True)
    assert served.metric("generation_tokens_total") == before + 3
    assert served.metric("http_responses_total", code="200") > 0


def test_each_request_has_a_line_in_the_log(served: Served) -> None:
    secret = "zebra-giraffe-okapi"
    reply = served.chat(secret, max_tokens=2)
    line = served.line(reply["id"])
    assert line["path"] == PATH
    assert (line["status"], line["outcome"], line["stream"], line["model"]) == (200, "ok", False, "smol")
    assert line["completion_tokens"] == 2
    assert line["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert 0 < line["first_token_s"] <= line["total_s"]
    assert secret not in json.dumps(served.lines())

    def latest() -> dict[str, Any]:
        return [line for line in served.lines() if line["logger"] == "octavo.requests"][-1]

    for path, status in (("/tokenize", 200), ("/version", 200), ("/health", 200), ("/no/such/path" + "x" * 200, 404)):
        served.http.request("POST" if path == "/tokenize" else "GET", path, json={"prompt": secret})
        if path != "/health":  # probes are not in it while all is well
            shown = path if len(path) < 100 else path[:99] + "…"
            until(lambda shown=shown: latest()["path"] == shown)
            assert (latest()["status"], latest()["client"]) == (status, "127.0.0.1")
    assert not [line for line in served.lines() if line.get("path") == "/health"]
    assert secret not in json.dumps(served.lines())
