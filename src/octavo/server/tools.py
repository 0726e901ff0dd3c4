"""Tool calls: what a request's tools ask of the prompt and of the answer, and calls found in text as it comes.

Owns the two ways in which models write calls, and the grammars that make them do so. The chat template tells which:

    hermes   any text, and <tool_call>{"name": …, "arguments": {…}}</tool_call> for each call   (Hermes, Qwen)
    json     nothing but {"name": …, "parameters": {…}}, several parted by ";" or in a list     (Llama 3)

`tool_choice` "auto" leaves it to the model, but for a tool that is `strict`, whose calls are held to its schema, and
for a `response_format`, which holds the answer to its schema unless it is a call. "required" and a named function hold
the answer to calls whose arguments are valid by construction; they need no template that knows tools, while "auto"
does. With "none" the model is not told about the tools.

Pure functions and small machines over text: it knows no request, no token and no engine.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from octavo.engine.guide import JSON_OPTIONS
from octavo.errors import InvalidRequest
from octavo.server.structured import Constraint, json_size
from octavo.types import Guide

Style = Literal["hermes", "json"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOOLS, MAX_TOOLS_BYTES = 128, 1 << 18
MAX_CALLS = 16
"""Calls in an answer that the grammar allows: a small model would otherwise go on calling until its tokens end."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_SPACE = " \t\r\n"


# ── from a request ───────────────────────────────────────────────────────────────────────────────────────────────


class ToolUse(NamedTuple):
    """What a request's tools come to.

    tools: for the template, None if the model is not to know of any. style and names: for the ToolParser, which reads
    the answer; style None means that the answer is plain text. constraint: what holds the answer to its form, the
    request's own constraint included.
    """

    tools: Sequence[Mapping[str, Any]] | None
    style: Style | None
    names: frozenset[str]
    constraint: Constraint | None


def tool_use(
    template: str | None,
    tools: Any,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    constraint: Constraint | None = None,
) -> ToolUse:
    """From the body's fields as they stand, the chat template's source and the constraint of the other fields.

    Raises InvalidRequest("tools…") or ("tool_choice").
    """
    functions = _functions(tools)
    choice = _choice(tool_choice, functions)
    if not functions or choice == "none":
        return ToolUse(None, None, frozenset(), constraint)
    known = _style(template)
    if choice == "auto" and known is None:
        raise InvalidRequest(
            "tools",
            "the model's chat template knows no tools, or writes calls in a way that is not read here: "
            'choose one by tool_choice or "required"',
        )
    style, key = known or ("json", "arguments")
    names = frozenset(function["name"] for function in functions)
    forms = [_Form(style, key, function["name"], _arguments(function)) for function in functions]
    many = parallel_tool_calls is not False and style == "hermes"
    if choice == "auto":
        strict = [function.get("strict") is True for function in functions]
        return ToolUse(tools, style, names, _auto(forms, strict, many, constraint))
    named = [form for form in forms if choice in ("required", form.name)]
    return ToolUse(
        tools, style, names, Constraint(Guide("grammar", _calls(named, many and choice == "required")), "tools")
    )


def template_messages(messages: Sequence[Any]) -> list[Any]:
    """The messages as templates expect them: arguments of earlier calls as objects, and no content that is null."""
    return [_template_message(message) if isinstance(message, Mapping) else message for message in messages]


def _template_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") == "assistant" and message.get("content") is None:
        message = {**message, "content": ""}
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest("messages", "tool_calls must be a list of objects")
    return {**message, "tool_calls": [_template_call(call) for call in calls]}


