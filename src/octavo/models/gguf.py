"""Reading GGUF: header, metadata, tensor table and block formats, straight from the mapped file.

Our own reader, because the `gguf` package trusts the file (counts and offsets are used before they are checked), takes
seconds over a vocabulary and brings an HTTP client along; the tests use it as the independent oracle. Here every count,
length and offset is compared with the file's size before anything is allocated, and whatever is wrong is a ModelError
that says what and where. Layout and block formats: github.com/ggml-org/ggml, docs/gguf.md and src/ggml-quants.c.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from octavo.config import Architecture, ModelConfig
from octavo.errors import ModelError
from octavo.models.tokenizer import Tokenizer, from_gguf
from octavo.models.weights import (
    BF16,
    F16,
    F32,
    Bytes,
    Checkpoint,
    Format,
    MappedFile,
    Stored,
    positive_number,
    whole_number,
)
from octavo.ops.api import Floats, Quantized

# ── block formats ────────────────────────────────────────────────────────────────────────────────────────────────
# Each decoder takes raw rows [rows, row_bytes] and returns codes in input order; see octavo.ops.api.Quantized.


def _blocks(raw: Bytes, size: int) -> Bytes:
    return raw.reshape(raw.shape[0], -1, size)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as float32 [rows, blocks]."""
    return blocks[:, :, at : at + 2].view(np.float16)[:, :, 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[rows, blocks, n] bytes to [rows, blocks, 2, n]: all low halves, then all high halves."""
    codes = np.empty((*packed.shape[:2], 2, packed.shape[2]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of a block's four bytes belongs to input i: 0 or 16, [rows, blocks, 2, 16]."""
    bits: Bytes = np.unpackbits(packed, axis=2, bitorder="little") << np.uint8(4)
    return bits.reshape(*packed.shape[:2], 2, 16)


def _q4_0(raw: Bytes) -> Quantized:
    blocks = _blocks(raw, 18)
    scales = _half(blocks, 0)
    return Quantized(_nibbles(blocks[:, :, 2:]).reshape(len(raw), -1), scales, scales * np.float32(-8), 32, 4)


def _q4_1(raw: Bytes) -> Quantized:
    blocks = _blocks(raw, 20)
    return Quantized(_nibbles(blocks[:, :, 4:]).reshape(len(raw), -1), _half(blocks, 0), _half(blocks, 2), 32, 4)


def _q5_0(raw: Bytes) -> Quantized:
    blocks = _blocks(raw, 22)
    codes = (_nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])).view(np.int8) - np.int8(16)
    return Quantized(codes.reshape(len(raw), -1), _half(blocks, 0), None, 32, 8)


def _q5_1(raw: Bytes) -> Quantized:
    blocks = _blocks(raw, 24)
    codes = (_nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])).view(np.int8)
    return Quantized(codes.reshape(len(raw), -1), _half(blocks, 0), _half(blocks, 2), 32, 8)


def _q8_0(raw: Bytes) -> Quantized:
    blocks = _blocks(raw, 34)
    codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
    return Quantized(codes.reshape(len(raw), -1), _half(blocks, 0), None, 32, 8)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums of a Q4_K or Q5_K block's eight groups: two float16 times six bits packed in bytes 4…15."""
    low, mid, high = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=2)
    minimum = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=2)
    rows = len(blocks)
    scales = (_half(blocks, 0)[:, :, None] * scale.astype(np.float32)).reshape(rows, -1)
    return scales, (_half(blocks, 2)[:, :, None] * -minimum.astype(np.float32)).reshape(rows, -1)


def _q4_k(raw: Bytes) -> Quantized:
    blocks = _blocks(raw, 144)
    scales, minimums = _k_scales(blocks)
    codes = _nibbles(np.ascontiguousarray(blocks[:, :, 16:]).reshape(len(raw), -1, 32))
    return Quantized(codes.reshape(len(raw), -1), scales, minimums, 32, 4)


def _q5_k(raw: Bytes) -> Quantized:
    blocks = _blocks(raw, 176)
    scales, minimums = _k_scales(blocks)
    low = _nibbles(np.ascontiguousarray(blocks[:, :, 48:]).reshape(len(raw), -1, 32))
    # bit g of byte i of the 32 high bytes belongs to input i of group g
    high: Bytes = (blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)) << np.uint8(4)
    codes = low.reshape(high.shape) | high
    return Quantized(codes.reshape(len(raw), -1).view(np.int8), scales, minimums, 32, 8)


def _q6_k(raw: Bytes) -> Quantized:
    blocks = _blocks(raw, 210)
    rows, count = blocks.shape[:2]
    # two halves of 128 inputs, each four runs of 32: low 4 bits from 64 bytes, high 2 bits from 32 bytes
    low = _nibbles(np.ascontiguousarray(blocks[:, :, :128]).reshape(rows, count * 2, 64))
    packed = np.ascontiguousarray(blocks[:, :, 128:192]).reshape(rows, count * 2, 1, 32)
    high: Bytes = (packed >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)) << np.uint8(4)
    codes = (low.reshape(high.shape) | high).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    scales *= _half(blocks, 208)[:, :, None]
    return Quantized(codes.reshape(rows, -1), scales.reshape(rows, -1), None, 16, 8)


