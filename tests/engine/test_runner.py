"""The runner on the tiny model: plans are written by hand here, so that only translation and order are in question."""

import gc
import weakref
from array import array

import numpy as np
import pytest

from octavo.engine import runner as module
from octavo.engine.guide import Guides
from octavo.engine.kv_store import KVStore
from octavo.engine.runner import ModelRunner, step_inputs, wanted_rows
from octavo.engine.sampler import Sampler
from octavo.kv_format import KVFormat
from octavo.models.llama import Decoder
from octavo.ops.reference import ReferenceOps
from octavo.types import CopyPage, Draw, MovePage, Place, SamplingParams, Slice, StepPlan, Tier

from .conftest import TinyCheckpoint

SIZE = 4
SCORED = SamplingParams(temperature=0, logprobs=3)


def ints(values):
    return array("i", values)


class Setup:
    """The tiny model on a pool of small pages."""

    def __init__(self, fill=None, num_host_pages=0):
        checkpoint, ops = TinyCheckpoint(), ReferenceOps()
        config = checkpoint.config
        self.format = KVFormat("bf16", config.num_layers, config.num_kv_heads, config.head_dim, SIZE)
        self.store = KVStore(ops, self.format, 100, num_host_pages=num_host_pages)
        if fill is not None:
            self.store.pool.data[:] = fill
        self.decoder = Decoder(checkpoint, ops, config.context_length)
        guides = Guides(checkpoint.tokenizer(), config.vocab_size)
        self.runner = ModelRunner(self.decoder, self.store, Sampler(ops, ()), guides)

    def run(self, *slices, page_ops=()):
        return self.runner.execute(StepPlan(1, page_ops, slices)).slices


def tokens_of(seed, length):
    return ints(np.random.default_rng(seed).integers(0, 250, length).tolist())


def piece(tokens, start, stop, pages, *, draws=1, write_start=0, params=SCORED, **more):
    draw = Draw(params, 1, tokens[:stop], stop, params.logprobs or 0)
    drawn = tuple(draw._replace(seed=seed) for seed in range(draws))
    return Slice(1, start, tokens[start:stop], write_start, ints(pages), drawn, **more)


def test_slices_become_rows():
    slices = [
        Slice(1, 5, ints([50, 51, 52]), 0, ints([7, 3]), ()),
        Slice(2, 0, ints([60]), 0, ints([9]), ()),
        Slice(3, 8, ints([70, 71]), 9, ints([1, 2, 5]), ()),
    ]
    step = step_inputs(slices)
    assert step.token_ids.tolist() == [50, 51, 52, 60, 70, 71]
    assert step.positions.tolist() == [5, 6, 7, 0, 8, 9]
    assert step.row_start.tolist() == [0, 3, 4, 6]
    assert step.write_start.tolist() == [0, 0, 9]
    assert step.page_start.tolist() == [0, 2, 3, 6]
    assert step.pages.tolist() == [7, 3, 9, 1, 2, 5]
    assert {values.dtype for values in step} == {np.dtype(np.int32)}
    slices[0].pages.append(4)  # live page tables may grow while the arrays are about


def test_logits_are_wanted_where_something_is_drawn_or_scored():
    tokens = tokens_of(0, 12)
    slices = [
        piece(tokens, 0, 4, [0], draws=0),
        piece(tokens, 4, 8, [0, 1], draws=0, num_prompt_logprobs=0, targets=tokens[5:9]),
        piece(tokens, 8, 12, [0, 1, 2], draws=2, num_prompt_logprobs=1, targets=tokens[9:12]),
        piece(tokens, 3, 4, [5], draws=3),
    ]
    assert wanted_rows(slices).tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 30])
def test_chunks_pages_and_company_change_nothing(length):
    tokens = tokens_of(length, length)
    [whole] = Setup().run(piece(tokens, 0, length, range(8)))
    pages = np.random.default_rng(1).permutation(100)[:8].tolist()
    for chunk in (1, 2, 3, SIZE, 7):
        setup = Setup(fill=255)  # NaN in every format
        others = [tokens_of(50 + i, 40) for i in range(3)]
        free = [page for page in range(100) if page not in pages]
        for start in range(0, length, chunk):
            stop = min(length, start + chunk)
            company = [piece(other, 0, 5 + i, free[10 * i : 10 * i + 2]) for i, other in enumerate(others)]
            chunked = setup.run(company[0], piece(tokens, start, stop, pages, draws=int(stop == length)), *company[1:])[
                1
            ]
        assert chunked == whole


