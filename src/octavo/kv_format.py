"""Bytes and shapes of a page of keys and values: the only KV arithmetic in the project.

A page holds `block_size` tokens of every layer, one block of memory:

    page  = layer 0 │ layer 1 │ … │ padding to 64 bytes
    layer = K of head 0 │ K of head 1 │ … │ V of head 0 │ V of head 1 │ …

K is stored with tokens as the fastest dimension, so that the lanes of a vector are tokens and a dot product never
crosses lanes; V with the head dimension fastest, so that the lanes are the output. Two-byte formats interleave pairs
along the reduction dimension, which is the operand order of bf16 dot products and of AMX tiles:

    bf16  K [head_dim/2][block_size][2]   V [block_size/2][head_dim][2]
    fp32  K [head_dim][block_size]        V [block_size][head_dim]
"""

from __future__ import annotations

from dataclasses import dataclass

KV_REVISION = 1
"""To be raised whenever a model's keys and values come out in other bits: pages on disk of another one are dropped."""

ITEM_BYTES = {"bf16": 2, "fp32": 4}
MAX_BLOCK_SIZE = 1 << 16
PAGE_ALIGNMENT = 64


def is_block_size(num_tokens: int) -> bool:
    """Whether a page may hold so many tokens: whole vectors of sixteen, or a half or a quarter of one."""
    return num_tokens in (4, 8) or (num_tokens % 16 == 0 and 0 < num_tokens <= MAX_BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The format of every page of a pool. Sizes are in bytes."""

    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token: 2 · layers · KV heads · head_dim · item."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """K (or V) of one head in one layer of a page."""
        return self.block_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        used = self.num_layers * self.layer_bytes
        return -(-used // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    def k_offset(self, layer: int, head: int) -> int:
        """Where K of `head` in `layer` begins inside a page."""
        return layer * self.layer_bytes + head * self.head_bytes

    def v_offset(self, layer: int, head: int) -> int:
        """Where V of `head` in `layer` begins inside a page."""
        return self.k_offset(layer, self.num_kv_heads + head)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)
