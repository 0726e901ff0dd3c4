"""Memory: a server's pools as its feed (docs/feed.md) tells of them, and the sums that a reader wants.

It knows cells and holders, no socket and no screen. What the server says is checked where it would do harm.
"""

from __future__ import annotations

import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.errors import OctavoError

TIERS = ("device", "host", "disk")
MAX_PAGES = 1 << 26
"""A tier of more is a mistake, or meant to do harm."""
MIN_IDLE_S = 60.0
"""A session is spoken of as idle from here on,"""
MIN_SHARE = 0.02
"""if it holds at least this share of the pool."""
SortKey = Literal["bytes", "idle", "name"]


@dataclass(slots=True)
class Holder:
    """A session, a request, or the cached pages of nobody in particular; `pages` by tier, `at` when that was told."""

    kind: str
    tenant: str
    name: str
    running: int
    idle_s: float
    pinned_s: float
    queried_tokens: int
    hit_tokens: int
    at: float
    pages: Counter[str] = field(default_factory=Counter)

    @property
    def identity(self) -> tuple[str, str, str]:
        """What tells it from others, also after the server gave it another number."""
        return self.kind, self.tenant, self.name

    @property
    def shown(self) -> str:
        """Its name, for people: without anything that moves a cursor or turns text around."""
        names = {"prefix": "cached prefixes", "shared": "shared by several"}
        return inert(self.name) if self.name else names.get(self.kind, self.kind)


