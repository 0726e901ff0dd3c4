"""The disk tier's file. Whatever happens to it, a page read is what was written for its label, or is refused."""

import errno
import logging
import os
import random
import signal
import struct
import subprocess
import sys
from functools import cache
from hashlib import sha256

import numpy as np
import pytest

from octavo.engine import page_file
from octavo.engine.page_file import BLOCK, NAME, DamagedPage, PageFile
from octavo.errors import ConfigError
from octavo.types import PageLabel

PAGE_BYTES, BLOCK_SIZE = 5056, 16  # not whole blocks
RECORD = BLOCK + 2 * BLOCK
SPACE = BLOCK + 10 * RECORD


@cache
def label_of(number, num_tokens=BLOCK_SIZE):
    digest = sha256(b"%d" % number).digest()
    return PageLabel(digest, sha256(digest).digest(), tuple(range(number, number + num_tokens)))


@cache
def page_of(number, page_bytes=PAGE_BYTES):
    return np.random.default_rng(number).integers(0, 256, page_bytes, np.uint8).data


def open_file(directory, **changes):
    options = {"fingerprint": b"f" * 32, "page_bytes": PAGE_BYTES, "block_size": BLOCK_SIZE, "max_bytes": SPACE}
    return PageFile.open(str(directory), **{"restore": True, **options, **changes})


def filled(directory, numbers, **changes):
    """A closed file with page `number` in record 0, 1, …; its path."""
    file = open_file(directory, **changes)
    for record, number in enumerate(numbers):
        file.write(record, label_of(number), page_of(number))
    file.close()
    return directory / NAME


def read(file, record, page_bytes=PAGE_BYTES):
    out = np.zeros(page_bytes, np.uint8)
    file.read(record, out.data)
    return out.data


def found(directory, **changes):
    """(record, label, page) of all that a new opener finds; the page is None where it is refused."""
    file = open_file(directory, **changes)
    pages = []
    for record, label in file.labels():
        try:
            pages.append((record, label, read(file, record)))
        except DamagedPage:
            pages.append((record, label, None))
    file.close()
    return pages


def all_of(numbers):
    return [(record, label_of(number), page_of(number)) for record, number in enumerate(numbers)]


def test_pages_and_labels_survive(tmp_path):
    directory = tmp_path / "made" / "here"
    filled(directory, [7, 8, 9])
    assert found(directory) == all_of([7, 8, 9])
    assert oct((directory / NAME).stat().st_mode)[-3:] == "600"


def test_a_record_is_replaced(tmp_path):
    filled(tmp_path, [7])
    file = open_file(tmp_path)
    file.write(0, label_of(8, num_tokens=3), page_of(8))
    assert read(file, 0) == page_of(8)
    file.close()
    assert found(tmp_path) == [(0, label_of(8, num_tokens=3), page_of(8))]


def test_a_label_longer_than_a_block(tmp_path):
    size = {"block_size": 4096, "max_bytes": 1 << 20}
    file = open_file(tmp_path, **size)
    file.write(2, label_of(1, 4096), page_of(1))
    file.write(2, label_of(2, 5), page_of(2))
    file.write(3, label_of(3, 4096), page_of(3))
    with pytest.raises(ValueError, match="4097 tokens"):
        file.write(4, label_of(4, 4097), page_of(4))
    file.close()
    assert found(tmp_path, **size) == [(2, label_of(2, 5), page_of(2)), (3, label_of(3, 4096), page_of(3))]


def test_records_that_were_never_written_are_empty(tmp_path):
    file = open_file(tmp_path)
    file.write(7, label_of(7), page_of(7))
    assert file.labels() == [(7, label_of(7))]
    for record in (0, 6, 9):
        with pytest.raises(DamagedPage, match="there is no page"):
            read(file, record)
    file.close()
    assert (tmp_path / NAME).stat().st_blocks * 512 < 7 * RECORD  # a sparse file


