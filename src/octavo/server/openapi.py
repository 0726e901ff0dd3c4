"""The description of the API that /openapi.json gives, made from the structures that decode and encode it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo import __version__
from octavo.server.protocol import (
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
    TokenizeReply,
    TokenizeRequest,
    VersionReply,
)

SHAPES = (
    *(CompletionRequest, Completion, ChatRequest, ChatCompletion, ChatChunk, ModelList, ModelCard, TokenizeRequest),
    *(TokenizeReply, DetokenizeRequest, DetokenizeReply, VersionReply, HealthReply, ErrorReply),
)
ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or unknown.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests are queued; Retry-After says when to come back.",
    503: "The server is shutting down, or its engine is.",
}
BODY_ERRORS = (400, 401, 404, 408, 413, 415)


def document(models: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI document of a server with models of these names."""
    _, components = msgspec.json.schema_components(SHAPES, ref_template="#/components/schemas/{name}")
    for schema in components.values():
        if "model" in schema.get("properties", {}) and schema["title"].endswith("Request"):
            schema["properties"]["model"] = {"enum": [*models, None], "default": models[0]}
    text: dict[str, Any] = {"text/event-stream": {}}  # 3.1 has no words for what is in an event
    generating = (*BODY_ERRORS, 429, 503)
    paths = {
        "/v1/completions": {
            "post": _operation("Continue prompts", Completion, generating, CompletionRequest, text),
        },
        "/v1/chat/completions": {
            "post": _operation("Answer a conversation", ChatCompletion, generating, ChatRequest, text),
        },
        "/v1/models": {"get": _operation("The names of the model", ModelList, (401,))},
        "/v1/models/{model}": {
            "get": _operation("One of them", ModelCard, (401, 404))
            | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"enum": list(models)}}]}
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
) -> dict[str, Any]:
    responses = {"200": {"description": "OK", "content": _content(reply) | (more or {})}}
    responses |= {str(code): {"description": ERRORS[code], "content": _content(ErrorReply)} for code in errors}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _content(body)}
    return operation


def _content(shape: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}}
