"""A short soak: requests abandoned in every phase, a crowd that does nothing, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bench.idle_connections import Crowd, at_rest, stream_speed
from bench.load import Server
from bench.soak import ABANDONED, OPTIONS, Soak, settle
from tests.server.serving import serving, until

from octavo.bench.wire import Connection

PATIENCE_S = 20.0
POOL = "--kv-cache-memory-bytes=12MiB"


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(str(model_path), POOL, *OPTIONS, "--header-timeout=2", log=log) as server:
        yield server
        assert server.stop() == 0
        assert not os.path.exists(f"/proc/{server.engine_pid}")
        assert '"level":"error"' not in log.read_text()


def test_abandoned_requests_leave_nothing_behind(server: Server) -> None:
    before = server.metrics()
    soak = Soak(server, num_requests=160, num_clients=16, share_abandoned=0.4, seed=5)
    asyncio.run(soak.run(50, progress=False))
    assert soak.faults == []
    assert {name for name in soak.outcomes if name.startswith("abandoned")} == {f"abandoned: {at}" for at in ABANDONED}
    after, left = settle(server)
    assert left == []
    states = [f"kv_pages{{state={state}}}" for state in ("referenced", "cached", "free")]
    assert sum(after[state] for state in states) == sum(before[state] for state in states)
    assert after["request_success_total{finished_reason=error}"] == 0
    assert after["request_success_total{finished_reason=abort}"] > 0


def test_a_crowd_that_does_nothing_is_served_and_let_go(server: Server) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{server.pid}/fd"))

    async def scene() -> None:
        crowd = Crowd(server.port)
        await crowd.gather_round(60, 6)
        await asyncio.wait_for(at_rest(server), PATIENCE_S)  # slow readers' answers are computed, read or not
        assert descriptors() > 60
        await stream_speed(server.endpoint, 20)
        deadline = time.monotonic() + PATIENCE_S
        while crowd.num_reopened < 40 and time.monotonic() < deadline:  # silent ones and half heads are closed in time
            await asyncio.sleep(0.1)
        assert crowd.num_reopened >= 40
        await crowd.leave()

    before = descriptors()
    asyncio.run(scene())
    deadline = time.monotonic() + PATIENCE_S
    while descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descriptors() <= before
    assert settle(server)[1] == []


def test_gauges_follow_a_request_that_is_dropped(server: Server) -> None:
    """Within a step and a poll, and no token is generated for nobody."""

    async def scene() -> None:
        connection = await Connection.open(server.endpoint)
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        reply = connection.send("/v1/completions", body)
        while len(reply.pieces) < 3:
            await asyncio.sleep(0.001)
        now = await asyncio.to_thread(server.metrics)
        assert now["num_requests_running"] == 1
        assert now["kv_pages{state=referenced}"] >= 1
        connection.close()

    asyncio.run(scene())
    after, left = settle(server, 2.0)
    assert left == []
    time.sleep(0.3)
    assert server.metrics()["generation_tokens_total"] == after["generation_tokens_total"]


def test_a_client_that_does_not_read_holds_up_nobody(model_path: Path, tmp_path: Path) -> None:
    """Its socket is full and its answer computed nevertheless; the end of the server does not wait for it."""
    path, log = tmp_path / "socket", tmp_path / "log"
    body = b'{"prompt": [5, 6], "max_tokens": 220, "ignore_eos": true, "stream": true, "logprobs": 20}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: o\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    options = ("--uds", str(path), "--drain-timeout", "0.1")
    with serving(log, model_path, POOL, *OPTIONS, *options) as server, socket.socket(socket.AF_UNIX) as stalled:
        stalled.connect(str(path))
        stalled.sendall(head % len(body) + body)
        assert stalled.recv(12) == b"HTTP/1.1 200"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://o") as http:
            computed = re.compile(r'request_success_total\{.*="length".*\} 1\.0')
            until(lambda: computed.search(http.get("/metrics").text) is not None, PATIENCE_S)
        assert server.stop() == 0
        [drained] = [line for line in server.lines() if line["message"] == "drained"]
        assert (drained["cut"], drained["stalled"]) == (0, 1)
        assert not [line for line in server.lines() if line["level"] == "error"]
