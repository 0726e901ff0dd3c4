"""Sequence: one line of tokens on its way, and Group: the sequences of one request."""

from __future__ import annotations

from array import array
from collections import abc
from enum import Enum
from typing import NamedTuple, get_args

from octavo.cache.manager import Wait
from octavo.cache.page_table import PageTable
from octavo.cache.sessions import Session
from octavo.scheduler.forecast import Ahead
from octavo.types import Draw, FinishReason, Request, RequestInfo, Sampled, ToldPhase

TOLD_PHASES = get_args(ToldPhase)


class Phase(Enum):
    """Where a sequence is. Only RUNNING ones are planned; WAITING and FINISHED ones hold no pages."""

    WAITING = "waiting"  # in the queue: never started, or preempted
    LOADING = "loading"  # admitted; pages of it are on their way from a tier below
    RUNNING = "running"
    PARKED = "parked"  # a beam whose next candidates are known, until its siblings' are too; may have lost its pages
    FINISHED = "finished"


class Sequence:
    """Tokens, how many of them are computed, and the pages that hold them.

    There is no prefill and no decode: `num_computed` catches up with the tokens known, and whenever it has, a token is
    sampled.
    """

    __slots__ = (
        "ahead",
        "aside_since",
        "candidates",
        "draws",
        "group",
        "index",
        "key",
        "num_at_admission",
        "num_computed",
        "num_found",
        "num_lost",
        "num_preemptions",
        "num_ways",
        "phase",
        "sampled",
        "score",
        "seed",
        "seq_id",
        "table",
        "token_ids",
        "wait",
        "write_start",
    )

    def __init__(self, seq_id: int, group: Group, index: int, token_ids: array[int], seed: int) -> None:
        self.seq_id = seq_id
        self.group = group
        self.index = index
        self.token_ids = token_ids
        self.seed = seed
        self.key = (group.priority, group.arrival, index, seq_id)
        self.phase = Phase.WAITING
        self.table: PageTable | None = None
        self.num_computed = 0
        self.num_at_admission = 0
        self.num_found = 0  # pages that others held when it came to them
        self.num_ways = 1  # in which it is to be continued
        self.ahead: Ahead | None = None
        self.aside_since = 0  # the number of the step, when set aside
        self.write_start = 0
        self.num_preemptions = 0
        self.num_lost = 0  # tokens that were computed when it was preempted, until it is admitted again
        self.wait: Wait | None = None
        self.draws: tuple[Draw, ...] = ()
        # of beams only: the answer so far, its summed log-probability, and the best tokens to come next
        self.sampled: list[Sampled] = []
        self.score = 0.0
        self.candidates: abc.Sequence[tuple[int, float]] = ()

    @property
    def num_remaining(self) -> int:
        """Tokens known but not yet computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def protected(self) -> bool:
        """Whether it was preempted before, and has not got a token further since it came back."""
        return self.num_preemptions > 0 and len(self.token_ids) == self.num_at_admission

    @property
    def told_phase(self) -> ToldPhase:
        """Its phase, as people want to know it."""
        if self.phase is Phase.RUNNING:
            return "prefilling" if self.num_computed < self.group.num_prompt_tokens else "decoding"
        return "parked" if self.phase is Phase.PARKED else "loading" if self.phase is Phase.LOADING else "waiting"

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.group.num_prompt_tokens


class Hypothesis(NamedTuple):
    """A finished beam: its score, already divided by length ** length_penalty, and its tokens."""

    score: float
    sampled: list[Sampled]
    finish_reason: FinishReason


class Group:
    """One request and its sequences: one at first, `n` or up to `beam_width` once the prompt is computed."""

    __slots__ = (
        "arrival",
        "guided",
        "hypotheses",
        "live",
        "max_tokens",
        "num_cached_tokens",
        "num_prompt_tokens",
        "priority",
        "prompt_logprobs",
        "request",
        "searches",
        "served",
        "session",
        "stop_token_ids",
        "wants_scores",
    )

    def __init__(
        self, request: Request, priority: int, arrival: int, max_tokens: int, stop_token_ids: frozenset[int]
    ) -> None:
        self.request = request
        self.priority = priority
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.searches = request.params.use_beam_search
        self.guided = request.params.guide is not None
        self.session: Session | None = None
        self.wants_scores = request.params.prompt_logprobs is not None
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens: int | None = None  # None until all is there that was found first
        self.served = False  # whether it was ever admitted
        self.live: dict[int, Sequence] = {}  # by seq_id, unfinished
        self.prompt_logprobs: list[Sampled] = []
        self.hypotheses: list[Hypothesis] = []  # best first

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to come, so that every position must be computed."""
        return self.wants_scores and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def info(self) -> RequestInfo:
        """How far it has come."""
        live, prompt = list(self.live.values()), self.num_prompt_tokens
        tables = [sequence.table for sequence in live if sequence.table is not None]
        pages = len(tables[0].pages) if len(tables) == 1 else len(set().union(*(table.pages for table in tables)))
        num_computed = sum(sequence.num_computed for sequence in live)
        on_its_way = self.num_cached_tokens is None and self.served
        return RequestInfo(
            self.request.request_id,
            max((sequence.told_phase for sequence in live), key=TOLD_PHASES.index),
            num_computed if on_its_way else self.num_cached_tokens,
            num_computed,
            sum(len(sequence.token_ids) - prompt for sequence in live),
            self.max_tokens,
            pages,
            sum(sequence.num_preemptions for sequence in live),
        )
