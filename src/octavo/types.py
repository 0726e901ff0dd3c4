"""What crosses the layers: requests, sampling parameters, step plans and their results.

Plain values only. This module imports no array library and knows no model, page pool or scheduler.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple, get_args

from octavo.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort"]
ToldPhase = Literal["waiting", "loading", "parked", "prefilling", "decoding"]
GuideKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

MAX_SEED = 2**64 - 1
MAX_CHOICES = 1024
MAX_LOGPROBS = 1024
MAX_GUIDE_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class Guide:
    """What an answer must look like, whatever the model would rather say.

    `spec` is for json_schema the schema and for choice a list of texts, both as JSON; for regex an expression that the
    whole answer matches; for grammar a grammar in Lark's or llama.cpp's notation; for json_object it is empty.

    Raises InvalidRequest("guide"). Whether the text says anything sensible is found out by compiling it.
    """

    kind: GuideKind
    spec: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuideKind):
            raise InvalidRequest("guide", f"kind must be one of {get_args(GuideKind)}, got {_short(self.kind)}")
        if not isinstance(self.spec, str) or (self.kind == "json_object") != (self.spec == ""):
            raise InvalidRequest("guide", f"a {self.kind} guide cannot be {_short(self.spec)}")
        if not self.spec.isascii() and any("\ud800" <= char <= "\udfff" for char in self.spec):
            raise InvalidRequest("guide", "is not valid Unicode text")
        if len(self.spec) > MAX_GUIDE_CHARS:
            raise InvalidRequest("guide", f"has {len(self.spec)} characters, and the limit is {MAX_GUIDE_CHARS}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and meanings are vLLM's.

    `n` choices are drawn from one stored prompt; choice i uses `seed + i`. `top_k` 0 or -1 and `top_p` 1 switch
    those filters off. `max_tokens` None means "up to the context length". With `use_beam_search` the `n` best of
    `beam_width` beams are returned, scored by sum of log-probabilities / length ** length_penalty.

    With a `guide` only tokens that it allows are drawn, and an end of the text only where it is complete. Where nothing
    else may follow the answer ends, even below `min_tokens` and with `ignore_eos`.

    Raises InvalidRequest naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    use_beam_search: bool = False
    beam_width: int = 4
    length_penalty: float = 1.0
    guide: Guide | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 1e9)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e3, above=True)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(name, f"must be true or false, got {_short(getattr(self, name))}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequest("stop", f"must be non-empty strings, got {_short(text)}")
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidRequest("logit_bias", "must map token ids to numbers")
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0, 2**31 - 1)
                _number("logit_bias", bias, -100.0, 100.0)
        if self.use_beam_search:
            _integer("beam_width", self.beam_width, max(self.n, 1), 64)
            _number("length_penalty", self.length_penalty, -10.0, 10.0)
            if self.stop:
                raise InvalidRequest("stop", "stop strings do not work with use_beam_search: use stop_token_ids")
            if self.guide is not None:
                raise InvalidRequest("guide", "does not work with use_beam_search")
        if self.guide is not None and not isinstance(self.guide, Guide):
            raise InvalidRequest("guide", f"must be a Guide, got {_short(self.guide)}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken; a vanishing temperature means the same."""
        return self.temperature < 1e-5


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, (bytes, str)) or not isinstance(value, Sequence):
        raise InvalidRequest(name, f"must be a list, got {_short(value)}")
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(name, f"must be a whole number from {low} to {high}, got {_short(value)}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        bound = "above" if above else "from"
        raise InvalidRequest(name, f"must be a number {bound} {low:g} to {high:g}, got {_short(value)}")


@dataclass(slots=True)
class Request:
    """One prompt to be continued.

    `identity` names whose prefix-cache root the prompt may share (tenant, adapter, salt); requests of different
    identities never share a page. Where the engine's scheduling_policy is "priority", lower values are served first.
    `tenant` is who asks; a `session_id`, which is the tenant's own, says that its conversation may come back.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    identity: tuple[str, ...] = ()
    priority: int = 0
    tenant: str = ""
    session_id: str | None = None


# ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Tier(IntEnum):
    """Where a page lies, the nearest first: the pool that kernels read, host memory, a file."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Place(NamedTuple):
    """A page of a tier."""

    tier: Tier
    page: int


class PageLabel(NamedTuple):
    """What a page on disk is found by after a restart: its own tokens, and digests of the path to it and to its parent.

    A digest (SHA-256) is that of the identity for a root, of the parent's digest and the tokens below it.
    """

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


class CopyPage(NamedTuple):
    """A page operation: copy page `src` onto page `dst` of the device tier, all layers, now."""

    src: int
    dst: int


class MovePage(NamedTuple):
    """A page operation: begin to copy a page from one tier to another; a later StepResult says how that went.

    Moves end in the order in which they began, as far as that shows. The page copied stays as it is until then, and
    nobody reads the copy. A copy to disk has a label.
    """

    number: int
    source: Place
    target: Place
    label: PageLabel | None = None


class AwaitMove(NamedTuple):
    """A page operation: go on when that move has ended, because what follows writes what it reads."""

    number: int


PageOp = CopyPage | MovePage | AwaitMove


class Draw(NamedTuple):
    """One token to be chosen from the logits after a slice's last token.

    `token_ids` holds the sequence so far, of which the first `num_prompt_tokens` are prompt: penalties and min_tokens
    look at them, and a guide's state is a function of what follows. It is the sequence's own array and lives as long.
    `num_top` log-probabilities are returned beside the chosen token's. The noise is a function of `seed` and the
    position `len(token_ids)` alone.
    """

    params: SamplingParams
    seed: int
    token_ids: array[int]
    num_prompt_tokens: int
    num_top: int


class Slice(NamedTuple):
    """A run of one sequence's tokens, computed in one step.

            0            write_start     start                    start+len(token_ids)
            │ in the pages │ in the pages │ computed here           │
            └──────────────┴──────────────┴─────────────────────────┘
                                           KV is written from max(start, write_start) on

    `write_start` passes `start` when the whole prompt was found in the cache: the last token is computed again for
    its logits, and its KV, which lies in a shared page, is left alone.
    `pages` covers every position up to the end of the slice; it is the live page table, valid until the next plan.
    Logits are wanted at the last position if `draws`, and at every position if `num_prompt_logprobs` is not None:
    the logits at position p then score token p + 1 of `draws`' or the prompt's tokens, `targets`.
    """

    seq_id: int
    start: int
    token_ids: array[int]
    write_start: int
    pages: array[int]
    draws: tuple[Draw, ...]
    num_prompt_logprobs: int | None = None
    targets: Sequence[int] = ()


class StepPlan(NamedTuple):
    """What one step does: page operations in order, then one forward pass over all slices.

    With `wait`, it ends no earlier than one of the moves under way: there is nothing else to do.
    """

    step: int
    page_ops: Sequence[PageOp]
    slices: Sequence[Slice]
    wait: bool = False


class Sampled(NamedTuple):
    """A chosen (or scored) token: its log-probability, its rank (1 = most likely), and the `num_top` best tokens.

    They cost an exponential of the vocabulary: log-probability and rank are 0 where the request asked for none.
    A `token_id` below 0 is no token: the guide has become too complex to go on, and the choice is aborted.
    """

    token_id: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]]


