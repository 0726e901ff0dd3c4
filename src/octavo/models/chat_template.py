"""Rendering a model's chat template, which is a program that came with a file: it gets a sandbox and a budget.

The environment has what Transformers gives templates (`apply_chat_template` in utils/chat_template_utils.py): trimmed
blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that keeps non-ASCII, `{% generation %}`. Python's
internals and changes to the messages are out of reach in Jinja's immutable sandbox; loops, recursion and growth are
bounded by counting, so that the same template fails at the same place everywhere.
"""

from __future__ import annotations

import json
import sys
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
"""Length of a text or list, and size of a number, that a template may make."""
MAX_LINES = 2_000_000
"""Lines of compiled template that one rendering may run; a long conversation takes some thousands."""


class _OverBudget(TemplateError):
    pass


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
        self.filters = {name: _bounded(function) for name, function in {**self.filters, "tojson": _to_json}.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _now

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        parts = list(parts)
        _check_size(sum(map(len, parts)))
        return "".join(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_size(max(abs(left), 1).bit_length() * right if isinstance(left, int) else 0)
        elif operator == "*":
            for many, one in ((left, right), (right, left)):
                if isinstance(many, int) and isinstance(one, Sized):
                    _check_size(len(one) * many)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            raise _OverBudget("the % of texts is not available in chat templates: use ~ to join them")
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in Jinja)
        _check_arguments(args, kwargs)
        if isinstance(getattr(__obj, "__self__", None), str) and __obj.__name__ in ("format", "format_map"):
            raise _OverBudget("str.format is not available in chat templates: use ~ to join texts")
        return _checked(super().call(__context, __obj, *args, **kwargs))


def _check_size(size: int) -> None:
    if size > MAX_VALUE:
        raise _OverBudget(f"the chat template makes a value of size {size}; {MAX_VALUE} is the most allowed")


def _checked(value: Any) -> Any:
    if isinstance(value, int):
        _check_size(value.bit_length())
    elif isinstance(value, (str, list, tuple, dict)):
        _check_size(len(value))
    return value


def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """No width, count or list of parts in a call may ask for more than a value's size."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check_size(abs(value))
        elif isinstance(value, (list, tuple)):
            _check_size(sum(len(part) for part in value if isinstance(part, str)))


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps the marks by which Jinja passes the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        return _checked(function(*args, **kwargs))

    return bounded


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
        self._source = source
        self._render: Callable[..., str] | None = None

    def render(self, **variables: Any) -> str:
        """The text of a conversation. Raises InvalidRequest("messages") with the template's own words if it refuses."""
        previous = sys.gettrace()
        lines = 0

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal lines
            lines += 1
            if lines > MAX_LINES:
                raise _OverBudget(f"the chat template does not end within {MAX_LINES} lines")
            return trace

        try:
            if self._render is None:
                if len(self._source) > MAX_TEMPLATE_CHARS:
                    raise _OverBudget(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
                self._render = _Environment().from_string(self._source).render
            sys.settrace(trace)
            return self._render(**variables)
        except Exception as error:  # the template's code and Jinja's can raise anything, and all of it is a refusal
            message = str(error) or type(error).__name__
            raise InvalidRequest("messages", f"the model's chat template refuses them: {message}") from error
        finally:
            sys.settrace(previous)
