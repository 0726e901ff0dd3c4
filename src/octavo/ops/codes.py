"""Keys and values as they lie in pages, in numpy: the specification of every format that the kernels are held to.

Numbers of a byte or less are codes of *turned* heads. A head's pairs of dimensions are put in the order of their rotary
frequencies, fast half first, and each half goes through a Hadamard transform in blocks as long as a power of two can
be: an outlier is spread over its block, and as queries turn likewise, no dot product changes (QuaRot: Ashkboos and
others, 2024). Values turn as well, and what attention makes of them turns back.

A token's head has one scale in bf16, from its own largest number; a number is code · scale. Nothing else is looked at,
so a token's bytes never depend on its neighbours. Numbers below LEAST all over a head are zero, above MOST they
saturate, and a head with a NaN or an infinity is NaN.

int8 is −127…127, and so are the keys of the fp8 formats: three bits of mantissa lose more of them, in the same room,
than eight bits of even steps. The fp8 formats are float16 with fewer bits: e5m2 its first byte, e4m3 without the first
bit of its exponent, and so 2⁻⁸ times the usual. int4 stands for levels that suit a normal distribution (Lloyd, 1957,
Max, 1960), 4 bits for values and the fast half of keys, 5 for the slow half, where keys have their outliers (Jin and
others, 2025); of a few scales, the one of the least squared error is taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.ops.api import Bytes, Floats, Ints, KVPool

Halves = NDArray[np.uint16]

LEAST, MOST = np.float32(2.0**-40), np.float32(2.0**60)
TOPS = {"int8": np.float32(127), "fp8_e4m3": np.float32(1.75), "fp8_e5m2": np.float32(57344)}
MANTISSA_BITS = {"fp8_e4m3": 3, "fp8_e5m2": 2}
FACTORS = (1.0, 0.9, 0.8, 0.7, 0.6)


def _levels(*sizes: int) -> Floats:
    """By code: the sign is its last bit."""
    return np.array([*sizes, *(-size for size in sizes)], np.float32)


VALUE_LEVELS = _levels(6, 18, 31, 44, 58, 75, 96, 127)
FAST_LEVELS = _levels(4, 11, 18, 26, 35, 45, 58, 76)
SLOW_LEVELS = _levels(3, 8, 14, 19, 25, 31, 37, 43, 50, 57, 64, 73, 82, 93, 107, 127)
HALVES = ((FAST_LEVELS, SLOW_LEVELS), (VALUE_LEVELS, VALUE_LEVELS))
"""Levels of the halves of a head: of K and of V."""


def to_bf16(values: Floats) -> Halves:
    """The nearest bf16, ties to even; a NaN stays a NaN."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def from_bf16(bits: Halves) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ── turning ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _swap_quarters(heads: Floats) -> Floats:
    """Halves of pairs (i, i + dim/2), from and to halves that are fast and slow. Its own inverse."""
    return heads.reshape(*heads.shape[:-1], 2, 2, -1).swapaxes(-3, -2).reshape(heads.shape)


def _mix(heads: Floats) -> Floats:
    half = heads.shape[-1] // 2
    block, step = half & -half, 1
    while step < block:
        a, b = np.moveaxis(heads.reshape(*heads.shape[:-1], -1, 2, step), -2, 0)
        heads = np.stack((a + b, a - b), axis=-2).reshape(heads.shape)
        step *= 2
    return heads * np.float32(block**-0.5)


def turn(heads: Floats) -> Floats:
    """[…, head_dim], as the codes have it: orthogonal."""
    return _mix(_swap_quarters(heads))


def turn_back(heads: Floats) -> Floats:
    return _swap_quarters(_mix(heads))


