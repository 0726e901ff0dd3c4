"""Owns the step from a row of logits to a token. Knows no request beyond its `Draw`, keeps no state between draws.

A draw is a pure function of (logits row, Draw). The transforms and their order are vLLM's:

    guide → logit_bias → min_tokens → repetition, frequency, presence penalty → temperature → top_k → top_p → min_p

From temperature on they are the backend's, which answers for many rows at once (`best`, `choose` and `score` in
ops/api.py); the rest changes a copy of the row, here. Log-probabilities and ranks are those of the raw logits, before
any transform, and cost an exponential of the whole vocabulary: they are computed only for requests that ask for them.

Logits that are not numbers are taken as "impossible", infinite ones as the largest float, and a row without one finite
logit as all equal: a broken row spoils its own request at most, and `num_broken_rows` counts it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from octavo.engine.guide import Mask
from octavo.ops.api import Draws, Floats, Ops
from octavo.types import Draw, Sampled

_log = logging.getLogger(__name__)

_LARGEST = float(np.finfo(np.float32).max)
_MASK64 = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the step of SplitMix64


class Target(NamedTuple):
    """A token that is given, a prompt's, to be scored."""

    token_id: int
    num_top: int


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone.

    The `position`th output of a SplitMix64 generator (Steele, Lea, Flood 2014) that starts at the hash of `seed`, so
    that neighbouring seeds (the choices of one request) share no stream. A counter needs no state to be kept or redone.
    """
    return (_mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x &= _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


class Sampler:
    """Answers draws and scores from rows of logits, which it never writes to."""

    def __init__(self, ops: Ops, eos_token_ids: Iterable[int]) -> None:
        self.num_broken_rows = 0
        self._ops = ops
        self._eos = tuple(eos_token_ids)
        self._rows = np.empty((0, 0), np.float32)

    def sample(
        self,
        logits: Floats,
        asked: Sequence[tuple[int, Draw | Target]],
        allowed: Callable[[Draw], Mask | None] = lambda _: None,
    ) -> list[Sampled]:
        """Answer what is asked of rows of `logits` [rows, vocab]; a draw chooses one of the tokens `allowed` to it.

        Without `params.logprobs` (and outside beam search) log-probability and rank are left 0. If no token is allowed,
        it is -1. A beam's draw chooses nothing: it is the most likely token and the `num_top` best.
        """
        logits, best = self._finite(logits)
        sampled: list[Sampled] = []
        drawn: list[tuple[int, int, Draw]] = []  # (place, row, draw) of those that are not greedy
        changed: list[tuple[int, int, Draw]] = []
        masks: list[Mask | None] = []  # of those that are changed
        scored: list[tuple[int, int, int]] = []  # (place, row, num_top)
        for place, (row, ask) in enumerate(asked):
            if isinstance(ask, Target):
                sampled.append(Sampled(ask.token_id, 0.0, 0, ()))
                scored.append((place, row, ask.num_top))
                continue
            params, mask = ask.params, allowed(ask)
            if mask is not None and not mask.any():
                sampled.append(Sampled(-1, 0.0, 0, ()))
                continue
            sampled.append(Sampled(best[row], 0.0, 0, ()))
            if params.use_beam_search or params.logprobs is not None:
                scored.append((place, row, ask.num_top))
            if params.use_beam_search:
                continue
            if mask is not None or _is_changed(ask):
                changed.append((place, row, ask))
                masks.append(mask)
            elif not params.greedy:
                drawn.append((place, row, ask))
        self._choose(logits, drawn, sampled)
        if changed:
            rows = self._changed(len(changed), logits.shape[1])
            for (_, row, draw), mask, out in zip(changed, masks, rows, strict=True):
                self._change(logits[row], draw, mask, out)
            for (place, _, _), token in zip(changed, self._ops.best(rows).tolist(), strict=True):
                sampled[place] = Sampled(max(token, 0), 0.0, 0, ())  # 0 where nothing is possible any more
            drawn = [(place, i, draw) for i, (place, _, draw) in enumerate(changed) if not draw.params.greedy]
            self._choose(rows, drawn, sampled)
        self._score(logits, scored, sampled)
        return sampled

    def _finite(self, logits: Floats) -> tuple[Floats, list[int]]:
        """The rows without NaN or +inf, and their best tokens. Sound rows are not copied."""
        best = self._ops.best(logits)
        broken = np.flatnonzero(best < 0)
        if len(broken):
            self.num_broken_rows += len(broken)
            _log.error("%d rows of logits are not finite: their requests' tokens are meaningless", len(broken))
            logits = logits.copy()
            for row in broken:
                np.nan_to_num(logits[row], copy=False, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
                if logits[row].max() == -np.inf:
                    logits[row] = 0
                best[row] = logits[row].argmax()
        return logits, best.tolist()

    def _choose(self, logits: Floats, drawn: Sequence[tuple[int, int, Draw]], sampled: list[Sampled]) -> None:
        """Draw from the given rows and put the tokens in their places."""
        if not drawn:
            return
        params = [draw.params for _, _, draw in drawn]
        draws = Draws(
            np.array([row for _, row, _ in drawn], np.int32),
            np.array([p.temperature for p in params]),
            np.array([p.top_k for p in params], np.int32),
            np.array([p.top_p for p in params], np.float64),
            np.array([p.min_p for p in params], np.float64),
            np.array([uniform(draw.seed, len(draw.token_ids)) for _, _, draw in drawn]),
        )
        for (place, _, _), token in zip(drawn, self._ops.choose(logits, draws).tolist(), strict=True):
            sampled[place] = Sampled(token, 0.0, 0, ())

    def _score(self, logits: Floats, scored: Sequence[tuple[int, int, int]], sampled: list[Sampled]) -> None:
        """Give those in the given places their log-probabilities, ranks and best tokens."""
        if not scored:
            return
        places, rows, num_tops = zip(*scored, strict=True)
        of_row, tokens = np.array(rows, np.int32), np.array([sampled[place].token_id for place in places], np.int32)
        log_totals, ranks, tops = self._ops.score(logits, of_row, tokens, np.array(num_tops, np.int32))
        logprobs = logits[of_row, tokens] - log_totals
        best = logits[of_row[:, None], tops] - log_totals[:, None]
        entries = zip(places, num_tops, logprobs.tolist(), ranks.tolist(), tops.tolist(), best.tolist(), strict=True)
        for place, count, logprob, rank, ids, values in entries:
            top = list(zip(ids, values, strict=True))[:count]
            sampled[place] = Sampled(sampled[place].token_id, logprob, rank, top)

    def _changed(self, num_rows: int, vocab_size: int) -> Floats:
        """Memory for rows that are changed; it grows and is kept."""
        if self._rows.shape[1] != vocab_size or len(self._rows) < num_rows:
            self._rows = np.empty((num_rows, vocab_size), np.float32)
        return self._rows[:num_rows]

    def _change(self, logits: Floats, draw: Draw, allowed: Mask | None, changed: Floats) -> None:
        """Put the row after guide, bias, min_tokens and penalties into `changed`.

        What min_tokens and, in guided answers, ignore_eos rule out is drawn nevertheless if nothing else is left.
        """
        params = draw.params
        np.copyto(changed, logits)
        if allowed is not None:
            np.copyto(changed, np.float32(-np.inf), where=~allowed)
            if changed.max() == -np.inf:  # the model takes all of them for impossible
                changed[allowed] = 0
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
            changed[ids] += np.fromiter(params.logit_bias.values(), np.float32, len(ids))
        suppressed = _is_short(draw)
        ends = list(self._eos) if suppressed or (allowed is not None and params.ignore_eos) else []
        if suppressed:
            ends += params.stop_token_ids
        if ends:
            before = changed[ends]
            changed[ends] = -np.inf
            if allowed is not None and changed.max() == -np.inf:
                changed[ends] = before
        repeated, counted = params.repetition_penalty != 1.0, params.frequency_penalty or params.presence_penalty
        if repeated or counted:
            tokens = np.array(draw.token_ids, np.int64)  # a copy: a view would forbid the sequence to grow
        if repeated:
            seen = changed[tokens].astype(np.float64)
            penalty = params.repetition_penalty
            seen = np.where(seen > 0, seen / penalty, seen * penalty)
            changed[tokens] = np.where(np.isfinite(seen), np.clip(seen, -_LARGEST, _LARGEST), -np.inf)  # equal twins
        if counted:
            ids, counts = np.unique(tokens[draw.num_prompt_tokens :], return_counts=True)
            changed[ids] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)


def _is_short(draw: Draw) -> bool:
    """Whether the answer has fewer tokens than it must."""
    return len(draw.token_ids) - draw.num_prompt_tokens < draw.params.min_tokens


def _is_changed(draw: Draw) -> bool:
    """Whether bias, min_tokens or penalties change a row."""
    params = draw.params
    penalised = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(params.logit_bias or penalised or _is_short(draw))