class Memory:
    """Takes the feed's events in, in order: a snapshot first."""

    def __init__(self) -> None:
        self.time = 0.0
        self.about: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self.num_requests = 0
        self.history: list[dict[str, Any]] = []
        self.num_pages: dict[str, int] = {}
        self._cells: dict[str, array[int]] = {}
        self._holders: dict[int, Holder] = {}
        self._pages: dict[int, Counter[str]] = {}

    @property
    def page_bytes(self) -> int:
        return int(self.about.get("page_bytes", 0))

    def take(self, event: str, data: Any) -> None:
        """A snapshot or a delta. Raises OctavoError if it is not what the feed's description says."""
        try:
            if event == "snapshot":
                self._begin(data)
            elif event != "delta":
                return
            self.time = float(data["time"])
            for told in data.get("holders", ()):
                self._hold(told)
            for tier in data["tiers"]:
                self._paint(tier["name"], tier["runs"])
            for number in data.get("gone", ()):
                self._holders.pop(number, None)
            self.stats = data["stats"]
            self.requests = data.get("requests", self.requests)
            self.num_requests = int(data.get("num_requests", len(self.requests)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise OctavoError(
                f"the server's feed is not what it should be ({error!r}): is it of another version?"
            ) from error

    def _begin(self, data: Any) -> None:
        self.about = {key: data[key] for key in ("model", "kv_layout", "page_tokens", "page_bytes", "admin")}
        self.num_pages = {tier["name"]: int(tier["num_pages"]) for tier in data["tiers"]}
        if any(not 0 <= number <= MAX_PAGES for number in self.num_pages.values()):
            raise ValueError(f"tiers of {self.num_pages} pages")
        self._cells = {name: array("q", bytes(8 * number)) for name, number in self.num_pages.items()}
        self._pages = {0: Counter(self.num_pages)}
        self._holders = {}
        self.history = list(data.get("history", ()))

    def _hold(self, told: Any) -> None:
        self._holders[int(told["id"])] = Holder(
            *(str(told["kind"]), str(told["tenant"]), str(told["name"]), int(told["running"])),
            *(float(told["idle_s"]), float(told["pinned_s"]), int(told["queried_tokens"]), int(told["hit_tokens"])),
            at=self.time,
        )

    def _paint(self, tier: str, runs: Iterable[Sequence[int]]) -> None:
        cells = self._cells[tier]
        for first, count, _, holder in runs:
            if not 0 <= first <= first + count <= len(cells):
                raise ValueError(f"pages {first} to {first + count} of {len(cells)}")
            before = Counter(cells[first : first + count]) if count > 1 else {cells[first]: 1}
            for old, number in before.items():
                self._pages[old][tier] -= number
                if not any(self._pages[old].values()):
                    del self._pages[old]
            self._pages.setdefault(holder, Counter())[tier] += count
            cells[first : first + count] = array("q", [holder]) * count

    # ── what a reader wants ──

    def holders(self, sort: SortKey = "bytes", wanted: str = "") -> list[Holder]:
        """Those that hold pages, with these letters in their name, kind or tenant."""
        found = []
        for number, holder in self._holders.items():
            holder.pages = self._pages.get(number, Counter())
            texts = (holder.shown, holder.kind, holder.tenant)
            if holder.pages.total() and any(wanted.casefold() in text.casefold() for text in texts):
                found.append(holder)
        order = {
            "bytes": lambda at: (-at.pages["device"], -at.pages.total(), at.name),
            "idle": lambda at: (-self.idle_s(at), -at.pages["device"], at.name),
            "name": lambda at: (at.shown.casefold(), at.tenant, at.kind),
        }
        return sorted(found, key=order[sort])

    def idle_s(self, holder: Holder) -> float:
        """For how long nothing of it has run, 0 while something does or where that is not told."""
        if holder.running or holder.kind != "session":
            return 0.0
        return holder.idle_s + max(self.time - holder.at, 0.0)

    def pinned_s(self, holder: Holder) -> float:
        """What remains of its pin."""
        return max(holder.pinned_s - max(self.time - holder.at, 0.0), 0.0)

    def share(self, holder: Holder) -> float:
        """Of the pool, 0 to 1."""
        return holder.pages["device"] / max(self.num_pages.get("device", 0), 1)

    def advice(self) -> str:
        """The idle session that holds most of the pool, and what to do about it."""
        idle = [at for at in self.holders() if at.kind == "session" and self.idle_s(at) >= MIN_IDLE_S]
        if not idle or self.share(idle[0]) < MIN_SHARE:
            return "No idle session holds much of the pool."
        largest, total = idle[0], sum(map(self.share, idle))
        held, idle_for = size(largest.pages["device"] * self.page_bytes), duration(self.idle_s(largest))
        text = f"Session {largest.shown} holds {self.share(largest):.0%} of the pool ({held}), idle for {idle_for}"
        if len(idle) > 1:
            text += f"; all {len(idle)} that are idle for over a minute hold {total:.0%}"
        if pinned_s := self.pinned_s(largest):
            return f"{text}. A pin keeps it there for {duration(pinned_s)}: unpin it to let it go, or release it."
        below = next((tier for tier in TIERS[1:] if self.num_pages.get(tier)), None)
        if below is None:
            return f"{text}. Release it to forget it; with --swap-space it could be put away instead."
        full = "" if self._pages.get(0, Counter())[below] else ", which is full: what lay there longest goes"
        return f"{text}. Demote it to put it away to the {below} tier{full}, or release it to forget it."

    def document(self, sort: SortKey = "bytes", wanted: str = "") -> dict[str, Any]:
        """All of it, for scripts."""
        return {
            "time": self.time,
            **self.about,
            "stats": self.stats,
            "holders": [
                {
                    "kind": at.kind,
                    "tenant": at.tenant,
                    "name": at.name,
                    "pages": {tier: at.pages[tier] for tier in self.num_pages},
                    "bytes": {tier: at.pages[tier] * self.page_bytes for tier in self.num_pages},
                    "share": round(self.share(at), 6),
                    "running": at.running,
                    "idle_s": round(self.idle_s(at), 3),
                    "pinned_s": round(self.pinned_s(at), 3),
                    "prompt_tokens": at.queried_tokens,
                    "cached_tokens": at.hit_tokens,
                }
                for at in self.holders(sort, wanted)
            ],
            "requests": self.requests,
            "num_requests": self.num_requests,
            "advice": self.advice(),
        }


def inert(text: str, most: int = 40) -> str:
    """A text that somebody else chose, fit to be shown in a line."""
    shown = "".join("·" if unicodedata.category(char)[0] in "CZ" and char != " " else char for char in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def size(num_bytes: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 10 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds, for people: two units at most."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, _ = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
