"""A client of servers: any OpenAI-compatible one for `octavo chat --url`, conversations out and text in as it comes.

It owns the HTTP of one conversation, or of one who watches, and nothing of an engine, and needs only the standard
library.
"""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from octavo.errors import ConfigError, InvalidRequest, OctavoError
from octavo.types import SamplingParams

CONNECT_S = 10.0
SILENCE_S = 600.0
"""How long the server may think before a byte comes."""


class Delta(NamedTuple):
    """Text that was added to the answer."""

    text: str


class Refused(OctavoError):
    """The server's answer is an error, of this status."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answers {status}: {message}")
        self.status = status
        self.message = message


class Endpoint:
    """A server behind a URL, which may end in /v1: where it is, and what every request to it says.

    Raises ConfigError for a URL that is none. Every call raises OctavoError when the server cannot be reached or fails.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError("url", f"must look like http://localhost:8000, got {url!r}")
        self.url = url
        self.secure = parts.scheme == "https"
        self.host, self.port = parts.hostname, port or (443 if self.secure else 80)
        self.authority = parts.netloc.rpartition("@")[2]
        self.root = parts.path.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is not made yet."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=CONNECT_S)

    def ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None = None,
        silence_s: float = SILENCE_S,
    ) -> http.client.HTTPResponse:
        """Send a request, over a new connection or one that is made; `path` is what follows /v1.

        Any status but 200 is raised.
        """
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(silence_s)
            connection.request(method, f"{self.root}/v1{path}", body, self.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(self.url, response.status, response.read(65536))
        except (OSError, http.client.HTTPException) as error:
            raise OctavoError(f"{self.url} cannot be reached: {error}") from error
        return response

    def models(self, silence_s: float = SILENCE_S) -> list[dict[str, Any]]:
        """What the server lists, one model or more."""
        try:
            listed = list(self.json("GET", "/models", silence_s=silence_s)["data"])
            str(listed[0]["id"])
        except (LookupError, TypeError) as error:
            raise OctavoError(f"{self.url} lists no models: is it an OpenAI-compatible server?") from error
        return listed

    def json(self, method: str, path: str, body: Any = None, silence_s: float = SILENCE_S) -> Any:
        """Send JSON, if there is any, and read the JSON that comes back."""
        with closing(self.connect()) as connection:
            sent = None if body is None else json.dumps(body).encode()
            response = self.ask(connection, method, path, sent, silence_s)
            try:
                return json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise OctavoError(f"{self.url} answers with something that is no JSON: {error}") from error


class RemoteChat:
    """A model behind a URL. `model` None takes the first one that the server lists. Raises what Endpoint raises."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.url = url
        self._endpoint = Endpoint(url, api_key)
        self.begin()
        self._stats = {"generation_tokens": 0, "hit_tokens": 0, "queried_tokens": 0}
        self._model = model or str(self._endpoint.models()[0]["id"])

    def begin(self) -> None:
        """Begin another conversation, which servers that know sessions keep apart from the last one."""
        self._endpoint.headers["X-Session-ID"] = uuid.uuid4().hex

    def stream_chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams) -> Generator[Delta]:
        """Answer a conversation. Closing the generator early closes the connection, which ends the answer."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **_changed(params),
        }
        with closing(self._endpoint.connect()) as connection:
            response = self._endpoint.ask(connection, "POST", "/chat/completions", json.dumps(body).encode())
            try:
                for line in response:
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            return
                        yield from self._take(json.loads(data))
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise OctavoError(f"{self.url} broke off: {error}") from error
            raise OctavoError(f"{self.url} broke off in the middle of an answer")

    def stats(self) -> dict[str, int]:
        """Tokens so far, as the server counted them."""
        return dict(self._stats)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _take(self, chunk: Any) -> Generator[Delta]:
        if "error" in chunk:
            raise OctavoError(f"{self.url}: {message_of(chunk)}")
        for choice in chunk.get("choices") or ():
            text = (choice.get("delta") or {}).get("content")
            if text:
                yield Delta(text)
        usage = chunk.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            self._stats["generation_tokens"] += usage.get("completion_tokens") or 0
            self._stats["queried_tokens"] += usage.get("prompt_tokens") or 0
            self._stats["hit_tokens"] += details.get("cached_tokens") or 0


def _changed(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, so that a server which knows fewer fields than vLLM's is not bothered."""
    changed = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            changed[field.name] = list(value) if isinstance(value, tuple) else value
    return changed


def _refusal(url: str, status: int, body: bytes) -> OctavoError:
    try:
        document = json.loads(body)
        message, field = message_of(document), (document.get("error") or {}).get("param")
    except (AttributeError, ValueError):
        message, field = body[:200].decode(errors="replace"), None
    if status in (400, 422):
        field = str(field or "messages")
        return InvalidRequest(field, message.removeprefix(f"{field}: "))
    return Refused(url, status, message)


def message_of(document: Any) -> str:
    """What an error says, in OpenAI's form or in another."""
    error = (document.get("error") or document) if isinstance(document, dict) else document
    return str(error.get("message", error) if isinstance(error, dict) else error)
