"""Sessions over HTTP: whose they are, what is said of them, what becomes of their pages, and saving."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.models import tiny
from tests.server.serving import Served, error_of, serving, until
from tests.server.test_life import children

from octavo.config import EngineConfig
from octavo.engine.llm import Engine, assemble
from octavo.engine.process import Changed, EngineStats, Frames, Reply, framed, stats_of
from octavo.errors import PinRefused
from octavo.models.weights import open_checkpoint
from octavo.server.metrics import Metrics
from octavo.types import Request, Tier

COMPLETIONS, CHATS, SESSIONS, SAVE = "/v1/completions", "/v1/chat/completions", "/v1/sessions", "/v1/cache/save"
PAGES = 64
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 2
"""Of the tiny model: tokens, layers, K and V, heads, values, bytes."""
POOL = ("--kv-cache-memory-bytes", str(PAGES * PAGE_BYTES), "--max-num-seqs", "8")
TIERS = ("--kv-offload-space", "0.01", "--preemption-mode", "swap")
FIELDS = {
    *("object", "id", "tenant", "running", "requests", "idle_s", "pinned_s", "pages", "bytes", "shared_pages"),
    *("own_pages", "prompt_tokens", "cached_tokens", "hit_rate"),
}


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 512 tokens of context."""
    shape = tiny.config("llama")
    return tiny.write_folder(tmp_path_factory.mktemp("model") / "tiny", shape, tiny.tensors(shape))


@pytest.fixture(scope="module")
def open_to_all(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Without keys and without tiers below the pool."""
    with serving(tmp_path_factory.mktemp("open") / "log", tiny_path, *POOL) as server:
        yield server


@pytest.fixture(scope="module")
def tiered(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With two keys, an administrator's, host memory and a directory; pins may hold an eighth of the pool."""
    folder = tmp_path_factory.mktemp("tiered")
    keys = ("--api-key", "alpha", "--api-key", "beta", "--admin-api-key", "boss", "--share-prefixes")
    tiers = (*TIERS, "--swap-space", "0.01", "--kv-offload-dir", str(folder / "kv"))
    with serving(folder / "log", tiny_path, *POOL, *keys, *tiers, "--max-pinned-fraction", "0.125") as server:
        yield server
        assert server.stop() == 0
        assert "AuditError" not in server.log.read_text()


@pytest.fixture(autouse=True)
def _nothing_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("open_to_all", "tiered"):
        if name in request.fixturenames:
            server: Served = request.getfixturevalue(name)
            assert server.process.poll() is None, server.log.read_text()[-2000:]
            server.settle()


def key(name: str | None) -> dict[str, str]:
    return {} if name is None else {"authorization": f"Bearer {name}"}


def say(served: Served, session_id: Any, prompt: Any, by: str | None = None, **more: Any) -> Any:
    """A completion in a session; asserts that there is one."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "session_id": session_id, **more}
    reply = served.http.post(COMPLETIONS, json=body, headers=key(by))
    assert reply.status_code == 200, reply.text
    return reply.json()


def at(session_id: str, action: str = "") -> str:
    """A session's path. Clients take dots for themselves unless they are written so."""
    return f"{SESSIONS}/{quote(session_id, safe='').replace('.', '%2E')}{action}"


def look(served: Served, session_id: str, by: str | None = None) -> Any:
    reply = served.http.get(at(session_id), headers=key(by))
    assert reply.status_code == 200, reply.text
    assert set(reply.json()) == FIELDS
    return reply.json()


def do(served: Served, session_id: str, action: str, by: str | None = None, **body: Any) -> Any:
    reply = served.http.post(at(session_id, f"/{action}"), headers=key(by), **({"json": body} if body else {}))
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(reply: httpx.Response, status: int) -> Any:
    assert reply.status_code == status, reply.text
    return error_of(reply)


def tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 250), k=length)


# ── what a session is ──