# ── codes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(dtype: str, part: int, heads: Floats) -> tuple[Bytes, Halves]:
    """Codes, one a number, and scales, bf16, of turned keys (part 0) or values (1): [..., head_dim] and […]."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _encode4(heads, HALVES[part]) if dtype == "int4" else _encode8(_of_part(dtype, part), heads)


def decode(dtype: str, part: int, codes: Bytes, scales: Halves) -> Floats:
    """What they stand for, turned."""
    dtype = _of_part(dtype, part)
    if dtype == "int8":
        numbers = codes.view(np.int8).astype(np.float32)
    elif dtype == "int4":
        halves = zip(HALVES[part], np.split(codes, 2, -1), strict=True)
        numbers = np.concatenate([levels[half] for levels, half in halves], -1)
    else:
        byte = codes.astype(np.uint16)
        wide = byte << 8 if dtype == "fp8_e5m2" else (byte & 0x80) << 8 | (byte & 0x7F) << 7
        numbers = wide.astype(np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):  # unused slots hold anything
        return numbers * from_bf16(scales)[..., None]


def _of_part(dtype: str, part: int) -> str:
    """What keys or values are in a format."""
    return "int8" if part == 0 and dtype in MANTISSA_BITS else dtype


def _scale(largest: Floats, factor: np.float32) -> tuple[Halves, Floats, Floats]:
    """A scale, its value, and what makes codes of numbers: 0 where all are to be zero or none is sound."""
    zero, sound = largest < LEAST, largest < np.inf
    bits = to_bf16(np.minimum(largest, MOST) * factor)
    bits = np.where(zero, 0, np.where(sound, bits, 0x7FC0)).astype(np.uint16)
    value = from_bf16(bits)
    live = sound & ~zero
    return bits, value, np.where(live, 1 / np.where(live, value, np.float32(1)), np.float32(0))


def _units(heads: Floats, inverse: Floats) -> Floats:
    """In units of a scale; 0 where that is far below all codes, or NaN."""
    scaled = heads * inverse[..., None]
    return np.where(np.abs(scaled) > 2.0**-20, scaled, np.float32(0))


def _encode8(dtype: str, heads: Floats) -> tuple[Bytes, Halves]:
    top = TOPS[dtype]
    bits, _, inverse = _scale(np.abs(heads).max(-1), 1 / top)
    values = np.clip(_units(heads, inverse), -top, top)
    if dtype == "int8":
        return np.rint(values).astype(np.int8).view(np.uint8), bits
    mantissa = MANTISSA_BITS[dtype]
    cut, size = 23 - mantissa, np.abs(values)
    word = size.view(np.uint32)
    normal = (word + (word >> cut & 1) + ((1 << cut - 1) - 1) >> cut) - (112 << mantissa)
    small = np.rint(size * np.float32(2.0 ** (14 + mantissa))).astype(np.uint32)
    sign = values.view(np.uint32) >> 24 & 0x80
    return (np.where(size < 2.0**-14, small, normal) + sign).astype(np.uint8), bits


def _nearest(sizes: Floats, levels: Floats) -> Ints:
    """Codes of the levels nearest to some sizes, the lower one in the middle."""
    positive = levels[: len(levels) // 2]
    return np.searchsorted((positive[1:] + positive[:-1]) / 2, sizes).astype(np.int32)


def _sum(errors: Floats) -> Floats:
    """Over the last axis, in sixteen chains from its first to its last, which are added in halves."""
    chains = np.zeros((*errors.shape[:-1], 16), np.float32)
    for start in range(0, errors.shape[-1], 16):
        chains = chains + errors[..., start : start + 16]
    for n in (8, 4, 2, 1):
        chains = chains[..., :n] + chains[..., n:]
    return chains[..., 0]


def _encode4(heads: Floats, halves: tuple[Floats, Floats]) -> tuple[Bytes, Halves]:
    parts = np.split(heads, 2, -1)
    tops = [1 / levels[len(levels) // 2 - 1] for levels in halves]
    need = np.maximum(*(np.abs(part).max(-1) * top for part, top in zip(parts, tops, strict=True)))
    best_bits, _, best_inverse = _scale(need, np.float32(1))
    least = np.full(need.shape, np.inf, np.float32)
    for factor in FACTORS:
        bits, value, inverse = _scale(need, np.float32(factor))
        errors = []
        for part, levels in zip(parts, halves, strict=True):
            sizes = np.abs(_units(part, inverse))
            error = np.square(levels[_nearest(sizes, levels)] - sizes)
            padding = [(0, 0)] * (error.ndim - 1) + [(0, -error.shape[-1] % 16)]
            errors.append(np.pad(error, padding))
        error = _sum(np.concatenate(errors, -1)) * (value * value)
        better = error < least
        least = np.where(better, error, least)
        best_bits, best_inverse = np.where(better, bits, best_bits), np.where(better, inverse, best_inverse)
    codes = []
    for part, levels in zip(parts, halves, strict=True):
        units = _units(part, best_inverse)
        codes.append(_nearest(np.abs(units), levels) + np.signbit(units) * (len(levels) // 2))
    return np.concatenate(codes, -1).astype(np.uint8), best_bits


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


PAIRS = {"fp32": (1, 1), "bf16": (2, 2), "int8": (2, 2), "fp8_e4m3": (2, 1), "fp8_e5m2": (2, 1), "int4": (1, 1)}
"""Elements of K, or tokens of V, that lie side by side; nibbles share a byte besides."""


class Views(NamedTuple):
    """A layer of all pages of a pool, in place.

    k: [page, head, item of a token, slot, pair], v: [page, head, slot / pair, item, pair], where a pair is as many
    numbers as PAIRS has. scales: [page, K or V, head, slot], of codes only.
    """

    k: NDArray[Any]
    v: NDArray[Any]
    scales: Halves | None


def views(pool: KVPool, layer: int) -> Views:
    f, num_pages = pool.format, len(pool.data)
    dtype = f.layer_dtype(layer)
    number: Any = {"fp32": np.float32, "bf16": np.uint16}.get(dtype, np.uint8)
    k_pair, v_pair = PAIRS[dtype]
    k, v, scales = f.k_offset(layer), f.v_offset(layer), f.scale_offset(layer)
    shape = (num_pages, f.num_kv_heads)
    return Views(
        pool.data[:, k:v].view(number).reshape(*shape, -1, f.block_size, k_pair),
        pool.data[:, v:scales].view(number).reshape(*shape, f.block_size // v_pair, -1, v_pair),
        pool.data[:, scales : f.k_offset(layer + 1)].view(np.uint16).reshape(num_pages, 2, f.num_kv_heads, f.block_size)
        if f.is_scaled(layer)
        else None,
    )


def write(pool: KVPool, layer: int, page: Ints, slot: Ints, k: Floats, v: Floats) -> None:
    """Put keys and values [num_tokens, num_kv_heads, head_dim] into slots of pages [num_tokens]."""
    dtype, to = pool.format.layer_dtype(layer), views(pool, layer)
    k_pair, v_pair = PAIRS[dtype]
    k_items: NDArray[Any] = k
    v_items: NDArray[Any] = v
    if dtype == "bf16":
        k_items, v_items = to_bf16(k), to_bf16(v)
    elif to.scales is not None:
        k_items, to.scales[page, 0, :, slot] = encode(dtype, 0, turn(k))
        v_items, to.scales[page, 1, :, slot] = encode(dtype, 1, turn(v))
        if dtype == "int4":
            k_items, v_items = _pack_k(k_items), _pack_v(v_items)
    to.k[page, :, :, slot] = k_items.reshape(*k_items.shape[:2], k_items.shape[2] // k_pair, k_pair)
    to.v[page, :, slot // v_pair, :, slot % v_pair] = v_items


def read(pool: KVPool, layer: int, pages: Ints) -> tuple[Floats, Floats]:
    """Keys and values of all slots of some pages in float32, [num_kv_heads, num_slots, head_dim]; codes stay turned."""
    f, dtype, of = pool.format, pool.format.layer_dtype(layer), views(pool, layer)
    k = of.k[pages].transpose(1, 0, 3, 2, 4).reshape(f.num_kv_heads, len(pages) * f.block_size, -1)
    v = of.v[pages].transpose(1, 0, 2, 4, 3).reshape(f.num_kv_heads, len(pages) * f.block_size, -1)
    if dtype == "bf16":
        return from_bf16(k), from_bf16(v)
    if of.scales is None:
        return k, v
    if dtype == "int4":
        k, v = _unpack_k(k, f.head_dim), _unpack_v(v)
    k_scales, v_scales = of.scales[pages].transpose(1, 2, 0, 3).reshape(2, f.num_kv_heads, -1)
    return decode(dtype, 0, k, k_scales), decode(dtype, 1, v, v_scales)


def _pack_k(codes: Bytes) -> Bytes:
    """Nibbles of neighbours, then the fifth bits of the slow half, eight a byte."""
    fifth = np.packbits(codes[..., codes.shape[-1] // 2 :] >> 4, axis=-1, bitorder="little")
    return np.concatenate((codes[..., ::2] & 15 | codes[..., 1::2] << 4, fifth), -1)


def _unpack_k(items: Bytes, dim: int) -> Bytes:
    pairs, fifth = items[..., : dim // 2], items[..., dim // 2 :]
    codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(*items.shape[:-1], dim)
    codes[..., dim // 2 :] |= np.unpackbits(fifth, axis=-1, bitorder="little") << 4
    return codes


def _pack_v(codes: Bytes) -> Bytes:
    """Nibbles of columns i and i + 8 of each sixteen."""
    low, high = np.moveaxis(codes.reshape(*codes.shape[:-1], -1, 2, 8), -2, 0)
    return (low | high << 4).reshape(*codes.shape[:-1], -1)


def _unpack_v(items: Bytes) -> Bytes:
    eights = items.reshape(*items.shape[:-1], -1, 8)
    return np.stack((eights & 15, eights >> 4), -2).reshape(*items.shape[:-1], -1)
