"""Why a request took as long as it did: what of its prompt was found, why no more was, and who made it give way.

Keeps the stories of requests that have not ended and of the last MAX_ENDED that have: numbers and names, no texts. What
one tenant is told names no other, and does not say that another has sent the same prompt.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from octavo.engine.async_llm import AsyncLLM, RequestStream
from octavo.server.keys import Caller, shown
from octavo.server.protocol import APIError
from octavo.types import Found, Missed, Note, Output, Tier

MAX_ENDED = 2000
ANOTHER = "another tenant's"


class CachedTokens(Struct):
    """Prompt tokens that were not computed: found on each tier, the last ones by copying a part of a page."""

    tokens: int
    by_tier: dict[str, int]
    copied: int


class Evicted(Struct):
    """When pages were forgotten, and for which request; null is for nobody's."""

    ago_s: float
    by: str | None


class MissedTokens(Struct):
    """Prompt tokens from the first position to the second that were computed, and why."""

    tokens: tuple[int, int]
    reason: str
    text: str
    evicted: Evicted | UnsetType = UNSET


class Times(Struct):
    """Where the time went, up to now if it has not ended."""

    queued: float
    copying: float
    prefilling: float
    decoding: float
    total: float


class Preemption(Struct):
    """It gave its pages to another request, computed `lost_tokens` again and got its next token `cost_s` later."""

    at_s: float
    by: str | None
    lost_tokens: int
    cost_s: float


class Explanation(Struct, omit_defaults=True):
    """The reply of /v1/requests/{id}/explain. It has either a phase or the reason why it finished."""

    id: str
    tenant: str
    session: str | None
    prompt_tokens: int
    num_pages: int
    cached: CachedTokens
    missed: list[MissedTokens]
    times_s: Times
    preemptions: list[Preemption]
    generated_tokens: int
    text: str
    phase: str | UnsetType = UNSET
    finished: str | UnsetType = UNSET


class _Paused:
    """A preemption: when, by whom, and what came of it."""

    __slots__ = ("at", "by", "by_tenant", "cost_s", "index", "lost", "waits")

    def __init__(self, at: float, index: int, by: str | None, by_tenant: str) -> None:
        self.at, self.index, self.by, self.by_tenant = at, index, by, by_tenant
        self.lost, self.waits = 0, True
        self.cost_s: float | None = None


class _Story:
    """What is kept of a request. Its stream is let go at its end, since that holds its texts."""

    def __init__(self, stream: RequestStream[Any]) -> None:
        request = stream.request
        self.id, self.tenant, self.session = request.request_id, request.tenant, request.session_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.stream: RequestStream[Any] | None = stream
        self.found: Found | None = None
        self.arrived_at: float | None = None
        self.paused: list[_Paused] = []
        self.reason: str | None = None
        self.ended_at = 0.0
        self._read(stream)

    def _read(self, stream: RequestStream[Any]) -> None:
        self.queued_at, self.scheduled_at = stream.queued_at, stream.scheduled_at
        self.first_token_at, self.last_token_at = stream.first_token_at, stream.last_token_at
        self.num_generated = stream.num_generated

    def refresh(self) -> None:
        if self.stream is not None:
            self._read(self.stream)

    def end(self, reason: str) -> None:
        self.refresh()
        self.stream, self.reason, self.ended_at = None, reason, time.monotonic()

    @property
    def phase(self) -> str:
        """Where it is, as far as that shows here."""
        if self.scheduled_at is None or any(paused.waits for paused in self.paused):
            return "waiting"
        if self.found is not None and any(self.found.by_tier[1:]) and self.arrived_at is None:
            return "loading"
        return "prefilling" if self.first_token_at is None else "decoding"


