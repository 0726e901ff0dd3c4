"""Weights as a file stores them: memory-mapped, read row range by row range, and never held twice.

Owns the float formats, the matrix over mapped bytes and the checkpoint, which knows its tensors under these names:

    embed, norm, lm_head, rope_divisors, and in each layer, as layers.{i}.…, attention_norm, q_proj, k_proj, v_proj,
    q_norm, k_norm, o_proj, ffn_norm, gate_proj, up_proj, down_proj, with ….bias beside a projection that has one.

Each reader maps its own file's names to these. Nothing here knows a file's layout, and nothing computes a model.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.ops.api import Floats, Quantized

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

Bytes = NDArray[np.uint8]


class Format(NamedTuple):
    """How numbers become bytes. `decode` takes raw rows [rows, row_bytes] and gives Floats, or Quantized when bits ≤ 8.

    A row is a whole number of blocks of `block` inputs in `block_bytes` bytes; `group` inputs share a scale.
    """

    name: str
    block: int
    block_bytes: int
    bits: int
    group: int
    decode: Callable[[Bytes], Any]


def _bf16(raw: Bytes) -> Floats:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


F32 = Format("F32", 1, 4, 32, 0, lambda raw: raw.view(np.float32))
F16 = Format("F16", 1, 2, 16, 0, lambda raw: raw.view(np.float16).astype(np.float32))
BF16 = Format("BF16", 1, 2, 16, 0, _bf16)


HASHED_AT_ONCE = 1 << 26

FAULT_AROUND = 1 << 21
"""Linux maps up to this much of a file, aligned, around the byte that is touched."""


class MappedFile:
    """A file's bytes, read-only, brought in by the kernel as they are touched."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: mmap refuses an empty file
            raise ModelError(path, f"cannot be read: {error}") from error
        self.path = path
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    @property
    def buffer(self) -> mmap.mmap:
        return self._map

    def release(self, start: int, stop: int) -> None:
        """Drop bytes start…stop from this process's memory; the next read brings them back."""
        first, stop = start // FAULT_AROUND * FAULT_AROUND, min(-(-stop // FAULT_AROUND) * FAULT_AROUND, len(self._map))
        if stop > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)


class Stored:
    """A tensor over mapped bytes; with two dimensions it is an `octavo.ops.api.Weight`.

    `order`, where given, lists the stored row that each row is read from. What a call has decoded is dropped from the
    process's memory again, so that packing a model never holds both forms of it.
    """

    def __init__(
        self,
        file: MappedFile,
        name: str,
        dims: tuple[int, ...],
        format: Format,
        start: int,
        order: NDArray[np.int64] | None = None,
    ) -> None:
        self.file, self.name, self.dims, self.format, self.start, self.order = file, name, dims, format, start, order
        self.row_bytes = dims[-1] // format.block * format.block_bytes
        self.num_rows = dims[0] if len(dims) == 2 else 1
        self.num_bytes = self.num_rows * self.row_bytes

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.dims[-1]

    @property
    def bits(self) -> int:
        return self.format.bits

    @property
    def group(self) -> int:
        return self.format.group

    def reordered(self, order: NDArray[np.int64]) -> Stored:
        """The same matrix with its rows in another order."""
        return Stored(self.file, self.name, self.dims, self.format, self.start, order)

    def quantized(self, start: int, stop: int) -> Quantized:
        """Rows start…stop without loss."""
        if self.bits > 8:
            raise TypeError(f"tensor {self.name!r} is stored as {self.format.name}, which has no codes")
        with np.errstate(all="ignore"):  # numbers that are not finite are reported below, by name
            decoded: Quantized = self.format.decode(self._rows(start, stop))
        self._released(start, stop)
        self._check(decoded.scales)
        if decoded.minimums is not None:
            self._check(decoded.minimums)
        return decoded

    def float32(self, start: int, stop: int) -> Floats:
        """Rows start…stop as float32, the exact values that the file's format defines."""
        if self.bits <= 8:
            return dequantize(self.quantized(start, stop))
        with np.errstate(all="ignore"):
            values: Floats = np.array(self.format.decode(self._rows(start, stop)), np.float32)
        self._released(start, stop)
        self._check(values)
        return values

    def hash_into(self, digest: xxh3_128) -> None:
        """Feed a hash with all that the tensor's values depend on."""
        digest.update(repr((self.dims, self.format.name)).encode())
        if self.order is not None:
            digest.update(self.order.tobytes())
        for start in range(self.start, stop := self.start + self.num_bytes, HASHED_AT_ONCE):
            end = min(start + HASHED_AT_ONCE, stop)
            digest.update(self.file.bytes[start:end].data)
            self.file.release(start, end)

    def _rows(self, start: int, stop: int) -> Bytes:
        if not 0 <= start < stop <= self.num_rows:
            raise IndexError(f"rows {start}…{stop} of {self.num_rows} in tensor {self.name!r}")
        rows = self.file.bytes[self.start : self.start + self.num_bytes].reshape(self.num_rows, self.row_bytes)
        return rows[start:stop] if self.order is None else rows[self.order[start:stop]]

    def _released(self, start: int, stop: int) -> None:
        low, high = (start, stop) if self.order is None else (0, self.num_rows)
        self.file.release(self.start + low * self.row_bytes, self.start + high * self.row_bytes)

    def _check(self, values: Floats) -> None:
        if not np.isfinite(values).all():
            raise ModelError(self.file.path, f"tensor {self.name!r} holds a number that is not finite")