@pytest.mark.parametrize("while_open", [False, True])
def test_any_flipped_byte_is_detected(tmp_path, while_open):
    path, noise = filled(tmp_path, range(4)), random.Random(0)
    good = path.read_bytes()
    near = [BLOCK + record * RECORD + offset for record in range(4) for offset in range(200)]  # checksums and labels
    for place in [*near, *(noise.randrange(BLOCK, len(good)) for _ in range(300))]:
        file = open_file(tmp_path)
        if while_open:
            assert len(file.labels()) == 4
        os.pwrite(file._fd, bytes([good[place] ^ 1 << noise.randrange(8)]), place)
        labels = dict(file.labels())
        hurt, offset = divmod(place - BLOCK, RECORD)
        for record in range(4):
            assert labels.get(record, label_of(record)) == label_of(record)
            try:
                assert read(file, record) == page_of(record)
                refused = False
            except DamagedPage:
                refused = True
            if record != hurt:
                assert not refused
                assert record in labels
            elif offset < BLOCK:
                assert record not in labels
                assert refused is not while_open  # it knows what it wants to read
            else:
                assert refused is (offset < BLOCK + PAGE_BYTES)
        os.pwrite(file._fd, good[place : place + 1], place)
        file.close()


def test_pages_and_records_in_each_others_place_are_refused(tmp_path):
    path = filled(tmp_path, range(3))
    first, *records = (path.read_bytes()[start : start + RECORD] for start in (0, *range(BLOCK, SPACE, RECORD)))
    first = first[:BLOCK]
    headers, pages = zip(
        *((record[:BLOCK], record[BLOCK:].ljust(2 * BLOCK, b"\0")) for record in records[:3]), strict=True
    )
    path.write_bytes(first + headers[0] + pages[1] + headers[1] + pages[0] + headers[2] + pages[2])
    assert found(tmp_path) == [(0, label_of(0), None), (1, label_of(1), None), (2, label_of(2), page_of(2))]
    path.write_bytes(first + headers[1] + pages[1] + headers[0] + pages[0] + headers[2] + pages[2])
    assert found(tmp_path) == [(2, label_of(2), page_of(2))]


def test_a_page_is_bound_to_its_label(tmp_path):
    """Even by a header that is whole and says the page's right checksum under another label."""
    filled(tmp_path, [1])
    file = open_file(tmp_path)
    header = bytearray(os.pread(file._fd, BLOCK, BLOCK))
    header[page_file._FIXED] ^= 1  # the first token
    header[:8] = struct.pack("<Q", page_file.xxh3_64_intdigest(header[8:], file._seed))
    os.pwrite(file._fd, header, BLOCK)
    assert file.labels() == [(0, label_of(1)._replace(tokens=(0, *range(2, 17))))]
    with pytest.raises(DamagedPage, match="checksum"):
        read(file, 0)
    file.close()


def test_records_of_another_file_are_refused(tmp_path):
    old = filled(tmp_path / "old", [1], fingerprint=b"o" * 32).read_bytes()
    path = filled(tmp_path / "new", [])
    path.write_bytes(path.read_bytes() + old[BLOCK:])
    assert found(tmp_path / "new") == []


def test_a_file_may_be_cut_anywhere(tmp_path):
    path = filled(tmp_path, range(3))
    whole = path.read_bytes()
    for length in range(BLOCK, len(whole), 97):
        path.write_bytes(whole[:length])
        num_whole = (length - 2 * BLOCK - PAGE_BYTES) // RECORD + 1
        assert found(tmp_path) == all_of(range(num_whole))
    path.write_bytes(whole)
    file = open_file(tmp_path)
    file.labels()
    os.truncate(path, BLOCK + RECORD + 2 * BLOCK)
    assert read(file, 0) == page_of(0)
    for record in (1, 2):
        with pytest.raises(DamagedPage, match="cut short"):
            read(file, record)
    file.close()


def test_short_writes_and_reads_are_continued(tmp_path, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:999]], offset))
    filled(tmp_path, range(3))
    assert found(tmp_path) == all_of(range(3))


@pytest.mark.parametrize("num_good", range(7))
def test_a_write_that_fails_leaves_the_old_page_or_none(tmp_path, monkeypatch, num_good):
    """A rewrite takes seven calls here, of a quarter of a page at most; the disk is full at one of them."""
    filled(tmp_path, range(3))
    pwrite, left = os.pwrite, num_good

    def write_or_fail(fd, data, offset):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data[: PAGE_BYTES // 4], offset)

    file = open_file(tmp_path)
    file.labels()
    monkeypatch.setattr(os, "pwrite", write_or_fail)
    with pytest.raises(OSError, match="No space left"):
        file.write(1, label_of(9), page_of(9))
    monkeypatch.undo()
    file.close()
    old = all_of(range(3))
    if num_good == 6:  # of its header only zeros were missing
        old[1] = (1, label_of(9), page_of(9))
    elif num_good > 0:
        del old[1]
    assert found(tmp_path) == old


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fingerprint": b"g" * 32}, "another model, KV format or backend"),
        ({"page_bytes": PAGE_BYTES + 64}, "another page size"),
        ({"block_size": 4}, "another block size"),
        ({"restore": False}, "not to be restored"),
    ],
)
def test_what_another_engine_cannot_use_is_dropped(tmp_path, caplog, changes, reason):
    path = filled(tmp_path, range(3))
    with caplog.at_level(logging.WARNING):
        file = open_file(tmp_path, **changes)
    assert f"{path} is emptied: " in caplog.text
    assert reason in caplog.text
    assert file.labels() == []
    file.close()
    assert path.stat().st_size == BLOCK