class SliceResult(NamedTuple):
    """One `Sampled` for each draw, and one for each target when prompt log-probabilities were asked for."""

    sampled: Sequence[Sampled]
    prompt_logprobs: Sequence[Sampled] = ()


class Moved(NamedTuple):
    """A move that has ended. Unless `ok` the copy is not to be used: it failed, or what was read was damaged."""

    number: int
    ok: bool
    seconds: float = 0.0


class StepResult(NamedTuple):
    """Results in the order of the plan's slices, how long they took, and the moves that ended since the last result."""

    slices: Sequence[SliceResult]
    moved: Sequence[Moved] = ()
    seconds: float = 0.0


# ── what the engine says after a step ────────────────────────────────────────────────────────────────────────────


class Output(NamedTuple):
    """News of one choice of a request: tokens new since the last Output, and why it ended, if it did.

    `prompt_logprobs` holds P - 1 entries (the first prompt token has no predecessor) and comes with the first Output of
    choice 0. `score` is a beam's final score. `num_cached_tokens` counts prompt tokens found in the cache when the
    request was first admitted, none of a page that was lost on its way from a tier below.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    new_tokens: Sequence[Sampled]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    num_preemptions: int
    prompt_logprobs: Sequence[Sampled] | None = None
    score: float | None = None


MissReason = Literal[
    "new",
    "evicted",
    "other_identity",
    "tail",
    "last_token",
    "caching_off",
    "prompt_logprobs",
    "not_worth_loading",
    "load_failed",
]


class Missed(NamedTuple):
    """Tokens of a prompt that were not found, and why. Of what was forgotten: `how`, for which `request` of which
    `tenant`, how long ago. Of what lies under another identity: whose it is.
    """

    start: int
    stop: int
    reason: MissReason
    how: str = ""
    request: str = ""
    tenant: str = ""
    ago_s: float = 0.0


class Found(NamedTuple):
    """What a request's first admission found: tokens by tier, tokens of a part of a page, and what it did not."""

    by_tier: tuple[int, ...]
    copied: int
    missed: Sequence[Missed]


class Note(NamedTuple):
    """What befell a request. "admitted": `found`. "arrived": its pages have come from the tiers below.

    "preempted": choice `index` gave way to the request `by`, or to nobody in particular, with `num_tokens` computed;
    "resumed": of which it must compute so many again.
    """

    request_id: str
    what: Literal["admitted", "arrived", "preempted", "resumed"]
    index: int = 0  # type: ignore[assignment]  # hides tuple.index
    num_tokens: int = 0
    by: str | None = None
    found: Found | None = None


class RequestInfo(NamedTuple):
    """How far a request has come. Of several choices: tokens of all of them, pages that any of them names, the phase of
    the one that is furthest. `num_cached` is None until the first admission, and counts what is on its way.
    """

    request_id: str
    phase: ToldPhase
    num_cached: int | None
    num_computed: int
    num_generated: int
    max_tokens: int
    num_pages: int
    num_preemptions: int


class SessionInfo(NamedTuple):
    """What a session holds. `pages` counts those on its path by tier; `shared_pages` of them other sessions use too.

    `idle_s` is 0 while a request runs; `pinned_s` is what remains of a pin, 0 without one. Tokens are of all prompts.
    """

    tenant: str
    session_id: str
    num_running: int
    num_requests: int
    pages: tuple[int, int, int]
    shared_pages: int
    idle_s: float
    pinned_s: float
    queried_tokens: int
    hit_tokens: int
