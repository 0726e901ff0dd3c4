"""The description at /openapi.json is true: requests made from it are answered as it says, and none with a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from tests.server.serving import Served
from tests.server.test_sessions import at

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
PATHS = {
    "/v1/completions": 40,
    "/v1/chat/completions": 40,
    "/tokenize": 20,
    "/detokenize": 20,
    "/v1/models": 5,
    "/v1/models/{model}": 5,
    "/v1/sessions": 10,
    "/v1/sessions/{id}": 10,
    "/v1/sessions/{id}/pin": 20,
    "/v1/sessions/{id}/release": 10,
    "/v1/sessions/{id}/demote": 10,
    "/v1/cache/save": 2,
    "/v1/cache/map": 5,
    "/v1/cache/pages/{tier}/{page}": 10,
    "/v1/cache/tree": 5,
    "/v1/requests/{id}/explain": 5,
    "/health": 5,
    "/version": 5,
    "/metrics": 5,
}


def test_the_description_names_every_path(small: Served) -> None:
    document = small.http.get("/openapi.json").json()
    assert set(document["paths"]) == set(PATHS)
    assert document["openapi"].startswith("3.1")


@pytest.mark.parametrize("path", PATHS)
def test_requests_made_from_it_are_answered_as_it_says(small: Served, path: str) -> None:
    ask_all(small, path, GenerationMode.POSITIVE)
    for session in small.http.get("/v1/sessions", params={"limit": 1000}).json()["data"]:
        assert small.http.post(at(session["id"], "/release")).status_code == 200


@pytest.mark.parametrize("path", [path for path in PATHS if path.endswith(("completions", "tokenize", "pin"))])
def test_requests_that_contradict_it_are_refused(small: Served, path: str) -> None:
    ask_all(small, path, GenerationMode.NEGATIVE)


def ask_all(small: Served, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    [result] = schema.include(path=path).get_all_operations()

    @settings(
        max_examples=PATHS[path],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=result.ok().as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            for name in ("max_tokens", "max_completion_tokens", "n", "best_of"):  # answers of a bearable length
                if isinstance(case.body.get(name), int) and case.body[name] > 4:
                    case.body[name] = 4
        response = case.call(timeout=30)
        refused = (
            response.status_code == 413
        )  # a body that contradicts and is too large besides: not in the check's list
        case.validate_response(
            response, checks=[one for one in CHECKS if not (refused and one is negative_data_rejection)]
        )

    ask()