def dequantize(q: Quantized) -> Floats:
    """value = scale · code + minimum in float32; the product is exact, so there is one rounding."""
    rows, inputs = q.codes.shape
    values = q.codes.reshape(rows, inputs // q.group, q.group).astype(np.float32)
    values *= q.scales[:, :, None]
    if q.minimums is not None:
        values += q.minimums[:, :, None]
    return values.reshape(rows, inputs)


class Checkpoint:
    """A model on disk: its shape, its tensors under canonical names, and its tokenizer.

    Opening checks that every tensor is there with the shape that `config` says. Raises ModelError.
    """

    def __init__(
        self, path: Path, config: ModelConfig, tensors: Mapping[str, Stored], tokenizer: Callable[[], Tokenizer]
    ) -> None:
        self.path, self.config = path, config
        self._tensors, self._tokenizer = dict(tensors), tokenizer
        if config.head_dim % 2 or config.num_heads % config.num_kv_heads:
            heads = f"{config.num_heads} heads of size {config.head_dim} over {config.num_kv_heads} KV heads"
            raise ModelError(path, f"has {heads}: sizes must be even, and KV heads serve equal numbers of heads")
        extra = dict(self._tensors)
        for name, dims in _expected(config, self._tensors):  # stops at the first that is absent: sizes may be lies
            stored = extra.pop(name, None)
            if stored is None:
                raise ModelError(path, f"has no tensor for {name!r}")
            if stored.dims != dims:
                got, want = ("×".join(map(str, shape)) for shape in (stored.dims, dims))
                raise ModelError(path, f"tensor {stored.name!r} is {got} but the model's shape needs {want}")
        for stored in extra.values():
            what = f"tensor {stored.name!r} has no place in a {config.architecture} model"
            raise ModelError(path, f"{what} ({len(extra)} such)")

    @property
    def stored_bytes(self) -> int:
        """What the tensors take in the file."""
        return sum(stored.num_bytes for stored in self._tensors.values())

    def digest(self) -> bytes:
        """What identifies the weights: a hash of all tensors, which reads them once."""
        digest = xxh3_128()
        for name in sorted(self._tensors):
            digest.update(name.encode())
            self._tensors[name].hash_into(digest)
        return digest.digest()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def weight(self, name: str) -> Stored:
        """A matrix, [num_outputs, num_inputs]."""
        return self._tensors[name]

    def vector(self, name: str) -> Floats:
        """A norm, a bias or the rotary divisors as float32."""
        stored = self._tensors[name]
        values = Stored(stored.file, stored.name, stored.dims, stored.format, stored.start).float32(0, 1)[0]
        return values if stored.order is None else values[stored.order]

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer()


def _expected(c: ModelConfig, present: Mapping[str, Stored]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and dimensions of each tensor; of the optional ones, those that are present."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield "embed", (c.vocab_size, c.hidden_size)
    yield "norm", (c.hidden_size,)
    if not c.tie_embeddings:
        yield "lm_head", (c.vocab_size, c.hidden_size)
    if "rope_divisors" in present:
        yield "rope_divisors", (c.head_dim // 2,)
    for i in range(c.num_layers):
        layer = f"layers.{i}."
        yield layer + "attention_norm", (c.hidden_size,)
        yield layer + "ffn_norm", (c.hidden_size,)
        if c.qk_norm:
            yield layer + "q_norm", (c.head_dim,)
            yield layer + "k_norm", (c.head_dim,)
        for name, outputs, inputs in (
            ("q_proj", q, c.hidden_size),
            ("k_proj", kv, c.hidden_size),
            ("v_proj", kv, c.hidden_size),
            ("o_proj", c.hidden_size, q),
            ("gate_proj", c.intermediate_size, c.hidden_size),
            ("up_proj", c.intermediate_size, c.hidden_size),
            ("down_proj", c.hidden_size, c.intermediate_size),
        ):
            yield layer + name, (outputs, inputs)
            bias = layer + name + ".bias"
            if bias in present or (c.qkv_bias and name in ("q_proj", "k_proj", "v_proj")):
                yield bias, (outputs,)


def whole_number(path: Path, name: str, value: object) -> int:
    """A size that a model's file gives. Raises ModelError unless it is a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ModelError(path, f"has {name} = {value!r}, which is not a whole number from 1 to {2**31 - 1}")
    return value


def positive_number(path: Path, name: str, value: object) -> float:
    """A setting that a model's file gives. Raises ModelError unless it is a finite number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(path, f"has {name} = {value!r}, which is not a number above 0")
    return float(value)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file or a folder of safetensors. Raises ModelError."""
    from octavo.models import gguf, safetensors  # the readers build what is defined above

    path = Path(path)
    if path.is_dir():
        return safetensors.open_folder(path)
    if not path.exists():
        raise ModelError(path, "does not exist")
    return gguf.open_file(path)