def test_a_session_is_what_its_requests_left(open_to_all: Served) -> None:
    prompt = tokens(80, 1)
    say(open_to_all, "first", prompt)
    one = look(open_to_all, "first")
    assert (one["object"], one["id"], one["tenant"]) == ("session", "first", "")
    assert (one["running"], one["requests"], one["pinned_s"]) == (0, 1, 0)
    assert one["pages"] == {"device": 5, "host": 0, "disk": 0}
    assert one["bytes"] == {"device": 5 * PAGE_BYTES, "host": 0, "disk": 0}
    assert (one["own_pages"], one["shared_pages"]) == (5, 0)
    assert (one["prompt_tokens"], one["cached_tokens"], one["hit_rate"]) == (80, 0, 0)
    assert one["idle_s"] >= 0

    say(open_to_all, "first", [*prompt, *tokens(20, 2)])
    two = look(open_to_all, "first")
    assert (two["requests"], two["prompt_tokens"], two["cached_tokens"]) == (2, 180, 80)
    assert two["hit_rate"] == 80 / 180
    assert two["pages"]["device"] == 6

    say(open_to_all, "other", prompt)
    assert (look(open_to_all, "first")["shared_pages"], look(open_to_all, "first")["own_pages"]) == (5, 1)
    assert (look(open_to_all, "other")["shared_pages"], look(open_to_all, "other")["own_pages"]) == (5, 0)