FORMATS = {
    0: F32,
    1: F16,
    2: Format("Q4_0", 32, 18, 4, 32, _q4_0),
    3: Format("Q4_1", 32, 20, 4, 32, _q4_1),
    6: Format("Q5_0", 32, 22, 8, 32, _q5_0),
    7: Format("Q5_1", 32, 24, 8, 32, _q5_1),
    8: Format("Q8_0", 32, 34, 8, 32, _q8_0),
    12: Format("Q4_K", 256, 144, 4, 32, _q4_k),
    13: Format("Q5_K", 256, 176, 8, 32, _q5_k),
    14: Format("Q6_K", 256, 210, 8, 16, _q6_k),
    30: BF16,
}
_REFUSED = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_u32, _u64 = struct.Struct("<I").unpack_from, struct.Struct("<Q").unpack_from


class GGUF:
    """A mapped GGUF file: `metadata` (numbers, strings, and lists of one of these) and `tensors`, by the file's names.

    Raises ModelError where the file is not what the format says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self._data, self._at, self._size = self._file.buffer, 0, len(self._file.bytes)
        if self._take(4, "the magic number") != b"GGUF":
            self._fail("is not a GGUF file (and no folder of safetensors)")
        version = self._u32("the version")
        if version not in (2, 3):
            self._fail(f"has GGUF version {version}, which is not supported (2 and 3 in little-endian order are)")
        num_tensors = self._count("tensors", 24)
        num_keys = self._count("metadata keys", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            if key in self.metadata:
                self._fail(f"has the key {key!r} twice")
            self.metadata[key] = self._value(f"the value of {key!r}")
        self.tensors = self._read_tensors(num_tensors)

    def _read_tensors(self, count: int) -> dict[str, Stored]:
        infos = []
        for _ in range(count):
            name = self._string("a tensor's name")
            num_dims = self._u32(f"the dimensions of tensor {name!r}")
            if not 1 <= num_dims <= 4:
                self._fail(f"tensor {name!r} has {num_dims} dimensions, not 1 to 4")
            dims = [self._u64(f"the dimensions of tensor {name!r}") for _ in range(num_dims)]
            kind = self._u32(f"the type of tensor {name!r}")
            infos.append((self._u64(f"the offset of tensor {name!r}"), name, dims, kind))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"has general.alignment {alignment!r}, which is not a power of two")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, Stored] = {}
        end = 0
        for offset, name, dims, kind in sorted(infos):
            stored = self._tensor(name, dims, kind, base + offset)
            if offset % alignment:
                self._fail(f"tensor {name!r} begins at offset {offset}, which is not aligned to {alignment}")
            if offset < end:
                self._fail(f"tensor {name!r} begins at offset {offset}, inside the tensor before it")
            if name in tensors:
                self._fail(f"has the tensor {name!r} twice")
            end = offset + stored.num_bytes
            tensors[name] = stored
        return tensors

    def _tensor(self, name: str, dims: list[int], kind: int, start: int) -> Stored:
        form = FORMATS.get(kind)
        if form is None:
            known = ", ".join(form.name for form in FORMATS.values())
            self._fail(f"tensor {name!r} has the type {_REFUSED.get(kind, kind)}, which is not supported ({known} are)")
        if len(dims) > 2 or min(dims) < 1 or dims[0] % form.block:
            shape = "×".join(map(str, reversed(dims)))
            self._fail(f"tensor {name!r} is {shape}: {form.name} needs one or two dimensions, rows in {form.block}s")
        size = math.prod(dims) // form.block * form.block_bytes  # Python's integers: no overflow to exploit
        if start + size > self._size:
            self._fail(f"tensor {name!r} ends at byte {start + size} but the file has {self._size}")
        return Stored(self._file, name, tuple(reversed(dims)), form, start)

    # ── primitives: each checks what is left of the file before it reads ──

    def _fail(self, message: str) -> NoReturn:
        raise ModelError(self.path, message)

    def _need(self, count: int, what: str) -> int:
        at = self._at
        if count > self._size - at:
            self._fail(f"ends at byte {self._size}, but {what} needs {count} bytes at byte {at}")
        self._at = at + count
        return at

    def _take(self, count: int, what: str) -> bytes:
        at = self._need(count, what)
        return self._data[at : at + count]

    def _u32(self, what: str) -> int:
        return int(_u32(self._data, self._need(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_u64(self._data, self._need(8, what))[0])

    def _count(self, what: str, least: int) -> int:
        """A number of things that take at least `least` bytes each."""
        count = self._u64(f"the number of {what}")
        if count * least > self._size - self._at:
            self._fail(f"claims {count} {what}, more than a file of {self._size} bytes can hold")
        return count

    def _string(self, what: str) -> str:
        raw = self._take(self._u64(what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._fail(f"{what} at byte {self._at - len(raw)} is not UTF-8")

    def _value(self, what: str) -> Any:
        kind = self._u32(what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            return self._numbers(kind, 1, what)[0]
        kind = self._u32(what)
        if kind == _STRING:
            return self._strings(self._count(f"strings in {what}", 8), what)
        if kind == _ARRAY:
            self._fail(f"{what} is an array of arrays, which is not supported")
        return self._numbers(kind, self._u64(what), what)

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _NUMBERS:
            self._fail(f"{what} has the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        at = self._need(count * dtype.itemsize, what)
        return np.frombuffer(self._data, dtype, count, at).tolist()

    def _strings(self, count: int, what: str) -> list[str]:
        """`_string` in a loop without its calls: a vocabulary has a hundred thousand of these."""
        data, at, size, texts = self._data, self._at, self._size, []
        try:
            for _ in range(count):
                start = at + 8
                at = start + _u64(data, at)[0]
                if at > size:
                    self._fail(f"ends at byte {size}, but a string of {what} ends at byte {at}")
                texts.append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError:
            self._fail(f"a string of {what} at byte {start} is not UTF-8")
        except struct.error:
            self._fail(f"ends at byte {size}, in a string of {what}")
        self._at = at
        return texts


# ── a model in the file ──────────────────────────────────────────────────────────────────────────────────────────

_TOP = {
    "token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "lm_head",
    "rope_freqs.weight": "rope_divisors",
}  # fmt: skip
_LAYER = {
    "attn_norm": "attention_norm", "ffn_norm": "ffn_norm", "attn_q_norm": "q_norm", "attn_k_norm": "k_norm",
    "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj",
    "ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj",
}  # fmt: skip
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")


def _canonical(name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if not match or match[2] not in _LAYER:
        return _TOP.get(name, name)
    return f"layers.{match[1]}.{_LAYER[match[2]]}" + (".bias" if match[3] == "bias" else "")


def rotary_order(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """The stored row of each row of a llama file's Q or K.

    The converter interleaves the halves that rotary embedding pairs: in each head of size d, stored row 2i + s is row
    s·d/2 + i (`permute` in llama.cpp's convert_hf_to_gguf.py). Files of qwen2 and qwen3 keep the rows in place.
    """
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def open_file(path: Path) -> Checkpoint:
    """A checkpoint from a GGUF file. Raises ModelError."""
    file = GGUF(path)
    config = read_config(file)
    tensors = {_canonical(name): stored for name, stored in file.tensors.items()}
    if config.architecture in ("llama", "mistral"):
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        for name, stored in tensors.items():
            num_heads = heads.get(name.removesuffix(".bias").rpartition(".")[2], 0)
            if stored.dims[0] == num_heads * config.head_dim and config.head_dim % 2 == 0:  # else it will be refused
                tensors[name] = stored.reordered(rotary_order(num_heads, config.head_dim))
    return Checkpoint(path, config, tensors, lambda: _tokenizer(file, config))


def _tokenizer(file: GGUF, config: ModelConfig) -> Tokenizer:
    tokenizer = from_gguf(file.metadata, file.path)
    if tokenizer.vocab_size > config.vocab_size:
        file._fail(f"its tokenizer has {tokenizer.vocab_size} tokens but its embedding only {config.vocab_size} rows")
    return tokenizer


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "logit_scale": (0, 1), "residual_scale": (0, 1),
    "embedding_scale": (0, 1), "attention.scale": (0,), "expert_count": (0,), "attention.clamp_kqv": (0,),
    "attention.causal": (True,), "rope.scaling.type": ("none",), "use_parallel_residual": (False,),
}  # fmt: skip
"""Keys that would change the mathematics, with the values that do not."""


def read_config(file: GGUF) -> ModelConfig:
    """The model's shape from the metadata. Raises ModelError for a model that Octavo cannot run."""
    meta = file.metadata
    arch = meta.get("general.architecture")
    names: dict[Any, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
    if not isinstance(arch, str) or arch not in names:
        file._fail(f"has the architecture {arch!r}, which is not supported (llama, mistral, qwen2, qwen3 are)")
    if meta.get("split.count", 1) not in (0, 1):
        file._fail("is one part of a split model: join the parts with `llama-gguf-split --merge`")
    for key, values in _NEUTRAL.items():
        if (value := meta.get(f"{arch}.{key}", values[0])) not in values:
            file._fail(f"has {arch}.{key} = {value!r}, which is not supported")

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one for each layer, all alike
        return value

    def whole(key: str, default: int | None = None) -> int:
        return whole_number(file.path, f"{arch}.{key}", get(key, default))

    def number(key: str, default: float | None = None) -> float:
        return positive_number(file.path, f"{arch}.{key}", get(key, default))

    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := get(key, head_dim)) != head_dim:
            file._fail(f"has {arch}.{key} = {value!r}, which is not supported: heads are of size {head_dim}")
    window = get("attention.sliding_window")
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        file._fail("has no tensor 'token_embd.weight'")
    return ModelConfig(
        architecture="mistral" if arch == "llama" and window else names[arch],
        num_layers=whole("block_count"),
        hidden_size=hidden,
        intermediate_size=whole("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=embed.num_rows,
        context_length=whole("context_length"),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        sliding_window=whole("attention.sliding_window") if window else None,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )
