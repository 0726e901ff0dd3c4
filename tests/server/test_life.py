"""How requests and servers end: clients that go, limits of the pool, signals, and an engine that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.faulty_engine import CAUSE, RAISE
from tests.server.serving import PAGE_BYTES, Served, error_of, serving, until

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def request(**body: Any) -> bytes:
    return json.dumps(body).encode()


def aborts(served: Served) -> float:
    return served.metric("request_success_total", finished_reason="abort")


# ── clients that go ──


def test_a_client_that_goes_in_the_middle_of_a_stream(served: Served) -> None:
    before = aborts(served)
    sock = served.raw(request(prompt="Once upon a time", stream=True, **LONG))
    seen = b""
    while seen.count(b"data: ") < 3:
        seen += sock.recv(65536)
    sock.close()
    served.settle()
    assert aborts(served) == before + 1
    tokens = served.metric("generation_tokens_total")
    time.sleep(0.3)
    assert served.metric("generation_tokens_total") == tokens


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_without_having_read(served: Served, path: str, stream: bool) -> None:
    before = aborts(served)
    what: dict[str, Any] = (
        {"prompt": "Tell"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    )
    sock = served.raw(request(stream=stream, **what, **LONG), path)
    until(lambda: served.metric("num_requests_running") == 1)
    sock.close()
    served.settle()
    assert aborts(served) == before + 1


def test_a_client_that_goes_before_the_first_token(served: Served) -> None:
    before = aborts(served)
    sock = served.raw(request(prompt=list(range(30_000, 31_500)), stream=True, **LONG))
    until(lambda: served.metric("num_requests_running") == 1)
    sock.close()
    served.settle()
    assert aborts(served) == before + 1


def test_a_client_that_goes_with_many_prompts(served: Served) -> None:
    before = aborts(served)
    sock = served.raw(request(prompt=["a", "b", "c"], n=2, stream=True, **LONG))
    until(lambda: served.metric("num_requests_running") == 6)
    sock.close()
    served.settle()
    assert aborts(served) == before + 6


def test_a_client_that_goes_while_it_is_queued(small: Served) -> None:
    body = request(prompt=[9] * 20, **LONG | {"max_tokens": 140})
    running = [small.raw(body) for _ in range(4)]
    until(lambda: small.metric("num_requests_waiting") > 0)
    before = aborts(small)
    queued = small.raw(request(prompt=[9] * 130, max_tokens=20, temperature=0))
    until(lambda: small.metric("num_requests_running") + small.metric("num_requests_waiting") == 5)
    queued.close()
    until(lambda: aborts(small) == before + 1)
    for sock in running:
        sock.close()
    small.settle()


def test_a_body_that_is_cut_off(served: Served) -> None:
    with socket.create_connection(served.address) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
    until(lambda: any(line.get("outcome") == "disconnected" for line in served.lines()))


def test_readers_that_are_slow_hold_up_nobody(served: Served) -> None:
    body = request(prompt="One", stream=True, logprobs=20, **LONG | {"max_tokens": 1500})
    lazy = []
    for _ in range(4):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(served.address)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        lazy.append(sock)
    until(lambda: served.metric("num_requests_running") == 4)
    assert len(served.events(COMPLETIONS, prompt="Two", **LONG | {"max_tokens": 40})) >= 20
    for sock in lazy:
        sock.close()


@pytest.fixture(scope="module")
def local(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """A server on a Unix socket, which holds less than TCP's do: who does not read it stalls."""
    folder = tmp_path_factory.mktemp("local")
    options = ("--uds", str(folder / "socket"), "--max-model-len", "512", *SMALL)
    with serving(folder / "log", model_path, *options) as server:
        local = Local(server, folder / "socket")
        with local.http:
            yield local


class Local:
    def __init__(self, served: Served, path: Path) -> None:
        self.served, self.path = served, path
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://o", timeout=60)

    def stalled(self, **body: Any) -> socket.socket:
        """A client that has asked and does not read."""
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self.path))
        data = request(stream=True, logprobs=20, **body)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: o\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def ends(self, reason: str) -> int:
        found = re.search(rf'request_success_total\{{.*="{reason}".*\}} (\d+)', self.http.get("/metrics").text)
        assert found is not None
        return int(found[1])


def test_a_stop_string_ends_an_answer_that_nobody_reads(local: Local) -> None:
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "temperature": 1, "seed": 5}
    choice = local.http.post(COMPLETIONS, json=body | {"logprobs": 0}).json()["choices"][0]
    text, start = choice["text"], choice["logprobs"]["text_offset"][330] - len("Once") + 4
    stop = next(text[at : at + 12] for at in range(start, len(text)) if text.find(text[at : at + 12]) == at)
    before, generated = local.ends("stop"), tokens_of(local.http)
    with local.stalled(**body, stop=stop) as sock:
        until(lambda: local.ends("stop") == before + 1, 20)
        assert 330 <= tokens_of(local.http) - generated < 480
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(1 << 16)
    pieces = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text[: text.find(stop)]
    assert pieces[-1]["choices"][0]["stop_reason"] == stop


def tokens_of(http: httpx.Client) -> int:
    found = re.search(r"generation_tokens_total\{.*\} (\d+)", http.get("/metrics").text)
    assert found is not None
    return int(found[1])


def test_who_goes_before_the_answer_is_sent_is_logged_as_gone(local: Local) -> None:
    before = local.ends("length")
    with local.stalled(prompt="One", max_tokens=400, ignore_eos=True) as sock:
        until(lambda: local.ends("length") == before + 1, 20)
        head = sock.recv(4096).decode()
    [name] = re.findall(r"x-request-id: (\S+)", head)
    line = local.served.line(name)
    assert (line["outcome"], line["completion_tokens"], line["finish_reasons"]) == ("disconnected", 400, {"length": 1})


# ── the pool's limits ──


@pytest.mark.parametrize("length", [159, 160, 161, 162])
def test_prompts_of_the_pools_size(small: Served, length: int) -> None:
    """Ten pages of sixteen: 160 slots, and the last token drawn needs none."""
    body = {"prompt": [11] * length, "max_tokens": 1, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(small.complete, "hello", max_tokens=2)
        reply = small.post(COMPLETIONS, **body)
        assert len(other.result()["choices"]) == 1
    if length <= 160:
        assert reply.status_code == 200
    else:
        assert reply.status_code == 400
        assert error_of(reply)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("n", [4, 5, 64])
def test_more_choices_than_places_run_in_waves(small: Served, n: int) -> None:
    reply = small.complete("Once", n=n, max_tokens=4, temperature=1.0, seed=1)
    assert [choice["index"] for choice in reply["choices"]] == list(range(n))
    assert all(choice["finish_reason"] in ("stop", "length") for choice in reply["choices"])
    assert reply["usage"]["prompt_tokens"] == small.complete("Once", max_tokens=1)["usage"]["prompt_tokens"]


def test_answers_that_do_not_fit_beside_each_other_all_come(small: Served) -> None:
    """Seven pages each, of ten: whether the later ones wait or give way is for what the machine's steps cost to say."""
    bodies = [{"prompt": [20 + i] * 40, "max_tokens": 60, "ignore_eos": True} for i in range(4)]
    alone = [small.complete(**body)["choices"] for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: small.complete(**body)["choices"], bodies))
    assert together == alone


def test_prompts_with_one_beginning_sent_at_once(served: Served) -> None:
    """Sixteen at once on a cold cache, one of them abandoned: each is as it is alone with another salt."""
    start = list(range(9000, 9128))
    bodies = [{"prompt": [*start, 100 + i, 200 + i], "max_tokens": 4} for i in range(16)]
    gone = served.raw(request(prompt=[*start, 1, 2], **LONG))
    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(served.complete, **body) for body in bodies]
        gone.close()
        together = [job.result()["choices"] for job in jobs]
    for i in (0, 7, 15):
        assert served.complete(**bodies[i], cache_salt=f"alone{i}")["choices"] == together[i]


