import errno
import logging
import os
import random
import threading
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.engine.kv_store import KVStore
from octavo.engine.page_file import NAME, PageFile
from octavo.engine.sizing import GIB, host_size, pool_size
from octavo.errors import ConfigError
from octavo.kv_format import KVFormat
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps
from octavo.types import AwaitMove, CopyPage, MovePage, PageLabel, Place, Tier

FORMAT = KVFormat("bf16", num_layers=2, num_kv_heads=2, head_dim=16, block_size=16)
PAGE = FORMAT.page_bytes
PLENTY = 1 << 40


def size(context=128, available=PLENTY, **options):
    return pool_size(EngineConfig(**options), FORMAT, context, available)


def test_a_given_size_is_filled_with_whole_pages():
    assert size(kv_cache_memory_bytes=10 * PAGE + PAGE - 1) == (10, 128)


def test_without_a_size_every_sequence_fits_at_its_longest():
    assert size(max_num_seqs=5) == (5 * 8, 128)
    assert size(max_num_seqs=5, max_model_len=64) == (5 * 4, 64)


def test_without_a_size_the_pool_takes_a_part_of_what_is_free():
    assert size(max_num_seqs=1000, available=100 * PAGE) == (40, 128)


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)])
def test_the_last_token_of_a_sequence_needs_no_slot(length, pages):
    assert size(kv_cache_memory_bytes=pages * PAGE, max_model_len=length) == (pages, length)
    if pages > 1:
        too_long = rf"max_model_len: .* {length} tokens takes {pages} pages and the pool has {pages - 1} "
        with pytest.raises(ConfigError, match=too_long):
            size(kv_cache_memory_bytes=(pages - 1) * PAGE, max_model_len=length)


def test_a_length_that_nobody_asked_for_is_cut_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert size(kv_cache_memory_bytes=3 * PAGE) == (3, 49)
    assert "max_model_len is 49 instead of the model's 128 tokens" in caplog.text


def test_errors_name_the_option_and_both_numbers():
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes: one page takes {PAGE:,} .* gives {PAGE - 1:,}"):
        size(kv_cache_memory_bytes=PAGE - 1)
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes: one page .* 40 % of the {PAGE:,} bytes"):
        size(available=PAGE)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        size(available=-5)
    with pytest.raises(ConfigError, match="max_model_len: 129 tokens are more than the model's context of 128"):
        size(max_model_len=129)


def test_host_memory_holds_whole_pages_of_what_is_free():
    one = PAGE / GIB
    assert host_size(EngineConfig(), FORMAT, 0) == 0
    assert host_size(EngineConfig(swap_space=3.5 * one), FORMAT, 4 * PAGE) == 3
    with pytest.raises(
        ConfigError, match=f"swap_space: {3 * PAGE:,} bytes are more than the {2 * PAGE:,} that are free"
    ):
        host_size(EngineConfig(swap_space=3 * one), FORMAT, 2 * PAGE)
    with pytest.raises(ConfigError, match=r"swap_space: .* more than the 0 that are free"):
        host_size(EngineConfig(swap_space=1), FORMAT, -5)
    with pytest.raises(ConfigError, match=f"swap_space: one page takes {PAGE:,} bytes"):
        host_size(EngineConfig(swap_space=one / 2), FORMAT, PLENTY)


# ── page operations ──────────────────────────────────────────────────────────────────────────────────────────────


NUM_PAGES, NUM_SLOTS, NUM_RECORDS = 4, 3, 5
LABEL = PageLabel(sha256(b"own").digest(), sha256(b"parent").digest(), tuple(range(16)))


def device(page):
    return Place(Tier.DEVICE, page)


def host(page):
    return Place(Tier.HOST, page)


def disk(page):
    return Place(Tier.DISK, page)


@pytest.fixture(params=[ReferenceOps, lambda: CpuOps(1)], ids=["reference", "cpu"])
def ops(request):
    return request.param()


@pytest.fixture
def make_store(ops, tmp_path):
    """Makes a store of all three tiers, or others; its pages hold noise. It is closed after the test."""
    made = []

    def make(**changes):
        if "disk" not in changes:
            options = {"fingerprint": bytes(32), "page_bytes": PAGE, "block_size": FORMAT.block_size}
            changes["disk"] = PageFile.open(str(tmp_path), max_bytes=10**5, restore=True, **options)
        made.append(KVStore(ops, FORMAT, NUM_PAGES, **{"num_host_pages": NUM_SLOTS, **changes}))
        for page in range(NUM_PAGES):
            content(made[-1], page)[:] = np.random.default_rng(page).integers(0, 256, PAGE, np.uint8)
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store):
    return make_store()


