"""The live map over HTTP: that it is kept right, whom it shows what, and what becomes of its streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from tests.heart.test_fuzz import TENANTS, Life
from tests.models import tiny
from tests.server.serving import Served, serving, until
from tests.server.test_life import children
from tests.server.test_sessions import POOL, TIERS, do, key, refusal, say, tokens
from tests.server.watcher import MAP, REFERENCED, STATES, Watcher, look, watching

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.process import EngineStats, TierNews
from octavo.engine.watching import Mapped, Observing
from octavo.server import app
from octavo.server.feed import MAX_STREAMS, Feed
from octavo.server.keys import Caller
from octavo.server.recent import Recent

TREE = "/v1/cache/tree"


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny.config("llama")
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", shape, tiny.tensors(shape))


@pytest.fixture(scope="module")
def keyed(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two keys and an administrator's, 64 pages, host memory; whoever may read a page's text can."""
    keys = ("--api-key", "alpha", "--api-key", "beta", "--admin-api-key", "boss")
    options = (*POOL, *keys, *TIERS, "--swap-space", "0.01", "--ui-show-text")
    with serving(tmp_path_factory.mktemp("keyed") / "log", tiny_path, *options) as server:
        yield server
        assert server.stop() == 0
        assert "AuditError" not in server.log.read_text()


@pytest.fixture(scope="module")
def plain(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("plain") / "log", tiny_path, *POOL) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no session is there, nobody watches, and nothing runs."""
    yield
    for name in ("keyed", "plain"):
        if name in request.fixturenames:
            server: Served = request.getfixturevalue(name)
            by = "boss" if name == "keyed" else None
            for session in look(server, "/v1/sessions", by, limit=1000)["data"]:
                whose = {"tenant": session["tenant"]} if by else {}
                path = f"/v1/sessions/{session['id']}/release"
                assert server.http.post(path, headers=key(by), params=whose).status_code == 200
            server.settle()


# ── what a client misses ──


class Told:
    """An engine's outputs end here, and what it tells goes to a feed."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.observing = Observing(core, self.take)
        self.on_map: Callable[[Any], None]
        self.healthy, self.num_open = True, 0
        self.limits, self.config = core.scheduler.limits, EngineConfig()

    def take(self, message: Any) -> None:
        self.on_map(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Mapped))

    def watch(self, on: bool) -> None:
        self.observing.turn(on)

    def stats(self) -> EngineStats:
        return EngineStats(tiers=TierNews(self.core.cache.tier_pages()))

    def stream(self, request_id: str) -> None:
        return None

    def num_open_of(self, tenant: str) -> int:
        return 0


@pytest.mark.parametrize("number", [2, 5])
def test_whatever_a_client_misses_it_catches_up(number: int) -> None:
    """Clients of two tenants and an administrator's ask at random moments, and know then what all news would tell."""

    async def life() -> None:
        played = Life(number)
        told = Told(played.engine)
        feed = Feed(told, "m", Recent(), Recent())  # type: ignore[arg-type]
        feed._enter()
        callers = {name: Caller(name, admin=name == "boss") for name in (*TENANTS, "boss")}
        at = dict.fromkeys(callers, -1)
        events: dict[str, list[tuple[str, Any]]] = {name: [] for name in callers}
        watchers: dict[str, Watcher] = {}
        for now in range(200):
            if len(played.live) < 8:
                played.add()
            played.step()
            for act in (Life.govern, Life.abort, Life.drop_cached):
                if played.rng.random() < 0.05:
                    act(played)
            told.observing.tell(float(now))
            if not feed._complete:
                continue
            name = played.rng.choice([*callers, *["boss"] * 30])
            kind, body = "delta", b""
            if feed._behind(at[name]):
                kind, body = "snapshot", feed._snapshot(callers[name])
            elif at[name] != feed._at:
                body = feed._delta(callers[name], at[name])
            if body:
                at[name] = feed._at
                events[name].append((kind, msgspec.json.decode(body)))
                if name not in watchers:
                    watchers[name] = Watcher(iter_of(events[name]))
                else:
                    watchers[name].next()
                check(name, watchers[name], feed)
        assert all("delta" in watcher.names for watcher in watchers.values())
        assert any("snapshot" in watcher.names[1:] for watcher in watchers.values())

    def check(name: str, watcher: Watcher, feed: Feed) -> None:
        fresh = msgspec.json.decode(feed._snapshot(Caller(name, admin=name == "boss")))
        for tier in fresh["tiers"]:
            assert [(s, h) for _, count, s, h in tier["runs"] for _ in range(count)] == watcher.pages[tier["name"]]
        if name != "boss":
            assert all(holder["tenant"] == name for holder in watcher.holders.values())

    asyncio.run(life())


