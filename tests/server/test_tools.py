"""Tool calls: read from text however it is cut, and grammars that make models write them."""

from __future__ import annotations

import json
import random
from itertools import count, pairwise
from typing import Any

import pytest
from tests.engine.conftest import byte_tokenizer

from octavo.engine.guide import Guides
from octavo.errors import InvalidRequest
from octavo.server.structured import Constraint, constraint
from octavo.server.tools import MAX_CALLS, Call, Style, ToolParser, template_messages, tool_use
from octavo.types import Guide

HERMES = '{% if tools %}{{ tools | tojson }} answer with <tool_call>{"name": …, "arguments": …}</tool_call>{% endif %}'
LLAMA = '{% if tools %}{"name": function name, "parameters": dictionary}{{ tools }}{% endif %}'
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = frozenset({"weather", "stop"})
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [WEATHER, STOP]
SCHEMA = {"type": "object", "properties": {"answer": {"enum": [1, 2]}}, "required": ["answer"],
          "additionalProperties": False}  # fmt: skip


# ── reading calls ──


def read(style: Style, pieces: list[str]) -> tuple[str, list[Call]]:
    """(content, calls) of a text that comes in pieces, joined from the news as a client does it."""
    ids = count(1)
    parser = ToolParser(style, NAMES, lambda: f"call_{next(ids)}")
    content, calls = "", []
    for news in (*map(parser.push, pieces), parser.flush()):
        content += news.content
        for delta in news.calls:
            if delta.index == len(calls):
                assert delta.id is not None
                assert delta.name is not None
                calls.append(Call(delta.id, delta.name, ""))
            else:
                assert (delta.id, delta.name) == (None, None)
            last = calls[delta.index]
            calls[delta.index] = last._replace(arguments=last.arguments + delta.arguments)
    assert calls == parser.calls
    return content, calls


