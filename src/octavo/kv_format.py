"""Bytes and shapes of a page of keys and values: the only KV arithmetic in the project.

A page holds `block_size` tokens of every layer, one block of memory:

    page  = layer 0 │ layer 1 │ … │ padding to 64 bytes
    layer = K of head 0 │ K of head 1 │ … │ V of head 0 │ V of head 1 │ … │ scales

K is stored with tokens as the fastest dimension, so that the lanes of a vector are tokens and a dot product never
crosses lanes; V with the head dimension fastest, so that the lanes are the output. Pairs along the reduction dimension
lie together where they are the operands of dot products (bf16, int16 widened from int8); a byte of int4 is a pair as
well:

    fp32        K [head_dim][block_size]          V [block_size][head_dim]
    bf16, int8  K [head_dim/2][block_size][2]     V [block_size/2][head_dim][2]
    fp8         K [head_dim/2][block_size][2]     V [block_size][head_dim]
    int4        K [head_dim/2][block_size]        V [block_size][head_dim/16][8], column i with i + 8
                + [head_dim/16][block_size] of eight fifth bits

Codes of a byte or less stand for numbers of a rotated head (ops/codes.py) and have one scale for each token, head and K
or V: bf16 [2][num_kv_heads][block_size]. Dot products are scaled, not codes, so a scale costs one product a token.
Keys are harder to round than values, those of slow frequencies hardest: in int4 that half of them has a fifth bit, and
with fp8 values they are int8.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_REVISION = 2
"""To be raised whenever a model's keys and values come out in other bits or places: pages on disk of another one are
dropped."""

KV_BITS = {"bf16": (16, 16), "fp32": (32, 32), "fp8_e4m3": (8, 8), "fp8_e5m2": (8, 8), "int8": (8, 8), "int4": (4.5, 4)}
"""Of an element of K and of V, without scales."""
ALIASES = {"auto": "bf16", "fp8": "fp8_e4m3"}
SCALE_BYTES = 2
MAX_BLOCK_SIZE = 1 << 16
PAGE_ALIGNMENT = 64


def is_block_size(num_tokens: int) -> bool:
    """Whether a page may hold so many tokens: whole vectors of sixteen, or a half or a quarter of one."""
    return num_tokens in (4, 8) or (num_tokens % 16 == 0 and 0 < num_tokens <= MAX_BLOCK_SIZE)


def whole_block_size(num_tokens: int) -> int:
    """The smallest page that holds so many tokens."""
    return next((size for size in (4, 8) if size >= num_tokens), -(-num_tokens // 16) * 16)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The format of every page of a pool. Sizes are in bytes. `bf16_layers` keep bf16, whatever the dtype."""

    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    bf16_layers: tuple[int, ...] = ()

    def layer_dtype(self, layer: int) -> str:
        return "bf16" if layer in self.bf16_layers else self.dtype

    def is_scaled(self, layer: int) -> bool:
        """Whether the layer holds codes and scales."""
        return KV_BITS[self.layer_dtype(layer)][0] <= 8

    def head_bytes(self, layer: int) -> tuple[int, int]:
        """K and V of one head in one layer of a page, without scales."""
        k_bits, v_bits = KV_BITS[self.layer_dtype(layer)]
        num_elements = self.block_size * self.head_dim
        return int(num_elements * k_bits) // 8, int(num_elements * v_bits) // 8

    def layer_bytes(self, layer: int) -> int:
        scales = 2 * self.block_size * SCALE_BYTES if self.is_scaled(layer) else 0
        return self.num_kv_heads * (sum(self.head_bytes(layer)) + scales)

    @property
    def used_bytes(self) -> int:
        """Of a page, without its padding."""
        return self.k_offset(self.num_layers)

    @property
    def page_bytes(self) -> int:
        return -(-self.used_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    @property
    def token_bytes(self) -> int:
        """Keys, values and scales of one token in all layers."""
        return self.used_bytes // self.block_size

    def k_offset(self, layer: int) -> int:
        """Where `layer` begins inside a page: K of its first head."""
        return sum(self.layer_bytes(before) for before in range(layer))

    def v_offset(self, layer: int) -> int:
        return self.k_offset(layer) + self.num_kv_heads * self.head_bytes(layer)[0]

    def scale_offset(self, layer: int) -> int:
        """Where the scales of `layer` begin: of K, all heads, then of V."""
        return self.v_offset(layer) + self.num_kv_heads * self.head_bytes(layer)[1]

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)