def test_a_request_that_runs_is_counted(open_to_all: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(say, open_to_all, "runs", tokens(30, 3), max_tokens=400)
        until(lambda: open_to_all.http.get(at("runs")).status_code == 200)
        seen = look(open_to_all, "runs")
        running.result()
    assert (seen["running"], seen["idle_s"]) in ((1, 0), (0, seen["idle_s"]))
    assert look(open_to_all, "runs")["running"] == 0


def test_chats_have_sessions_too(open_to_all: Served) -> None:
    open_to_all.chat("hello", session_id="talk", max_tokens=1)
    assert len(open_to_all.events(CHATS, messages=[{"role": "user", "content": "a"}], session_id="talk")) > 1
    assert look(open_to_all, "talk")["requests"] == 2
    line = [line for line in open_to_all.lines() if line.get("session") == "talk"]
    assert len(line) == 2


def test_the_header_names_the_session_unless_the_body_does(open_to_all: Served) -> None:
    body = {"prompt": [5], "max_tokens": 1}
    for name in ("by header", "by header 🦑"):
        header = {"X-Session-ID": name.encode()}
        assert open_to_all.http.post(COMPLETIONS, json=body, headers=header).status_code == 200
        assert look(open_to_all, name)["requests"] == 1
    both = {"json": {**body, "session_id": "by body"}, "headers": {"x-session-id": "by header"}}
    assert open_to_all.http.post(COMPLETIONS, **both).status_code == 200
    assert (look(open_to_all, "by header")["requests"], look(open_to_all, "by body")["requests"]) == (1, 1)
    for value in (b"", b"x" * 257, b"a\tb", b"\xff", b"a\xc2\x85"):
        for asked in (body, body | {"session_id": "by body"}):
            reply = open_to_all.http.post(COMPLETIONS, json=asked, headers={"X-Session-ID": value})
            assert refusal(reply, 400)["param"] == "X-Session-ID"


# ── names ──

STRANGE = [
    "../x", "..", ".", "/", "a/b", "/a/", "a/pin", "pin", "%2F", "%00", "a%2Fpin", "🦑", "한국어", "e\u0301", " ",
    "a b", "#", "?limit=1", "a?tenant=b", "'; DROP TABLE sessions;--", '"', "<script>", "\\", "null", "0", "{}",
    "\u202e", "\ufeff", "${jndi:ldap://x}", "a\u2028b", "\ufffd", "x" * 256, "é" * 256,
]  # fmt: skip


@pytest.mark.parametrize("name", STRANGE, ids=lambda name: ascii(name)[:20])
def test_strange_names_are_names(open_to_all: Served, name: str) -> None:
    say(open_to_all, name, [7] * 20)
    assert look(open_to_all, name)["id"] == name
    assert do(open_to_all, name, "pin")["pinned_s"] > 500
    assert do(open_to_all, name, "pin", ttl_s=0)["pinned_s"] == 0
    assert do(open_to_all, name, "demote")["id"] == name
    assert do(open_to_all, name, "release")["id"] == name
    assert refusal(open_to_all.http.get(at(name)), 404)["code"] == "session_not_found"


@pytest.mark.parametrize("name", ["", "x" * 300, "a\nb", "a\n", "\n", "\x00", "\x1b[2J", "\x7f", "a\x85", 5, [], {}])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_what_is_no_name_is_refused(open_to_all: Served, path: str, name: Any) -> None:
    what: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    assert open_to_all.refused(path, **what, max_tokens=1, session_id=name)["param"] == "session_id"
    if isinstance(name, str):
        refusal(open_to_all.http.get(at(name)), 404)
        refusal(open_to_all.http.post(at(name, "/release")), 404)


def test_a_name_that_is_almost_one(open_to_all: Served) -> None:
    say(open_to_all, "exact", [7])
    for name in ("exact\n", "exact ", "Exact", "exac", "exact/", "exact\x00"):
        refusal(open_to_all.http.get(at(name)), 404)
        refusal(open_to_all.http.post(at(name, "/release")), 404)
    for action in ("/pin\n", "/Pin", "/drop"):
        refusal(open_to_all.http.post(SESSIONS + "/exact" + quote(action)), 404)
    for action in ("", "/", "/pin/"):
        refusal(open_to_all.http.post(SESSIONS + "/exact" + action), 405)
    refusal(open_to_all.http.delete(SESSIONS + "/exact"), 405)
    assert look(open_to_all, "exact")["requests"] == 1


# ── lists ──


def test_the_longest_idle_come_first(open_to_all: Served) -> None:
    for name in ("one", "two", "three", "one"):
        say(open_to_all, name, [8])
    reply = open_to_all.http.get(SESSIONS, params={"limit": 1000}).json()
    assert set(reply) == {"object", "data"}
    assert [one["id"] for one in reply["data"]][-3:] == ["two", "three", "one"]
    ages = [one["idle_s"] for one in reply["data"]]
    assert ages == sorted(ages, reverse=True)
    assert all(set(one) == FIELDS for one in reply["data"])
    first = open_to_all.http.get(SESSIONS, params={"limit": 1}).json()["data"]
    assert [one["id"] for one in first] == [reply["data"][0]["id"]]
    for limit in ("0", "1001", "-1", "x", "", "1.0", "9" * 99, "١"):
        assert refusal(open_to_all.http.get(SESSIONS, params={"limit": limit}), 400)["param"] == "limit"


# ── keys ──


def test_nobody_without_a_key_and_nobody_sees_anothers(tiered: Served) -> None:
    for by in ("alpha", "beta"):
        say(tiered, "same", tokens(40, 5), by)
    say(tiered, "same", tokens(40, 6), "beta")
    say(tiered, "alone", tokens(40, 5), "alpha")
    assert [look(tiered, "same", by)["requests"] for by in ("alpha", "beta")] == [1, 2]
    listed = {by: tiered.http.get(SESSIONS, headers=key(by)).json()["data"] for by in ("alpha", "beta", "boss")}
    assert {one["id"] for one in listed["alpha"]} == {"same", "alone"}
    assert {one["id"] for one in listed["beta"]} == {"same"}
    assert len(listed["boss"]) == 3

    unknown = refusal(tiered.http.get(at("alonf"), headers=key("beta")), 404)
    others = refusal(tiered.http.get(at("alone"), headers=key("beta")), 404)
    assert others == unknown | {"message": unknown["message"].replace("alonf", "alone")}
    for action in ("pin", "release", "demote"):
        assert refusal(tiered.http.post(at("alone", f"/{action}"), headers=key("beta")), 404) == others
    assert look(tiered, "alone", "alpha")["requests"] == 1

    for by in (None, "x", "alph", "boss2"):
        for method, path in (
            *(
                ("GET", SESSIONS),
                ("GET", at("alone")),
                ("POST", at("alone", "/pin")),
                ("POST", at("alone", "/release")),
            ),
            *(("POST", at("alone", "/demote")), ("POST", SAVE)),
        ):
            assert refusal(tiered.http.request(method, path, headers=key(by)), 401)["code"] == "invalid_api_key"

    do(tiered, "same", "release", "alpha")
    refusal(tiered.http.get(at("same"), headers=key("alpha")), 404)
    assert look(tiered, "same", "beta")["requests"] == 2


def test_the_administrator_names_whose(tiered: Served) -> None:
    for by in ("alpha", "beta"):
        say(tiered, "twin", tokens(40, 7), by)
    say(tiered, "single", tokens(40, 8), "beta")
    twins = [one for one in tiered.http.get(SESSIONS, headers=key("boss")).json()["data"] if one["id"] == "twin"]
    alpha, beta = (one["tenant"] for one in twins)
    assert alpha != beta
    assert {len(alpha), len(beta)} == {12}
    assert "alpha" not in str(twins)
    assert look(tiered, "single", "boss")["tenant"] == beta
    error = refusal(tiered.http.get(at("twin"), headers=key("boss")), 409)
    assert error["param"] == "tenant"
    assert alpha in error["message"]
    assert beta in error["message"]
    refusal(tiered.http.get(at("nobody's"), headers=key("boss")), 404)
    for tenant in (alpha, beta):
        mine = {"params": {"tenant": tenant}, "headers": key("boss")}
        assert tiered.http.get(at("twin"), **mine).json()["tenant"] == tenant
        assert {one["tenant"] for one in tiered.http.get(SESSIONS, **mine).json()["data"]} == {tenant}
        assert tiered.http.post(at("twin", "/release"), **mine).status_code == 200
        refusal(tiered.http.get(at("twin"), **mine), 404)
    assert refusal(tiered.http.get(SESSIONS, params={"tenant": "zz"}, headers=key("boss")), 400)["param"] == "tenant"
    for by, tenant in (("alpha", alpha), ("alpha", beta), ("beta", "zz")):
        for path in (SESSIONS, at("single")):
            refusal(tiered.http.get(path, params={"tenant": tenant}, headers=key(by)), 403)


def test_an_administrators_key_alone_guards_saving(tiny_path: Path, tmp_path: Path) -> None:
    environment = {"OCTAVO_ADMIN_API_KEY": "boss"}
    options = (*TIERS, "--kv-offload-dir", str(tmp_path / "kv"))
    with serving(tmp_path / "log", tiny_path, *POOL, *options, environment=environment) as server:
        say(server, "s", tokens(40, 1), "whatever")
        assert [one["id"] for one in server.http.get(SESSIONS).json()["data"]] == ["s"]
        refusal(server.http.post(SAVE), 403)
        assert server.http.post(SAVE, headers=key("boss")).json()["pages"] == 2
        assert "boss" not in server.log.read_text()


# ── pages ──


def test_pins_last_as_long_as_they_are_told(tiered: Served) -> None:
    say(tiered, "kept", tokens(64, 10), "alpha")
    assert 590 < do(tiered, "kept", "pin", "alpha")["pinned_s"] <= 600
    assert 590 < do(tiered, "kept", "pin", "alpha", ttl_s=None)["pinned_s"] <= 600
    assert 0 < do(tiered, "kept", "pin", "alpha", ttl_s=0.5)["pinned_s"] <= 0.5
    assert 86000 < do(tiered, "kept", "pin", "alpha", ttl_s=86400)["pinned_s"] <= 86400
    assert tiered.metric("kv_pages_pinned") == 4
    assert do(tiered, "kept", "pin", "alpha", ttl_s=0)["pinned_s"] == 0
    assert tiered.metric("kv_pages_pinned") == 0
    for ttl_s in (-1, 86401, 1e300, "5", [], True):
        reply = tiered.http.post(at("kept", "/pin"), json={"ttl_s": ttl_s}, headers=key("alpha"))
        assert refusal(reply, 400)["param"] == "ttl_s"
    for body in (b"{", b"[]", b"null", b'{"ttl_s": NaN}', b'{"ttl_s": 1e999}', b"\xff"):
        refusal(tiered.http.post(at("kept", "/pin"), content=body, headers=key("alpha")), 400)
    reply = tiered.http.post(at("kept", "/pin"), content=b"a=b", headers={"content-type": "text/plain", **key("alpha")})
    refusal(reply, 415)
    assert look(tiered, "kept", "alpha")["pinned_s"] == 0


def test_pins_hold_no_more_than_their_share(tiered: Served) -> None:
    say(tiered, "large", tokens(16 * 9, 11), "alpha")
    error = refusal(tiered.http.post(at("large", "/pin"), headers=key("alpha")), 409)
    assert error["code"] == "pin_refused"
    assert "9" in error["message"]
    assert look(tiered, "large", "alpha")["pinned_s"] == 0
    do(tiered, "large", "release", "alpha")


def test_what_is_released_is_gone_and_what_is_shared_stays(tiered: Served) -> None:
    start, end = tokens(48, 12), tokens(48, 13)
    say(tiered, "long", [*start, *end], "alpha")
    say(tiered, "short", start, "beta")
    cached = tiered.metric("kv_tier_pages", tier="device", state="cached")
    assert do(tiered, "long", "release", "alpha")["pages"]["device"] == 6
    assert tiered.metric("kv_tier_pages", tier="device", state="cached") == cached - 3
    assert look(tiered, "short", "beta")["pages"]["device"] == 3
    again = say(tiered, "long", [*start, *end], "alpha")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


def test_what_is_demoted_comes_back_the_same(tiered: Served) -> None:
    prompt = tokens(90, 14)
    moved = tiered.metric("kv_pages_moved_total", **{"from": "device", "to": "host"})
    right = say(tiered, "down", prompt, "alpha", max_tokens=8)  # whose pages may be copied ahead of need
    do(tiered, "down", "demote", "alpha")
    until(lambda: look(tiered, "down", "alpha")["pages"]["device"] == 0)
    below = look(tiered, "down", "alpha")["pages"]
    assert below["host"] == 6
    assert tiered.metric("kv_pages_moved_total", **{"from": "device", "to": "host"}) >= moved + 6
    again = say(tiered, "down", prompt, "alpha", max_tokens=8)
    assert again["choices"] == right["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 89 // 16 * 16


WAYS = [("device", "host"), ("device", "disk"), ("host", "disk"), ("host", "device"), ("disk", "device")]


def test_the_metrics_are_the_audits_counts(tiny_path: Path, tmp_path: Path) -> None:
    """After every step of a pool under pressure, and as the messages between the processes carry them."""
    config = EngineConfig(
        kv_cache_memory_bytes=24 * PAGE_BYTES,
        swap_space=40 * PAGE_BYTES / 2**30,
        kv_offload_dir=str(tmp_path / "kv"),
        kv_offload_space=80 * (PAGE_BYTES + 4096) / 2**30,
        preemption_mode="swap",
    )
    engine = assemble(open_checkpoint(tiny_path), config, audit=True)
    core, cache, chance = engine.core, engine.core.cache, random.Random(18)
    page = Metrics("octavo", "m", 512, lambda: told(engine), {})
    for number in range(30):
        now = float(number)
        core.tick(now)
        who, name = chance.choice("ab"), f"s{chance.randrange(6)}"
        core.add(
            Request(f"r{number}", tokens(chance.randrange(1, 150), chance.randrange(9)), tenant=who, session_id=name)
        )
        if number % 5 == 0:
            with suppress(PinRefused):
                core.pin(who, name, chance.choice([0, 3]))
        if number % 7 == 0:
            core.demote_session(who, name)
        if number % 10 == 9:
            core.save()
        for _ in range(chance.randrange(1, 12)):
            core.step(now=now)
            shown = samples(page)
            for tier, pool in zip(Tier, cache.tiers.pools, strict=True):
                of_tier = f"tier={tier.name.lower()}"
                free = pool.num_pages - pool.num_used + len(pool.free_pages())
                cached = len(pool.eviction_order(now))
                held = sum(pool.refs(at) > 0 for at in range(pool.num_pages))
                assert free + cached + held == pool.num_pages
                states = {"free": free, "cached": cached, "referenced": held}
                for state, count in states.items():
                    assert shown["kv_tier_pages", f"state={state}", of_tier] == count
                    assert shown["kv_tier_bytes", f"state={state}", of_tier] == count * PAGE_BYTES
                    if tier is Tier.DEVICE:
                        assert shown["kv_pages", f"state={state}"] == count
                pinned = sum(place.tier is tier for place in cache.sessions.pins)
                assert shown["kv_pages_pinned", of_tier] == pinned
            assert shown["num_sessions",] == len(core.list_sessions(None, 1000))
    core.close()
    shown = samples(page)
    assert all(shown["kv_pages_moved_total", f"from={source}", f"to={to}"] > 0 for source, to in WAYS)
    assert shown["kv_load_page_seconds", "tier=disk"] > 0


def told(engine: Engine) -> EngineStats:
    """What the parent hears of an engine."""
    [frame] = Frames().push(framed(Changed(stats_of(engine))))
    changed = msgspec.msgpack.decode(frame, type=Reply)
    assert isinstance(changed, Changed)
    return changed.stats


def samples(page: Metrics) -> dict[tuple[str, ...], float]:
    """Samples by name and what tells them apart."""
    return {
        (
            sample.name.removeprefix("octavo:"),
            *sorted(f"{name}={text}" for name, text in sample.labels.items() if name not in ("engine", "model_name")),
        ): sample.value
        for family in text_string_to_metric_families(page.page().decode())
        for sample in family.samples
    }


# ── saving ──


def test_only_with_a_directory(open_to_all: Served) -> None:
    error = refusal(open_to_all.http.post(SAVE), 400)
    assert error["param"] == "kv_offload_dir"
    assert "kv_offload_dir" in error["message"]


def test_what_is_saved_is_found_after_a_restart(tiny_path: Path, tmp_path: Path) -> None:
    options = (*POOL, *TIERS, "--kv-offload-dir", str(tmp_path / "kv"))
    prompt = tokens(100, 15)
    with serving(tmp_path / "log", tiny_path, *options) as server:
        right = say(server, "s", prompt, max_tokens=8)
        with ThreadPoolExecutor(4) as pool:
            saves = [pool.submit(server.http.post, SAVE) for _ in range(4)]
            replies = [save.result().json() for save in saves]
        assert {reply["pages"] for reply in replies} <= {0, 6}  # the later ones may have found nothing left to write
        assert max(reply["pages"] for reply in replies) == 6
        assert all(set(reply) == {"object", "pages", "failed", "seconds"} for reply in replies)
        assert all((reply["object"], reply["failed"]) == ("cache.save", 0) for reply in replies)
        assert server.http.post(SAVE).json()["pages"] == 0
        say(server, "more", tokens(100, 19))
        server.raw(b"", SAVE).close()  # who goes stops nothing
        until(lambda: server.metric("kv_tier_pages", tier="disk", state="cached") == 12)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with serving(tmp_path / "log2", tiny_path, *options) as server:
        again = say(server, "s", prompt, max_tokens=8)
        assert again["choices"] == right["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_who_may_save(tiered: Served) -> None:
    for by in ("alpha", "beta"):
        refusal(tiered.http.post(SAVE, headers=key(by)), 403)
    assert tiered.http.post(SAVE, headers=key("boss")).json()["failed"] == 0


# ── many at once, and ends ──


def test_many_at_once_and_some_that_go(tiered: Served) -> None:
    """Streams that are left midway beside everything that can be asked of their sessions: no 5xx, and nothing held."""
    chance = random.Random(16)
    names = [f"crowd{i}" for i in range(6)]

    def talk(seed: int) -> None:
        mine = random.Random(seed)
        body = {"prompt": tokens(mine.randrange(1, 150), mine.randrange(8)), "session_id": mine.choice(names)}
        body |= {"max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream(
            "POST", tiered.url + COMPLETIONS, json=body, headers=key(mine.choice(["alpha", "beta"])), timeout=60
        ) as reply:
            assert reply.status_code == 200
            for _ in zip(reply.iter_lines(), range(mine.choice([0, 5, 1000])), strict=False):
                pass

    def touch(seed: int) -> int:
        mine = random.Random(seed)
        by, name = key(mine.choice(["alpha", "beta", "boss"])), mine.choice(names)
        action = mine.choice(["", "", "/pin", "/release", "/demote"])
        if seed % 7 == 0:
            return tiered.http.get(SESSIONS, headers=by).status_code
        return tiered.http.request("POST" if action else "GET", at(name, action), headers=by).status_code

    with ThreadPoolExecutor(8) as pool:
        talks = [pool.submit(talk, chance.randrange(1 << 30)) for _ in range(40)]
        codes = {pool.submit(touch, seed) for seed in range(200)}
        for job in talks:
            job.result()
        assert {job.result() for job in codes} <= {200, 404, 409}
    until(lambda: tiered.metric("num_requests_running") + tiered.metric("num_requests_waiting") == 0)
    for by in ("alpha", "beta"):
        for one in tiered.http.get(SESSIONS, headers=key(by)).json()["data"]:
            assert one["running"] == 0
            if one["id"] in names:  # some are pinned
                do(tiered, one["id"], "release", by)


def test_the_engines_death_is_told_and_its_sessions_are_gone(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", tiny_path, *POOL) as server, ThreadPoolExecutor(1) as pool:
        say(server, "s", tokens(40, 17))
        [engine] = children(server.process.pid)
        os.kill(engine, signal.SIGSTOP)
        asked = pool.submit(server.http.get, SESSIONS)
        time.sleep(0.2)
        os.kill(engine, signal.SIGKILL)
        assert refusal(asked.result(), 503)["code"] == "engine_dead"
        assert server.http.get(SESSIONS).json()["data"] == []  # waits for the new engine
        refusal(server.http.get(at("s")), 404)
        say(server, "s", tokens(40, 17))
        assert look(server, "s")["requests"] == 1
        assert server.stop() == 0
