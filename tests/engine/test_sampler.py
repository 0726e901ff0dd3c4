"""The sampler against a float64 sampler that sorts everything and states each transform by its definition."""

from array import array
from itertools import islice, pairwise

import numpy as np
import pytest

from octavo.engine.sampler import Sampler, Target, uniform
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps
from octavo.types import Draw, SamplingParams

VOCAB = 1000
EOS = 7


def row(seed=0, spread=3.0, vocab=VOCAB):
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def draw_of(params, token_ids=(1, 2, 3), num_prompt_tokens=None, seed=5):
    tokens = array("i", token_ids)
    num_prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return Draw(params, seed, tokens, num_prompt, params.logprobs or 0)


OPS = {"reference": ReferenceOps(), "cpu": CpuOps(2)}


class OneRow(Sampler):
    """Asked about one row at a time."""

    def draw(self, logits, draw):
        [sampled] = self.sample(logits[None], [(0, draw)])
        return sampled

    def score(self, logits, token, num_top):
        [scored] = self.sample(logits[None], [(0, Target(token, num_top))])
        return scored


@pytest.fixture(params=OPS)
def sampler(request):
    """Makes samplers for one backend."""
    return lambda eos=(EOS,): OneRow(OPS[request.param], eos)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def oracle(logits, draw):
    """(token ids kept, most likely first, and their probabilities) by the definitions, in float64."""
    p, z = draw.params, logits.astype(np.float64)
    for token, bias in (p.logit_bias or {}).items():
        z[token] += bias
    prompt, output = draw.token_ids[: draw.num_prompt_tokens], draw.token_ids[draw.num_prompt_tokens :]
    if len(output) < p.min_tokens:
        for token in (EOS, *p.stop_token_ids):
            z[token] = -np.inf
    for token in {*prompt, *output}:
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token in set(output):
        z[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    if p.greedy:
        return order[:1], np.ones(1)
    order = [token for token in order if z[token] > -np.inf]
    if p.top_k > 0:
        order = order[: p.top_k]
    mass = np.exp((z[order] - z[order[0]]) / p.temperature)
    mass /= mass.sum()
    if p.top_p < 1:
        count = 1
        while mass[:count].sum() < p.top_p and count < len(order):
            count += 1
        order, mass = order[:count], mass[:count]
    keep = mass >= p.min_p * mass[0] * (1 - 1e-6)
    return [t for t, k in zip(order, keep, strict=True) if k], mass[keep] / mass[keep].sum()


def expected(logits, draw):
    ids, mass = oracle(logits, draw)
    point = uniform(draw.seed, len(draw.token_ids))
    line = np.cumsum(mass)
    assert len(ids) == 1 or np.abs(line[:-1] - point).min() > 1e-6, "the case is too close to call: take another seed"
    return ids[min(int(np.searchsorted(line, point, side="right")), len(ids) - 1)]


TOKENS = [3, 9, 9, 40, 41, 3, 3, 900]
CASES = {
    "greedy": {"temperature": 0},
    "vanishing temperature": {"temperature": 1e-6},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "flat": {"temperature": 1e9},
    "top_k 1": {"top_k": 1},
    "top_k": {"top_k": 20, "temperature": 2.0},
    "top_k above the vocabulary": {"top_k": 5000},
    "top_k -1": {"top_k": -1},
    "top_p": {"top_p": 0.9},
    "top_p tiny": {"top_p": 1e-9},
    "top_p of a flat line": {"top_p": 0.7, "temperature": 50.0},
    "min_p": {"min_p": 0.05},
    "min_p 1": {"min_p": 1.0},
    "min_p hot": {"min_p": 0.3, "temperature": 4.0},
    "top_k, top_p": {"top_k": 50, "top_p": 0.8, "temperature": 3.0},
    "top_k, top_p, min_p": {"top_k": 50, "top_p": 0.95, "min_p": 0.2, "temperature": 3.0},
    "top_p, min_p": {"top_p": 0.95, "min_p": 0.05, "temperature": 2.0},
    "bias": {"logit_bias": {5: 100.0, 6: -100.0}, "temperature": 0},
    "bias sampled": {"logit_bias": {5: 8.0, 6: 8.5}},
    "repetition": {"repetition_penalty": 1.8},
    "repetition reward": {"repetition_penalty": 0.2},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": -2.0},
    "presence": {"presence_penalty": 2.0, "temperature": 0},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [11, 12], "logit_bias": {EOS: 99.0, 11: 98.0}},
    "min_tokens reached": {"min_tokens": 4, "stop_token_ids": [11, 12], "logit_bias": {EOS: 99.0, 11: 98.0}},
    "all": {
        "logit_bias": {5: 8.0, 3: 9.0}, "min_tokens": 9, "repetition_penalty": 1.3,
        "frequency_penalty": 0.5, "presence_penalty": 0.3, "temperature": 1.7,
        "top_k": 200, "top_p": 0.9, "min_p": 0.01,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_draw_is_what_the_definitions_say(sampler, name):
    params = SamplingParams(**CASES[name])
    chosen = set()
    for seed in range(40):
        draw = draw_of(params, TOKENS, num_prompt_tokens=4, seed=seed)
        logits = row(seed)
        sampled = sampler().draw(logits, draw)
        assert sampled.token_id == expected(logits, draw)
        chosen.add(sampled.token_id)
    assert len(chosen) > (2 if "bias" not in name and "min_tokens" not in name else 0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=1.3, top_k=12),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.3, min_p=0.1),
    ],
    ids=lambda params: f"k{params.top_k} p{params.top_p} m{params.min_p}",
)
def test_frequencies_are_the_probabilities(sampler, params):
    """Chi-square over 20,000 draws; each bound is the mean plus five deviations."""
    logits = row(1, spread=2.0, vocab=60)
    one = sampler(())
    counts = np.zeros(60)
    number = 20_000
    tokens = array("i", [0])
    for seed in range(number):
        counts[one.draw(logits, Draw(params, seed, tokens, 1, 0)).token_id] += 1
    ids, mass = oracle(logits, draw_of(params))
    outside = np.delete(counts, ids).sum()
    assert outside == 0
    chi = ((counts[ids] - number * mass) ** 2 / (number * mass)).sum()
    freedom = len(ids) - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom)


