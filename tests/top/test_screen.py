"""`octavo top` on a real server: its screen and keys, and what it prints once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.serving import PAGE_BYTES, Served, serving, until
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from octavo.top.app import Asked, Said, Top
from octavo.top.feed import Feed

STORY = "The lighthouse keeper wrote down every ship that passed, its flag, its cargo and the weather of the day. "
NAMES = ("small", "large [b]<i>\u202etxt", "middle")
OPTIONS = ("--kv-cache-memory-bytes", str(60 * PAGE_BYTES), "--swap-space", "0.05", "--api-key", "k")


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With three sessions, of 1, 5 and 3 stories."""
    log = tmp_path_factory.mktemp("top") / "log"
    with serving(log, model_path, *OPTIONS, "--admin-api-key", "boss") as served:
        served.http.headers["Authorization"] = "Bearer k"
        for name, count in zip(NAMES, (1, 5, 3), strict=True):
            served.complete(f"{count} {STORY * count}", max_tokens=2, session_id=name)
        yield served


def run(server: Served, story: Callable[[Top, Pilot[None]], Any], key: str = "k") -> Top:
    """Play a story on the screen of a server, whose memory has come."""

    async def play() -> Top:
        top = Top(Feed(server.url, key), interval=0.1)
        async with top.run_test(size=(150, 40)) as pilot:
            await shows(top, pilot, lambda: top.memory.about)
            await story(top, pilot)
        return top

    return asyncio.run(play())


async def shows(top: Top, pilot: Pilot[None], true: Callable[[], Any]) -> None:
    """Wait for something to be so."""
    for _ in range(200):
        if true():
            return
        await pilot.pause(0.05)
    pytest.fail(f"it did not come to be so: {[column(top, table=name) for name in ('#holders', '#requests')]}")


def column(top: Top, name: str = "", table: str = "#holders") -> list[str]:
    """The first column, or the one of this name."""
    found = top.query_one(table, DataTable)
    at = [str(column.label) for column in found.ordered_columns].index(name) if name else 0
    return [str(found.get_row_at(row)[at]) for row in range(found.row_count)]


def text(top: Top, name: str) -> str:
    return str(top.query_one(name, Static).render())


def test_keys_sort_filter_pin_demote_and_release(server: Served) -> None:
    small, large, middle = "small", "large [b]<i>·txt", "middle"

    async def story(top: Top, pilot: Pilot[None]) -> None:
        await shows(top, pilot, lambda: column(top) == [large, middle, small])
        assert "60 pages" in text(top, "#pools") and "idle" in text(top, "#pools")
        await pilot.press("i")
        await shows(top, pilot, lambda: column(top) == [small, large, middle])
        await pilot.press("slash", *"MID", "enter")
        await shows(top, pilot, lambda: column(top) == [middle])
        await pilot.press("p")
        await shows(top, pilot, lambda: column(top, "pin") == ["9 min"] or column(top, "pin") == ["10 min"])
        assert server.http.get("/v1/sessions/middle").json()["pinned_s"] > 500
        await pilot.press("u")
        await shows(top, pilot, lambda: column(top, "pin") == [""])
        await pilot.press("escape", "b")
        await shows(top, pilot, lambda: column(top) == [large, middle, small])
        assert top._chosen() is not None and top._chosen().name == "middle"  # type: ignore[union-attr]
        await pilot.press("d")
        await shows(top, pilot, lambda: column(top, "share")[column(top).index(middle)] == "0.0%")
        assert server.http.get("/v1/sessions/middle").json()["pages"]["device"] == 0
        await pilot.press("r")
        await shows(top, pilot, lambda: isinstance(top.screen, Asked))
        await pilot.press("n")
        await pilot.press("r")
        await shows(top, pilot, lambda: isinstance(top.screen, Asked))
        await pilot.press("y")
        await shows(top, pilot, lambda: not isinstance(top.screen, Asked) and column(top) == [large, small])
        assert server.http.get("/v1/sessions/middle").status_code == 404
        await pilot.press("q")

    assert run(server, story).return_code == 0


