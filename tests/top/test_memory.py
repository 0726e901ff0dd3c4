"""What `octavo top` makes of a server's feed, with feeds that are written here."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import OctavoError
from octavo.top.memory import Memory, duration, inert, size


def told(number: int, name: str, kind: str = "session", **more: Any) -> dict[str, Any]:
    holder = {"id": number, "kind": kind, "tenant": "", "name": name, "running": 0, "idle_s": 0.0, "pinned_s": 0.0}
    return {**holder, "num_requests": 1, "queried_tokens": 100, "hit_tokens": 25, **more}


def snapshot(
    runs: list[list[int]], holders: list[dict[str, Any]], num_pages: int = 100, host: int = 0, **more: Any
) -> dict[str, Any]:
    tiers = [{"name": "device", "num_pages": num_pages, "runs": runs}]
    if host:
        tiers.append({"name": "host", "num_pages": host, "runs": [[0, host, 0, 0]]})
    about = {"model": "m", "kv_layout": "paged", "page_tokens": 16, "page_bytes": 1 << 20, "admin": True}
    return {**about, "time": 1000.0, "tiers": tiers, "holders": holders, "stats": {}, "requests": [], **more}


def delta(time: float, runs: list[list[int]], **more: Any) -> dict[str, Any]:
    return {"time": time, "tiers": [{"name": "device", "runs": runs}], "stats": {}, **more}


def held(memory: Memory) -> dict[str, int]:
    return {at.name: at.pages["device"] for at in memory.holders()}


def test_pages_are_counted_by_holder_as_they_change_hands() -> None:
    memory = Memory()
    memory.take("snapshot", snapshot([[0, 30, 4, 1], [30, 10, 1, 2], [40, 60, 0, 0]], [told(1, "a"), told(2, "b")]))
    assert held(memory) == {"a": 30, "b": 10}
    memory.take("delta", delta(1001, [[5, 1, 0, 0], [20, 15, 4, 3]], holders=[told(3, "c")]))
    assert held(memory) == {"a": 19, "b": 5, "c": 15}
    memory.take("delta", delta(1002, [[0, 100, 0, 0]], gone=[1, 2, 3]))
    assert held(memory) == {}
    memory.take("snapshot", snapshot([[0, 100, 4, 9]], [told(9, "z")]))  # the server began anew
    assert held(memory) == {"z": 100}


def test_order_and_filter() -> None:
    holders = [told(1, "Quick", idle_s=5.0), told(2, "slow", idle_s=500.0), told(3, "", "prefix", tenant="ab12")]
    memory = Memory()
    memory.take("snapshot", snapshot([[0, 50, 4, 1], [50, 20, 4, 2], [70, 30, 5, 3]], holders))
    assert [at.shown for at in memory.holders()] == ["Quick", "cached prefixes", "slow"]
    assert [at.shown for at in memory.holders("idle")] == ["slow", "Quick", "cached prefixes"]
    assert [at.shown for at in memory.holders("name")] == ["cached prefixes", "Quick", "slow"]
    assert [at.shown for at in memory.holders(wanted="QU")] == ["Quick"]
    assert [at.shown for at in memory.holders(wanted="AB1")] == ["cached prefixes"]


def test_time_goes_on_between_what_is_told() -> None:
    memory = Memory()
    memory.take("snapshot", snapshot([[0, 100, 4, 1]], [told(1, "a", idle_s=50.0, pinned_s=30.0)]))
    memory.take("delta", delta(1020, []))
    [a] = memory.holders()
    assert memory.idle_s(a) == 70 and memory.pinned_s(a) == 10
    memory.take("delta", delta(1040, [], holders=[told(1, "a", running=1)]))
    [a] = memory.holders()
    assert memory.idle_s(a) == memory.pinned_s(a) == 0


@pytest.mark.parametrize(
    ("host", "more", "advice"),
    [
        (
            50,
            {},
            (
                "Session big holds 40% of the pool (40 MiB), idle for 2 h 3 min; "
                "all 2 that are idle for over a minute hold 50%. "
                "Demote it to put it away to the host tier, or release it to forget it."
            ),
        ),
        (
            0,
            {},
            (
                "Session big holds 40% of the pool (40 MiB), idle for 2 h 3 min; "
                "all 2 that are idle for over a minute hold 50%. "
                "Release it to forget it; with --swap-space it could be put away instead."
            ),
        ),
        (
            50,
            {"pinned_s": 600.0},
            (
                "Session big holds 40% of the pool (40 MiB), idle for 2 h 3 min; "
                "all 2 that are idle for over a minute hold 50%. "
                "A pin keeps it there for 10 min: unpin it to let it go, or release it."
            ),
        ),
        (50, {"running": 1}, "Session small holds 10% of the pool (10 MiB), idle for 2 min. Demote it"),
    ],
)
def test_the_largest_idle_holder_is_named_with_what_to_do(host: int, more: dict[str, Any], advice: str) -> None:
    holders = [told(1, "small", idle_s=120.0), told(2, "big", **{"idle_s": 7400.0, **more}), told(3, "new", idle_s=1.0)]
    memory = Memory()
    memory.take("snapshot", snapshot([[0, 10, 4, 1], [10, 40, 4, 2], [50, 50, 4, 3]], holders, host=host))
    assert memory.advice().startswith(advice)


def test_it_is_told_where_the_tier_below_is_full() -> None:
    memory = Memory()
    memory.take("snapshot", snapshot([[0, 40, 4, 1]], [told(1, "a", idle_s=120.0)], host=50))
    assert memory.advice().endswith("to the host tier, or release it to forget it.")
    memory.take("delta", {**delta(1001, []), "tiers": [{"name": "host", "runs": [[0, 50, 4, 1]]}]})
    assert "to the host tier, which is full: what lay there longest goes, or release it" in memory.advice()


def test_nothing_is_said_of_what_is_small_or_just_used() -> None:
    memory = Memory()
    memory.take("snapshot", snapshot([[0, 1, 4, 1], [1, 99, 4, 2]], [told(1, "a", idle_s=900.0), told(2, "b")]))
    assert memory.advice() == "No idle session holds much of the pool."


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        snapshot([[0, 101, 0, 0]], []),
        snapshot([[-1, 2, 0, 0]], []),
        snapshot([[0, 1]], []),
        snapshot([["0", 1, 0, 0]], []),
        snapshot([], [], num_pages=1 << 40),
        snapshot([], [{"id": 1}]),
        snapshot([], [told(1, "a", idle_s="long")]),
    ],
)
def test_a_feed_that_is_none_is_an_error(data: Any) -> None:
    with pytest.raises(OctavoError, match="feed is not what it should be"):
        Memory().take("snapshot", data)


def test_names_of_others_do_no_harm() -> None:
    assert inert("\x1b[2J\u202egnp.exe\r\nx") == "·[2J·gnp.exe··x"
    assert inert("n" * 10_000) == "n" * 39 + "…"
    assert inert("[red]plain[/]") == "[red]plain[/]"


def test_figures_for_people() -> None:
    assert [size(count) for count in (0, 1023, 1024, 20 << 10, 5 << 20, 3 << 30, 1 << 41)] == [
        *("0 B", "1023 B", "1.0 KiB", "20 KiB", "5.0 MiB", "3.0 GiB", "2.0 TiB")
    ]
    assert [duration(s) for s in (0.25, 4.2, 42.4, 60, 3599, 3600 * 5 + 61, 86400 * 2 + 3600)] == [
        *("250 ms", "4.2 s", "42 s", "1 min", "59 min", "5 h 1 min", "2 d 1 h")
    ]
