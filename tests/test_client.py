"""`octavo chat --url` against a server of a few lines that says what it is told to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.client import RemoteChat
from octavo.errors import ConfigError, InvalidRequest, OctavoError
from octavo.types import SamplingParams

ASKED = [{"role": "user", "content": "¿Qué?"}]


class Scripted(ThreadingHTTPServer):
    """Answers a chat with `pieces` as chunks of HTTP, however they cut the events, and keeps what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.pieces: list[bytes] = []
        self.whole = True
        self.asked: list[tuple[str, str | None, Any]] = []
        self.sessions: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        self.server.sessions.append(self.headers["X-Session-ID"])
        self.send_response(self.server.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in self.server.pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
        if self.server.whole:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = not self.server.whole

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def events(*chunks: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(chunk, ensure_ascii=False).encode() for chunk in chunks)


def says(text: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_answer_is_put_together_however_it_is_cut(server: Scripted, size: int) -> None:
    sent = (
        b": keep-alive\r\n\r\n" + events(says(""), says("안녕"), says(None), says(" 🦑"), USAGE) + b"data: [DONE]\n\n"
    )
    server.pieces = [sent[i : i + size] for i in range(0, len(sent), size)]
    chat = RemoteChat(server.url, api_key="secret")
    assert [delta.text for delta in chat.stream_chat(ASKED, SamplingParams())] == ["안녕", " 🦑"]
    assert chat.stats() == {"generation_tokens": 3, "hit_tokens": 4, "queried_tokens": 9}


def test_only_what_was_set_is_sent(server: Scripted) -> None:
    server.pieces = [b"data: [DONE]\n\n"]
    chat = RemoteChat(server.url + "/v1/", "second", "secret")
    assert list(chat.stream_chat(ASKED, SamplingParams(top_k=5, stop=["x"], max_tokens=7))) == []
    [(path, key, body)] = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body == {
        "model": "second",
        "messages": ASKED,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 5,
        "stop": ["x"],
        "max_tokens": 7,
    }


def test_without_a_name_the_first_model_is_asked(server: Scripted) -> None:
    server.pieces = [b"data: [DONE]\n\n"]
    list(RemoteChat(server.url).stream_chat(ASKED, SamplingParams()))
    assert server.asked[0][2]["model"] == "first"


def test_each_conversation_has_a_session_of_its_own(server: Scripted) -> None:
    server.pieces = [b"data: [DONE]\n\n"]
    chat, other = RemoteChat(server.url), RemoteChat(server.url)
    for conversation in (chat, chat, other):
        list(conversation.stream_chat(ASKED, SamplingParams()))
    chat.begin()
    list(chat.stream_chat(ASKED, SamplingParams()))
    first, same, others, new = server.sessions
    assert first == same
    assert len({first, others, new}) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in server.sessions)


def test_a_refusal_names_the_field(server: Scripted) -> None:
    server.status = 400
    server.pieces = [json.dumps({"error": {"message": "temperature: too hot", "param": "temperature"}}).encode()]
    with pytest.raises(InvalidRequest, match=r"^temperature: too hot$"):
        list(RemoteChat(server.url).stream_chat(ASKED, SamplingParams()))


@pytest.mark.parametrize("body", [b"<html>no</html>", b"[]", b'{"error": "busy"}', b'{"error": {"message": "busy"}}'])
def test_a_failure_is_told_with_its_status(server: Scripted, body: bytes) -> None:
    server.status, server.pieces = 503, [body]
    with pytest.raises(OctavoError, match="answers 503: "):
        list(RemoteChat(server.url).stream_chat(ASKED, SamplingParams()))


@pytest.mark.parametrize(
    ("pieces", "whole", "message"),
    [
        ([events(says("a"))], True, "in the middle of an answer"),
        ([events(says("a"))], False, "broke off"),
        ([events(says("a"), {"error": {"message": "the engine died"}})], True, "the engine died"),
        ([events(says("a")), b"data: {\n\n"], True, "broke off"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(
    server: Scripted, pieces: list[bytes], whole: bool, message: str
) -> None:
    server.pieces, server.whole = pieces, whole
    answer = RemoteChat(server.url).stream_chat(ASKED, SamplingParams())
    assert next(answer).text == "a"
    with pytest.raises(OctavoError, match=message):
        next(answer)


@pytest.mark.parametrize("url", ["ftp://here", "http://", "http://here:port", "http://here:99999"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url: "):
        RemoteChat(url, "model")


def chat(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    command = [sys.executable, "-m", "octavo", "chat", *arguments]
    environment = {**os.environ, "OPENAI_API_KEY": "of the environment", "COLUMNS": "200"}
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_command_keeps_a_conversation(server: Scripted) -> None:
    server.pieces = [events(says("Blue"), says("."), USAGE), b"data: [DONE]\n\n"]
    status, out, err = chat(
        "--url", server.url, "--max-tokens", "5", "--system", "Be brief.", stdin="A colour?\nOne more?\n"
    )
    assert (status, out, err) == (0, "Blue.\nBlue.\n", "")
    (_, key, first), (_, _, second) = server.asked
    assert key == "Bearer of the environment"
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A colour?"}]
    assert second["messages"][1:] == [
        {"role": "user", "content": "A colour?"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "One more?"},
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "octavo: model: name one"),
        (("--url", "http://127.0.0.1:9"), 1, "octavo: http://127.0.0.1:9 cannot be reached: "),
        (("--url", "http://127.0.0.1:9", "--block-size", "32"), 2, "octavo: --block-size: is an option of the engine"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], status: int, message: str) -> None:
    left, out, err = chat(*arguments)
    assert (left, out) == (status, "")
    assert err.startswith(message)
