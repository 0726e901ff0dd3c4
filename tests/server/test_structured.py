"""Structured output and tool calls over HTTP, and what of a request's fields constrains its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.server.serving import Served, error_of, serving

from octavo import LLM
from octavo.errors import InvalidRequest
from octavo.server.structured import Constraint, constraint
from octavo.types import Guide, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
DATE = r"\d{4}-\d{2}-\d{2}"
GRAMMAR = 'root ::= "(" [a-c]{1,4} ")"'
QWEN = (
    '{% if tools %}<|im_start|>system\nCall functions by <tool_call>{"name": …, "arguments": …}</tool_call>\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


# ── from fields to one guide ──

JSON_SCHEMA = Guide("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("fields", "guide", "field"),
    [
        ({"response_format": {"type": "json_object"}}, Guide("json_object"), "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
         JSON_SCHEMA, "response_format.json_schema.schema"),
        ({"guided_json": SCHEMA}, JSON_SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, JSON_SCHEMA, "guided_json"),
        ({"guided_regex": DATE}, Guide("regex", DATE), "guided_regex"),
        ({"guided_choice": ["a", "ä"]}, Guide("choice", '["a", "ä"]'), "guided_choice"),
        ({"guided_grammar": GRAMMAR}, Guide("grammar", GRAMMAR), "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, JSON_SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, Guide("json_object"), "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": DATE, "json": None}}, Guide("regex", DATE), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, Guide("choice", '["a"]'), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, Guide("grammar", GRAMMAR), "structured_outputs.grammar"),
        ({"guided_regex": DATE, "response_format": {"type": "text"}}, Guide("regex", DATE), "guided_regex"),
    ],
)  # fmt: skip
def test_each_field_makes_a_guide(fields: dict[str, Any], guide: Guide, field: str) -> None:
    assert constraint(**fields) == Constraint(guide, field)


def test_no_field_makes_none() -> None:
    assert constraint() is None
    assert constraint(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
         "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": {"const": float("nan")}}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json"),
        ({"guided_choice": ["x" * 100_000]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": "x" * 100_000}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)  # fmt: skip
def test_what_makes_no_guide_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint(**fields)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


# ── over HTTP ──


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def is_animal(text: str | None) -> bool:
    value = json.loads(text or "")
    return (
        set(value) == {"name", "age", "kind"}
        and isinstance(value["name"], str)
        and 1 <= value["age"] <= 99
        and value["kind"] in ("cat", "dog")
    )


def test_the_client_gets_json_of_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    more: Any = {"model": "smol", "messages": MESSAGES, "temperature": 1, "max_tokens": 100, "response_format": form}
    reply = client.chat.completions.create(**more, n=3, seed=1)
    assert all(choice.finish_reason == "stop" and is_animal(choice.message.content) for choice in reply.choices)
    assert len({choice.message.content for choice in reply.choices}) == 3
    [single] = client.chat.completions.create(**more, seed=2).choices
    assert single.message.content == reply.choices[1].message.content
    chunks = list(client.chat.completions.create(**more, seed=1, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == reply.choices[0].message.content


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_regex": DATE}, DATE),
        ({"guided_choice": ["Rome", "Paris"]}, "Rome|Paris"),
        ({"guided_grammar": GRAMMAR}, r"\([a-c]{1,4}\)"),
        ({"structured_outputs": {"regex": DATE}}, DATE),
        ({"structured_outputs": {"choice": ["Rome", "Paris"]}}, "Rome|Paris"),
        ({"guided_json": {"const": {"a": [1]}}}, r'\{\s*"a"\s*:\s*\[\s*1\s*\]\s*\}'),
        ({"response_format": {"type": "json_object"}, "logit_bias": {}}, r"(?s)\{.*"),
    ],
)
def test_both_endpoints_take_vllms_fields(client: openai.OpenAI, body: dict[str, Any], pattern: str) -> None:
    more: Any = {"model": "smol", "max_tokens": 24, "seed": 3, "extra_body": body}
    chat = client.chat.completions.create(messages=MESSAGES, **more).choices[0].message.content
    plain = client.completions.create(prompt="The answer is ", **more).choices[0].text
    assert re.fullmatch(pattern, chat or "")
    assert re.fullmatch(pattern, plain)


def test_a_guided_answer_is_the_offline_one(served: Served, llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=5, max_tokens=60, n=2, guide=JSON_SCHEMA)
    [offline] = llm.generate("A pet: ", params)
    reply = served.complete("A pet: ", temperature=1, seed=5, max_tokens=60, n=2, guided_json=SCHEMA)
    assert [choice["text"] for choice in reply["choices"]] == [choice.text for choice in offline.outputs]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frog"}}}},
         "response_format.json_schema.schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": {"type": "object"}, "use_beam_search": True}, "guided_json"),
    ],
)  # fmt: skip
def test_a_bad_constraint_is_refused_by_its_name(served: Served, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        assert served.refused(COMPLETIONS, prompt="x", stream=stream, **body)["param"] == param
        assert served.refused(CHAT, messages=MESSAGES, stream=stream, **body)["param"] == param


def test_who_goes_while_a_guide_is_compiled_leaves_nothing(served: Served) -> None:
    for count in (400, 410, 420):
        schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}
        served.raw(json.dumps({"prompt": "x", "max_tokens": 400, "guided_json": schema}).encode()).close()
    assert served.complete("x", max_tokens=3, guided_regex="[abc]{9}")["choices"][0]["finish_reason"] == "length"


def test_a_constraint_that_becomes_too_complex_is_said_to_be(served: Served) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    body: dict[str, Any] = {"prompt": "x", "guided_json": schema, "max_tokens": 50}
    reply = served.post(COMPLETIONS, **body)
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["code"] == "guide_too_complex"
    assert served.events(COMPLETIONS, **body)[-1]["error"]["code"] == "guide_too_complex"


# ── tools ──


@pytest.fixture(scope="module")
def tool_server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a template like Qwen's."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "template.jinja").write_text(QWEN)
    options = ("--kv-cache-memory-bytes", "128MiB", "--served-model-name", "smol")
    with serving(folder / "log", model_path, *options, "--chat-template", str(folder / "template.jinja")) as server:
        yield server


@pytest.fixture
def tool_client(tool_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def joined(chunks: Any) -> tuple[str, list[dict[str, str]], list[str]]:
    """(content, calls, finish reasons) of a stream of one choice."""
    content, calls, reasons = "", [], []
    for chunk in chunks:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            if piece.index == len(calls):
                assert piece.type == "function"
                assert piece.id.startswith("call_")
                calls.append({"name": piece.function.name, "arguments": ""})
            calls[piece.index]["arguments"] += piece.function.arguments or ""
        if choice.finish_reason is not None:
            reasons.append(choice.finish_reason)
    return content, calls, reasons


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_has_to_be_made_is_made_and_valid(tool_client: openai.OpenAI, choice: Any) -> None:
    more: Any = {"model": "smol", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    for seed in range(3):
        [whole] = tool_client.chat.completions.create(**more, seed=seed, parallel_tool_calls=False).choices
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        [call] = whole.message.tool_calls or []
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if choice != "required" or call.function.name == "get_weather":
            assert call.function.name == "get_weather"
            assert set(arguments) == {"city", "unit"}
            assert arguments["unit"] in ("C", "F")
        else:
            assert (call.function.name, arguments) == ("stop", {})
        stream = tool_client.chat.completions.create(**more, seed=seed, parallel_tool_calls=False, stream=True)
        content, calls, reasons = joined(stream)
        assert (content, reasons) == ("", ["tool_calls"])
        assert calls == [{"name": call.function.name, "arguments": call.function.arguments}]


def test_a_call_that_is_cut_off_ends_by_its_length(tool_server: Served) -> None:
    body = {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 24}
    [choice] = tool_server.chat(MESSAGES, **body)["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])


def test_left_to_itself_the_model_just_talks(tool_server: Served) -> None:
    for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        [choice] = tool_server.chat(MESSAGES, tools=TOOLS, max_tokens=5, **more)["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"]
        assert not choice["message"].get("tool_calls")
    known = [tool_server.chat(MESSAGES, max_tokens=1, **more)["usage"]["prompt_tokens"] for more in
             ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})]  # fmt: skip
    assert known[0] == known[1] < known[2]


def test_beside_a_response_format_the_model_answers_or_calls(tool_server: Served, tool_client: openai.OpenAI) -> None:
    [seven] = tool_server.post("/tokenize", prompt="7", add_special_tokens=False).json()["tokens"]
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"const": 7}}}
    more: Any = {"model": "smol", "messages": MESSAGES, "tools": TOOLS, "response_format": form, "max_tokens": 200}
    more["parallel_tool_calls"] = False
    for bias, called in ((100, False), (-100, True)):
        [whole] = tool_client.chat.completions.create(**more, seed=1, logit_bias={str(seven): bias}).choices
        calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in whole.message.tool_calls or []]  # type: ignore[union-attr]
        assert (whole.message.content, bool(calls)) == ((None, True) if called else ("7", False))
        assert whole.finish_reason == ("tool_calls" if called else "stop")
        assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
        stream = tool_client.chat.completions.create(**more, seed=1, logit_bias={str(seven): bias}, stream=True)
        assert joined(stream) == (whole.message.content or "", calls, [whole.finish_reason])


def test_calls_and_their_results_go_back_into_the_prompt(tool_server: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    prompt = tool_server.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    text = tool_server.post("/detokenize", tokens=prompt).json()["prompt"]
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "<|im_start|>tool\nsunny" in text
    assert "None" not in text
    assert tool_server.chat(messages, tools=TOOLS, max_tokens=3)["choices"][0]["message"]["content"]


def test_tools_that_are_malformed_or_unknown_to_the_template(tool_server: Served, served: Served) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS}
    assert tool_server.refused(CHAT, **body, tool_choice="sometimes")["param"] == "tool_choice"
    assert tool_server.refused(CHAT, messages=MESSAGES, tool_choice="required")["param"] == "tool_choice"
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "frog"}}}]
    assert tool_server.refused(CHAT, messages=MESSAGES, tools=bad, tool_choice="required")["param"] == "tools"
    error = served.refused(CHAT, **body)
    assert error["param"] == "tools"
    assert "chat template knows no tools" in error["message"]
    [choice] = served.chat(MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=60)["choices"]
    assert choice["message"]["tool_calls"]
