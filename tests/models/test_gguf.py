"""GGUF: block formats against the `gguf` package, and files that lie, end early or rot."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.models.gguf import FORMATS, GGUF, open_file
from octavo.models.weights import Checkpoint, dequantize

# ── block formats ────────────────────────────────────────────────────────────────────────────────────────────────

TYPES = {number: gguf.GGMLQuantizationType(number) for number in FORMATS}
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
"""Where the float16 numbers lie in a block; the rest of it may be any bytes."""


def random_rows(name: str, rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    """Raw rows of any bits but for scales, which are finite."""
    random = np.random.default_rng(seed)
    form = next(form for form in FORMATS.values() if form.name == name)
    if form.bits > 8:
        values = random.standard_normal((rows, inputs)).astype("<f4")
        kind = gguf.GGMLQuantizationType[name]
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    blocks = random.integers(0, 256, (rows, inputs // form.block, form.block_bytes), np.uint8)
    for at in HALVES[name]:
        scales = (random.standard_normal(blocks.shape[:2]) * 0.1).astype("<f2")
        blocks[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def one_tensor(path: Path, name: str, raw: np.ndarray) -> Any:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUF(path).tensors["w"]


@pytest.mark.parametrize("number", FORMATS)
def test_blocks_are_what_ggml_says(tmp_path: Path, number: int) -> None:
    form, kind = FORMATS[number], TYPES[number]
    assert form.name == kind.name
    rows, inputs = 7, 512
    raw = random_rows(form.name, rows, inputs)
    stored = one_tensor(tmp_path / "m.gguf", form.name, raw)
    assert stored.shape == (rows, inputs)
    expected = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(stored.float32(0, rows), expected)
    np.testing.assert_array_equal(stored.float32(2, 5), expected[2:5])
    if form.bits > 8:
        with pytest.raises(TypeError, match="no codes"):
            stored.quantized(0, 1)
        return
    codes = stored.quantized(0, rows)
    assert (codes.bits, codes.group) == (stored.bits, stored.group)
    assert codes.codes.dtype == (np.uint8 if codes.bits == 4 else np.int8)
    assert codes.codes.shape == (rows, inputs) and codes.scales.shape == (rows, inputs // codes.group)
    assert codes.bits == 8 or codes.codes.max() == 15
    np.testing.assert_array_equal(dequantize(codes), expected)


def test_row_ranges_outside_the_matrix_are_refused(tmp_path: Path) -> None:
    stored = one_tensor(tmp_path / "m.gguf", "Q4_1", random_rows("Q4_1", 4, 64))
    for start, stop in ((-1, 2), (0, 5), (3, 2), (1, 1)):
        with pytest.raises(IndexError):
            stored.quantized(start, stop)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q4_K", "F16", "BF16", "F32"])
def test_numbers_that_are_not_finite_are_named(tmp_path: Path, name: str, bad: float) -> None:
    raw = random_rows(name, 3, 256)
    width = {"F32": 4, "BF16": 2}.get(name, 2)
    at = HALVES[name][0] if name in HALVES else 0
    value = np.array([bad], "<f2" if name not in ("F32", "BF16") else "<f4").view(np.uint8)[-width:]
    raw[1, at : at + width] = value
    stored = one_tensor(tmp_path / "m.gguf", name, raw)
    with pytest.raises(ModelError, match="tensor 'w' holds a number that is not finite"):
        stored.float32(0, 3)
    assert np.isfinite(stored.float32(2, 3)).all()


def test_the_real_model_reads_as_the_gguf_package_reads_it(model_path: Path) -> None:
    ours, theirs = GGUF(model_path), gguf.GGUFReader(model_path)
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors[::17]:
        stored = ours.tensors[tensor.name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(stored.shape)
        np.testing.assert_array_equal(stored.float32(0, stored.num_rows), expected)
    assert len(ours.metadata["tokenizer.ggml.tokens"]) == 49152
    assert open_file(model_path).config.num_heads == 9


# ── hostile files ────────────────────────────────────────────────────────────────────────────────────────────────
# Written here byte by byte, so that a test can lie about anything.

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def u32(value: int) -> bytes:
    return struct.pack("<II", U32, value)


def f32(value: float) -> bytes:
    return struct.pack("<If", F32, value)


def string(value: str) -> bytes:
    return struct.pack("<I", STRING) + text(value)


def array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, len(items)) + b"".join(items)


VOCABULARY = ["<s>", "</s>", "a", "b", "c", "ab", "abc", "Ġ", "1", "2"]
HIDDEN = 8


def keys() -> dict[str, bytes]:
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": 8}
    heads = {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 4}
    return {
        "general.architecture": string("llama"),
        **{f"llama.{key}": u32(value) for key, value in (sizes | heads).items()},
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "llama.rope.freq_base": f32(1e4),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("smollm"),
        "tokenizer.ggml.tokens": array(STRING, [text(token) for token in VOCABULARY]),
        "tokenizer.ggml.token_type": array(I32, [struct.pack("<i", 3 if i < 2 else 1) for i in range(len(VOCABULARY))]),
        "tokenizer.ggml.merges": array(STRING, [text("a b"), text("ab c")]),
        "tokenizer.ggml.bos_token_id": u32(0),
        "tokenizer.ggml.eos_token_id": u32(1),
        "tokenizer.ggml.add_bos_token": struct.pack("<I?", BOOL, True),
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Dimensions in the file's order, inputs first."""
    layer = {"attn_norm": (8,), "ffn_norm": (8,), "attn_q": (8, 8), "attn_k": (8, 4), "attn_v": (8, 4)}
    layer |= {"attn_output": (8, 8), "ffn_gate": (8, 8), "ffn_up": (8, 8), "ffn_down": (8, 8)}
    top = {"token_embd.weight": (HIDDEN, len(VOCABULARY)), "output_norm.weight": (HIDDEN,)}
    return top | {f"blk.0.{name}.weight": dims for name, dims in layer.items()}


