"""Bodies, heads and clients that mean no good: each gets a small clear answer, and nobody else notices."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.serving import PAGE_BYTES, Served, error_of, serving, until

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def send(served: Served, path: str, body: bytes) -> httpx.Response:
    return served.http.post(path, content=body, headers=JSON)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"123",
        b'"x"',
        b"true",
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "a"} x',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800", "tokens": ["\\ud800"], "messages": "\\ud800"}',
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": NaN, "tokens": NaN, "messages": NaN}',
        b'{"temperature": NaN, "prompt": "a", "tokens": [NaN], "messages": [NaN]}',
        b'{"x":' * 100_000,
        b"[" * 1_000_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages":[' + b'{"role":' * 100_000,
        b"\x00" * 1000,
    ],
    ids=lambda body: repr(body[:30]),
)
def test_malformed_bodies(served: Served, path: str, body: bytes) -> None:
    reply = send(served, path, body)
    assert reply.status_code == 400
    error_of(reply)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "0x10", "1e-99999999999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "max_tokens", "seed"])
def test_numbers_that_are_none(served: Served, number: str, field: str) -> None:
    reply = send(served, COMPLETIONS, f'{{"prompt": "a", "max_tokens": 1, "{field}": {number}}}'.encode())
    if reply.status_code == 200:  # so small that it is 0
        assert (number, field) in {("1e-99999999999", name) for name in ("temperature", "min_p", "presence_penalty")}
    else:
        assert reply.status_code == 400
        error_of(reply)


def test_a_wrong_request_harms_none_beside_it(served: Served) -> None:
    body: dict[str, Any] = {"prompt": "One, two, three,", "max_tokens": 12}
    alone = served.complete(**body)["choices"]
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(served.complete, **body) for _ in range(3)]
        bad = [pool.submit(send, served, COMPLETIONS, b'{"prompt": [-1], "temperature": 1e300}') for _ in range(20)]
    assert all(job.result()["choices"] == alone for job in good)
    assert {job.result().status_code for job in bad} == {400}


def test_what_is_not_json_is_415(served: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application"):
        reply = served.http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert reply.status_code == 415
        error_of(reply)
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/ld+json"):
        body = b'{"prompt": "a", "max_tokens": 1}'
        assert served.http.post(COMPLETIONS, content=body, headers={"content-type": kind}).status_code == 200


def test_no_path_and_no_method(served: Served) -> None:
    for path in ("/", "/v1", "/v1/completion", "/v1/completions/", "/" + "x" * 5000, "/%00"):
        reply = served.http.get(path)
        assert reply.status_code == 404
        error_of(reply)
    for method, path, allowed in (
        ("GET", COMPLETIONS, "POST"),
        ("DELETE", CHATS, "POST"),
        ("POST", "/health", "GET"),
        ("PUT", "/v1/models", "GET"),
        ("PATCH", "/tokenize", "POST"),
    ):
        reply = served.http.request(method, path)
        assert reply.status_code == 405
        assert allowed in reply.headers["allow"]
        error_of(reply)


@contextmanager
def asking_for_health(served: Served) -> Iterator[None]:
    """Asks /health all the while, and every answer has to come before long; on a quiet machine, within 0.3 seconds."""
    worst, over = 0.0, False

    def ask() -> None:
        nonlocal worst
        with httpx.Client(base_url=served.url, timeout=30) as http:
            while not over:
                start = time.monotonic()
                assert http.get("/health").status_code == 200
                worst = max(worst, time.monotonic() - start)
                time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        yield
        over = True
        asking.result()
    assert worst < 5.0


def test_large_bodies_hold_up_nobody(served: Served) -> None:
    most = 15 << 20
    bodies = [
        (COMPLETIONS, {"prompt": "x " * (most // 2)}),
        (COMPLETIONS, {"prompt": "안녕" * (1 << 16), "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [5] * (most // 4)}),
        (COMPLETIONS, {"prompt": [[5]] * 100_000}),
        (COMPLETIONS, {"prompt": "a", "stop": ["s"] * 100_000}),
        (COMPLETIONS, {"prompt": "a", "stop": "ab" * 1_000_000}),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [5] * 1_000_000}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(100_000)}}),
        (CHATS, {"messages": [{"role": 5, "content": "x" * 100}] * 12_000}),
        (CHATS, {"messages": [5] * 12_000}),
        (CHATS, {"messages": [{"role": "user", "content": "x" * 1000}] * 12_000}),
        (CHATS, {"messages": [{"role": "user", "content": "a"}] * 12_000}),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "x"}] * 100_000}),
        ("/detokenize", {"tokens": [-1] * 100_000}),
        ("/detokenize", {"tokens": [5] * 3_000_000}),
    ]
    encoded = [(path, json.dumps(body, ensure_ascii=False).encode()) for path, body in bodies]
    huge = json.dumps({"prompt": "x" * 50_000_000}).encode()
    with asking_for_health(served):
        reply = send(served, COMPLETIONS, huge)
        assert reply.status_code == 413
        assert "16777216" in error_of(reply)["message"]
        for path, body in encoded:
            reply = send(served, path, body)
            assert reply.status_code == 400, (path, body[:50])
            error_of(reply)


def test_bodies_that_do_not_say_how_long_they_are(small: Served) -> None:
    """A chunked body is cut off where the limit is."""

    def chunks(count: int) -> Iterator[bytes]:
        yield b'{"max_tokens": 1, "prompt": "'
        for _ in range(count):
            yield b"x " * 500
        yield b'"}'

    reply = small.http.post(COMPLETIONS, content=chunks(60), headers=JSON)
    assert reply.status_code == 400  # it came, and the prompt is too long for this pool
    assert error_of(reply)["code"] == "context_length_exceeded"
    with socket.create_connection(small.address) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65536 + b"\r\n1\r\n")
        sock.sendall(b"x\r\n")
        answer = ends(sock, 5)
    assert b" 413 " in answer.split(b"\r\n")[0]
    assert b"connection: close" in answer.lower()


def ends(sock: socket.socket, within: float) -> bytes:
    """What comes until the server hangs up, which it does in time."""
    sock.settimeout(within)
    data = b""
    with suppress(ConnectionResetError):  # it hung up on what we were still sending
        while part := sock.recv(65536):
            data += part
    return data


def test_clients_that_are_slow_to_ask(small: Served) -> None:
    """Nothing at all, half a head, drops of a head, half a body: each is let go."""
    connections = []
    for start in (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"\r\n"):
        sock = socket.create_connection(small.address)
        sock.sendall(start)
        connections.append(sock)
    body = small.raw(b'{"prompt": "a", "ma', headers="X-More: y\r\n")
    slow = socket.create_connection(small.address)
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
    for sock in connections:
        with sock:
            assert ends(sock, 5) == b""
    with slow:
        assert b" 408 " in ends(slow, 5).split(b"\r\n")[0]
    with body:
        assert b" 400 " in body.recv(65536).split(b"\r\n")[0]
        ends(body, 5)  # idle after its answer


def test_heads_that_are_too_large(small: Served) -> None:
    with socket.create_connection(small.address) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        with suppress(OSError):
            for i in range(200):
                sock.sendall(b"X-%d: " % i + b"y" * 1000 + b"\r\n")
        answer = ends(sock, 5)
        assert answer == b"" or b" 431 " in answer


@pytest.mark.parametrize(
    "head",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),  # TLS
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http://x:99999999/ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nBad Header: x\r\n\r\n",
    ],
)
def test_what_is_no_http(small: Served, head: bytes) -> None:
    with socket.create_connection(small.address) as sock:
        sock.sendall(head)
        first, _, rest = ends(sock, 5).partition(b"\r\n")
    assert first == b"HTTP/1.1 400 Bad Request"
    assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_too_many_connections(model_path: Path, tmp_path: Path) -> None:
    """What is beyond the limit is told so, or hung up on if it stays silent; what was there before goes on."""
    options = ("--kv-cache-memory-bytes", str(20 * PAGE_BYTES), "--max-connections", "3")
    with serving(tmp_path / "log", model_path, *options) as server:
        server.http.get("/health")  # one that is kept
        idle = [socket.create_connection(server.address) for _ in range(2)]
        until(lambda: httpx.get(server.url + "/health").status_code == 503)
        reply = httpx.post(server.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        assert (reply.status_code, reply.headers["connection"]) == (503, "close")
        assert int(reply.headers["retry-after"]) >= 1
        assert error_of(reply)["code"] == "too_many_connections"
        with socket.create_connection(server.address) as silent:
            assert ends(silent, 5) == b""
        assert server.complete("a", max_tokens=1)["choices"]
        idle.pop().close()
        until(lambda: httpx.get(server.url + "/health").status_code == 200)
        idle.pop().close()


def test_many_more_tokens_than_the_context_has(served: Served) -> None:
    """Texts that are longer than the context can be counted, within bounds, and nobody waits meanwhile."""
    text, huge = "ab1!" * (1 << 17), "ab1!" * (1 << 20)
    with asking_for_health(served):
        reply = served.post("/tokenize", prompt=text, return_token_strs=True)
        assert reply.status_code == 200
        tokens = reply.json()["tokens"]
        assert len(tokens) == len(reply.json()["token_strs"]) > 8192
        assert served.post("/detokenize", tokens=tokens).json()["prompt"] == text
        for body in ({"prompt": huge}, {"messages": [{"role": "user", "content": huge}]}):
            error = served.refused("/tokenize", **body)
            assert error["code"] == "context_length_exceeded"
            assert "8192" in error["message"]


def test_who_leaves_a_large_text_to_be_counted_is_forgotten(served: Served) -> None:
    large = json.dumps({"prompt": "안녕" * (1 << 18)}, ensure_ascii=False).encode()
    for _ in range(100):
        served.raw(large, "/tokenize").close()
    with served.raw(b'{"prompt": "', "/tokenize", "X-Cut: off\r\n") as cut:
        cut.sendall(b"a")
    assert send(served, "/tokenize", large).status_code == 200  # not behind a minute's work for the others
    assert not [line for line in served.lines() if line["level"] == "error"]


def test_too_much_at_once(small: Served) -> None:
    error = small.refused(COMPLETIONS, prompt=["a"] * 9)
    assert (error["code"], error["param"]) == ("too_many_prompts", "prompt")
    assert small.refused(COMPLETIONS, prompt=["a"] * 8, n=1000)["param"] == "n"


def test_a_full_queue_is_429(small: Served) -> None:
    body = {"prompt": [7] * 20, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(24) as pool:
        replies = [job.result() for job in [pool.submit(small.post, COMPLETIONS, **body) for _ in range(24)]]
    codes = [reply.status_code for reply in replies]
    assert set(codes) == {200, 429}
    for reply in replies:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert error_of(reply)["code"] == "queue_full"
        else:
            assert reply.json()["choices"] == replies[codes.index(200)].json()["choices"]