def test_noise_is_uniform_along_positions_and_seeds():
    for points in (
        [uniform(3, position) for position in range(20_000)],
        [uniform(seed, 17) for seed in range(20_000)],
        [uniform(2**64 - 1 - seed, 2 * seed) for seed in range(20_000)],
    ):
        counts = np.histogram(points, 100, (0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * np.sqrt(198)
        assert abs(np.corrcoef(points[:-1], points[1:])[0, 1]) < 0.03
        assert len(set(points)) == len(points)


def splitmix64(state):
    """The generator as published, with its state."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        yield z ^ z >> 31


def test_noise_is_a_splitmix64_stream():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert list(islice(splitmix64(1234567), 4)) == published
    for seed in (0, 1, 2**63, 2**64 - 1):
        stream = splitmix64(next(splitmix64(seed)))
        assert [uniform(seed, position) for position in range(50)] == [(next(stream) >> 11) / 2**53 for _ in range(50)]


def test_a_draw_depends_on_its_row_alone(sampler):
    """The same row draws the same, bit for bit, after any others, at any address, and leaves its logits alone."""
    logits = row(3, vocab=4999)
    everything = [SamplingParams(logprobs=5, **fields) for fields in CASES.values()]
    draws = [draw_of(params, TOKENS, 4) for params in everything]
    alone = [sampler().draw(logits.copy(), draw) for draw in draws]
    one = sampler()
    for shift in range(1, 8):
        block = np.empty(4999 * 3 + shift, np.float32)[shift:].reshape(3, 4999)
        block[:] = row(9, vocab=3 * 4999).reshape(3, 4999)
        block[1] = logits
        together = [(row, draw) for row in (0, 1, 2) for draw in draws]
        assert one.sample(block, together)[len(draws) : 2 * len(draws)] == alone
        for draw, before in zip(reversed(draws), reversed(alone), strict=True):
            one.draw(block[0], draw)
            assert one.draw(block[1], draw) == before
        assert (block[1] == logits).all()


def test_sequences_may_grow_after_a_draw(sampler):
    tokens = array("i", TOKENS)
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)
    sampled = sampler().draw(row(), Draw(params, 0, tokens, 4, 0))
    tokens.append(sampled.token_id)


def test_the_noise_of_a_position_is_its_own(sampler):
    params = SamplingParams(temperature=3.0)
    tokens = [sampler().draw(row(), draw_of(params, [1] * length, 1)).token_id for length in range(1, 30)]
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("spread", [0.1, 3.0, 50.0, 1e4])
@pytest.mark.parametrize("num_top", [0, 1, 2, 20, 1024])
def test_log_probabilities_are_of_the_raw_logits(sampler, spread, num_top):
    logits = row(4, spread)
    truth = log_softmax(logits)
    params = SamplingParams(temperature=2.0, logprobs=num_top, logit_bias={3: 50.0}, repetition_penalty=1.5, top_k=5)
    sampled = sampler().draw(logits, draw_of(params))
    assert sampled.logprob == pytest.approx(truth[sampled.token_id], rel=1e-6, abs=1e-5)
    assert sampled.rank == 1 + (logits > logits[sampled.token_id]).sum()
    order = np.lexsort((np.arange(VOCAB), -logits))[:num_top]
    assert [token for token, _ in sampled.top] == order.tolist()
    assert [value for _, value in sampled.top] == pytest.approx(truth[order], rel=1e-6, abs=1e-5)
    assert all(left >= right for (_, left), (_, right) in pairwise(sampled.top))


def test_log_probabilities_are_left_out_unless_asked_for(sampler):
    assert sampler().draw(row(), draw_of(SamplingParams()))[1:] == (0.0, 0, ())


def test_a_score_is_of_the_given_token(sampler):
    logits = row(2)
    one = sampler()
    for token in (0, 5, VOCAB - 1):
        scored = one.score(logits, token, 3)
        assert scored.token_id == token
        assert scored.logprob == pytest.approx(log_softmax(logits)[token], abs=1e-5)
        assert scored.rank == 1 + (logits > logits[token]).sum()
        assert len(scored.top) == 3


def test_a_beams_draw_is_the_best_tokens(sampler):
    logits = row(6)
    draw = Draw(SamplingParams(use_beam_search=True, repetition_penalty=2.0), 0, array("i", [1]), 1, 8)
    sampled = sampler().draw(logits, draw)
    assert [token for token, _ in sampled.top] == np.argsort(-logits, kind="stable")[:8].tolist()
    assert sampled.token_id == sampled.top[0][0]
    assert sampled.logprob == sampled.top[0][1]


def test_equal_logits_go_by_token_id(sampler):
    logits = np.full(VOCAB, 0.5, np.float32)
    logits[2] = -0.0
    logits[3] = 0.0
    logits[0] = -1.0
    assert sampler().draw(logits, draw_of(SamplingParams(temperature=0))).token_id == 1
    top = sampler().score(logits, 0, VOCAB).top
    assert [token for token, _ in top] == [1, *range(4, VOCAB), 2, 3, 0]
    draw = draw_of(SamplingParams(top_k=2))
    assert {sampler().draw(logits, draw._replace(seed=seed)).token_id for seed in range(40)} == {1, 4}


EVERY = [SamplingParams(logprobs=3, **fields) for fields in CASES.values()]


@pytest.mark.parametrize("params", EVERY, ids=CASES)
def test_broken_rows_are_survived(sampler, params):
    """NaN is impossible, +inf the largest float, a row of neither all equal; every value said is a number."""
    draw = draw_of(params, TOKENS, 4)
    for broken, choices in (
        (np.full(VOCAB, np.nan, np.float32), range(VOCAB)),
        (np.full(VOCAB, -np.inf, np.float32), range(VOCAB)),
        (np.where(np.arange(VOCAB) % 2, np.nan, row()).astype(np.float32), range(0, VOCAB, 2)),
        (np.where(np.arange(VOCAB) == 800, np.inf, row()).astype(np.float32), range(VOCAB)),
        (np.where(np.arange(VOCAB) % 2, -np.inf, row()).astype(np.float32), range(0, VOCAB, 2)),
        (np.where(np.arange(VOCAB) % 2, -3e38, 3e38).astype(np.float32), range(VOCAB)),
    ):
        one = sampler()
        sampled = one.draw(broken, draw)
        assert sampled.token_id in choices
        assert not np.isnan([sampled.logprob, *(value for _, value in sampled.top)]).any()
        assert one.num_broken_rows == int(not np.isfinite(np.max(broken)))
        logits = row()
        assert one.draw(logits, draw) == sampler().draw(logits, draw)


def test_a_wholly_suppressed_vocabulary_still_draws(sampler):
    for temperature in (0.0, 1.0):
        params = SamplingParams(min_tokens=2, stop_token_ids=range(VOCAB), temperature=temperature)
        assert sampler().draw(row(), draw_of(params)).token_id == 0


@pytest.mark.parametrize("penalty", [1e-300, 1e3])
def test_extreme_penalties_stay_numbers(sampler, penalty):
    params = SamplingParams(repetition_penalty=penalty, logprobs=2)
    sampled = sampler().draw(row(), draw_of(params, range(VOCAB)))
    assert np.isfinite(sampled.logprob)
