"""GPUS: what the data sheets of well-known GPUs say. Plain values; nothing here knows a model or an engine."""

from __future__ import annotations

from typing import NamedTuple

GB = 10**9


class Gpu(NamedTuple):
    """One GPU: memory in bytes; bytes a second that it reads; 16-bit operations a second, dense; bytes a second to its
    peers and to host memory, in one direction.
    """

    memory_bytes: int
    read_rate: float
    operation_rate: float
    peer_rate: float
    host_rate: float


GPUS = {
    "t4": Gpu(16 * GB, 320e9, 65e12, 16e9, 16e9),
    "v100-32gb": Gpu(32 * GB, 900e9, 125e12, 150e9, 16e9),
    "a10": Gpu(24 * GB, 600e9, 125e12, 32e9, 32e9),
    "a10g": Gpu(24 * GB, 600e9, 70e12, 32e9, 32e9),
    "l4": Gpu(24 * GB, 300e9, 121e12, 32e9, 32e9),
    "l40s": Gpu(48 * GB, 864e9, 362e12, 32e9, 32e9),
    "rtx-a6000": Gpu(48 * GB, 768e9, 155e12, 56e9, 32e9),
    "rtx-3090": Gpu(24 * GB, 936e9, 71e12, 56e9, 32e9),
    "rtx-4090": Gpu(24 * GB, 1.008e12, 165e12, 32e9, 32e9),
    "rtx-5090": Gpu(32 * GB, 1.792e12, 210e12, 64e9, 64e9),
    "a100-40gb": Gpu(40 * GB, 1.555e12, 312e12, 300e9, 32e9),
    "a100-80gb": Gpu(80 * GB, 2.039e12, 312e12, 300e9, 32e9),
    "h100": Gpu(80 * GB, 3.35e12, 989e12, 450e9, 64e9),
    "h200": Gpu(141 * GB, 4.8e12, 989e12, 450e9, 64e9),
    "b200": Gpu(180 * GB, 7.7e12, 2250e12, 900e9, 64e9),
    "mi210": Gpu(64 * GB, 1.6e12, 181e12, 150e9, 32e9),
    "mi250x": Gpu(128 * GB, 3.277e12, 383e12, 400e9, 32e9),
    "mi300x": Gpu(192 * GB, 5.3e12, 1307e12, 448e9, 64e9),
    "mi325x": Gpu(256 * GB, 6e12, 1307e12, 448e9, 64e9),
}
"""The SXM boards of V100, A100, H100, H200 and B200 (NVLink 2 to 5), A10G as AWS has it, the others as they are sold.
Memory in 10⁹ bytes as its maker says; drivers show up to 7 % more, an 80 GB A100 81,920 MiB. Rates are dense where
sheets give sparse ones, links half of what sheets give for both directions; PCIe where there is no other link."""
