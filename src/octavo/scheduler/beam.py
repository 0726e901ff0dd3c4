"""Beam search: which beams go on, which are finished, when it is over. Pure functions of what the beams offer.

Scores and stopping follow Hugging Face Transformers' `generate(num_beams=…, early_stopping=False)`.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.scheduler.sequence import Group, Hypothesis, Sequence
from octavo.types import Sampled


class Step(NamedTuple):
    """A beam goes on from `parent` with one more token, to the summed log-probability `score`."""

    parent: Sequence
    sampled: Sampled
    score: float


def advance(group: Group, beams: list[Sequence]) -> list[Step]:
    """Choose the beams of the next step from all candidates; finished ones go to `group.hypotheses`.

    An empty list means that the search is over and `group.hypotheses` holds the answers, best first.
    """
    params = group.request.params
    width, num_top = params.beam_width, params.logprobs or 0
    length = beams[0].num_generated + 1
    offers = [
        (beam.score + logprob, place, rank, token)
        for place, beam in enumerate(beams)
        for rank, (token, logprob) in enumerate(beam.candidates)
    ]
    offers.sort(key=lambda offer: (-offer[0], offer[1], offer[2]))

    going_on: list[Step] = []
    for order, (score, place, rank, token) in enumerate(offers):
        beam = beams[place]
        sampled = Sampled(token, beam.candidates[rank][1], rank + 1, beam.candidates[:num_top])
        if token in group.stop_token_ids:
            if order < width and length > params.min_tokens:
                _keep(group, Hypothesis(score / length**params.length_penalty, [*beam.sampled, sampled], "stop"))
        else:
            going_on.append(Step(beam, sampled, score))
        if len(going_on) == width:
            break

    if length >= group.max_tokens or not going_on:
        for step in going_on:
            answer = [*step.parent.sampled, step.sampled]
            _keep(group, Hypothesis(step.score / length**params.length_penalty, answer, "length"))
        return []
    enough = len(group.hypotheses) >= width
    if enough and group.hypotheses[-1].score >= going_on[0].score / length**params.length_penalty:
        return []
    return going_on


def _keep(group: Group, hypothesis: Hypothesis) -> None:
    group.hypotheses.append(hypothesis)
    group.hypotheses.sort(key=lambda kept: -kept.score)
    del group.hypotheses[group.request.params.beam_width :]