@pytest.mark.parametrize("first", [b"", b"x", b"my diary " * 1000, struct.pack("<8sI", b"octavoPF", 2)])
def test_a_file_that_begins_otherwise_is_emptied(tmp_path, caplog, first):
    path = filled(tmp_path, range(3))
    path.write_bytes(first + path.read_bytes()[BLOCK:] if first else b"")
    assert found(tmp_path) == []
    assert ("is emptied: it is of another" in caplog.text) is bool(first)


def test_nothing_is_said_of_a_new_file(tmp_path, caplog):
    found(tmp_path, restore=False)
    found(tmp_path)
    assert caplog.text == ""


def test_less_space_keeps_what_fits(tmp_path):
    path = filled(tmp_path, range(5))
    assert found(tmp_path, max_bytes=BLOCK + 2 * RECORD + 1) == all_of(range(2))
    assert path.stat().st_size == BLOCK + 2 * RECORD
    with pytest.raises(ConfigError, match=f"kv_offload_space: one page takes {BLOCK + RECORD:,} bytes .* gives 16,383"):
        open_file(tmp_path, max_bytes=BLOCK + RECORD - 1)
    assert found(tmp_path) == all_of(range(2))


def test_a_directory_has_one_engine(tmp_path):
    file = open_file(tmp_path)
    with pytest.raises(ConfigError, match="kv_offload_dir: another engine is using"):
        open_file(tmp_path)
    file.close()
    open_file(tmp_path).close()


def test_a_directory_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / NAME).mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / NAME)
    for name in ("file", "folder", "pipe"):
        with pytest.raises(ConfigError, match=r"kv_offload_dir: .* cannot be used"):
            open_file(tmp_path / name)


def test_ten_thousand_labels(tmp_path):
    size = {"page_bytes": 64, "max_bytes": 1 << 30}
    file = open_file(tmp_path, **size)
    for number in range(10_000):
        file.write(number, label_of(number), page_of(0, 64))
    file.close()
    file = open_file(tmp_path, **size)
    labels = file.labels()
    assert [record for record, _ in labels] == list(range(10_000))
    assert labels[9_999] == (9_999, label_of(9_999))
    file.close()


def test_the_time_of_a_page_leaves_nothing_behind(tmp_path):
    path = filled(tmp_path, range(10))
    before = path.read_bytes()
    file = open_file(tmp_path)
    assert file.load_seconds(page_of(0)) > 0
    assert path.read_bytes() == before
    assert len(file.labels()) == 10
    file.close()


WRITER = """
import sys
from tests.engine.test_page_file import *

start = int(sys.argv[2])
file = open_file(sys.argv[1], page_bytes=BIG, max_bytes=BIG_SPACE)
pages = [page_of(number, BIG) for number in range(7)]
for number in range(start, start + 10**9):
    file.write(number % 5, label_of(number), pages[number % 7])
    if number == start + 3:
        print(flush=True)
"""
BIG = 1 << 20
BIG_SPACE = 6 * (BIG + 2 * BLOCK)


def test_a_killed_writer_leaves_only_whole_pages(tmp_path):
    """Twenty times. The header comes last, so that even a page that would be refused is not offered."""
    noise = random.Random(0)
    pages = [page_of(number, BIG) for number in range(7)]
    num_found = 0
    for start in range(0, 20 * 10**6, 10**6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(start)], stdout=subprocess.PIPE)
        with writer:
            assert writer.stdout.readline() == b"\n"
            signal.sigtimedwait([], noise.random() * 0.02)
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        file = open_file(tmp_path, page_bytes=BIG, max_bytes=BIG_SPACE)
        for record, label in file.labels():
            number = label.tokens[0]
            assert label == label_of(number)
            assert number % 5 == record
            assert read(file, record, BIG) == pages[number % 7]
            num_found += number >= start
        file.close()
    assert num_found >= 20 * 3
