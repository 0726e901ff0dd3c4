"""A memory as lines: cells of the tables that the screen and `--once` both show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from octavo.top.memory import Holder, Memory, SortKey, duration, inert, size

HOLDERS = ("holder", "kind", "tenant", "pool", "share", "host", "disk", "idle", "pin", "running", "cache hits")
REQUESTS = (*("request", "phase", "progress", "prompt", "cached", "answer", "pages", "age", "preempted", "session"),)
TEXTS = frozenset(("holder", "kind", "tenant", "request", "phase", "progress", "session"))
"""Columns of texts; the others are numbers, and stand on the right."""


def facts(memory: Memory) -> str:
    """What the server does now, and what it did since it began."""
    stats = memory.stats
    totals, first, next_ = stats["totals"], stats.get("ttft_s") or {}, stats.get("itl_s") or {}
    queried = totals["queried_tokens"]
    spared = f", {stats['spared_pages']:,} pages kept for the running" if stats["spared_pages"] else ""
    return " · ".join(
        (
            f"{stats['running']} running, {stats['waiting']} waiting{spared}",
            f"first token {_seconds(first.get('p50'))} (p99 {_seconds(first.get('p99'))})",
            f"next tokens {_seconds(next_.get('p50'))} (p99 {_seconds(next_.get('p99'))})",
            f"cache hits {totals['hit_tokens'] / queried:.0%}" if queried else "no prompts yet",
            f"sharing saves {size(stats['saved_by_sharing_pages'] * memory.page_bytes)}",
            f"{totals['evicted']:,} evicted, {totals['swapped_out']:,} swapped out, {totals['swapped_in']:,} back",
            f"{totals['preemptions']:,} preemptions",
        )
    )


def holder(memory: Memory, at: Holder) -> list[str]:
    """A row of HOLDERS."""
    held = {tier: size(at.pages[tier] * memory.page_bytes) if at.pages[tier] else "" for tier in ("host", "disk")}
    idle, pinned = memory.idle_s(at), memory.pinned_s(at)
    return [
        *(at.shown, at.kind, inert(at.tenant, 12)),
        *(size(at.pages["device"] * memory.page_bytes), f"{memory.share(at):.1%}", held["host"], held["disk"]),
        *(duration(idle) if idle else "", duration(pinned) if pinned else "", str(at.running or "")),
        f"{at.hit_tokens / at.queried_tokens:.0%}" if at.queried_tokens else "",
    ]


def request(at: dict[str, Any]) -> list[str]:
    """A row of REQUESTS."""
    prompt, computed, answer = int(at["prompt_tokens"]), int(at["computed_tokens"]), int(at["generated_tokens"])
    most = max(int(at["max_tokens"]), 1)
    done = computed / max(prompt, 1) if at["phase"] in ("prefilling", "loading") else answer / most
    tenths = 0 if at["phase"] == "waiting" else round(min(done, 1.0) * 10)
    return [
        *(inert(str(at["id"]), 24), str(at["phase"]), "█" * tenths + "·" * (10 - tenths)),
        *(f"{prompt:,}", f"{int(at['cached_tokens']):,}", f"{answer:,}/{most:,}", f"{int(at['pages']):,}"),
        *(duration(float(at["age_s"])), str(at["preemptions"] or ""), inert(str(at["session"] or ""), 24)),
    ]


def lines(memory: Memory, sort: SortKey, wanted: str) -> Iterator[str | Table]:
    """Everything, once."""
    for tier, number in memory.num_pages.items():
        states = memory.stats["tiers"][tier]["states"]
        held = ", ".join(f"{count:,} {state}" for state, count in states.items() if count)
        yield f"{tier}: {number:,} pages, {size(number * memory.page_bytes)}: {held}"
    yield facts(memory)
    yield memory.advice()
    yield ""
    yield _table(HOLDERS, [holder(memory, at) for at in memory.holders(sort, wanted)])
    if memory.requests:
        yield ""
        yield _table(REQUESTS, [request(at) for at in memory.requests])


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else duration(value)
