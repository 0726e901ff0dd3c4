"""PageFile: pages on disk, each with the label it is found by, in records of one size. Never decides whose they are.

    file   = what it is for │ record 0 │ record 1 │ …      each part padded to 4,096 bytes
    record = header (checksums, label) │ page

The file's first block is part of what a header's checksum covers, and so is the record's number; the label is part of
what a page's checksum covers. A record is written header last. So whatever a crash, a full disk or a bad one leaves
there, a record read is the page that was written for its label, or is refused.
"""

from __future__ import annotations

import fcntl
import logging
import os
import statistics
import struct
import time
from pathlib import Path
from typing import Self

from xxhash import xxh3_64_intdigest

from octavo.errors import ConfigError
from octavo.types import PageLabel

_log = logging.getLogger(__name__)

NAME = "pages.octavo"
VERSION = 1
BLOCK = 4096
NUM_READINGS = 5

_FIRST = struct.Struct("<8sIQI32s")  # magic, version, page_bytes, block_size, fingerprint
_FIRST_MAGIC = b"octavoPF"
_FIRST_FIELDS = ("kind of file", "version", "page size", "block size", "model, KV format or backend")

_CHECKSUM = struct.Struct("<Q")  # of the header's rest; 0 while the page is being written
_HEADER = struct.Struct("<8sQI")  # magic, checksum of the page, number of tokens; then the label
_MAGIC = b"octavoPG"
_DIGESTS = struct.Struct("<32s32s")
_FIXED = _CHECKSUM.size + _HEADER.size + _DIGESTS.size


class DamagedPage(OSError):
    """What a tier gave back is not what was stored there."""


