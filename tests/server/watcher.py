"""Somebody who watches: reads a stream of the map, keeps it as a client does, and checks that it adds up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from tests.server.serving import Served

MAP = "/v1/cache/map"
STATES = ["free", "active", "shared", "pinned", "idle", "cached", "moving"]
REFERENCED = {"active", "shared", "pinned", "moving"}


class Watcher:
    """The map as the events so far have it."""

    def __init__(self, events: Iterator[tuple[str, Any]]) -> None:
        self._events = events
        self.text = ""
        self.names: list[str] = []
        self.pages: dict[str, list[tuple[int, int]]] = {}
        self.holders: dict[int, Any] = {}
        self.latest: dict[str, Any] = {}
        self.next()

    def next(self) -> str:
        """Take one more event in; returns its name."""
        name, data = next(self._events)
        self.names.append(name)
        self.text += json.dumps(data)
        if name == "snapshot":
            self.latest = data
            self.pages = {tier["name"]: [(-1, -1)] * tier["num_pages"] for tier in data["tiers"]}
            self.holders = {}
        self.latest = {**self.latest, **data}
        self.holders |= {holder["id"]: holder for holder in data["holders"]}
        for tier in data["tiers"]:
            end = 0
            for first, count, state, holder in tier["runs"]:
                assert first >= end
                assert count > 0
                end = first + count
                self.pages[tier["name"]][first:end] = [(state, holder)] * count
        for number in data.get("gone", ()):
            del self.holders[number]
        self.check()
        return name

    def goes_on(self) -> bool:
        """Whether there was another event, which is taken in."""
        try:
            self.next()
        except StopIteration:
            return False
        return True

    def until(self, true: Callable[[], bool]) -> None:
        """Take events in until something is true of the map."""
        for _ in range(200):
            if true():
                return
            self.next()
        raise AssertionError(f"it did not happen: {self.latest['stats']}")

    def states(self, tier: str = "device") -> dict[str, int]:
        seen = [STATES[state] for state, _ in self.pages[tier]]
        return {state: seen.count(state) for state in STATES}

    def held(self, tier: str = "device") -> dict[str, int]:
        """Pages by their holder's name, or its kind where it has none, or "" of nobody known."""
        named: dict[str, int] = {}
        for _, number in self.pages[tier]:
            holder = self.holders.get(number)
            name = "" if holder is None else holder["name"] or holder["kind"]
            named[name] = named.get(name, 0) + 1
        return named

    def holder(self, name: str) -> Any:
        [holder] = [holder for holder in self.holders.values() if holder["name"] == name]
        return holder

    def check(self) -> None:
        """Every page is in a state and known holders hold all that are held; the figures are those of the audit."""
        used = {number for pages in self.pages.values() for _, number in pages} - {0}
        assert used == self.holders.keys()
        assert self.pages.keys() == self.latest["stats"]["tiers"].keys()
        for name, pages in self.latest["stats"]["tiers"].items():
            states = self.states(name)
            assert states == pages["states"]
            assert sum(states.values()) == pages["total"] == len(self.pages[name])
            in_use = states["active"] + states["pinned"] + states["moving"] + states["shared"] - pages["idle_shared"]
            idle = states["idle"] + states["cached"] + pages["idle_shared"]
            assert (states["free"], in_use, idle) == (pages["free"], pages["referenced"], pages["cached"])
        if len(self.latest["requests"]) < 200:
            assert self.latest["num_requests"] >= len(self.latest["requests"])


def events_of(reply: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "), parse_constant=lambda constant: 1 / 0)
        else:
            assert line in ("", ": keep-alive")


@contextmanager
def watching(served: Served, by: str | None = None, **query: Any) -> Iterator[Watcher]:
    """A stream that is open meanwhile."""
    headers = {"accept": "text/event-stream"} | ({} if by is None else {"authorization": f"Bearer {by}"})
    with (
        httpx.Client(base_url=served.url, timeout=20) as client,
        client.stream("GET", MAP, headers=headers, params=query) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield Watcher(events_of(reply))


def look(served: Served, path: str, by: str | None = None, **query: Any) -> Any:
    """The JSON of a GET; asserts that there is one."""
    headers = {} if by is None else {"authorization": f"Bearer {by}"}
    reply = served.http.get(path, headers=headers, params=query)
    assert reply.status_code == 200, reply.text
    return json.loads(reply.content, parse_constant=lambda constant: 1 / 0)