def content(store, page):
    """A page of the pool, in place."""
    return store._ops.page(store.pool, page)


def move(store, *places):
    """Move a page from place to place; whether each step went well."""
    moves = [MovePage(i, *ends, LABEL) for i, ends in enumerate(pairwise(places))]
    store.begin(moves)
    ended = []
    while len(ended) < len(moves):
        ended += store.ended(wait=True)
    assert [moved.number for moved in ended] == list(range(len(moves)))
    assert all(moved.seconds > 0 for moved in ended)
    return [moved.ok for moved in ended]


@pytest.mark.parametrize(("option", "pages"), [("kv_cache_memory_bytes", (1 << 40, 0)), ("swap_space", (1, 1 << 40))])
def test_more_memory_than_there_is_names_the_option(ops, option, pages):
    with pytest.raises(ConfigError, match=f"{option}: the system does not give {PAGE << 40:,} bytes"):
        KVStore(ops, FORMAT, pages[0], num_host_pages=pages[1])


def test_page_operations_are_applied_in_order(make_store):
    store = make_store(num_host_pages=0, disk=None)
    for page in range(4):
        content(store, page)[:] = page
    store.begin([CopyPage(0, 1), CopyPage(1, 2), CopyPage(3, 0)])
    assert [np.unique(content(store, page)).tolist() for page in range(4)] == [[3], [0], [0], [3]]


def test_without_tiers_there_is_no_thread_and_nothing_to_wait_for(make_store):
    num_threads = threading.active_count()
    store = make_store(num_host_pages=0, disk=None)
    assert threading.active_count() == num_threads
    assert list(store.ended(wait=True)) == []
    assert store.load_seconds() == {}


@pytest.mark.parametrize(
    "places",
    [
        (device(1), host(2), device(3)),
        (device(1), disk(4), device(3)),
        (device(1), host(0), disk(4), host(2), device(3)),
        (device(1), disk(0), host(1), disk(1), device(3)),
        (device(1), host(0), host(1), device(2), device(3)),
    ],
    ids=lambda places: "-".join(place.tier.name.lower() for place in places),
)
def test_a_page_comes_back_as_it_was(store, places):
    want = content(store, 1).copy()
    assert all(move(store, *places))
    np.testing.assert_array_equal(content(store, 3), want)
    np.testing.assert_array_equal(content(store, 1), want)


def test_many_moves_at_once_do_what_they_say_in_order(store):
    """Against a model in which pages are names and all happens at once."""
    noise = random.Random(0)
    places = [*map(device, range(NUM_PAGES)), *map(host, range(NUM_SLOTS)), *map(disk, range(NUM_RECORDS))]
    holds = {device(page): content(store, page).copy() for page in range(NUM_PAGES)}
    begun, ended = [], []
    for number in range(500):
        source = noise.choice(list(holds))
        target = noise.choice([place for place in places if (source.tier, place.tier) != (Tier.DISK, Tier.DISK)])
        if source != target:
            store.begin([MovePage(number, source, target, LABEL)])
            begun.append(number)
            holds[target] = holds[source]
        if number % 7 == 0:
            ended += store.ended(wait=noise.random() < 0.5)
    store.begin([AwaitMove(begun[-1])])
    ended += store.ended(wait=True)
    assert [moved.number for moved in ended] == begun
    assert all(moved.ok for moved in ended)
    for place, want in holds.items():
        if place.tier is not Tier.DEVICE:
            assert move(store, place, device(0)) == [True]
            np.testing.assert_array_equal(content(store, 0), want)


class Gate:
    """A file that writes nothing, and not before it may."""

    def __init__(self):
        self.open = threading.Event()
        self.wrote = []

    def write(self, record, label, page):
        assert self.open.wait(60)
        self.wrote.append(record)

    def close(self):
        pass


