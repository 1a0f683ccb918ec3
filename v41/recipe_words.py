# SPDX-License-Identifier: Apache-2.0
"""The key of a tensor and its 32-bit random words (v41/recipe.py says how both are computed)."""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def key(seed: int, name: str) -> int:
    """64-bit key of a tensor: FNV-1a over the seed (8 bytes, little-endian) and the name (UTF-8), finished as splitmix64 does."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed {seed} is not in 0..2^64 - 1")
    full = (1 << 64) - 1
    x = 0xCBF29CE484222325
    for byte in seed.to_bytes(8, "little") + name.encode():
        x = (x ^ byte) * 0x100000001B3 & full
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & full
    x = (x ^ x >> 27) * 0x94D049BB133111EB & full
    return x ^ x >> 31


def _mix(x: Tensor) -> Tensor:
    x.bitwise_xor_(x >> 15).mul_(0x2C1B3C6D).bitwise_and_(MASK)
    x.bitwise_xor_(x >> 12).mul_(0x297A2D39).bitwise_and_(MASK)
    return x.bitwise_xor_(x >> 15)


def words(seed_key: int, start: int, count: int) -> Tensor:
    """Words start .. start + count - 1 of a key as int64 [count], each 0..2^32 - 1."""
    j = torch.arange(start, start + count, dtype=torch.int64)
    high = (j >> 32).mul_(0x9E3779B1).bitwise_and_(MASK) if (start + count - 1) >> 32 else 0  # j < 2^37: the product is below 2^37
    x = _mix(j.bitwise_and_(MASK).bitwise_xor_(seed_key & MASK))
    return _mix(x.bitwise_xor_(seed_key >> 32).bitwise_xor_(high))