def _template_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("messages", "a tool call must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # the model wrote it so, and may see it so
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _functions(tools: Any) -> list[Mapping[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidRequest("tools", "must be a list")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"there are {len(tools)}, and the limit is {MAX_TOOLS}")
    if json_size(tools) > MAX_TOOLS_BYTES:
        raise InvalidRequest("tools", f"are larger than {MAX_TOOLS_BYTES} bytes")
    functions: list[Mapping[str, Any]] = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidRequest(f"tools[{i}]", "must be an object of type function")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(f"tools[{i}].function.name", "must be 1 to 64 letters, digits or any of _ - . :")
        if not isinstance(function.get("parameters", {}), (Mapping, type(None))):
            raise InvalidRequest(f"tools[{i}].function.parameters", "must be a JSON schema, which is an object")
        if any(name == other["name"] for other in functions):
            raise InvalidRequest(f"tools[{i}].function.name", f"{name!r} is there twice")
        functions.append(function)
    return functions


def _choice(choice: Any, functions: Sequence[Mapping[str, Any]]) -> str:
    """Which of "auto", "none" and "required", or the name of one of the functions."""
    if choice is None:
        return "auto" if functions else "none"
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        if choice == "required" and not functions:
            raise InvalidRequest("tool_choice", "is required, and there are no tools")
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice", "must be none, auto, required, or name a function")
    if all(name != function["name"] for function in functions):
        raise InvalidRequest("tool_choice", f"there is no tool {name[:64]!r}")
    return name


def _style(template: str | None) -> tuple[Style, str] | None:
    """How calls are written, and the key of their arguments; None if the template knows no tools, or in another way."""
    if template is None or not re.search(r"\btools\b", template) or "<function=" in template:
        return None
    if OPEN in template:
        return "hermes", "arguments"
    if "[TOOL_CALLS]" in template:
        return "json", "arguments"
    return ("json", "parameters") if '"parameters"' in template else None


# ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Form(NamedTuple):
    """How one function is called: what is written around its arguments, and their schema."""

    style: Style
    key: str
    name: str
    schema: Mapping[str, Any]

    @property
    def begin(self) -> str:
        mark = f"{OPEN}\n" if self.style == "hermes" else ""
        return f'{mark}{{"name": {json.dumps(self.name)}, "{self.key}": '

    @property
    def end(self) -> str:
        return f"}}\n{CLOSE}" if self.style == "hermes" else "}"

    @property
    def whole(self) -> Mapping[str, Any]:
        """The schema of a call in the json style. Definitions stay at its root, where references look for them."""
        shared = {key: value for key, value in self.schema.items() if key in ("$defs", "definitions")}
        own = {key: value for key, value in self.schema.items() if key not in shared}
        properties = {"name": {"const": self.name}, self.key: own}
        required = ["name", self.key]
        return {**_OBJECT, **shared, "properties": properties, "required": required, "additionalProperties": False}


_OBJECT: Mapping[str, Any] = {"type": "object"}


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_OBJECT, **(function.get("parameters") or {})}


def _calls(forms: Sequence[_Form], many: bool) -> str:
    """One of the calls, or some of them."""
    return "\n".join([f"start: {_repeated(many)}", *_rules(forms)])


def _repeated(many: bool) -> str:
    return f'call ("\\n" call){{0,{MAX_CALLS - 1}}}' if many else "call"


def _rules(forms: Sequence[_Form]) -> list[str]:
    names = " | ".join(f"call_{i}" for i in range(len(forms)))
    rules = [
        f"call_{i}: {json.dumps(form.begin)} %json {_dump(form.schema)} {json.dumps(form.end)}"
        for i, form in enumerate(forms)
    ]
    return [f"call: {names}", *rules]


def _auto(
    forms: Sequence[_Form], strict: Sequence[bool], many: bool, constraint: Constraint | None
) -> Constraint | None:
    """Hold the answer to `constraint` or calls, or to any text with calls of strict functions in it, or to nothing."""
    if constraint is not None:
        if constraint.guide.kind not in ("json_schema", "json_object"):
            raise InvalidRequest(constraint.field, 'works beside tools only with tool_choice "none"')
        schema = json.loads(constraint.guide.spec) if constraint.guide.spec else _OBJECT
        rules = [f"answer: %json {_dump(schema)}"]
        if forms[0].style == "hermes":
            rules += [f"start: answer | {_repeated(many)}", *_rules(forms)]
        else:  # the answer begins like a call, and only as JSON are the two told apart late enough
            rules += [f"start: answer | {' | '.join(f'call_{i}' for i in range(len(forms)))}"]
            rules += [f"call_{i}: %json {_dump(form.whole)}" for i, form in enumerate(forms)]
        return Constraint(Guide("grammar", "\n".join(rules)), constraint.field)
    if not any(strict) or forms[0].style == "json":
        return None
    rules = [
        f"start: text_call{'*' if many else '?'} TEXT",
        "TEXT: /(.|\\n)*/",
        f"trigger[lazy]: TEXT {json.dumps(OPEN)}",
        f"text_call: trigger ({' | '.join(f'call_{i}' for i in range(len(forms)))})",
    ]
    for i, (form, held) in enumerate(zip(forms, strict, strict=True)):
        begin = json.dumps(form.begin.removeprefix(OPEN))
        rules.append(f"call_{i}: {begin} %json {_dump(form.schema if held else _OBJECT)} {json.dumps(form.end)}")
    return Constraint(Guide("grammar", "\n".join(rules)), "tools")


def _dump(schema: Any) -> str:
    """A schema for a grammar, with the options that a schema by itself is compiled with."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest("tools", f"parameters cannot be written as JSON: {error}") from None


# ── from the answer ──────────────────────────────────────────────────────────────────────────────────────────────


class CallDelta(NamedTuple):
    """News of one call, for `delta.tool_calls`. `id` and `name` come with its first, `arguments` in pieces."""

    index: int  # type: ignore[assignment]
    id: str | None
    name: str | None
    arguments: str


class ToolNews(NamedTuple):
    """Text that is none of a call, and news of calls."""

    content: str
    calls: list[CallDelta]


class Call(NamedTuple):
    """A whole call, for `message.tool_calls`."""

    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolParser:
    """Finds calls in one choice's text. What it returns for pieces of a text joins to the same, however it is cut.

    Blanks around calls belong to neither. What looks like a call and is none is text. Arguments are passed on as they
    come, once the name is known; an answer that is cut off ends inside them.

    calls: those found so far. A choice that stops, with at least one of them, has finish_reason "tool_calls".
    """

    def __init__(self, style: Style, names: frozenset[str], new_id: Callable[[], str] = new_call_id) -> None:
        self.calls: list[Call] = []
        self._style, self._names, self._new_id = style, names, new_id
        self._take = self._text if style == "hermes" else self._between
        self._rest = ""  # not looked at yet
        self._blanks = ""  # held back, until text or a call follows
        self._after_call = False  # so that blanks are left out
        self._raw: list[str] = []  # of the call that is being read, to be given back if it is none
        self._count = 0  # of calls begun
        self._object = _CallObject()
        self._open = False  # whether the call being read is one, so that its arguments are passed on
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []

    def push(self, text: str) -> ToolNews:
        self._rest += text
        while self._rest and self._take():
            pass
        return self._news()

    def flush(self) -> ToolNews:
        """What was held back, now that the text is at its end."""
        if self._raw and not self._open:
            self._give_back()
        self._say(self._rest)
        self._rest = ""
        if not self.calls:
            self._content.append(self._blanks)
        self._blanks = ""
        return self._news()

    def _news(self) -> ToolNews:
        news = ToolNews("".join(self._content), self._deltas)
        self._content, self._deltas = [], []
        for delta in news.calls:
            if delta.name is not None and delta.id is not None:
                self.calls.append(Call(delta.id, delta.name, delta.arguments))
            else:
                call = self.calls[delta.index]
                self.calls[delta.index] = call._replace(arguments=call.arguments + delta.arguments)
        return news

    def _say(self, text: str) -> None:
        """Text of the answer, but for the blanks at its end."""
        if self._after_call:
            text = text.lstrip(_SPACE)
            self._after_call = not text
        kept = text.rstrip(_SPACE)
        if kept:
            self._content.append(self._blanks + kept)
            self._blanks = ""
        self._blanks += text[len(kept) :]

    # Each of these takes something from the front of `_rest`; False if it needs more of it.

    def _text(self) -> bool:
        before, mark, after = self._rest.partition(OPEN)
        if mark:
            self._say(before)
            self._rest, self._raw, self._take = after, [mark], self._call
            return True
        held = next((n for n in range(min(len(OPEN) - 1, len(before)), 0, -1) if OPEN.startswith(before[-n:])), 0)
        self._say(before[: len(before) - held])
        self._rest = before[len(before) - held :]
        return False

    def _between(self) -> bool:
        """Before the first call and after each, in the json style: a call may begin."""
        marks = _SPACE + (";,]" if self._count else "[")
        kept = self._rest.lstrip(marks)
        self._raw.append(self._rest[: len(self._rest) - len(kept)])
        self._rest = kept
        if not kept:
            return False
        if kept[0] == "{":
            self._take = self._call
            return True
        self._give_back()
        return True

    def _give_back(self) -> None:
        """It is no call after all: text, and in the json style all that follows too."""
        raw = "".join(self._raw)
        self._say(raw.lstrip(_SPACE + ";,]") if self._count and self._style == "json" else raw)
        self._raw = []
        self._object = _CallObject()
        self._take = self._text if self._style == "hermes" else self._all

    def _all(self) -> bool:
        self._say(self._rest)
        self._rest = ""
        return False

    def _call(self) -> bool:
        found, rest, used = self._object, self._rest, 0
        # until it is known to be a call character by character, so that no cut of the text makes a difference
        while not self._open and found.state == "reading" and used < len(rest):
            used += found.read(rest[used])
            if found.name is not None and self._style == "json" and found.name not in self._names:
                found.state = "bad"
            elif found.begun:
                self._open = True
                self._blanks = ""
                self._deltas.append(CallDelta(self._count, self._new_id(), found.name, ""))
                self._count += 1
        if not self._open:
            self._raw.append(rest[:used])
        if self._open and found.state == "reading":
            used += found.read(rest[used:])
        self._rest = rest[used:]
        if self._open and (arguments := found.take()):
            last = self._deltas.pop() if self._deltas else CallDelta(self._count - 1, None, None, "")
            self._deltas.append(last._replace(arguments=last.arguments + arguments))
        if found.state == "reading":
            return False
        if not self._open:
            self._give_back()
            return True
        self._open, self._after_call, self._raw, self._object = False, True, [], _CallObject()
        self._take = self._close if self._style == "hermes" else self._between
        return True

    def _close(self) -> bool:
        """After the object of a call in the hermes style: blanks and the closing mark."""
        rest = self._rest.lstrip(_SPACE)
        if rest.startswith(CLOSE):
            self._rest = rest[len(CLOSE) :]
            self._take = self._text
            return True
        if CLOSE.startswith(rest):
            self._rest = rest
            return False
        self._take = self._text  # text where the mark should be
        return True


class _CallObject:
    """Reads the JSON object of a call, character by character, as far as is needed to find its name and arguments.

    `arguments` are the pieces read and not taken yet. Brackets and quotes have to match; what is between them is for
    whoever uses the arguments to judge.
    """

    def __init__(self) -> None:
        self.state: Literal["reading", "done", "bad"] = "reading"
        self.name: str | None = None
        self.arguments: list[str] = []
        self._given = False  # whether there were any arguments
        self._expect = self._open
        self._key = ""
        self._token: list[str] = []  # of the string being read
        self._closers = ""  # of the brackets that are open inside a value
        self._quoted = self._escaped = False

    def read(self, text: str) -> int:
        """Take characters up to the object's end, or short of the first that has no place in it; how many it took."""
        for used, char in enumerate(text):
            self._expect(char)
            if self.state != "reading":
                return used + (self.state == "done")
        return len(text)

    @property
    def begun(self) -> bool:
        """Whether it is known whom it calls, and with what to begin with."""
        return self.state != "bad" and self.name is not None and (bool(self.arguments) or self.state == "done")

    def take(self) -> str:
        """The arguments read since the last time; an empty object if there were none to the end."""
        taken, self.arguments = "".join(self.arguments), []
        if self.state == "done" and not self._given:
            self._given = True
            return "{}"
        return taken

    def _open(self, char: str) -> None:
        if char == "{":
            self._expect = self._key_start
        elif char not in _SPACE:
            self.state = "bad"

    def _key_start(self, char: str) -> None:
        if char == '"':
            self._token, self._expect = [char], self._key_text
        elif char == "}":
            self._end()
        elif char not in _SPACE:
            self.state = "bad"

    def _key_text(self, char: str) -> None:
        if self._string(char):
            self._key, self._expect = self._loaded(), self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._expect = self._value_start
        elif char not in _SPACE:
            self.state = "bad"

    def _value_start(self, char: str) -> None:
        if char in _SPACE:
            return
        self._token = []
        if self._key == "name":
            self._expect = self._name_text
            good = char == '"' and self.name is None
        elif self._key in ("arguments", "parameters"):
            good = char in '{"' and not self._given
            self._given = True
            self._expect = self._arguments_text if char == '"' else self._value
        else:
            good = char not in ",}]:"
            self._expect = self._value
        if not good:
            self.state = "bad"
        else:
            self._expect(char)

    def _name_text(self, char: str) -> None:
        if self._string(char):
            self.name, self._expect = self._loaded(), self._after

    def _arguments_text(self, char: str) -> None:
        """Arguments that were written as JSON inside a string."""
        if self._string(char):
            text, self._expect = self._loaded(), self._after
            if text.lstrip(_SPACE).startswith("{"):
                self.arguments = [text]
            else:
                self.state = "bad"

    def _value(self, char: str) -> None:
        if not self._closers and not self._quoted and char in ",}" + _SPACE:  # a number or a word has ended before it
            self._expect = self._after
            self._after(char)
            return
        if not self._quoted and char in "}]" and self._closers[-1:] != char:
            self.state = "bad"
            return
        if self._key in ("arguments", "parameters"):
            self.arguments.append(char)
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._closers += "}" if char == "{" else "]"
        elif char in "}]":
            self._closers = self._closers[:-1]
        if not self._closers and not self._quoted and char in '}]"':
            self._expect = self._after

    def _after(self, char: str) -> None:
        if char == ",":
            self._expect = self._key_start
        elif char == "}":
            self._end()
        elif char not in _SPACE:
            self.state = "bad"

    def _string(self, char: str) -> bool:
        """Take a character of a string that is read whole; whether it is the last."""
        self._token.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        else:
            return char == '"' and len(self._token) > 1
        return False

    def _loaded(self) -> str:
        try:
            return str(json.loads("".join(self._token)))
        except ValueError:
            self.state = "bad"
            return ""

    def _end(self) -> None:
        self.state = "done" if self.name is not None else "bad"