def test_prompt_log_probabilities_are_those_of_the_next_token(monkeypatch):
    tokens = tokens_of(3, 21)
    setup = Setup()
    step = step_inputs([piece(tokens, 0, 21, range(6))])
    logits = setup.decoder.logits(setup.decoder.forward(step, setup.store.pool), np.arange(21, dtype=np.int32))
    truth = logits.astype(np.float64)
    truth -= np.log(np.exp(truth - truth.max(1, keepdims=True)).sum(1, keepdims=True)) + truth.max(1, keepdims=True)

    whole = piece(tokens, 0, 21, range(6), num_prompt_logprobs=2, targets=tokens[1:])
    [expected] = setup.run(whole)
    assert [scored.token_id for scored in expected.prompt_logprobs] == tokens[1:].tolist()
    assert [scored.logprob for scored in expected.prompt_logprobs] == pytest.approx(
        [truth[row, token] for row, token in enumerate(tokens[1:])], abs=1e-5
    )
    assert all(len(scored.top) == 2 for scored in expected.prompt_logprobs)
    assert len(expected.sampled) == 1

    other = piece(tokens_of(4, 9), 0, 9, range(50, 53))
    [alone] = setup.run(other)
    monkeypatch.setattr(module, "LOGIT_ROWS", 4)
    assert setup.run(other, whole, other) == [alone, expected, alone]
    halves = [
        piece(tokens, 0, 10, range(6), draws=0, num_prompt_logprobs=2, targets=tokens[1:11]),
        piece(tokens, 10, 21, range(6), num_prompt_logprobs=2, targets=tokens[11:]),
    ]
    first, second = (setup.run(half)[0] for half in halves)
    assert first.prompt_logprobs + second.prompt_logprobs == expected.prompt_logprobs
    assert first.sampled == ()
    assert second.sampled == expected.sampled


def test_nothing_is_computed_for_the_vocabulary_unless_wanted(monkeypatch):
    setup = Setup()
    monkeypatch.setattr(setup.decoder, "logits", lambda *_: pytest.fail("logits were computed"))
    [result] = setup.run(piece(tokens_of(0, 9), 0, 9, range(3), draws=0))
    assert result == ((), ())


def test_draws_of_one_slice_share_its_row_and_differ_by_seed():
    params = SamplingParams(temperature=5.0, logprobs=0)
    [result] = Setup().run(piece(tokens_of(0, 9), 0, 9, range(3), draws=6, params=params))
    alone = [
        Setup().run(Slice(1, 0, piece_.token_ids, 0, piece_.pages, (draw,)))[0].sampled[0]
        for piece_ in [piece(tokens_of(0, 9), 0, 9, range(3), draws=6, params=params)]
        for draw in piece_.draws
    ]
    assert list(result.sampled) == alone
    assert len({sampled.token_id for sampled in result.sampled}) > 3


def test_page_operations_come_before_the_forward_pass():
    """A sequence goes on upon a copy of another's last page; the original stays as it is."""
    tokens = tokens_of(7, 10)
    setup = Setup()
    setup.run(piece(tokens, 0, 6, [0, 1], draws=0))
    original = np.array(setup.store.pool.data[1])
    [result] = setup.run(piece(tokens, 6, 10, [0, 2, 3]), page_ops=[CopyPage(1, 5), CopyPage(5, 2)])
    [expected] = Setup().run(piece(tokens, 0, 10, range(3)))
    assert result == expected
    assert (setup.store.pool.data[1] == original).all()
    assert setup.run(page_ops=[CopyPage(2, 1)]) == ()
    assert (setup.store.pool.data[1] == setup.store.pool.data[2]).all()


def test_a_token_computed_again_for_its_logits_leaves_its_page_alone():
    tokens = tokens_of(8, 8)
    setup = Setup()
    [expected] = setup.run(piece(tokens, 0, 8, [0, 1]))
    before = np.array(setup.store.pool.data)
    writes = []
    original = setup.decoder._ops.rope_write
    setup.decoder._ops.rope_write = lambda *args: (writes.append(args[5].write_start.tolist()), original(*args))
    [result] = setup.run(piece(tokens, 7, 8, [0, 1], write_start=8))
    assert result == expected
    assert writes == [[8]] * 2
    assert (setup.store.pool.data == before).all()


def test_a_model_is_freed_as_soon_as_nobody_has_it():
    setup = Setup()
    setup.run(piece(tokens_of(0, 9), 0, 9, range(3)))
    gone = weakref.ref(setup.decoder)
    gc.disable()
    try:
        del setup
        assert gone() is None
    finally:
        gc.enable()


def test_the_ends_of_moves_are_told_with_steps_and_between_them():
    setup, tokens = Setup(num_host_pages=2), tokens_of(1, 3)
    first, slot, copy = Place(Tier.DEVICE, 0), Place(Tier.HOST, 1), Place(Tier.DEVICE, 9)
    setup.run(piece(tokens, 0, 3, [0]))
    execute = setup.runner.execute
    waited = execute(StepPlan(2, [MovePage(1, first, slot)], (), wait=True))
    assert [moved[:2] for moved in waited.moved] == [(1, True)]
    assert waited.seconds == 0
    step = execute(StepPlan(3, [MovePage(2, slot, copy)], [piece(tokens, 2, 3, [0])], wait=True))
    assert [moved[:2] for moved in step.moved] == [(2, True)]
    assert step.seconds > 0
    assert execute(StepPlan(4, [], [piece(tokens, 2, 3, [9])])).slices == step.slices
    assert list(execute(StepPlan(5, [], (), wait=True)).moved) == []
    setup.runner.close()