def test_a_stream_goes_on_while_prompts_come(small: Served) -> None:
    """Every step serves who is running: a stream's tokens do not wait for the prompts of others."""
    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(small.events, COMPLETIONS, prompt="Count: 1, 2,", max_tokens=100, ignore_eos=True)
        until(lambda: small.metric("num_requests_running") >= 1)
        others = [pool.submit(small.complete, [30 + i] * 20, max_tokens=1) for i in range(6)]
        assert all(len(job.result()["choices"]) == 1 for job in others)
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"


def test_priority_is_taken_where_it_is_the_policy(small: Served, served: Served) -> None:
    assert small.complete("a", priority=-5, max_tokens=1)["choices"]
    assert served.refused(COMPLETIONS, prompt="a", priority=2)["param"] == "priority"
    assert served.complete("a", priority=0, max_tokens=1)["choices"]


# ── signals ──

SMALL = ("--kv-cache-memory-bytes", str(60 * PAGE_BYTES))


def children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in text.split()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def streamed(url: str, **body: Any) -> list[Any]:
    with httpx.stream("POST", url + COMPLETIONS, json={"stream": True, **body}, timeout=60) as reply:
        return [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]


def test_sigterm_lets_running_requests_finish(model_path: Path, tmp_path: Path) -> None:
    with (
        serving(tmp_path / "log", model_path, *SMALL, "--drain-timeout", "30") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        jobs = [pool.submit(streamed, server.url, prompt="One", **LONG | {"max_tokens": 60}) for _ in range(3)]
        until(lambda: server.metric("num_requests_running") == 3)
        [engine] = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any(line["message"] == "draining" for line in server.lines()))
        for answer in (server.post(COMPLETIONS, prompt="late"), server.http.get("/health")):
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "shutting_down"
            assert answer.headers["connection"] == "close"
            assert int(answer.headers["retry-after"]) > 0
        for job in jobs:
            *events, done = job.result()
            assert done == "[DONE]"
            assert json.loads(events[-1])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0
        until(lambda: not alive(engine))


