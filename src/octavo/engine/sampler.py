"""Owns the step from a row of logits to a token. Knows no request beyond its `Draw`, keeps no state between draws.

A draw is a pure function of (logits row, Draw). The transforms and their order are vLLM's:

    guide → logit_bias → min_tokens → repetition, frequency, presence penalty → temperature → top_k → top_p → min_p

The kept tokens, most likely first and lower ids first among equals, then lie end to end on a line; a point drawn
uniformly on it names the token. Log-probabilities and ranks are those of the raw logits, before any transform, and
cost an exponential of the whole vocabulary: they are computed only for requests that ask for them.

Logits that are not numbers are taken as "impossible", infinite ones as the largest float, and a row without one finite
logit as all equal: a broken row spoils its own request at most, and `num_broken_rows` counts it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.engine.guide import Mask
from octavo.ops.api import Floats
from octavo.types import Draw, Sampled, SamplingParams

_log = logging.getLogger(__name__)

_LARGEST = float(np.finfo(np.float32).max)
_MASK64 = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the step of SplitMix64
_HEADS = (3.0, 5.0, 7.0, 9.0, 12.0, 104.0)
"""How far below the best logit heads of the vocabulary reach, in units of temperature. The last one is everything that
can be drawn: exp(-104) is 0 in float32."""

Ids = NDArray[np.int64]


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
    """Draws tokens. Rows are float32 [vocab], never written to; the scratch row makes it single-threaded."""

    def __init__(self, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self.num_broken_rows = 0
        self._eos = tuple(eos_token_ids)
        self._adjusted = np.empty(vocab_size, np.float32)
        self._scratch = np.empty(vocab_size, np.float32)

    def draw(self, logits: Floats, draw: Draw, allowed: Mask | None = None) -> Sampled:
        """Choose a token, one of those that are `allowed`. Without `params.logprobs` (and outside beam search)
        log-probability and rank are left 0. If none is allowed, the token is -1.

        A beam's draw chooses nothing: it is the most likely token and the `num_top` best.
        """
        params = draw.params
        logits, best = self._finite(logits)
        if params.use_beam_search:
            return self._score(logits, best, best, draw.num_top)
        if allowed is not None and not allowed.any():
            return Sampled(-1, 0.0, 0, ())
        changed = self._transform(logits, draw, allowed)
        if params.greedy:
            token = best if changed is logits else int(changed.argmax())
        else:
            token = self._choose(changed, params, uniform(draw.seed, len(draw.token_ids)))
        if params.logprobs is None:
            return Sampled(token, 0.0, 0, ())
        return self._score(logits, token, best, draw.num_top)

    def score(self, logits: Floats, token_id: int, num_top: int) -> Sampled:
        """What the logits say about a token that is given: a prompt's."""
        logits, best = self._finite(logits)
        return self._score(logits, token_id, best, num_top)

    def _finite(self, logits: Floats) -> tuple[Floats, int]:
        """The row without NaN or +inf, and its best token. The maximum shows both, so a sound row is not copied."""
        best = int(logits.argmax())
        if math.isfinite(logits[best]):
            return logits, best
        self.num_broken_rows += 1
        _log.error("a row of logits is not finite: its request's tokens are meaningless")
        logits = np.nan_to_num(logits, nan=-np.inf, posinf=_LARGEST, neginf=-np.inf)
        best = int(logits.argmax())
        return (logits, best) if math.isfinite(logits[best]) else (np.zeros_like(logits), 0)

    def _score(self, logits: Floats, token: int, best: int, num_top: int) -> Sampled:
        log_total = float(logits[best]) + math.log(self._exponentials(logits, float(logits[best]), 1.0))
        rank = 1 if token == best else 1 + int(np.count_nonzero(logits > logits[token]))
        top: list[tuple[int, float]] = []
        if num_top == 1:
            top = [(best, float(logits[best]) - log_total)]
        elif num_top > 1:
            ids = _best(logits, num_top)
            top = [(i, value - log_total) for i, value in zip(ids.tolist(), logits[ids].tolist(), strict=True)]
        return Sampled(token, float(logits[token]) - log_total, rank, top)

    def _exponentials(self, logits: Floats, largest: float, temperature: float) -> float:
        """Leave exp((logits - largest) / temperature) in the scratch row and return its sum.

        numpy sums pairwise in an order that depends on the length alone: good to 1e-6, and the same in any batch.
        """
        with np.errstate(over="ignore"):  # logits near ±3e38, from broken rows
            np.subtract(logits, np.float32(largest), out=self._scratch)
            if temperature != 1.0:
                np.multiply(self._scratch, np.float32(1.0 / temperature), out=self._scratch)
        np.exp(self._scratch, out=self._scratch)
        return float(self._scratch.sum())

    def _transform(self, logits: Floats, draw: Draw, allowed: Mask | None) -> Floats:
        """The logits after guide, bias, min_tokens and penalties: the row itself when there is none, else a copy.

        What min_tokens and, in guided answers, ignore_eos rule out is drawn nevertheless if nothing else is left.
        """
        params = draw.params
        num_generated = len(draw.token_ids) - draw.num_prompt_tokens
        suppressed = num_generated < params.min_tokens
        repeated = params.repetition_penalty != 1.0
        counted = num_generated > 0 and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0)
        if not (params.logit_bias or suppressed or repeated or counted or allowed is not None):
            return logits
        changed = self._adjusted
        np.copyto(changed, logits)
        if allowed is not None:
            changed[~allowed] = -np.inf
            if changed.max() == -np.inf:  # the model takes all of them for impossible
                changed[allowed] = 0
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
            changed[ids] += np.fromiter(params.logit_bias.values(), np.float32, len(ids))
        ends = list(self._eos) if suppressed or (allowed is not None and params.ignore_eos) else []
        if suppressed:
            ends += params.stop_token_ids
        if ends:
            before = changed[ends]
            changed[ends] = -np.inf
            if allowed is not None and changed.max() == -np.inf:
                changed[ends] = before
        if repeated or counted:
            tokens = np.array(draw.token_ids, np.int64)  # a copy: a view would forbid the sequence to grow
        if repeated:
            ids = np.unique(tokens)
            seen = changed[ids].astype(np.float64)
            penalty = params.repetition_penalty
            seen = np.where(seen > 0, seen / penalty, seen * penalty)
            changed[ids] = np.where(np.isfinite(seen), np.clip(seen, -_LARGEST, _LARGEST), -np.inf)
        if counted:
            ids, counts = np.unique(tokens[draw.num_prompt_tokens :], return_counts=True)
            changed[ids] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
        return changed

    def _choose(self, logits: Floats, params: SamplingParams, point: float) -> int:
        """Temperature, top_k, top_p, min_p, and the token that lies at `point` of the line of those kept.

        Only the head of the vocabulary is sorted. Each filter keeps a prefix of the order "most likely first", and the
        running sum of a prefix does not depend on how much of the rest is known, so a longer head changes no answer.
        """
        temperature = params.temperature
        largest = float(logits.max())
        if largest == -math.inf:  # min_tokens suppressed the whole vocabulary
            return 0
        lowest = largest + temperature * math.log(params.min_p) if params.min_p > 0 else -_LARGEST
        total = None
        if 0 < params.top_k < len(logits):
            ids = _best(logits, params.top_k)
            ids = ids[logits[ids] > -np.inf]
            line = np.cumsum(np.exp((logits[ids].astype(np.float64) - largest) / temperature))
        elif params.top_p == 1.0 and params.min_p > 0:
            ids = _descending(logits, lowest)
            line = np.cumsum(np.exp((logits[ids].astype(np.float64) - largest) / temperature))
        else:
            total = self._exponentials(logits, largest, temperature)
            needed = total * (params.top_p if params.top_p < 1.0 else point)
            for depth in _HEADS:
                ids = _descending(logits, max(largest - depth * temperature, -_LARGEST))
                line = np.cumsum(self._scratch[ids], dtype=np.float64)
                if line[-1] > needed:
                    break
        num_kept = len(ids)
        if params.top_p < 1.0:
            mass = float(line[-1]) if total is None else total
            num_kept = min(num_kept, int(np.searchsorted(line, params.top_p * mass)) + 1)
        if params.min_p > 0:
            num_kept = min(num_kept, max(1, int(np.count_nonzero(logits[ids] >= lowest))))
        if params.top_p < 1.0 or total is None:
            total = float(line[num_kept - 1])
        return int(ids[min(int(np.searchsorted(line[:num_kept], point * total, side="right")), num_kept - 1)])


def _descending(logits: Floats, lowest: float) -> Ids:
    """Tokens of at least `lowest`, most likely first, lower ids first among equals.

    Sorted as integers: the value's bits, turned so that they descend, above the token id.
    """
    ids = np.flatnonzero(logits >= np.float32(lowest))
    bits = (logits[ids] + np.float32(0)).view(np.uint32)  # adding 0 makes one zero of two
    bits = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF))
    keys = (bits.astype(np.uint64) << 32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & 0xFFFFFFFF).astype(np.int64)


def _best(logits: Floats, count: int) -> Ids:
    """The `count` most likely tokens, in order; all of them when there are fewer."""
    if count >= len(logits):
        return _descending(logits, -math.inf)
    return _descending(logits, float(np.partition(logits, -count)[-count]))[:count]