def test_moves_go_on_beside_the_engine_until_one_is_awaited(make_store):
    gate = Gate()
    store = make_store(disk=gate)
    content(store, 3)[:] = 3
    store.begin([MovePage(8, device(0), disk(5), LABEL), MovePage(9, device(1), disk(6), LABEL), CopyPage(3, 2)])
    assert content(store, 2)[0] == 3  # nothing has waited
    assert list(store.ended(wait=False)) == []
    threading.Timer(0.05, gate.open.set).start()
    store.begin([AwaitMove(8)])
    assert gate.wrote[0] == 5
    store.begin([AwaitMove(9), AwaitMove(8), AwaitMove(77)])  # those that ended, or never were, are not waited for
    assert gate.wrote == [5, 6]
    assert [moved[:2] for moved in store.ended(wait=True)] == [(8, True), (9, True)]
    assert list(store.ended(wait=True)) == []  # nothing is under way


def test_who_waits_gets_the_first_move_that_ends(make_store):
    gate = Gate()
    store = make_store(disk=gate)
    store.begin([MovePage(8, device(0), disk(5), LABEL)])
    threading.Timer(0.05, gate.open.set).start()
    assert [moved[:2] for moved in store.ended(wait=True)] == [(8, True)]


def test_closing_ends_what_has_begun(make_store, tmp_path):
    store = make_store()
    want = bytes(content(store, 1))
    store.begin([MovePage(1, device(1), host(0)), MovePage(2, host(0), disk(3), LABEL)])
    store.close()
    store.close()
    again = make_store()
    assert again.disk.labels() == [(3, LABEL)]
    assert move(again, disk(3), device(0)) == [True]
    assert bytes(content(again, 0)) == want


# ── tiers that fail ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("target", [device(0), host(0), disk(0)], ids=lambda place: place.tier.name)
def test_a_damaged_host_page_is_refused(store, caplog, target):
    assert all(move(store, device(1), host(2)))
    store.host[2, 1234] ^= 4
    assert move(store, host(2), target) == [False]
    name = target.tier.name.lower()
    assert f"host page 2 could not be copied to {name} page 0: its checksum does not match" in caplog.text
    assert all(move(store, device(1), host(2), target))


@pytest.mark.parametrize("target", [device(0), host(0)], ids=lambda place: place.tier.name)
def test_a_damaged_record_is_refused(store, caplog, tmp_path, target):
    assert all(move(store, device(1), disk(0)))
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(2 * 4096 + 1234)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))
    assert move(store, disk(0), target) == [False]
    assert "disk page 0 could not be copied to" in caplog.text
    assert move(store, disk(2), target) == [False]  # never written
    os.truncate(tmp_path / NAME, 4096)
    assert move(store, disk(0), target) == [False]


def test_a_full_disk_fails_moves_and_floods_no_log(store, caplog, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(50):
        assert move(store, device(1), disk(0)) == [False]
    monkeypatch.undo()
    assert [record.getMessage() for record in caplog.records] == [
        "device page 1 could not be copied to disk page 0: [Errno 28] No space left on device"
    ]
    monkeypatch.setattr("octavo.engine.kv_store.WARN_EVERY_S", 0)
    assert move(store, disk(4), device(1)) == [False]
    assert "(49 failures before this one were not logged)" in caplog.text
    assert all(move(store, device(1), disk(0), device(0)))


def test_faults_of_the_plan_do_not_end_the_thread(store, caplog):
    store.begin([MovePage(1, device(0), disk(0)), MovePage(2, host(99), device(0)), MovePage(3, device(1), host(0))])
    store.begin([AwaitMove(3)])
    assert [moved.ok for moved in store.ended(wait=True)] == [False, False, True]
    assert "a page on disk needs a label" in caplog.text


def test_times_of_loading_leave_nothing_behind(store, caplog, tmp_path, monkeypatch):
    before = [content(store, page).copy() for page in range(NUM_PAGES)]
    seconds = store.load_seconds()
    assert set(seconds) == {Tier.HOST, Tier.DISK}
    assert all(0 < value < 60 for value in seconds.values())
    np.testing.assert_array_equal(before, [content(store, page) for page in range(NUM_PAGES)])
    assert store.disk.labels() == []
    assert (tmp_path / NAME).stat().st_size == 4096
    assert list(store.ended(wait=True)) == []
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    assert store.load_seconds()[Tier.DISK] == float("inf")
    assert "pages cannot be read back from disk" in caplog.text