class PageFile:
    """The file of one directory, for one engine at a time. Not thread-safe."""

    def __init__(self, fd: int, first: bytes, page_bytes: int, block_size: int, max_bytes: int) -> None:
        self._fd = fd
        self._seed = xxh3_64_intdigest(first)
        self._page_bytes, self._block_size = page_bytes, block_size
        self._header_bytes = _padded(_FIXED + 4 * block_size)
        self._record_bytes = self._header_bytes + _padded(page_bytes)
        self._checksums: dict[int, tuple[int, int]] = {}  # by record: the page's checksum, and the seed from its label
        self.max_records = (max_bytes - BLOCK) // self._record_bytes
        if self.max_records < 1:
            needed = BLOCK + self._record_bytes
            raise ConfigError("kv_offload_space", f"one page takes {needed:,} bytes and it gives {max_bytes:,}")

    @classmethod
    def open(
        cls, directory: str, *, fingerprint: bytes, page_bytes: int, block_size: int, max_bytes: int, restore: bool
    ) -> Self:
        """Take the directory's file for this process, and make both if need be.

        Without `restore`, or when `fingerprint` (32 bytes) or a size is another, what the file holds is dropped.
        Raises ConfigError.
        """
        first = _FIRST.pack(_FIRST_MAGIC, VERSION, page_bytes, block_size, fingerprint).ljust(BLOCK, b"\0")
        path = Path(directory, NAME)
        fd = -1
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file = cls(fd, first, page_bytes, block_size, max_bytes)
            file._begin(path, first, restore)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                raise ConfigError("kv_offload_dir", f"another engine is using {path}: give each its own") from None
            if isinstance(error, OSError):
                raise ConfigError("kv_offload_dir", f"{path} cannot be used: {error.strerror or error}") from error
            raise
        return file

    def _begin(self, path: Path, first: bytes, restore: bool) -> None:
        size, limit = os.fstat(self._fd).st_size, BLOCK + self.max_records * self._record_bytes
        found = os.pread(self._fd, BLOCK, 0)
        if size and (found != first or not restore):
            reason = _difference(found, first) if restore else "it is not to be restored"
            _log.warning("%s is emptied: %s", path, reason)
        if found != first or not restore:
            os.ftruncate(self._fd, 0)
            _write(self._fd, first, 0)
            os.fsync(self._fd)
        elif size > limit:
            os.ftruncate(self._fd, limit)

    def labels(self) -> list[tuple[int, PageLabel]]:
        """The records that a whole header says are there. Pages are not read: one may turn out to be damaged."""
        rest = os.fstat(self._fd).st_size + _padded(self._page_bytes) - self._page_bytes - BLOCK
        num_records = min(self.max_records, rest // self._record_bytes)
        for record in range(num_records):  # so that a disk reads many at once
            os.posix_fadvise(self._fd, self._offset(record), self._header_bytes, os.POSIX_FADV_WILLNEED)
        found = ((record, self._label(record)) for record in range(num_records))
        return [(record, label) for record, label in found if label is not None]

    def write(self, record: int, label: PageLabel, page: memoryview) -> None:
        """Store a page in place of the record's last one, which is lost even if that fails. Raises OSError."""
        num_tokens = len(label.tokens)
        if num_tokens > self._block_size or page.nbytes != self._page_bytes:
            raise ValueError(f"a page of {num_tokens} tokens in {page.nbytes} bytes does not fit the file")
        tail = _DIGESTS.pack(label.digest, label.parent) + struct.pack(f"<{num_tokens}i", *label.tokens)
        seed = xxh3_64_intdigest(tail, self._seed)
        checksum = xxh3_64_intdigest(page, seed)
        header = (_HEADER.pack(_MAGIC, checksum, num_tokens) + tail).ljust(self._header_bytes - _CHECKSUM.size, b"\0")
        offset = self._offset(record)
        self._checksums.pop(record, None)
        _write(self._fd, bytes(_CHECKSUM.size), offset)
        _write(self._fd, page, offset + self._header_bytes)
        _write(self._fd, _CHECKSUM.pack(xxh3_64_intdigest(header, self._seed ^ record)) + header, offset)
        self._checksums[record] = checksum, seed

    def read(self, record: int, page: memoryview) -> None:
        """Read a record's page into memory of its size. Raises OSError; DamagedPage if it is not what was written."""
        if record not in self._checksums and self._label(record) is None:
            raise DamagedPage("there is no page")
        checksum, seed = self._checksums[record]
        rest, offset = memoryview(page), self._offset(record) + self._header_bytes
        while rest:
            count = os.preadv(self._fd, [rest], offset)
            if not count:
                raise DamagedPage("the file is cut short")
            rest, offset = rest[count:], offset + count
        if xxh3_64_intdigest(page, seed) != checksum:
            raise DamagedPage("its checksum does not match")

    def load_seconds(self, page: memoryview) -> float:
        """Seconds to read a page that no memory holds: the median of a few. The file is as before. Raises OSError."""
        record, size, seconds = self.max_records, os.fstat(self._fd).st_size, []
        try:
            self.write(record, PageLabel(bytes(32), bytes(32), ()), page)
            self.flush()
            for _ in range(NUM_READINGS):
                os.posix_fadvise(self._fd, self._offset(record), self._record_bytes, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                self.read(record, page)
                seconds.append(time.perf_counter() - start)
        finally:
            self._checksums.pop(record, None)
            os.ftruncate(self._fd, size)
        return statistics.median(seconds)

    def flush(self) -> None:
        """Return when all that was written would outlive a loss of power. Raises OSError."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Flush, and let another engine have the file."""
        try:
            self.flush()
        except OSError as error:
            _log.warning("pages on disk may be lost: %s", error)
        finally:
            os.close(self._fd)

    def _offset(self, record: int) -> int:
        return BLOCK + record * self._record_bytes

    def _label(self, record: int) -> PageLabel | None:
        """The label in a record's header, if that is whole; its checksums are noted."""
        try:
            header = os.pread(self._fd, self._header_bytes, self._offset(record))
        except OSError:
            return None
        if len(header) < self._header_bytes:
            return None
        [checksum] = _CHECKSUM.unpack_from(header)
        magic, page_checksum, num_tokens = _HEADER.unpack_from(header, _CHECKSUM.size)
        if magic != _MAGIC or checksum != xxh3_64_intdigest(header[_CHECKSUM.size :], self._seed ^ record):
            return None
        tail = header[_FIXED - _DIGESTS.size : _FIXED + 4 * num_tokens]
        self._checksums[record] = page_checksum, xxh3_64_intdigest(tail, self._seed)
        digest, parent = _DIGESTS.unpack_from(tail)
        return PageLabel(digest, parent, struct.unpack_from(f"<{num_tokens}i", tail, _DIGESTS.size))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def _write(fd: int, data: memoryview | bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count


def _difference(found: bytes, first: bytes) -> str:
    """Why a file that begins with `found` is not one that would begin with `first`."""
    pairs = zip(_FIRST.unpack_from(found.ljust(BLOCK, b"\0")), _FIRST.unpack_from(first), strict=True)
    for name, (old, new) in zip(_FIRST_FIELDS, pairs, strict=True):
        if old != new:
            return f"it is of another {name}"
    return "its beginning is damaged"