class Stories:
    """Listens to an engine, and explains."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._open: dict[str, _Story] = {}
        self._ended: OrderedDict[str, _Story] = OrderedDict()
        llm.on_begin, llm.on_end, llm.on_note = self._begin, self._end, self._note

    def explain(self, caller: Caller, request_id: str) -> Explanation:
        """Raises APIError(404) for what is not known, or another tenant's."""
        story = self._find(request_id)
        if story is None or not (caller.admin or story.tenant == caller.tenant):
            name = request_id if len(request_id) <= 100 else request_id[:99] + "…"
            message = (
                f"there is no request {name!r}: give the id of the reply, or its X-Request-Id; "
                f"those that run are known, and the last {MAX_ENDED:,} that ended"
            )
            raise APIError(404, message, code="request_not_found")
        story.refresh()
        return self._told(story, None if caller.admin else caller.tenant)

    def _find(self, request_id: str) -> _Story | None:
        """By its own name, by that of its reply, of which it is the first prompt, or by one of its choices'."""
        names = (request_id, f"{request_id}-0", re.sub(r"-\d{1,4}\Z", "", request_id))
        return next((at for name in names for at in (self._open.get(name), self._ended.get(name)) if at), None)

    # ── what the engine tells ──

    def _begin(self, stream: RequestStream[Any]) -> None:
        self._open[stream.request_id] = _Story(stream)

    def _end(self, stream: RequestStream[Any], reason: str) -> None:
        story = self._open.pop(stream.request_id, None)
        if story is None or reason == "refused":
            return
        story.end(reason)
        self._ended[story.id] = story
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _note(self, note: Note, began: float, ended: float) -> None:
        story = self._open.get(note.request_id)
        if story is None or story.stream is None:
            return
        match note.what:
            case "admitted":
                story.found = note.found
            case "arrived":
                story.arrived_at = ended
            case "preempted":
                by = None if note.by is None else self._open.get(note.by)
                story.paused.append(_Paused(began, note.index, note.by, "" if by is None else by.tenant))
                story.stream.on_output = lambda output, now: _resumed(story, output, now)
            case "resumed":
                for paused in story.paused:
                    if paused.index == note.index and paused.waits:
                        paused.lost, paused.waits = note.num_tokens, False

    # ── what is told ──

    def _told(self, story: _Story, view: str | None) -> Explanation:
        end = story.ended_at if story.reason is not None else time.monotonic()
        found, size = story.found or Found((0, 0, 0), 0, ()), self._llm.limits.block_size
        by_tier = {tier.name.lower(): count for tier, count in zip(Tier, found.by_tier, strict=True)}
        missed = [_missed(at, story.tenant, view, size) for at in _seen(found.missed, story.tenant, view)]
        scheduled, first = story.scheduled_at, story.first_token_at
        copying = (story.arrived_at or scheduled or 0.0) - (scheduled or 0.0)
        told = Explanation(
            story.id,
            shown(story.tenant),
            story.session,
            story.num_prompt_tokens,
            -(-story.num_prompt_tokens // size),
            CachedTokens(sum(found.by_tier) + found.copied, by_tier, found.copied),
            missed,
            Times(
                _s((end if scheduled is None else scheduled) - story.queued_at),
                _s(copying),
                _s(0.0 if scheduled is None else (end if first is None else first) - scheduled - copying),
                _s(0.0 if first is None else (end if story.reason is None else story.last_token_at or end) - first),
                _s(end - story.queued_at),
            ),
            [
                Preemption(
                    _s(paused.at - story.queued_at),
                    paused.by if paused.by is None or view in (None, paused.by_tenant) else ANOTHER,
                    paused.lost,
                    _s((end if paused.cost_s is None else paused.at + paused.cost_s) - paused.at),
                )
                for paused in story.paused
            ],
            story.num_generated,
            "",
        )
        if story.reason is None:
            told.phase = story.phase
        else:
            told.finished = story.reason
        told.text = _in_words(told, known=story.found is not None)
        return told


def _resumed(story: _Story, output: Output, now: float) -> None:
    """The first token after a preemption says what that cost."""
    for paused in story.paused:
        if paused.index == output.index and paused.cost_s is None:
            paused.cost_s = now - paused.at
    if story.stream is not None and all(paused.cost_s is not None for paused in story.paused):
        story.stream.on_output = None


def _seen(missed: Sequence[Missed], tenant: str, view: str | None) -> list[Missed]:
    """What a viewer may know: that another tenant has the same prompt is to it as if nobody had."""
    for number, at in enumerate(missed):
        if at.reason == "other_identity" and view is not None and at.tenant != tenant:
            return [*missed[:number], Missed(at.start, missed[-1].stop, "new")]
    return list(missed)


TEXTS = {
    "new": "nobody has computed them before, or so long ago that it is forgotten; the next request that begins like "
    "this one finds them",
    "tail": "they do not fill a page of {size} tokens, and only whole pages are kept for others",
    "last_token": "the last token always is, as the answer begins with its result",
    "caching_off": "the server runs with --no-enable-prefix-caching; without that flag they would be kept",
    "prompt_logprobs": "log-probabilities of the prompt were asked for, which takes all of it; leave prompt_logprobs, "
    "or echo with logprobs, out to use the cache",
    "not_worth_loading": "they lie on a slower tier, and that was quicker than fetching them; --preemption-mode swap "
    "fetches them all the same",
    "load_failed": "their copy on a slower tier could not be written or read, or was damaged",
    "salt": "they are cached under another cache_salt, which keeps them apart; send the same one to share them",
    "key": "they are cached for another API key; --share-prefixes lets keys share what they have in common",
}
KEEP = "a larger --kv-cache-memory-bytes or --swap-space keeps more, and a session that is pinned keeps its own"
HOW = {
    "evicted": f"they were cached, and made room{{by}} {{ago}} ago; {KEEP}",
    "dropped": f"they were cached, and were forgotten for want of room {{ago}} ago; {KEEP}",
    "released": "they were cached until their session was released {ago} ago",
    "quota": "they were cached until their key had more idle pages than --kv-quota lets it keep, {ago} ago",
}


def _missed(at: Missed, tenant: str, view: str | None, size: int) -> MissedTokens:
    told = MissedTokens((at.start, at.stop), at.reason, "")
    if at.reason == "evicted":
        own = view is None or at.tenant == view
        by = None if at.how == "dropped" else ANOTHER if not own else at.request or "yours"
        told.evicted = Evicted(_s(at.ago_s), by)
        told.text = HOW[at.how].format(ago=_duration(at.ago_s), by=f" for {_whose(by)}")
    elif at.reason == "other_identity":
        told.text = TEXTS["salt" if at.tenant == tenant else "key"]
    else:
        told.text = TEXTS[at.reason].format(size=size)
    return told


def _whose(by: str | None) -> str:
    return (
        "those that came before" if by is None else "another tenant's request" if by == ANOTHER else f"the request {by}"
    )


def _in_words(told: Explanation, *, known: bool) -> str:
    times, cached = told.times_s, told.cached
    if not known:
        ended = "" if told.finished is UNSET else ", until it ended"
        return f"It has waited {_duration(times.queued)} for a place or for pages{ended}."
    where = [f"{count:,} on the {tier} tier" for tier, count in cached.by_tier.items() if count]
    if cached.copied:
        where.append(f"{cached.copied:,} in a part of a page, which was copied")
    parts = [f"Of its {told.prompt_tokens:,} prompt tokens {cached.tokens:,} were found in the cache"]
    parts[0] += f": {', '.join(where)}." if where else "."
    for missed in told.missed:
        start, stop = missed.tokens
        which = f"Tokens {start:,} to {stop - 1:,} were" if stop > start + 1 else f"Token {start:,} was"
        parts.append(f"{which} computed: {missed.text}.")
    spent = {
        "in the queue": times.queued,
        "for copies from slower tiers": times.copying,
        "computing the prompt": times.prefilling,
        "answering": times.decoding,
    }
    each = ", ".join(f"{_duration(seconds)} {name}" for name, seconds in spent.items() if seconds)
    parts.append(f"It took {_duration(times.total)}: {each}.")
    parts += [
        f"After {_duration(paused.at_s)} it gave its pages to {_whose(paused.by)}, which cost it "
        f"{_duration(paused.cost_s)} and {paused.lost_tokens:,} tokens that were computed again."
        for paused in told.preemptions
    ]
    return " ".join(parts)


def _s(seconds: float) -> float:
    return round(max(seconds, 0.0), 4)


def _duration(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