def test_what_takes_longer_than_the_drain_is_told_so(model_path: Path, tmp_path: Path) -> None:
    with (
        serving(tmp_path / "log", model_path, *SMALL, "--drain-timeout", "0.2") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        long = LONG | {"max_tokens": 280}  # all three fit
        stream = pool.submit(streamed, server.url, prompt="One", **long)
        whole = pool.submit(httpx.post, server.url + COMPLETIONS, json={"prompt": "Two", **long}, timeout=60)
        stalled = server.raw(request(prompt="Three", stream=True, logprobs=20, **long))
        until(lambda: server.metric("num_requests_running") == 3)
        [engine] = children(server.process.pid)
        assert server.stop() == 0
        *_, error, done = stream.result()
        assert done == "[DONE]"
        assert json.loads(error)["error"]["type"] == "service_unavailable_error"
        assert whole.result().status_code == 503
        error_of(whole.result())
        stalled.close()
        until(lambda: not alive(engine))


def test_the_second_sigint_leaves_at_once(model_path: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", model_path, *SMALL) as server:
        sock = server.raw(request(prompt="One", **LONG | {"max_tokens": 900}))
        until(lambda: server.metric("num_requests_running") == 1)
        [engine] = children(server.process.pid)
        server.process.send_signal(signal.SIGINT)
        until(lambda: any(line["message"] == "draining" for line in server.lines()))
        assert server.stop(signal.SIGINT) == 130
        sock.close()
        until(lambda: not alive(engine))


def test_an_engine_that_dies_is_told_everyone_and_started_once(model_path: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", model_path, *SMALL) as server, ThreadPoolExecutor(4) as pool:
        for turn in range(2):
            long = LONG | {"max_tokens": 900}
            stream = pool.submit(streamed, server.url, prompt="One", **long)
            whole = pool.submit(httpx.post, server.url + COMPLETIONS, json={"prompt": "Two", **long}, timeout=60)
            until(lambda: server.metric("num_requests_running") == 2)
            seen = server.metric("generation_tokens_total")
            until(lambda seen=seen: server.metric("generation_tokens_total") > seen + 8)  # type: ignore[misc]  # the stream has begun
            [engine] = children(server.process.pid)
            os.kill(engine, signal.SIGKILL)
            *_, error, done = stream.result()
            assert (json.loads(error)["error"]["code"], done) == ("engine_dead", "[DONE]")
            assert whole.result().status_code == 503
            assert error_of(whole.result())["code"] == "engine_dead"
            if turn == 0:
                assert server.complete("Again", max_tokens=2)["choices"]  # waits for the new one
                assert server.http.get("/health").status_code == 200
        assert server.process.wait(20) == 1
        assert any("died" in line["message"] and line["level"] == "error" for line in server.lines())


def test_an_error_of_one_request_is_its_own(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from octavo.engine import async_llm\nasync_llm.PROGRAM = 'tests.engine.faulty_engine'\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    with (
        serving(tmp_path / "log", model_path, *SMALL, environment=environment) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        beside = pool.submit(server.events, COMPLETIONS, prompt="Two", max_tokens=60, ignore_eos=True)
        until(lambda: server.metric("num_requests_running") == 1)
        reply = server.post(COMPLETIONS, prompt=[RAISE, 5, 6])
        assert reply.status_code == 500
        error = error_of(reply)
        assert (error["code"], error["type"]) == ("request_failed", "server_error")
        assert CAUSE in error["message"]
        text = server.complete("Two", max_tokens=60, ignore_eos=True)["choices"][0]["text"]
        assert "".join(event["choices"][0]["text"] for event in beside.result()) == text
        assert server.metric("request_success_total", finished_reason="error") == 1
        assert any("break_or_execute" in line["message"] for line in server.lines() if line["level"] == "error")
        server.settle()


def test_an_engine_that_hangs_is_ended_and_started_again(model_path: Path, tmp_path: Path) -> None:
    options = (*SMALL, "--step-timeout", "1")
    with serving(tmp_path / "log", model_path, *options) as server, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.post, COMPLETIONS, prompt="Two", **LONG | {"max_tokens": 900})
        until(lambda: server.metric("num_requests_running") == 1)
        [engine] = children(server.process.pid)
        os.kill(engine, signal.SIGSTOP)
        assert whole.result().status_code == 503
        error = error_of(whole.result())
        assert error["code"] == "engine_dead"
        assert "no step ended within 1 s" in error["message"]
        assert server.complete("Again", max_tokens=2)["choices"]
        assert not alive(engine)
        assert any("no step ended" in line["message"] and line["level"] == "error" for line in server.lines())


def test_a_port_in_use_and_a_model_that_is_none(served: Served, model_path: Path, tmp_path: Path) -> None:
    python = str(served.process.args[0])  # type: ignore[index]
    run: Callable[..., Any] = lambda *options: subprocess.run(  # noqa: E731
        [python, "-m", "octavo", "serve", *options], capture_output=True, text=True, timeout=60, check=False
    )
    done = run(str(model_path), "--port", str(served.address[1]))
    assert done.returncode == 2
    assert "--port: cannot listen" in done.stderr
    done = run(str(tmp_path / "none.gguf"), "--port", "0")
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    done = run(str(model_path), "--port", "0", "--kv-cache-memory-bytes", "1")
    assert done.returncode == 2
    assert "--kv-cache-memory-bytes" in done.stderr
    (tmp_path / "broken.jinja").write_text("{% for %}")
    done = run(str(model_path), "--port", "0", *SMALL, "--chat-template", str(tmp_path / "broken.jinja"))
    assert done.returncode == 2
    assert "--chat-template: is no Jinja template" in done.stderr
    assert "Traceback" not in done.stderr
