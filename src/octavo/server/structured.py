"""Which of a request's fields constrain its answer, and how: from OpenAI's and vLLM's names to one `Guide`.

Pure functions over plain JSON values. Compiling a guide, which finds out whether its text makes sense, is the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from octavo.errors import InvalidRequest
from octavo.types import MAX_GUIDE_CHARS, Guide

LEGACY_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")


MAX_BYTES = 4 * MAX_GUIDE_CHARS
"""Of a constraint as it stands in a body, blanks and all: more is not looked at."""


class Constraint(NamedTuple):
    """A guide, and the request's field that asked for it, for errors found later."""

    guide: Guide
    field: str


def constraint(
    *,
    response_format: Mapping[str, Any] | None = None,
    structured_outputs: Mapping[str, Any] | None = None,
    guided_json: str | Mapping[str, Any] | None = None,
    guided_regex: str | None = None,
    guided_choice: list[str] | None = None,
    guided_grammar: str | None = None,
    allowed_token_ids: list[int] | None = None,
) -> Constraint | None:
    """The one constraint that a request's fields ask for, or None.

    Takes the fields as they stand in the body. Raises InvalidRequest, naming the field, for a malformed one or for two.
    """
    found: list[Constraint] = []
    if response_format is not None and (asked := _response_format(response_format)) is not None:
        found.append(asked)
    if structured_outputs is not None:
        found += _structured_outputs(structured_outputs)
    legacy = zip(LEGACY_FIELDS, (guided_json, guided_regex, guided_choice, guided_grammar), strict=True)
    found += [_made(name.removeprefix("guided_"), value, name) for name, value in legacy if value is not None]
    if allowed_token_ids is not None:
        tokens = ",".join(map(str, sorted(set(allowed_token_ids))))
        found.append(Constraint(Guide("grammar", f"start: (<[{tokens}]>)*"), "allowed_token_ids"))
    if len(found) > 1:
        raise InvalidRequest(found[1].field, f"contradicts {found[0].field}: an answer can have one constraint")
    return found[0] if found else None


def _response_format(value: Any) -> Constraint | None:
    field = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(Guide("json_object"), field)
    if kind != "json_schema":
        raise InvalidRequest(field, "type must be text, json_object or json_schema")
    form = value.get("json_schema")
    schema = form.get("schema", form.get("json_schema")) if isinstance(form, Mapping) else None
    if schema is None:
        raise InvalidRequest(f"{field}.json_schema", "must be an object with a schema")
    return _made("json", schema, f"{field}.json_schema.schema")


def _structured_outputs(value: Any) -> list[Constraint]:
    field = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequest(field, f"must be an object with one of {', '.join(STRUCTURED_KINDS)}")
    given = [kind for kind in STRUCTURED_KINDS if value.get(kind) not in (None, False)]
    if "structural_tag" in value and value["structural_tag"] is not None:
        raise InvalidRequest(f"{field}.structural_tag", "is not supported: use json, regex, choice or grammar")
    if not given:
        raise InvalidRequest(field, f"must have one of {', '.join(STRUCTURED_KINDS)}")
    return [_made(kind, value[kind], f"{field}.{kind}") for kind in given]


def _made(kind: str, value: Any, field: str) -> Constraint:
    if json_size(value) > MAX_BYTES:
        raise InvalidRequest(field, f"is larger than {MAX_BYTES} bytes")
    try:
        return Constraint(_MAKERS[kind](value), field)
    except InvalidRequest as error:
        raise InvalidRequest(field, str(error).removeprefix(f"{error.field}: ")) from None


def json_size(value: Any) -> int:
    """About how many bytes a value takes as JSON, found out without delay even if they are millions."""
    try:
        return len(value) if isinstance(value, str) else len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError):
        return 0  # it is no JSON, which is said elsewhere


def _json_schema(value: Any) -> Guide:
    """A schema as an object, or written out."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("guide", f"is not JSON: {error}") from None
    if not isinstance(value, (Mapping, bool)):
        raise InvalidRequest("guide", "must be a JSON schema, which is an object")
    try:
        return Guide("json_schema", json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest("guide", f"cannot be written as JSON: {error}") from None


def _json_object(value: Any) -> Guide:
    if value is not True:
        raise InvalidRequest("guide", "must be true or false")
    return Guide("json_object")


def _choice(value: Any) -> Guide:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise InvalidRequest("guide", "must be a list of at least one text")
    return Guide("choice", json.dumps(value, ensure_ascii=False))


def _regex(value: Any) -> Guide:
    return Guide("regex", value)


def _grammar(value: Any) -> Guide:
    return Guide("grammar", value)


_MAKERS: Mapping[str, Callable[[Any], Guide]] = {
    "json": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
