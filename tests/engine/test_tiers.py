"""Real keys and values that move between tiers: the same tokens and log-probabilities, whatever becomes of pages."""

import random
import threading

import pytest
from tests.surprise import let_preempting_pay

from octavo.engine.kv_store import KVStore
from octavo.errors import ConfigError
from octavo.types import SamplingParams, Tier

BLOCK = 4
PAGE_BYTES = 512
GIB = 1 << 30


def prompts(seed, count, longest):
    """With beginnings in common, and some twice."""
    rng = random.Random(seed)
    made = [[rng.randrange(250) for _ in range(longest)]]
    while len(made) < count:
        base = rng.choice(made)
        made.append(base[: rng.randrange(len(base) + 1)] + [rng.randrange(250) for _ in range(rng.randrange(longest))])
        made[-1] = made[-1][:longest] or [1]
    return made


def params(seed, max_tokens):
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=1)


def bits(output):
    [choice] = output.outputs
    return choice.token_ids, [[(token, at.logprob) for token, at in entry.items()] for entry in choice.logprobs]


def pages_found(outputs):
    """Whole ones: a part of a page is found only in the pool."""
    return [output.metrics.num_cached_tokens // BLOCK for output in outputs]


def pool(num_pages, host_pages=0, disk=None):
    tiers = {"block_size": BLOCK, "kv_cache_memory_bytes": num_pages * PAGE_BYTES, "session_ttl": 0.1}
    if host_pages:
        tiers["swap_space"] = host_pages * PAGE_BYTES / GIB
    if disk is not None:
        tiers |= {"kv_offload_dir": str(disk), "kv_offload_space": 200 * 8192 / GIB}
    return tiers


@pytest.fixture
def failing(monkeypatch):
    """Makes every fifth copy fail."""
    count = 0
    copy = KVStore._try_to_copy

    def fail(self, move):
        nonlocal count
        count += 1
        if count % 5 == 0:
            raise OSError("a made-up fault")
        copy(self, move)

    monkeypatch.setattr(KVStore, "_try_to_copy", fail)


@pytest.mark.parametrize("faults", [False, True], ids=["sound", "failing"])
@pytest.mark.parametrize("disk", [False, True], ids=["", "disk"])
@pytest.mark.parametrize("host_pages", [0, 4, 1000])
@pytest.mark.parametrize("num_pages", [8, 16, 64])
def test_answers_are_the_same_bit_for_bit(make_llm, request, tmp_path, num_pages, host_pages, disk, faults):
    if faults:
        request.getfixturevalue("failing")
    asked = prompts(num_pages, 16, 20)
    wanted = [params(number, 3 + number % 9) for number in range(len(asked))]
    plain = make_llm(block_size=BLOCK, enable_prefix_caching=False)
    right = [bits(output) for output in plain.generate(asked, wanted)]
    assert plain._engine.format.page_bytes == PAGE_BYTES
    tiered = make_llm(preemption_mode="swap", **pool(num_pages, host_pages, tmp_path if disk else None))
    let_preempting_pay(tiered._core)
    assert [bits(output) for output in tiered.generate(asked, wanted)] == right
    for number in random.Random(1).sample(range(len(asked)), 8):
        with_abort = tiered.stream([asked[number], asked[-number]], [wanted[number], wanted[-number]])
        for _, _ in zip(with_abort, range(number % 5), strict=False):
            pass
        with_abort.close()
        assert bits(tiered.generate([asked[number]], wanted[number])[0]) == right[number]
    moved = tiered._core.cache.tiers.stats.moved
    if (host_pages or disk) and num_pages < 64:
        assert any(target is Tier.DEVICE for _, target in moved) and sum(moved.values()) > 20
        assert bool(tiered._core.cache.tiers.stats.moves_failed) == faults


def test_what_was_saved_is_found_after_a_restart(make_llm, tmp_path):
    asked, wanted = prompts(1, 12, 40), params(3, 6)
    first = make_llm(preemption_mode="swap", **pool(64, 8, tmp_path))
    right = [bits(output) for output in first.generate(asked, wanted)]
    first._core.save()
    while first._core.saving:
        first._core.step()
    assert first._core.save_failed == 0
    found = pages_found(first.generate(asked, wanted))
    first.close()
    second = make_llm(preemption_mode="swap", **pool(64, 8, tmp_path))
    outputs = second.generate(asked, wanted)
    assert [bits(output) for output in outputs] == right
    assert pages_found(outputs) == found and sum(found) > 50
    second.close()
    third = make_llm(preemption_mode="swap", restore=False, **pool(64, 8, tmp_path))
    assert third._core.cache.tier_pages()[Tier.DISK].cached == 0


def test_a_damaged_host_page_is_a_miss(make_llm):
    llm = make_llm(preemption_mode="swap", **pool(8, 64))
    [right] = llm.generate([[5] * 21], params(1, 4))
    llm.generate([[number] * 25 for number in range(6, 12)], params(1, 2))
    assert llm._engine.store.host.any()
    llm._engine.store.host[:, 7] ^= 1
    [again] = llm.generate([[5] * 21], params(1, 4))
    assert bits(again) == bits(right)
    assert llm._core.cache.tiers.stats.moves_failed > 0


def test_steps_go_on_while_pages_are_slow(make_llm, monkeypatch):
    """A copy that takes for ever holds up the request that needs it, and no other."""
    llm = make_llm(preemption_mode="swap", **pool(24, 64))
    [right] = llm.generate([[5] * 21], params(1, 4))
    llm.generate([[number] * 25 for number in range(6, 16)], params(1, 2))
    gate, copy = threading.Event(), KVStore._try_to_copy

    def slow(self, move):
        if move.target.tier is Tier.DEVICE:
            assert gate.wait(20)
        copy(self, move)

    monkeypatch.setattr(KVStore, "_try_to_copy", slow)
    waiting = llm.stream([[5] * 21], params(1, 4))
    other = llm.stream([[9, 9, 9]], params(1, 20))
    assert len([event for event in [next(other) for _ in range(10)] if event.token_ids]) == 10
    first = next(iter(other))
    assert first.token_ids
    other.close()
    threading.Timer(0.1, gate.set).start()
    tokens = [token for event in waiting for token in event.token_ids]
    assert tokens == right.outputs[0].token_ids


def test_a_start_measures_what_it_decides_by(make_llm, tmp_path):
    costs = make_llm(**pool(64, 64, tmp_path))._core.cache.tiers.costs
    assert costs.mode == "auto" and costs.token_s > 0 and costs.slope >= 0
    assert set(costs.load_s) == {Tier.HOST, Tier.DISK} and all(seconds > 0 for seconds in costs.load_s.values())


def test_tiers_need_the_prefix_cache(make_llm):
    with pytest.raises(ConfigError, match="swap_space: needs enable_prefix_caching"):
        make_llm(swap_space=1.0, enable_prefix_caching=False)
