"""The description of the API that /openapi.json gives, made from the structures that decode and encode it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo import __version__
from octavo.server.explain import Explanation
from octavo.server.feed import MAX_HZ, MIN_HZ, MapDelta, MapSnapshot
from octavo.server.look import LISTED as BRANCHES
from octavo.server.look import MAX_LISTED as MAX_BRANCHES
from octavo.server.look import TIERS, CachePage, CacheTree
from octavo.server.protocol import (
    CacheSave,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    HealthReply,
    ModelCard,
    ModelList,
    PinRequest,
    Session,
    SessionId,
    SessionList,
    TokenizeReply,
    TokenizeRequest,
    VersionReply,
)
from octavo.server.sessions import HEADER, LISTED, MAX_LISTED

SHAPES = (
    *(CompletionRequest, Completion, ChatRequest, ChatCompletion, ChatChunk, ModelList, ModelCard, TokenizeRequest),
    *(TokenizeReply, DetokenizeRequest, DetokenizeReply, VersionReply, HealthReply, ErrorReply),
    *(Session, SessionList, PinRequest, CacheSave, MapSnapshot, MapDelta, CachePage, CacheTree, Explanation),
)
ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "Only the admin key may do this.",
    404: "There is no such model, session, page or request.",
    408: "The body came too slowly.",
    409: "Pins may hold no more of the pool; or several tenants have a session of this name.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests are queued, or too many clients watch; Retry-After says when to come back.",
    503: "The server is shutting down, or its engine is.",
}
BODY_ERRORS = (400, 401, 404, 408, 413, 415)


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


SESSION = _parameter(HEADER, "header", msgspec.json.schema(SessionId))
TENANT = _parameter("tenant", "query", {"type": "string", "description": "For the admin key: whose sessions."})
HZ = _parameter("hz", "query", {"type": "number", "minimum": MIN_HZ, "maximum": MAX_HZ, "default": MAX_HZ})
TREE_LIMIT = {"type": "integer", "minimum": 1, "maximum": MAX_BRANCHES, "default": BRANCHES}
LIMIT = _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": LISTED})


def document(models: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI document of a server with models of these names."""
    _, components = msgspec.json.schema_components(SHAPES, ref_template="#/components/schemas/{name}")
    for schema in components.values():
        if "model" in schema.get("properties", {}) and schema["title"].endswith("Request"):
            schema["properties"]["model"] = {"enum": [*models, None], "default": models[0]}
    named = [_parameter("id", "path", msgspec.json.schema(SessionId)), TENANT]
    touching = (400, 401, 403, 404, 409, 503)
    text: dict[str, Any] = {"text/event-stream": {}}  # 3.1 has no words for what is in an event
    generating = (*BODY_ERRORS, 429, 503)
    paths = {
        "/v1/completions": {
            "post": _operation("Continue prompts", Completion, generating, CompletionRequest, text)
            | {"parameters": [SESSION]},
        },
        "/v1/chat/completions": {
            "post": _operation("Answer a conversation", ChatCompletion, generating, ChatRequest, text)
            | {"parameters": [SESSION]},
        },
        "/v1/models": {"get": _operation("The names of the model", ModelList, (401,))},
        "/v1/models/{model}": {
            "get": _operation("One of them", ModelCard, (401, 404))
            | {"parameters": [_parameter("model", "path", {"enum": list(models)})]}
        },
        "/v1/sessions": {
            "get": _operation("What sessions hold", SessionList, (400, 401, 403, 503)) | {"parameters": [LIMIT, TENANT]}
        },
        "/v1/sessions/{id}": {"get": _operation("What one holds", Session, touching) | {"parameters": named}},
        "/v1/sessions/{id}/pin": {
            "post": _operation(
                "Keep its pages for a while",
                Session,
                (*touching, 408, 413, 415),
                PinRequest,
                optional=True,
            )
            | {"parameters": named}
        },
        "/v1/sessions/{id}/release": {
            "post": _operation("Drop its pages and forget it", Session, touching) | {"parameters": named}
        },
        "/v1/sessions/{id}/demote": {
            "post": _operation("Have its pages leave the pool", Session, touching) | {"parameters": named}
        },
        "/v1/cache/save": {"post": _operation("Write what is cached to disk", CacheSave, (400, 401, 403, 503))},
        "/v1/cache/map": {
            "get": _operation(
                "The map of all pages, or a stream of MapSnapshot and MapDelta",
                MapSnapshot,
                (400, 401, 429, 503),
                more=text,
            )
            | {"parameters": [HZ]}
        },
        "/v1/cache/pages/{tier}/{page}": {
            "get": _operation("What is in a page", CachePage, (401, 404, 503))
            | {
                "parameters": [
                    _parameter("tier", "path", {"enum": list(TIERS)}),
                    _parameter("page", "path", {"type": "integer", "minimum": 0}),
                ]
            }
        },
        "/v1/cache/tree": {
            "get": _operation("What is shared", CacheTree, (400, 401, 503))
            | {"parameters": [_parameter("limit", "query", TREE_LIMIT)]}
        },
        "/v1/requests/{id}/explain": {
            "get": _operation("Why a request found no more of its prompt", Explanation, (401, 404, 503))
            | {"parameters": [_parameter("id", "path", {"type": "string", "pattern": "^[A-Za-z0-9-]{1,100}$"})]}
        },
        "/tokenize": {"post": _operation("Tokens of a text", TokenizeReply, BODY_ERRORS, TokenizeRequest)},
        "/detokenize": {"post": _operation("Text of tokens", DetokenizeReply, BODY_ERRORS, DetokenizeRequest)},
        "/health": {"get": _operation("Whether requests are taken", HealthReply, (503,))},
        "/version": {"get": _operation("Octavo's version", VersionReply, ())},
        "/metrics": {
            "get": {
                "summary": "Figures for Prometheus",
                "responses": {
                    "200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}},
                },
            }
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(
    summary: str,
    reply: type,
    errors: Sequence[int],
    body: type | None = None,
    more: dict[str, Any] | None = None,
    *,
    optional: bool = False,
) -> dict[str, Any]:
    responses = {"200": {"description": "OK", "content": _content(reply) | (more or {})}}
    responses |= {str(code): {"description": ERRORS[code], "content": _content(ErrorReply)} for code in errors}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": not optional, "content": _content(body)}
    return operation


def _content(shape: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}}