CASES: list[tuple[Style, str, str, list[tuple[str, str]]]] = [
    ("hermes", "just text, 1 < 2 <tool", "just text, 1 < 2 <tool", []),
    ("hermes", " \n text \n", " \n text \n", []),
    ("hermes", "", "", []),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
     "", [("weather", '{"city": "Köln"}')]),
    ("hermes", 'Let me see.\n<tool_call>{"arguments":{"a":[1,{"b":"}]"}]},"name":"weather"}</tool_call>\n',
     "Let me see.", [("weather", '{"a":[1,{"b":"}]"}]}')]),
    ("hermes", '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "b"}</tool_call> bye',
     "bye", [("a", "{}"), ("b", "{}")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": \\"\\\\u00e9\\"}", "id": null, "n": -1.5}</tool_call>',
     "", [("a", '{"x": "\\u00e9"}')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"q": "say \\"</tool_call>\\" \\\\"}}</tool_call>',
     "", [("a", '{"q": "say \\"</tool_call>\\" \\\\"}')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1', "", [("a", '{"x": 1')]),
    ("hermes", '<tool_call>{"name": "a", "argum', '<tool_call>{"name": "a", "argum', []),
    ("hermes", "<tool_call>\nnonsense\n</tool_call> more", "<tool_call>\nnonsense\n</tool_call> more", []),
    ("hermes", '<tool_call>{"arguments": {"x": 1}}</tool_call>', '<tool_call>{"arguments": {"x": 1}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "a"}<tool_call>{"name": "b"}</tool_call>', "", [("a", "{}"), ("b", "{}")]),
    ("json", '{"name": "weather", "parameters": {"city": "x"}}', "", [("weather", '{"city": "x"}')]),
    ("json", '  {"name": "weather", "parameters": {}}; {"name": "stop", "parameters": {"a": {}}}\n',
     "", [("weather", "{}"), ("stop", '{"a": {}}')]),
    ("json", '[{"name": "weather", "arguments": {}}, {"name": "stop"}]', "", [("weather", "{}"), ("stop", "{}")]),
    ("json", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ("json", '{"answer": {"name": "weather"}}', '{"answer": {"name": "weather"}}', []),
    ("json", '[1, 2] {"name": "weather"}', '[1, 2] {"name": "weather"}', []),
    ("json", ' Say {"name": "weather", "parameters": {}}', ' Say {"name": "weather", "parameters": {}}', []),
    ("json", '{"name": "weather", "parameters": {}} and that is it', "and that is it", [("weather", "{}")]),
    ("json", '{"name": "weather", "parameters": {}}; {"name": "x"}', '{"name": "x"}', [("weather", "{}")]),
    ("json", '{"name": "weather", "parameters": {"a": "\\', "", [("weather", '{"a": "\\')]),
    ("json", "", "", []),
    ("json", " \n", " \n", []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    style: Style, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    whole = read(style, [text])
    assert whole[0] == content
    assert [(call.name, call.arguments) for call in whole[1]] == calls
    assert [call.id for call in whole[1]] == [f"call_{i + 1}" for i in range(len(calls))]
    assert read(style, list(text)) == whole
    for cut in range(1, len(text)):
        assert read(style, [text[:cut], text[cut:]]) == whole


def test_no_cut_makes_a_difference_and_nothing_is_lost_without_a_call() -> None:
    parts = ["<tool_call>", "</tool_call>", "<tool", "{", "}", "[", "]", '"name"', '"arguments"', ":", ",", '"weather"',
             '"\\"', "\\", '"', " ", "\n", "é", "null", '{"name": "weather", "arguments": {"a": 1}}', ";"]  # fmt: skip
    for seed in range(3000):
        chosen = random.Random(seed)
        style: Style = chosen.choice(["hermes", "json"])
        mark = "<tool_call>" if style == "hermes" else ""
        head = chosen.choice(["", f'{mark}{{"name": "weather", "arguments": '])
        text = head + "".join(chosen.choices(parts, k=chosen.randrange(1, 12)))
        whole = read(style, [text])
        assert read(style, list(text)) == whole
        cuts = sorted(chosen.choices(range(len(text) + 1), k=3))
        assert read(style, [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]) == whole
        assert whole[1] or whole[0] == text


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser("hermes", NAMES)
    assert parser.push('hm <tool_call>{"name": "weather", "arguments": ') == ("hm", [])
    [head] = parser.push('{"city": "S').calls
    assert (head.index, head.name, head.arguments) == (0, "weather", '{"city": "S')
    assert head.id is not None
    assert head.id.startswith("call_")
    [more] = parser.push("eoul").calls
    assert more == (0, None, None, "eoul")


# ── what a request's tools come to ──


def sentences(guide: Guide | None, *texts: str) -> list[bool]:
    """Which of the texts the guide accepts as whole answers."""
    assert guide is not None
    tokenizer = byte_tokenizer()
    guides = Guides(tokenizer, tokenizer.vocab_size)
    guides.check(guide)
    accepted = []
    for text in texts:
        matcher = guides._matcher(guide).deep_copy()
        accepted.append(matcher.consume_tokens(tokenizer.encode(text)) and matcher.is_accepting())
    return accepted


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD = hermes("weather", '{"city": "Rome", "days": 3}')


def test_auto_leaves_it_to_the_model() -> None:
    for choice in (None, "auto"):
        assert tool_use(HERMES, TOOLS, choice) == (TOOLS, "hermes", NAMES, None)
        assert tool_use(LLAMA, TOOLS, choice) == (TOOLS, "json", NAMES, None)


@pytest.mark.parametrize("template", [None, PLAIN, "{{ tools }}<function=x>", "{{ toolset }}<tool_call>"])
def test_auto_needs_a_template_that_knows_tools(template: str | None) -> None:
    with pytest.raises(InvalidRequest, match="tools: the model's chat template knows no tools"):
        tool_use(template, TOOLS)
    assert tool_use(template, TOOLS, "required").style == "json"
    assert tool_use(template, TOOLS, "none").style is None
    assert tool_use(template, []).style is tool_use(template, None).style is None


def test_none_hides_the_tools() -> None:
    other = Constraint(Guide("regex", "a"), "guided_regex")
    assert tool_use(HERMES, TOOLS, "none", None, other) == (None, None, frozenset(), other)
    assert tool_use(HERMES, None, None, None, other).constraint == other


def test_required_holds_the_answer_to_calls() -> None:
    use = tool_use(HERMES, TOOLS, "required")
    assert use.constraint is not None
    assert use.constraint.field == "tools"
    good = [GOOD, hermes("stop", "{ }"), f"{GOOD}\n{hermes('stop', '{}')}", "\n".join([GOOD] * MAX_CALLS)]
    bad = ["", "text", f"text {GOOD}", hermes("weather", "{}"), hermes("weather", '{"city": "x", "days": 10}'),
           hermes("stop", "3"), hermes("nobody", "{}"), hermes("stop", "{" + " " * 65 + "}"),
            "\n".join([GOOD] * (MAX_CALLS + 1))]  # fmt: skip
    assert sentences(use.constraint.guide, *good, *bad) == [True] * len(good) + [False] * len(bad)
    single = tool_use(HERMES, TOOLS, "required", False).constraint
    assert single is not None
    assert sentences(single.guide, *good) == [True, True, False, False]


def test_a_named_function_is_called_once() -> None:
    use = tool_use(HERMES, TOOLS, {"type": "function", "function": {"name": "weather"}})
    assert use.constraint is not None
    assert sentences(use.constraint.guide, GOOD, hermes("stop", "{}"), f"{GOOD}\n{GOOD}") == [True, False, False]
    use = tool_use(LLAMA, TOOLS, {"type": "function", "function": {"name": "stop"}})
    assert use.constraint is not None
    texts = ('{"name": "stop", "parameters": {"a": [1]}}', '{"name": "stop", "arguments": {}}', "{}")
    assert sentences(use.constraint.guide, *texts) == [True, False, False]


def test_calls_of_strict_functions_are_held_to_their_schema() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    use = tool_use(HERMES, [strict, STOP])
    assert use.constraint is not None
    free = hermes("stop", '{"x": 1}')
    good = ["", "any text, 1 < 2", GOOD, f"let me see {GOOD}\n{free} done"]
    bad = [hermes("weather", "{}"), f"hm <tool_call>{GOOD}", hermes("nobody", "{}")]
    assert sentences(use.constraint.guide, *good, *bad) == [True] * len(good) + [False] * len(bad)
    single = tool_use(HERMES, [strict, STOP], "auto", False).constraint
    assert single is not None
    assert sentences(single.guide, *good[:3]) == [True] * 3


@pytest.mark.parametrize(("template", "call"), [(HERMES, GOOD), (LLAMA, '{"name": "stop", "parameters": {}}')])
def test_beside_a_response_format_the_answer_is_a_call_or_of_that_form(template: str, call: str) -> None:
    asked = constraint(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})
    use = tool_use(template, TOOLS, "auto", None, asked)
    assert use.constraint is not None
    assert use.constraint.field == "response_format.json_schema.schema"
    assert sentences(use.constraint.guide, '{"answer": 2}', call, "text", '{"answer": 3}') == [True, True, False, False]
    with pytest.raises(InvalidRequest, match='guided_regex: works beside tools only with tool_choice "none"'):
        tool_use(template, TOOLS, "auto", None, constraint(guided_regex="a+"))


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ({}, None, "tools"),
        ([3], None, "tools[0]"),
        ([{"type": "retrieval"}], None, "tools[0]"),
        ([WEATHER, {"type": "function", "function": {}}], None, "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 'a"'}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], None, "tools[0].function.parameters"),
        ([WEATHER, WEATHER], None, "tools[1].function.name"),
        ([STOP] * 129, None, "tools"),
        ([{"type": "function", "function": {"name": "a", "description": "x" * 300_000}}], None, "tools"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, 3, "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "nobody"}}, "tool_choice"),
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "stop"}}, "tool_choice"),
    ],
)
def test_malformed_tools_are_refused(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_use(HERMES, tools, choice)
    assert caught.value.field == field


def test_earlier_calls_are_shown_to_templates_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    odd = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "not JSON"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call, odd]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "3", "tool_calls": None},
    ]
    before = json.dumps(messages)
    shown = template_messages(messages)
    assert shown[0] == messages[0]
    assert shown[1]["content"] == ""
    assert [call["function"]["arguments"] for call in shown[1]["tool_calls"]] == [{"a": 1}, "not JSON"]
    assert shown[2] == messages[2]
    assert "tool_calls" not in shown[3]
    assert json.dumps(messages) == before
    for calls in (3, ["x"], [{}], [{"function": {}}]):
        with pytest.raises(InvalidRequest, match="messages: "):
            template_messages([{"role": "assistant", "tool_calls": calls}])