class Info:
    """A tensor's entry and bytes, of which each part may be wrong."""

    def __init__(self, name: str, dims: tuple[int, ...], offset: int) -> None:
        self.name, self.dims, self.kind, self.offset = name, dims, 0, offset
        count = int(np.prod(dims))
        self.data = np.random.default_rng(offset).standard_normal(count).astype("<f4").tobytes()

    def entry(self) -> bytes:
        return text(self.name) + struct.pack(
            f"<I{len(self.dims)}QIQ", len(self.dims), *self.dims, self.kind, self.offset
        )


def infos() -> list[Info]:
    found, offset = [], 0
    for name, dims in shapes().items():
        found.append(Info(name, dims, offset))
        offset += -(-len(found[-1].data) // 32) * 32
    return found


def build(
    meta: dict[str, bytes] | None = None,
    tensors: list[Info] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    meta = keys() if meta is None else meta
    tensors = infos() if tensors is None else tensors
    counts = (len(tensors) if num_tensors is None else num_tensors, len(meta) if num_keys is None else num_keys)
    head = magic + struct.pack("<IQQ", version, *counts)
    head += b"".join(text(key) + value for key, value in meta.items())
    head += b"".join(tensor.entry() for tensor in tensors)
    head += b"\0" * (-len(head) % 32)
    end = max((tensor.offset + len(tensor.data) for tensor in infos()), default=0)
    body = bytearray(end)
    for tensor in tensors:
        if tensor.offset + len(tensor.data) <= end:
            body[tensor.offset : tensor.offset + len(tensor.data)] = tensor.data
    return head + bytes(body)


def load_all(path: Path) -> Checkpoint:
    """What starting an engine reads: the shape, every weight and the tokenizer."""
    checkpoint = open_file(path)
    for name in list(checkpoint._tensors):
        stored = checkpoint._tensors[name]
        stored.float32(0, stored.num_rows)
    checkpoint.tokenizer().encode("abc 12")
    return checkpoint


def test_the_handmade_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(build())
    checkpoint = load_all(path)
    assert checkpoint.config.num_kv_heads == 1 and checkpoint.config.tie_embeddings
    assert checkpoint.tokenizer().encode("abc 12") == [0, 6, 7, 8, 9]
    assert checkpoint.stored_bytes == sum(len(tensor.data) for tensor in infos())


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = build()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError) as caught:
            load_all(path)
        assert "\n" not in str(caught.value)


def test_a_file_with_rotten_bytes_is_refused_or_loads(tmp_path: Path) -> None:
    """Whatever the damage: a ModelError or a model, little memory, no other exception, no hang."""
    path = tmp_path / "m.gguf"
    whole = build()
    head = len(whole) - len(build(tensors=[])) + 1500  # damage lands where structure is, mostly
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dice = random.Random(7)
    refused = 0
    for _ in range(3000):
        rotten = bytearray(whole)
        for _ in range(dice.choice((1, 1, 1, 2, 4))):
            at = dice.randrange(min(head, len(whole)))
            rotten[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        path.write_bytes(rotten)
        try:
            load_all(path)
        except ModelError:
            refused += 1
    assert 300 < refused < 3000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def meta_with(**changes: bytes | None) -> Callable[[], bytes]:
    def make() -> bytes:
        found = keys()
        for key, value in changes.items():
            if value is None:
                del found[key]
            else:
                found[key] = value
        return build(found)

    return make


def tensor_with(index: int, **changes: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        found = infos()
        for key, value in changes.items():
            setattr(found[index], key, value)
        return build(tensors=found)

    return make


def named(name: str) -> int:
    return list(shapes()).index(name)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "cannot be read"),
    "not gguf": (lambda: build(magic=b"GGML"), "is not a GGUF file"),
    "version 1": (lambda: build(version=1), "GGUF version 1,"),
    "big-endian": (lambda: build(version=3 << 24), "little-endian"),
    "more tensors than bytes": (lambda: build(num_tensors=2**40), "claims 1099511627776 tensors"),
    "most tensors": (lambda: build(num_tensors=2**64 - 1), "claims 18446744073709551615 tensors"),
    "more keys than bytes": (lambda: build(num_keys=2**63), "claims 9223372036854775808 metadata keys"),
    "a tensor too many": (lambda: build(num_tensors=12), r"tensor|name"),
    "long string": (
        meta_with(**{"general.name": struct.pack("<IQ", STRING, 2**63)}),
        r"ends at byte \d+, but the value of 'general.name' needs 9223372036854775808 bytes",
    ),
    "long array": (meta_with(x=struct.pack("<IIQ", ARRAY, U64, 2**61)), "ends at byte .* 'x' needs"),
    "many strings": (meta_with(x=struct.pack("<IIQ", ARRAY, STRING, 2**40)), "claims 1099511627776 strings"),
    "nested arrays": (meta_with(x=array(ARRAY, [array(U32, [])])), "array of arrays"),
    "unknown kind": (meta_with(x=struct.pack("<I", 99)), "unknown type 99"),
    "not utf-8": (meta_with(x=struct.pack("<IQ", STRING, 1) + b"\xff"), "not UTF-8"),
    "no dimensions": (tensor_with(2, dims=()), "0 dimensions"),
    "five dimensions": (tensor_with(2, dims=(1, 1, 1, 1, 8)), "5 dimensions"),
    "three dimensions": (tensor_with(4, dims=(8, 4, 2)), "2×4×8"),
    "a dimension of nothing": (tensor_with(4, dims=(8, 0)), "0×8"),
    "a negative dimension": (tensor_with(4, dims=(8, 2**64 - 8)), "but the file has"),
    "dimensions that overflow": (tensor_with(4, dims=(2**33, 2**33)), "ends at byte 2951479051793528"),
    "past the end": (tensor_with(10, offset=2**40), r"'blk.0.ffn_down.weight' ends at byte \d+ but the file has \d+"),
    "far past the end": (tensor_with(10, offset=2**64 - 32), "ends at byte"),
    "overlap": (tensor_with(3, offset=320), "inside the tensor before it"),
    "unaligned": (tensor_with(10, offset=8), "not aligned to 32"),
    "unsupported type": (tensor_with(4, kind=16), "'blk.0.attn_q.weight' has the type IQ2_XXS"),
    "unknown type": (tensor_with(4, kind=77), "has the type 77"),
    "rows that are no blocks": (tensor_with(4, kind=3), "Q4_1 needs one or two dimensions, rows in 32s"),
    "twice the same tensor": (tensor_with(5, name="blk.0.attn_q.weight"), "the tensor 'blk.0.attn_q.weight' twice"),
    "a tensor nobody knows": (tensor_with(5, name="blk.0.attn_v.scale"), "'blk.0.attn_v.scale'|'layers.0.k_proj'"),
    "alignment 0": (meta_with(**{"general.alignment": u32(0)}), "not a power of two"),
    "alignment 24": (meta_with(**{"general.alignment": u32(24)}), "not a power of two"),
    "huge alignment": (meta_with(**{"general.alignment": u32(2**31)}), "ends at byte"),
    "alignment in words": (meta_with(**{"general.alignment": string("32")}), "not a power of two"),
    "no architecture": (meta_with(**{"general.architecture": None}), "architecture None"),
    "an architecture of lists": (meta_with(**{"general.architecture": array(U32, [])}), r"architecture \[\]"),
    "another architecture": (meta_with(**{"general.architecture": string("mamba")}), "architecture 'mamba'"),
    "part of a split": (meta_with(**{"split.count": u32(3)}), "llama-gguf-split --merge"),
    "yarn": (meta_with(**{"llama.rope.scaling.type": string("yarn")}), "rope.scaling.type = 'yarn'"),
    "soft cap": (meta_with(**{"llama.attn_logit_softcapping": f32(50.0)}), "attn_logit_softcapping = 50.0"),
    "experts": (meta_with(**{"llama.expert_count": u32(8)}), "expert_count = 8"),
    "eps 0": (meta_with(**{"llama.attention.layer_norm_rms_epsilon": f32(0.0)}), "epsilon = 0.0"),
    "eps nan": (meta_with(**{"llama.attention.layer_norm_rms_epsilon": f32(float("nan"))}), "epsilon = nan"),
    "theta infinite": (meta_with(**{"llama.rope.freq_base": f32(float("inf"))}), "freq_base = inf"),
    "no layers": (meta_with(**{"llama.block_count": u32(0)}), "block_count = 0"),
    "most layers": (meta_with(**{"llama.block_count": u32(2**31 - 1)}), "no tensor for 'layers.1.attention_norm'"),
    "no heads": (meta_with(**{"llama.attention.head_count": u32(0)}), "head_count = 0"),
    "many heads": (meta_with(**{"llama.attention.head_count": u32(2**31 - 1)}), "has"),
    "heads that do not divide": (meta_with(**{"llama.attention.head_count_kv": u32(3)}), "over 3 KV heads"),
    "odd heads": (
        meta_with(**{"llama.attention.key_length": u32(3), "llama.rope.dimension_count": u32(3)}),
        "heads of size 3",
    ),
    "heads that differ": (
        meta_with(**{"llama.attention.head_count_kv": array(U32, [struct.pack("<I", 1), struct.pack("<I", 2)])}),
        r"head_count_kv = \[1, 2\]",
    ),
    "half the head rotated": (meta_with(**{"llama.rope.dimension_count": u32(2)}), "rope.dimension_count = 2"),
    "other values than keys": (meta_with(**{"llama.attention.value_length": u32(8)}), "value_length = 8"),
    "another width": (
        meta_with(**{"llama.embedding_length": u32(16), "llama.attention.key_length": u32(4)}),
        "the model.s shape needs 10×16",
    ),
    "a boundless context": (meta_with(**{"llama.context_length": u32(2**32 - 1)}), "context_length = 4294967295"),
    "no tokens": (meta_with(**{"tokenizer.ggml.tokens": None}), "no tokenizer.ggml.tokens"),
    "tokens that are numbers": (meta_with(**{"tokenizer.ggml.tokens": array(U32, [])}), "no tokenizer.ggml.tokens"),
    "no merges": (meta_with(**{"tokenizer.ggml.merges": None}), "no tokenizer.ggml.merges"),
    "merges of nothing": (meta_with(**{"tokenizer.ggml.merges": array(STRING, [text("xx y")])}), "merges do not fit"),
    "a merge of one part": (meta_with(**{"tokenizer.ggml.merges": array(STRING, [text("ab")])}), "merges do not fit"),
    "types too few": (meta_with(**{"tokenizer.ggml.token_type": array(I32, [])}), "needs 10 whole numbers"),
    "eos outside": (meta_with(**{"tokenizer.ggml.eos_token_id": u32(10)}), "eos_token_id 10, but 10 tokens"),
    "a wordpiece tokenizer": (meta_with(**{"tokenizer.ggml.model": string("bert")}), "kind 'bert'"),
    "a token twice": (
        meta_with(**{"tokenizer.ggml.tokens": array(STRING, [text("x")] * 10)}),
        "the token 'x' twice",
    ),
    "more tokens than rows": (
        meta_with(
            **{
                "tokenizer.ggml.tokens": array(STRING, [text(token) for token in [*VOCABULARY, "z"]]),
                "tokenizer.ggml.token_type": array(I32, [struct.pack("<i", 1)] * 11),
            }
        ),
        "11 tokens but its embedding only 10 rows",
    ),
    "no embedding": (tensor_with(0, name="token_embd.bias"), "no tensor 'token_embd.weight'"),
    "infinite weights": (
        tensor_with(4, data=np.full(64, np.inf, "<f4").tobytes()),
        "'blk.0.attn_q.weight' holds a number that is not finite",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_line(tmp_path: Path, case: str) -> None:
    make, message = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(make())
    with pytest.raises(ModelError, match=message) as caught:
        load_all(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    pair = text("general.name") + string("x")
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + pair
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=r"the key 'general\.name' twice"):
        GGUF(tmp_path / "m.gguf")


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        GGUF(tmp_path)


def test_what_was_decoded_does_not_stay_in_memory(model_path: Path) -> None:
    """Reading all weights must not leave the mapped file in this process's resident set."""

    def mapped() -> int:
        inside = False
        total = 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:
                inside = line.endswith(model_path.name)
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1])
        return total

    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc/self/smaps")
    before = mapped()  # by engines that other tests have open
    checkpoint = open_file(model_path)
    num_read = 0
    for name, stored in checkpoint._tensors.items():
        if len(stored.dims) == 2:
            checkpoint.weight(name).quantized(0, stored.num_rows)
            num_read += stored.num_bytes
    # the kernel maps more than is touched, metadata is touched too: what matters is that it is not the whole file
    assert mapped() - before < num_read / 1024 / 3
