"""Rendering a model's chat template, which is a program that came with a file: it gets a sandbox and a budget.

The environment has what Transformers gives templates (`apply_chat_template` in utils/chat_template_utils.py): trimmed
blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that keeps non-ASCII, `{% generation %}`. Python's
internals and changes to the messages are out of reach in Jinja's immutable sandbox; loops, recursion and growth of
texts are bounded by counting, so that the same template fails at the same place everywhere. That stops accidents and
plain malice; it does not make a prison, so a model from a stranger belongs in a container.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import datetime
from functools import wraps
from types import FrameType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidRequest

MAX_TEMPLATE_CHARS = 1 << 20
MAX_VALUE = 1 << 24
"""Length of one text or list that a template may make."""
MAX_MADE = 1 << 27
"""Length of all that one rendering makes, together."""
MAX_BITS = 1 << 12
"""Size of a whole number."""
MAX_LINES = 1_000_000
"""Lines of compiled template that one rendering may run; a long conversation takes some thousands."""


class _OverBudget(TemplateError):
    pass


class _Budget(threading.local):
    """What the rendering in this thread has used up."""

    lines = 0
    made = 0

    def charge(self, size: int) -> None:
        self.made += size
        if size > MAX_VALUE or self.made > MAX_MADE:
            raise _OverBudget(f"the chat template makes values of {max(size, self.made)} characters, which is too much")

    def charge_value(self, value: Any) -> Any:
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _OverBudget(f"the chat template makes a number of {value.bit_length()} bits, which is too much")
        if isinstance(value, (str, list, tuple, dict)):
            self.charge(len(value))
        return value

    def count_lines(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A trace function: called for every line of Python that the template runs."""
        self.lines += 1
        if self.lines > MAX_LINES:
            raise _OverBudget(f"the chat template does not end within {MAX_LINES} lines")
        return self.count_lines


_budget = _Budget()


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training: the contents and nothing else."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's way of naming them)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Compiles `a ~ b` to the environment's bounded `concat`."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802  (Jinja's name)
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        extensions = [LoopControlExtension, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        filters = {**self.filters, "tojson": _to_json, "replace": _replace}
        for name in ("center", "format", "wordwrap"):
            del filters[name]  # they pad to any width, and no chat needs that
        self.filters = {name: _bounded(function) for name, function in filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _now

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        kept = []
        for part in parts:
            _budget.charge(len(part))
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS:
                raise _OverBudget("the chat template makes too large a number")
        elif operator == "*":
            for many, one in ((left, right), (right, left)):
                if isinstance(many, int) and isinstance(one, Sized):
                    _budget.charge(len(one) * many)
        elif operator == "%" and isinstance(left, str):
            raise _OverBudget("the % of texts is not available in chat templates: use ~ to join them")
        return _budget.charge_value(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is not None:
            raise _OverBudget("str.format is not available in chat templates: use ~ to join texts")
        return None

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in Jinja)
        if isinstance(text := getattr(__obj, "__self__", None), str):
            if __obj.__name__ == "replace":
                __obj = _replace.__get__(text)
            _check_arguments(args, kwargs)
        return _budget.charge_value(super().call(__context, __obj, *args, **kwargs))


def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """No width and no list of parts may ask for more than a value's size."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _budget.charge(max(value, 0))
        elif isinstance(value, (list, tuple)):
            _budget.charge(sum(len(part) for part in value if isinstance(part, str)))


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the marks by which Jinja passes the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        return _budget.charge_value(function(*args, **kwargs))

    return bounded


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    """`str.replace`, unless the result would be too long."""
    _budget.charge(str(text).count(old) * len(new))
    return str(text).replace(old, new, -1 if count is None else count)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, *options: Any, **named: Any) -> str:
    """`json.dumps` with Transformers' order of options."""
    names = ("ensure_ascii", "indent", "separators", "sort_keys")
    return json.dumps(value, **{"ensure_ascii": False, **dict(zip(names, options, strict=False)), **named})


class ChatTemplate:
    """A compiled template. Compiling happens at the first rendering, and so do its errors."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._render: Callable[..., str] | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises InvalidRequest("messages") with the template's own words if it refuses."""
        previous = sys.gettrace()
        _budget.lines = _budget.made = 0
        try:
            if self._render is None:
                if len(self.source) > MAX_TEMPLATE_CHARS:
                    raise _OverBudget(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
                self._render = _Environment().from_string(self.source).render
            sys.settrace(_budget.count_lines)
            return self._render(variables)
        except Exception as error:  # the template's code and Jinja's can raise anything, and all of it is a refusal
            message = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the model's chat template refuses them: {message}") from error
        finally:
            sys.settrace(previous)