def iter_of(events: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The events of a list that grows."""
    number = 0
    while True:
        yield events[number]
        number += 1


def test_one_who_takes_nothing_for_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STALLED_S", 0.01)
    closed: list[bool] = []

    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b": keep-alive"

    async def forever(*message: Any) -> Any:
        if not message or message[0]["type"] == "http.response.body":
            await asyncio.Event().wait()

    feed = SimpleNamespace(close=lambda: closed.append(True))
    asyncio.run(asyncio.wait_for(app._Stream(feed, events())({}, forever, forever), 5))  # type: ignore[arg-type]
    assert closed == [True]


def test_percentiles_are_those_of_the_last_seconds() -> None:
    recent = Recent()
    assert recent.percentiles(0.0) is None
    for number in range(1, 101):
        recent.observe(number / 1000, 100 + number / 50)
    p50, p99, n = recent.percentiles(102.0) or (0, 0, 0)
    assert n == 100
    assert p50 == pytest.approx(0.05, rel=0.06)
    assert p99 == pytest.approx(0.099, rel=0.06)
    recent.observe(1e9, 105.0)
    assert (recent.percentiles(105.0) or (0, 0, 0))[2] == 101
    assert (recent.percentiles(113.5) or (0, 0, 0))[2] == 1
    assert recent.percentiles(130.0) is None


# ── that it is right ──


def test_a_snapshot_says_what_it_is_of(plain: Served) -> None:
    say(plain, "one", tokens(40, 1))
    seen = look(plain, MAP)
    told = {name: seen[name] for name in ("version", "kv_layout", "page_tokens", "page_bytes", "show_text", "admin")}
    assert told == {
        "version": 1,
        "kv_layout": "paged",
        "page_tokens": 16,
        "page_bytes": 16 * 2 * 2 * 2 * 16 * 2,
        "show_text": False,
        "admin": True,
    }
    assert seen["states"] == STATES
    assert seen["tiers"] == [{"name": "device", "runs": seen["tiers"][0]["runs"], "num_pages": 64}]
    assert abs(seen["time"] - time.time()) < 5
    [one] = [holder for holder in seen["holders"] if holder["name"] == "one"]
    expected = {"kind": "session", "tenant": "", "running": 0, "num_requests": 1, "queried_tokens": 40, "hit_tokens": 0}
    assert {name: one[name] for name in expected} == expected
    watcher = Watcher(iter([("snapshot", seen)]))
    assert watcher.held()["one"] == 2
    assert seen["requests"] == []
    assert seen["num_requests"] == 0


def test_a_request_is_seen_from_its_beginning_to_its_end(plain: Served) -> None:
    seen = Event()

    def ask() -> None:
        while not seen.is_set():  # one may be over before it is told
            say(plain, "long", tokens(40, 2), max_tokens=400)

    with watching(plain) as watcher, ThreadPoolExecutor(1) as pool:
        assert watcher.names == ["snapshot"]
        running = pool.submit(ask)
        watcher.until(lambda: watcher.states()["active"] >= 4 and watcher.latest["requests"])
        seen.set()
        assert watcher.held()["long"] == watcher.states()["active"] + watcher.states()["idle"]
        assert watcher.holder("long")["running"] == 1
        [request] = watcher.latest["requests"]
        assert (request["session"], request["prompt_tokens"], request["max_tokens"]) == ("long", 40, 400)
        assert request["phase"] in ("prefilling", "decoding")
        assert request["pages"] >= 3
        assert watcher.latest["num_requests"] == 1
        running.result()
        watcher.until(lambda: watcher.states()["idle"] == 27)
        assert watcher.holder("long")["running"] == 0
        watcher.until(lambda: watcher.latest["requests"] == [] and watcher.latest["num_requests"] == 0)
        assert watcher.latest["stats"]["ttft_s"]["n"] >= 1
        assert set(watcher.names[1:]) == {"delta"}
        assert not REFERENCED & {state for state, count in watcher.states().items() if count}
        do(plain, "long", "release")
        watcher.until(lambda: watcher.states()["idle"] == 0)
        assert not [holder for holder in watcher.holders.values() if holder["name"] == "long"]


def test_what_several_share_and_pins_hold(plain: Served) -> None:
    with watching(plain) as watcher:
        for name in ("one", "two"):
            say(plain, name, [*tokens(32, 3), *tokens(20, len(name) + ord(name[0]))])
        watcher.until(lambda: watcher.held().get("two") == 1)
        assert (watcher.held()["one"], watcher.held()["shared"]) == (1, 2)
        stats = watcher.latest["stats"]
        assert stats["tiers"]["device"]["idle_shared"] == watcher.states()["shared"] == 2
        assert stats["saved_by_sharing_pages"] == 2
        do(plain, "one", "pin", ttl_s=60)
        watcher.until(lambda: watcher.states()["pinned"] == 3)
        assert watcher.holder("one")["pinned_s"] > 50
        do(plain, "one", "pin", ttl_s=0)
        watcher.until(lambda: watcher.states()["pinned"] == 0)


def test_a_pin_ends_on_the_map_though_nothing_else_happens(plain: Served) -> None:
    say(plain, "short", tokens(16, 4))
    with watching(plain) as watcher:
        do(plain, "short", "pin", ttl_s=0.2)
        watcher.until(lambda: watcher.states()["pinned"] == 1)
        watcher.until(lambda: watcher.states()["pinned"] == 0)


def test_pages_that_leave_the_pool_are_seen_below(keyed: Served) -> None:
    say(keyed, "leaves", tokens(64, 5), "alpha")
    with watching(keyed, "alpha") as watcher:
        assert watcher.held()["leaves"] == 4
        do(keyed, "leaves", "demote", "alpha")
        watcher.until(lambda: watcher.states("host")["idle"] == 4 and watcher.states()["idle"] == 0)
        assert watcher.held("host")["leaves"] == 4
        assert watcher.latest["stats"]["totals"]["swapped_out"] >= 4


def test_the_map_is_kept_right_under_load(keyed: Served) -> None:
    """More prompts than the pool holds, with moves, evictions and preemptions; the watcher checks each event."""

    def client(number: int) -> None:
        for turn in range(6):
            say(keyed, f"s{number % 5}", tokens(60 + 30 * turn, number % 5), "alpha", max_tokens=30, n=1 + turn % 2)

    with watching(keyed, "boss") as watcher, ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client, number) for number in range(8)]
        while not all(work.done() for work in running):
            watcher.next()
        for work in running:
            work.result()
        watcher.until(lambda: not watcher.latest["num_requests"] and not watcher.states()["active"])
        watcher.until(lambda: not watcher.states()["moving"] + watcher.states("host")["moving"])
        seen = look(keyed, MAP, "boss")
        for tier in seen["tiers"]:
            runs = [(state, who) for _, count, state, who in tier["runs"] for _ in range(count)]
            assert runs == watcher.pages[tier["name"]]
        for name, pages in watcher.latest["stats"]["tiers"].items():
            by_state = watcher.states(name)
            assert by_state["free"] == pages["free"]
            assert by_state["idle"] + by_state["cached"] + by_state["shared"] == pages["cached"]
        assert watcher.latest["stats"]["totals"]["evicted"] > 0


def test_the_history_has_a_sample_a_second_though_nobody_watches(plain: Served) -> None:
    def history() -> list[Any]:
        found: list[Any] = look(plain, MAP)["history"]
        return found

    until(lambda: len(history()) >= 2)
    ages = [sample["time"] for sample in history()]
    assert ages == sorted(ages)
    latest = history()[-1]
    assert set(latest) == {
        *("time", "device", "host", "disk", "evicted", "swapped_out", "swapped_in", "preemptions"),
        *("ttft_s", "itl_s", "running", "waiting"),
    }
    assert sum(latest["device"].values()) == 64
    assert (latest["host"], latest["disk"]) == ({}, {})


# ── who sees what ──


def test_nobody_sees_anothers(keyed: Served) -> None:
    with ExitStack() as stack:
        watchers = {by: stack.enter_context(watching(keyed, by)) for by in ("alpha", "beta", "boss")}
        with ThreadPoolExecutor(12) as pool:  # so many that they wait for each other, and some are told of
            turns = [pool.submit(say, keyed, None, tokens(40, 9), by, max_tokens=400) for by in ("alpha", "beta") * 6]
        ids = [[turn.result()["id"] for turn in turns[at::2]] for at in (0, 1)]
        for by in ("alpha", "beta"):
            say(keyed, f"secret-{by}", tokens(50, ord(by[0])), by, max_tokens=20)
        for by, whose in (("alpha", "alpha"), ("beta", "beta"), ("boss", "alpha"), ("boss", "beta")):
            watchers[by].until(lambda at=watchers[by], name=f"secret-{whose}": at.held().get(name) == 4)  # type: ignore[misc]
        do(keyed, "secret-alpha", "release", "alpha")
        for watcher in watchers.values():
            watcher.until(lambda at=watcher: at.states()["idle"] == 4)  # type: ignore[misc]
        tenants = {session["id"]: session["tenant"] for session in look(keyed, "/v1/sessions", "boss")["data"]}
        for path in (TREE, MAP, *(f"/v1/cache/pages/device/{page}" for page in range(64))):
            watchers["alpha"].text += json.dumps(look(keyed, path, "alpha"))
    alpha, beta, boss = (watchers[by].text for by in ("alpha", "beta", "boss"))
    for text, own, other in ((alpha, 0, 1), (beta, 1, 0)):
        names = ("secret-alpha", "secret-beta")
        assert names[own] in text
        assert any(number in text for number in ids[own])
        assert names[other] not in text
        assert not any(number in text for number in ids[other])
    assert tenants["secret-beta"] in beta
    assert tenants["secret-beta"] not in alpha
    assert all(name in boss for name in ("secret-alpha", "secret-beta"))
    assert all(any(number in boss for number in own) for own in ids)
    # states, and so totals, are everybody's
    assert watchers["alpha"].states() == watchers["beta"].states() == watchers["boss"].states()
    assert watchers["beta"].held()["secret-beta"] == 4
    assert "secret-beta" not in watchers["alpha"].held()


def test_nobody_looks_without_a_key(keyed: Served) -> None:
    for path in (MAP, TREE, "/v1/cache/pages/device/0", "/v1/requests/x/explain"):
        for by in (None, "x", "alph"):
            assert refusal(keyed.http.get(path, headers=key(by)), 401)["code"] == "invalid_api_key"


# ── a page ──


def test_a_page_says_whose_it_is_and_what_it_holds(keyed: Served) -> None:
    prompt = list(b"The quick brown fox jumps over the dog.")
    say(keyed, "fox", prompt, "alpha")
    with watching(keyed, "alpha") as watcher:
        watcher.until(lambda: watcher.held().get("fox") == 2)
        number = watcher.holder("fox")["id"]
    own = [page for page, (_, who) in enumerate(watcher.pages["device"]) if who == number]
    pages = [look(keyed, f"/v1/cache/pages/device/{page}", "alpha") for page in own]
    first, second = sorted(pages, key=lambda page: page["positions"])
    assert (first["state"], first["refs"], first["sessions"], first["requests"]) == ("idle", 0, ["fox"], [])
    assert [page["positions"] for page in (first, second)] == [[0, 16], [16, 32]]
    decoded = keyed.http.post("/detokenize", json={"tokens": prompt[:16]}, headers=key("alpha")).json()["prompt"]
    assert first["text"] == decoded
    assert (first["others"], first["pinned"]) == (0, False)
    assert first["idle_s"] >= 0
    others = look(keyed, f"/v1/cache/pages/device/{own[0]}", "beta")
    assert others == {
        "tier": "device",
        "page": own[0],
        "state": "idle",
        "refs": 0,
        "tenant": "",
        "positions": None,
        "idle_s": None,
        "sessions": [],
        "requests": [],
        "others": 1,
        "pinned": False,
        "elsewhere": [],
    }
    assert look(keyed, f"/v1/cache/pages/device/{own[0]}", "boss")["sessions"] == ["fox"]


def test_a_page_that_there_is_not(keyed: Served, plain: Served) -> None:
    for tier, page in (("device", "64"), ("device", "-1"), ("device", "x"), ("device", "1e3"), ("device", "9" * 30)):
        error = refusal(keyed.http.get(f"/v1/cache/pages/{tier}/{page}", headers=key("alpha")), 404)
        assert error["code"] == "page_not_found"
        assert "0 to 63" in error["message"]
    for tier in ("disk", "Device", "x" * 500, "%00"):
        error = refusal(keyed.http.get(f"/v1/cache/pages/{tier}/0", headers=key("alpha")), 404)
        assert error["code"] == "tier_not_found"
        assert "device, host" in error["message"]
    assert "text" not in look(plain, "/v1/cache/pages/device/0")


# ── the tree ──


def test_the_tree_opens_what_is_shared(keyed: Served) -> None:
    system, more = tokens(64, 20), tokens(32, 21)
    for number in range(3):
        say(keyed, f"t{number}", [*system, *more, *tokens(17, 30 + number)], "alpha")
    say(keyed, "t3", [*system, *tokens(40, 40)], "alpha")
    say(keyed, "other", tokens(64, 50), "alpha")
    until(lambda: len(look(keyed, TREE, "alpha")["nodes"]) == 2)  # it may have been found out a moment ago
    tree = look(keyed, TREE, "alpha")
    top, below = tree["nodes"]
    told = ("parent", "start", "num_tokens", "pages", "sessions", "requests", "branches", "saved_pages")
    assert [top[name] for name in told] == [None, 0, 64, 4, 4, 0, 1, 4 * 3]
    assert [below[name] for name in told] == [top["id"], 64, 32, 2, 3, 0, 3, 2 * 2]
    assert [node["tiers"]["device"] for node in (top, below)] == [4, 2]
    assert (tree["saved_pages"], tree["saved_bytes"]) == (16, 16 * look(keyed, MAP, "alpha")["page_bytes"])
    assert tree["num_left_out"] == 0
    short = look(keyed, TREE, "alpha", limit=1)
    assert [node["id"] for node in short["nodes"]] == [top["id"]]
    assert (short["num_left_out"], short["saved_pages"], short["nodes"][0]["branches"]) == (1, 16, 2)
    assert look(keyed, TREE, "beta")["nodes"] == []
    for limit in ("0", "1001", "x", "-1", "1.5", "NaN"):
        assert refusal(keyed.http.get(TREE, params={"limit": limit}, headers=key("alpha")), 400)["param"] == "limit"


# ── streams ──


def test_what_is_no_rate_is_refused(plain: Served) -> None:
    for hz in ("nan", "inf", "0", "0.1", "11", "-1", "", "1e1", "x", "1" * 99, "١"):
        assert refusal(plain.http.get(MAP, params={"hz": hz}), 400)["param"] == "hz"
    for wanted in ("yes", "", "True", "1"):
        assert refusal(plain.http.get(MAP, params={"stream": wanted}), 400)["param"] == "stream"
    assert refusal(plain.http.post(MAP), 405)
    assert (
        plain.http.get(MAP, headers={"accept": "text/event-stream"}, params={"stream": "false"}).json()["version"] == 1
    )


def test_a_slow_rate_gets_what_changed_in_one_piece(plain: Served) -> None:
    with watching(plain, hz=2) as slow:
        for number in range(4):
            say(plain, f"fast{number}", tokens(32, 60 + number), max_tokens=8)
        slow.until(lambda: slow.held().get("fast3") == 2)
        assert len(slow.names) < 12
        assert "snapshot" not in slow.names[1:]


def test_one_who_reads_nothing_holds_nobody_up(plain: Served) -> None:
    with socket.create_connection(plain.address) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(f"GET {MAP}?stream=true HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        with watching(plain) as watcher:
            say(plain, "meanwhile", tokens(40, 70), max_tokens=100)
            watcher.until(lambda: watcher.held().get("meanwhile", 0) == 8)


def test_there_are_only_so_many_streams(plain: Served) -> None:
    with ExitStack() as stack:
        clients = []
        for _ in range(MAX_STREAMS):
            sock = stack.enter_context(socket.create_connection(plain.address))
            sock.sendall(f"GET {MAP}?stream=true HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
            clients.append(sock)
        refused = plain.http.get(MAP, params={"stream": "true"})
        assert refusal(refused, 429)["code"] == "too_many_streams"
        assert refused.headers["retry-after"] == "5"
        assert look(plain, MAP)["version"] == 1  # a snapshot is to be had all the same
        clients[0].close()
        until(lambda: room(plain))
    until(lambda: room(plain))


def room(served: Served) -> bool:
    with httpx.stream("GET", f"{served.url}{MAP}?stream=true") as reply:
        return reply.status_code == 200


def test_the_engines_death_gives_a_new_snapshot_and_draining_ends_the_stream(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", tiny_path, *POOL) as server:
        say(server, "before", tokens(40, 1))
        with watching(server) as watcher:
            assert watcher.held()["before"] == 2
            [engine] = children(server.process.pid)
            os.kill(engine, signal.SIGKILL)
            watcher.until(lambda: watcher.names.count("snapshot") == 2)
            assert watcher.states()["free"] == 64
            say(server, "after", tokens(40, 1))
            watcher.until(lambda: watcher.held().get("after") == 2)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not watcher.goes_on())
        assert server.process.wait(10) == 0
        assert '"level":"error","logger":"octavo.engine' in server.log.read_text()
