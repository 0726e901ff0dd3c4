"""`octavo bench serve`: its arithmetic, what it makes of hostile servers, and a run on a real one."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import client_check
from typer.testing import CliRunner, Result

from octavo.bench import charts, loads, report
from octavo.bench.figures import Outcome, Price, figures, goals, spread, summary
from octavo.bench.loads import Load, Talk
from octavo.bench.report import Grid, Plot, Report, Series
from octavo.bench.serve import Plan, Target, measure, summarise, warnings
from octavo.bench.wire import series
from octavo.bench.workloads import WORKLOADS, Work
from octavo.cli import app
from octavo.errors import ConfigError, InvalidRequest, OctavoError
from octavo.simulator.traces import Arrival, tokens_of
from tests.models import tiny
from tests.server.serving import Served, serving

# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────────────────────

FAST = Outcome(1.0, (1.2, 1.3, 1.5), 1.5, 10, 3, 3)
SLOW = Outcome(0.5, (1.5, 2.5), 2.5, 30, 5, 9)
LOST = Outcome(0.0, (0.1,), 0.1, 7, 1, 9, "broken off", "the stream ends before the answer does")


def test_latencies_are_those_that_vllm_names() -> None:
    assert FAST.latencies["ttft"] == pytest.approx([200]) and FAST.latencies["itl"] == pytest.approx([100, 200])
    assert FAST.latencies["tpot"] == pytest.approx([150]) and FAST.latencies["e2el"] == pytest.approx([500])
    assert SLOW.latencies["tpot"] == pytest.approx([250])  # two events brought five tokens
    assert Outcome(0.0, (1.0,), 1.0, 1, 1, 1).latencies["tpot"] == []


def test_figures_count_what_was_answered() -> None:
    found = figures([FAST, SLOW, LOST], 4.0, {"ttft": 500, "itl": 200}, Price(3.6, 4.0))
    assert (found["completed"], found["failed"], found["short_answers"]) == (2, 1, 1)
    assert found["failures"] == {"broken off": {"count": 1, "example": LOST.detail}}
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (40, 8)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.5, 2, 12)
    assert (found["request_goodput"], found["goodput_share"]) == (0.25, 1 / 3)
    assert found["mean_ttft_ms"] == pytest.approx(600) and found["median_itl_ms"] == pytest.approx(200)
    # 4 s cost 0.004; 48 tokens, or 40 + 4 · 8 = 72 that are weighed
    assert found["cost_per_million_tokens"] == pytest.approx(0.004e6 / 48)
    assert found["cost_per_million_output_tokens"] == 4 * found["cost_per_million_input_tokens"]
    paid = 40 * found["cost_per_million_input_tokens"] + 8 * found["cost_per_million_output_tokens"]
    assert paid / 1e6 == pytest.approx(0.004)


def test_nothing_answered_has_no_latency_and_no_cost() -> None:
    found = figures([LOST], 1.0, {"ttft": 1}, Price(1.0))
    assert (found["completed"], found["output_throughput"], found["goodput_share"]) == (0, 0, 0)
    assert "mean_ttft_ms" not in found and "cost_per_million_tokens" not in found


def test_percentiles_are_those_of_numpy() -> None:
    values = [float(value) for value in np.random.default_rng(1).exponential(size=37)]
    found = spread(values)
    assert list(found.values()) == pytest.approx([np.mean(values), *np.percentile(values, [50, 90, 99])])
    assert spread([3.0]) == {"mean": 3.0, "median": 3.0, "p90": 3.0, "p99": 3.0} and spread([]) == {}


def test_every_goal_must_be_met() -> None:
    assert FAST.meets({"ttft": 201, "tpot": 151, "itl": 201, "e2el": 501}) and FAST.meets({})
    for name, most in {"ttft": 199, "tpot": 149, "itl": 199, "e2el": 499}.items():
        assert not FAST.meets({"ttft": 1e9, name: most})
    assert goals(["ttft:500", "itl:50.5"]) == {"ttft": 500, "itl": 50.5}
    for wrong in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "speed:5"):
        with pytest.raises(InvalidRequest, match="goodput: must look like ttft:500"):
            goals([wrong])


def test_rounds_are_compared_in_pairs() -> None:
    def run(round: int, speed: float, **more: Any) -> dict[str, Any]:
        return {"round": round, "output_throughput": speed, "whole": True, **more}

    found = summary([run(0, 20.0, failed=0), run(1, 90.0, failed=2)], [run(1, 30.0), run(0, 20.0), run(2, 1.0)])
    assert found["figures"]["output_throughput"] == {"median": 55, "least": 20, "most": 90}
    assert found["ratios"] == {"output_throughput": {"median": 2, "least": 1, "most": 3}}
    assert found["figures"]["failed"]["most"] == 2 and "whole" not in found["figures"]


# ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_runs_of_a_trace_are_equal_tokens() -> None:
    shared = tokens_of(3, 512)
    first, second, other = (Arrival(0, array("i", shared + tokens_of(own, 20)), 1, 0) for own in (5, 7, 9))
    one, two = loads.drawn(first, 1, 1000), loads.drawn(second, 1, 1000)
    assert len(one) == len(two) == 532 and one[:512] == two[:512] and one[512:] != two[512:]
    assert min(one) >= 100 and max(one) < 1000 and len(set(one)) > 300
    assert loads.drawn(other, 2, 1000)[:512] != one[:512]  # another seed shares nothing


def test_people_come_at_the_rate_asked_for() -> None:
    talks = [Talk.single(Work([1], 1))] * 4000
    times = [talk.at for talk in loads.at_rate(talks, 8.0, seed=1)]
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0 and times == sorted(times)
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.05) and np.std(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert {talk.at for talk in loads.at_rate(talks, 0.0, seed=1)} == {0.0}


def test_conversations_have_their_turns() -> None:
    load = loads.of_conversations(3, 3000, 600, think_s=2.0)
    talks = load.draw(1, 1000)
    assert len(talks) == 1000 and {len(talk.turns) for talk in talks} == {3}
    assert all(talk.pauses[0] == 0 for talk in talks)
    assert np.mean([pause for talk in talks for pause in talk.pauses[1:]]) == pytest.approx(2, rel=0.15)
    assert len({tuple(talk.turns[0].prompt[:32]) for talk in talks}) == 1  # the system's prompt
    assert talks != load.draw(2, 1000) and talks == load.draw(1, 1000)


# ── hostile servers ──────────────────────────────────────────────────────────────────────────────────────────────

Answer = Callable[["Handler"], None]


class Scripted(socketserver.ThreadingTCPServer):
    """Answers what is next in `script`, then as a good server does; keeps what it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        self.refuses: tuple[str, ...] = ()
        self.stalled, self.over = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(socketserver.StreamRequestHandler):
    server: Scripted

    def handle(self) -> None:
        self.going = True
        while self.going and (line := self.rfile.readline()):
            length = 0
            while (header := self.rfile.readline().strip()) != b"":
                length = int(header[15:]) if header.lower().startswith(b"content-length:") else length
            body = self.rfile.read(length)
            if line.startswith(b"GET"):
                models = b'{"data":[{"id":"m","meta":{"n_vocab":500}}]}'
                found = b"models" in line
                self.say(models if found else b"{}", b"application/json", b"200 OK" if found else b"404 Not Found")
                continue
            asked = json.loads(body)
            self.server.asked.append(asked)
            if wrong := [name for name in self.server.refuses if name in asked]:
                self.say(json.dumps({"error": {"message": f"{wrong[0]} is unknown"}}).encode(), status=b"400 Bad")
            else:
                (self.server.script.pop(0) if self.server.script else good)(self)

    def say(self, body: bytes, kind: bytes = b"text/event-stream", status: bytes = b"200 OK", short: int = 0) -> None:
        head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(body))
        self.wfile.write(head + body[: len(body) - short])

    def stall(self) -> None:
        self.server.stalled.set()
        self.server.over.wait(20)
        self.going = False


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def token(text: str, end: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": end}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
DONE = b"data: [DONE]\n\n"


def good(to: Handler) -> None:
    to.say(token("a") + token("b") + token("", "length") + USAGE + DONE)


def closing(
    to: Handler, body: bytes, head: bytes = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
) -> None:
    to.wfile.write(head + body)
    to.going = False


FAILURES: dict[str, Answer] = {
    "status 500": lambda to: to.say(b'{"error":{"message":"out of luck"}}', status=b"500 Oh"),
    "status 503": lambda to: to.say(b"\xff\x00", b"text/html", b"503 Busy"),
    "broken off: cut": lambda to: (to.say(token("a") + USAGE, short=9), setattr(to, "going", False))[0],
    "broken off: no end": lambda to: to.say(token("a")),
    "broken off: at once": lambda to: closing(to, b"", b""),
    "broken off: no HTTP": lambda to: closing(to, b"hello\r\n\r\n", b""),
    "unreadable: no JSON": lambda to: to.say(b"data: {oops\n\n" + DONE),
    "unreadable: a list": lambda to: to.say(event([1, 2]) + DONE),
    "unreadable: a number": lambda to: to.say(event({"choices": 5}) + DONE),
    "unreadable: no text": lambda to: to.say(event({"choices": [{"text": {"a": 1}}]}) + DONE),
    "unreadable: counts": lambda to: to.say(token("a", "stop") + event({"usage": {"completion_tokens": "x"}}) + DONE),
    "no tokens": lambda to: to.say(DONE),
    "no stream": lambda to: to.say(b'{"choices":[{"text":"whole"}]}', b"application/json"),
    "error in the stream": lambda to: to.say(token("a") + event({"error": {"message": "died"}}) + DONE),
    "timed out": Handler.stall,
}


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def plan(count: int = 1, **changes: Any) -> Plan:
    load = Load("some", "short ones", lambda seed, vocab: [Talk.single(Work([seed, 2, 3], 5))] * count)
    same = {"load": load, "rates": [0.0], "bounds": [1], "rounds": 1, "seed": 1, "timeout_s": 20.0, "num_warmups": 0}
    return Plan(**{**same, "ignore_eos": True, "goals": {}, "price": None, **changes})


def run(server: Scripted, plan: Plan, path: str = "/v1/completions", *, text: bool = False) -> dict[str, Any]:
    target = Target.find(server.url, "it", None, None, path, text, None)
    script, server.script = server.script, [good]  # the warm-up's first request
    measured: list[list[dict[str, Any]]] = []

    def tell(about: str, done: int, total: int) -> None:
        if "round" in about and done == 0:
            server.script[:] = script

    measured, whole = measure([target], plan, tell)
    assert whole
    [server_record] = measured
    [found] = server_record["runs"]
    return found


def test_failures_are_counted_by_their_kind(scripted: Scripted) -> None:
    """Each on a connection of its own, among requests that are answered."""
    scripted.script = [part for answer in FAILURES.values() for part in (answer, good)]
    # a connection that lay idle may have been closed: a request that it loses is sent again, so none may lie there
    kinds = [name.partition(":")[0] for name in FAILURES]
    found = run(scripted, plan(2 * len(FAILURES), timeout_s=0.4))
    counted = {kind: of["count"] for kind, of in found["failures"].items()}
    expected = {kind: kinds.count(kind) for kind in kinds}
    expected["broken off"] -= 2  # these two were sent again, and answered by what was next
    assert counted == expected
    assert (
        found["completed"] == 2 * len(FAILURES) - sum(counted.values())
        and found["total_output_tokens"] == 5 * found["completed"]
    )
    assert found["failures"]["status 500"]["example"] == "out of luck"
    assert found["failures"]["error in the stream"]["example"] == "died"


@pytest.mark.parametrize(
    "answer",
    [
        lambda to: closing(to, token("a") + token("b", "stop")),  # neither a length nor a last event
        lambda to: to.say((b": hi\r\n\r\n" + token("a") + token("b", "stop") + DONE).replace(b"\n", b"\r\n")),
        lambda to: to.say((token("a") + token("", "stop") + USAGE + DONE).rstrip()),
        lambda to: closing(
            to,
            b"".join(b"3\r\n%b\r\n" % piece for piece in re.findall(rb"(?s)...", token("ab", "stop") + DONE))
            + b"0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        ),
    ],
)
def test_answers_are_read_however_they_are_framed(scripted: Scripted, answer: Answer) -> None:
    scripted.script = [answer]
    found = run(scripted, plan())
    assert (found["completed"], found["failures"]) == (1, {})
    assert found["total_output_tokens"] in (1, 2, 5)


def test_a_role_and_an_end_are_no_tokens(scripted: Scripted) -> None:
    def chat(to: Handler) -> None:
        deltas = [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "hm"},
            {"content": ""},
            {"content": "Hi"},
            {},
        ]
        ends = [None] * 4 + ["stop"]
        events = [{"choices": [{"delta": d, "finish_reason": end}]} for d, end in zip(deltas, ends, strict=True)]
        to.say(b"".join(map(event, events)) + DONE)

    scripted.script = [chat, chat]
    talk = Talk(0.0, [Work([100, 101], 7), Work([102], 7)], [0.0, 0.0])
    load = Load("talk", "two turns", lambda seed, vocab: [talk])
    found = run(scripted, plan(load=load), "/v1/chat/completions", text=True)
    assert (found["completed"], found["total_output_tokens"]) == (2, 6)  # no usage: events are counted
    said = scripted.asked[-1]["messages"]
    assert [one["role"] for one in said] == ["user", "assistant", "user"]
    assert [one["content"] for one in said] == [loads.words([100, 101]), "hmHi", loads.words([102])]


def test_optional_fields_are_left_out_where_they_are_refused(scripted: Scripted) -> None:
    scripted.refuses = ("ignore_eos",)
    assert run(scripted, plan())["completed"] == 1
    assert "ignore_eos" not in scripted.asked[-1] and scripted.asked[-1]["stream_options"] == {"include_usage": True}
    scripted.refuses = ("prompt",)
    with pytest.raises(OctavoError, match=r"status 400, prompt is unknown; a server that .* --prompts text$"):
        run(scripted, plan())


def test_two_clients_see_the_same_answers(scripted: Scripted) -> None:
    async def both() -> list[dict[str, float]]:
        tee = client_check.Tee(scripted.server_address[1])
        async with await asyncio.start_server(tee.client, "127.0.0.1", 0) as server:
            url = "http://127.0.0.1:{}".format(*server.sockets[0].getsockname()[1:])
            work = [Work([number, 2], 5) for number in range(6)]
            found = await asyncio.gather(*(client_check.ask_all(url, work, 2, 0.0) for _ in range(2)))
        await asyncio.wait(tee.open)
        return found

    for found in asyncio.run(both()):
        assert set(found) >= set(client_check.NAMES)
        assert found["output_throughput"] == pytest.approx(5 * found["request_throughput"])  # as the server counts them
        assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"]
    assert sorted(asked["prompt"][0] for asked in scripted.asked) == list(range(6))  # each was asked once


def test_servers_take_turns() -> None:
    order: list[str] = []
    with Scripted() as one, Scripted() as two:
        threads = [threading.Thread(target=of.serve_forever, kwargs={"poll_interval": 0.01}) for of in (one, two)]
        for thread in threads:
            thread.start()
        targets = [Target.find(of.url, None, None, None, "/v1/completions", False, None) for of in (one, two)]
        both = replace_names(targets)
        servers, whole = measure(both, plan(2, rounds=2, bounds=[1, 2]), lambda about, done, total: order.append(about))
        for of in (one, two):
            of.shutdown()
        for thread in threads:
            thread.join()
    assert whole and list(dict.fromkeys(about for about in order if "round" in about)) == [
        *("one, round 1, 1 at once", "two, round 1, 1 at once", "one, round 1, 2 at once", "two, round 1, 2 at once"),
        *("two, round 2, 1 at once", "one, round 2, 1 at once", "two, round 2, 2 at once", "one, round 2, 2 at once"),
    ]
    assert one.asked == two.asked
    prompts = [tuple(asked["prompt"]) for asked in one.asked[1:]]
    assert len(prompts) == 8 and len(set(prompts)) == 4  # each run has its own
    lines = summarise(servers)
    assert [(line["server"], line["max_concurrency"], line["rounds"]) for line in lines] == [
        *(("one", 1, 2), ("one", 2, 2), ("two", 1, 2), ("two", 2, 2))
    ]
    assert lines[2]["ratios"]["total_output_tokens"]["median"] == 1 and lines[0]["ratios"] == {}


def replace_names(targets: list[Target]) -> list[Target]:
    return [replace(target, name=name) for target, name in zip(targets, ("one", "two"), strict=True)]


def test_an_interruption_keeps_what_was_measured(scripted: Scripted, tmp_path: Path) -> None:
    scripted.script = [good] * 3 + [Handler.stall]  # the first request, two of the run, and one that has no end
    command = [sys.executable, "-m", "octavo", "bench", "serve", "--url", scripted.url, "--num-warmups", "0"]
    options = ["--num-requests", "9", "--concurrency", "1", "--json", str(tmp_path / "it.json")]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert scripted.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    document = json.loads((tmp_path / "it.json").read_text())
    [found] = document["servers"][0]["runs"]
    assert not document["whole"] and not found["whole"] and (found["completed"], found["failed"]) == (2, 0)
    assert "interrupted" in printed


def test_a_server_that_is_not_there_is_told(scripted: Scripted) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9", "--num-requests", "1"])
    assert isinstance(result.exception, OctavoError) and "cannot be reached" in str(result.exception)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--timeout", "0.05"])
    assert "cannot be reached: timed out" in str(result.exception)
    for options, message in (
        (["--request-rate", "0"], "request_rate: must be numbers above 0"),
        (["--concurrency", "a"], "concurrency: must be whole numbers"),
        (["--concurrency", "4,0"], "concurrency: must be numbers above 0"),
        (["--concurrency", "-1"], "concurrency: must be numbers above 0"),
        (["--name", "a", "--name", "b"], "name: is given 2 times, for 1 servers"),
        (["--model", "a", "--model", "b"], "model: is given 2 times, for 1 servers"),
        (["--turns", "2", "--trace", "x"], "exclude each other"),
        (["--turns", "2", "--prompts", "tokens"], "must be text in chats and conversations"),
    ):
        result = CliRunner().invoke(app, ["bench", "serve", "--url", scripted.url, *options])
        assert message in str(result.exception)


def test_where_nothing_is_answered_the_page_and_the_status_say_so(scripted: Scripted, tmp_path: Path) -> None:
    scripted.script = [good] + [FAILURES["status 500"]] * 2
    page = tmp_path / "it.html"
    command = ["bench", "serve", "--url", scripted.url, "--num-warmups", "0", "--num-requests", "2"]
    result = CliRunner().invoke(app, [*command, "--html", str(page)])
    assert result.exit_code == 1 and "2 × status 500" in result.output
    quick = {"completed": 0, "client_cpu_share": 0.99, "max_late_ms": 0.0, "short_answers": 0}
    assert not list(warnings([{"name": "refuses at once", "runs": [quick]}]))
    assert "Failures" in page.read_text() and "2 × status 500" in page.read_text()


# ── a real server ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("real")
    shape = tiny.config("llama")
    model = tiny.write_folder(folder / "tiny", shape, tiny.tensors(shape))
    with serving(folder / "log", model, "--num-threads", "1", "--kv-cache-memory-bytes", "2MiB") as server:
        yield server


def bench(server: Served, folder: Path, *options: str) -> tuple[Result, dict[str, Any]]:
    command = [
        "bench",
        "serve",
        "--url",
        server.url,
        "--vocab-size",
        "250",
        "--json",
        str(folder / "it.json"),
        *options,
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result, json.loads((folder / "it.json").read_text())


def test_a_real_server_counts_the_same(real: Served, tmp_path: Path) -> None:
    before = real.metric("generation_tokens_total")
    files = ["--html", str(tmp_path / "it.html"), "--png", str(tmp_path / "it.png")]
    options = ["--workload", "uniform", "--num-requests", "4", "--concurrency", "1,4", "--request-rate", "100"]
    result, document = bench(real, tmp_path, *options, *files, "--goodput", "e2el:1e9", "--price-per-hour", "1")
    [server] = document["servers"]
    assert [run["max_concurrency"] for run in server["runs"]] == [1, 4] and server["ignore_eos"]
    for found in server["runs"]:
        assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (4, 512, 512)
        assert found["goodput_share"] == 1 and found["short_answers"] == 0
        assert found["output_throughput"] * found["duration"] == pytest.approx(512)
        assert 0 < found["median_ttft_ms"] < found["median_e2el_ms"] <= 1e3 * found["duration"]
        at = found["timeline"]
        assert len(at["at"]) >= 1 and {"running", "waiting", "running_bytes", "cached_bytes", "empty_bytes"} <= set(at)
        assert all(empty <= held for empty, held in zip(at["empty_bytes"], at["running_bytes"], strict=True))
    assert real.metric("generation_tokens_total") - before == 2 * 512 + (1 + 4) * 4  # a first one, four to warm up
    assert "output tokens/s" in result.output and (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    again = report.page(charts.of_serving(json.loads(json.dumps(document))))
    assert again == (tmp_path / "it.html").read_text() and "<dd>e2el:1e9<dt>price an hour<dd>1.0" in again


def test_conversations_with_a_real_server_find_what_was_said(real: Served, tmp_path: Path) -> None:
    before = real.metric("prefix_cache_hits_total")
    options = ["--turns", "2", "--num-requests", "4", "--endpoint", "/v1/chat/completions", "--scale", "600"]
    _, document = bench(real, tmp_path, *options)
    [found] = document["servers"][0]["runs"]
    assert (found["completed"], found["failed"]) == (4, 0), found["failures"]
    assert real.metric("prefix_cache_hits_total") > before


def test_a_trace_is_sent_at_its_times(real: Served, tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.0,20,3", "2023-11-16 18:15:46.3,30,4"]
    (tmp_path / "trace.csv").write_text("\n".join([*rows, "2023-11-16 18:15:46.4,600,5"]))
    _, document = bench(real, tmp_path, "--trace", str(tmp_path / "trace.csv"), "--num-warmups", "0")
    [found] = document["servers"][0]["runs"]
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (50, 7)
    assert found["failures"]["status 400"]["count"] == 1  # the third is longer than the context
    sent = sorted(one["sent_s"] for one in found["requests"])
    assert sent[1] >= 0.29 and sent[2] >= 0.39  # the loop's clock has milliseconds


def test_series_are_told_apart_by_their_own_labels() -> None:
    page = b'# HELP a b\nvllm:a{engine="0",model_name="m"} 1\noctavo:b{model_name="m",state="c"} 2.5\nc 3\n'
    assert series(page) == {"a": 1, "b{state=c}": 2.5, "c": 3}


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Links(HTMLParser):
    """Fails on anything that a browser would ask a server for."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object", "base", "use", "image"), tag
        assert not {name for name, _ in attrs} & {"src", "href", "srcset", "xlink:href", "onload"}
        assert all("url(" not in (value or "") for _, value in attrs)


def test_a_page_asks_nobody_for_anything() -> None:
    nasty = '"><script src="http://x/y.js"></script>'
    plot = Plot(nasty, nasty, nasty, [Series(nasty, [0, 1], [2, 3], [nasty, ""])])
    bars = Plot("bars", "", "y", [Series("a", [], [1, 2]), Series("b", [], [3, 4])], "bars", [nasty, "two"])
    areas = Plot("areas", "x", "y", [Series("a", [0, 1], [1, 2]), Series("b", [0, 1], [3, 4])], "areas")
    text = report.page(Report(nasty, [(nasty, nasty)], [Grid(nasty, [nasty], [[nasty]]), plot, bars, areas]))
    Links().feed(text)
    assert "url(" not in text and "@import" not in text and "default-src 'none'" in text
    assert text.count("<svg") == 3 and areas.tops == [[1, 2], [4, 6]]


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0, [0, 1]), (6, [0, 1, 2, 3, 4, 5, 6]), (7, [0, 2, 4, 6, 8]), (59.4, [0, 10, 20, 30, 40, 50, 60])],
)
def test_ticks_are_round(most: float, expected: list[float]) -> None:
    assert report.ticks(most) == expected
    for value in (1e-9, 0.003, 123456.0, 1e30):
        found = report.ticks(value)
        assert found[-1] >= value * (1 - 1e-9) > found[-2] * (1 - 1e-6) and 3 <= len(found) <= 8


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    report.check_png(None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        report.check_png(Path("it.png"))


def test_workloads_are_loads() -> None:
    load = loads.of_workload(WORKLOADS["single"], 3)
    assert load.at_once == 1 and [talk.turns for talk in load.draw(5, 1000)] == [
        [work] for work in WORKLOADS["single"].draw(3, 1000, 5)[1]
    ]
    assert not load.paced