def test_a_request_is_seen_on_its_way_and_explained(server: Served) -> None:
    async def story(top: Top, pilot: Pilot[None]) -> None:
        await pilot.press("e")
        body = {"prompt": "On and on", "max_tokens": 800, "ignore_eos": True, "stream": True}
        with server.raw(json.dumps(body).encode(), headers="Authorization: Bearer k\r\n"):
            await shows(top, pilot, lambda: column(top, "phase", "#requests") == ["decoding"])
            await pilot.press("e")
            await shows(top, pilot, lambda: isinstance(top.screen, Said))
            await pilot.press("q")
        await shows(top, pilot, lambda: column(top, "phase", "#requests") == [])
        await pilot.press("ctrl+c")

    run(server, story)


def test_an_admin_acts_on_the_sessions_of_every_key(server: Served) -> None:
    server.complete(f"9 {STORY}", max_tokens=2, session_id="a's")

    async def story(top: Top, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"a's", "enter")
        await shows(top, pilot, lambda: column(top) == ["a's"] and len(column(top, "tenant")[0]) == 12)
        await pilot.press("p")
        await shows(top, pilot, lambda: column(top, "pin") in (["9 min"], ["10 min"]))
        await pilot.press("r")
        await shows(top, pilot, lambda: isinstance(top.screen, Asked))
        await pilot.press("y")
        await shows(top, pilot, lambda: column(top) == [])

    run(server, story, key="boss")


def test_without_a_right_key_it_ends_and_says_what_to_do(server: Served) -> None:
    async def play() -> Top:
        top = Top(Feed(server.url, "wrong"))
        async with top.run_test() as pilot:
            await shows(top, pilot, lambda: top._exit)
        return top

    assert asyncio.run(play()).return_code == 1


def test_a_lost_server_is_found_again(model_path: Path, tmp_path: Path) -> None:
    """It is the same screen, and the pages are those of the new server."""

    async def play() -> None:
        with serving(tmp_path / "first", model_path, *OPTIONS[:2]) as first:
            port = str(first.address[1])
            top = Top(Feed(first.url), interval=0.1)
            screen = top.run_test(size=(150, 40))
            pilot = await screen.__aenter__()
            await shows(top, pilot, lambda: top.memory.num_pages == {"device": 60})
            first.stop()
        await shows(top, pilot, lambda: "trying again" in text(top, "#head"))
        with serving(tmp_path / "second", model_path, "--kv-cache-memory-bytes", str(70 * PAGE_BYTES), "--port", port):
            await shows(top, pilot, lambda: top.memory.num_pages == {"device": 70})
            assert "trying again" not in text(top, "#head")
            await screen.__aexit__(None, None, None)

    asyncio.run(play())


# ── once ──


def top(server: Served, *arguments: str, key: str = "k") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "octavo", "top", "--url", server.url, "--api-key", key]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)


def test_once_prints_tables_and_json(server: Served) -> None:
    plain = top(server, "--once", "--sort", "name")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "device: 60 pages, 21 MiB:" in plain.stdout
    until(lambda: '"num_requests": 0' in top(server, "--once", "--json").stdout)
    done = top(server, "--once", "--json", "--filter", "large")
    document = json.loads(done.stdout)
    [large] = document["holders"]
    session = server.http.get("/v1/sessions", params={"limit": 10}).json()["data"]
    [same] = [at for at in session if at["id"] == NAMES[1]]
    assert large["name"] == NAMES[1] and large["pages"]["device"] == same["pages"]["device"] > 0
    assert large["bytes"]["device"] == same["bytes"]["device"] == large["pages"]["device"] * PAGE_BYTES
    assert document["stats"]["tiers"]["device"]["states"]["free"] == document["stats"]["tiers"]["device"]["free"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--once", "--api-key", "wrong"), 1, "give a key with --api-key"),
        (("--json",), 2, "octavo: --json: goes with --once"),
        ((), 2, "octavo: --once: is missing: the output is no terminal"),
        (("--once", "--url", "http://127.0.0.1:9"), 1, "octavo: http://127.0.0.1:9 cannot be reached"),
        (("--interval", "0"), 2, "Invalid value for '--interval'"),
    ],
)
def test_mistakes_are_named(server: Served, arguments: tuple[str, ...], status: int, message: str) -> None:
    done = top(server, *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
