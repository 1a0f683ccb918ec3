# SPDX-License-Identifier: Apache-2.0
"""Uniforms that depend on their counter only (docs/speculation.md 4): Threefry-2x32 with 20 rounds, in int32 that never overflows.

A 32-bit word is a pair of 16-bit halves, so that every sum stays below 2^18: exact in integers of any width and in fp32, which is what
the vector units of some accelerators add integers in.
"""

import torch
from torch import Tensor

from v41.spec.types import F32, I32

NEXT, ACCEPT, DRAFT = 0, 1, 1 << 16  # lanes: the next token; acceptance of draft i at ACCEPT + i; its draw at DRAFT + i
HALF = 0xFFFF
PARITY = (0x1BD1, 0x1BDA)  # high and low half of the constant 0x1BD11BDA
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
ROUNDS = 20

Word = tuple[I32[Tensor, "*n"], I32[Tensor, "*n"]]


def split(x: I32[Tensor, "*n"]) -> Word:
    """(high, low) halves of the bits of an int32."""
    return (x >> 16) & HALF, x & HALF


def add(a: Word, b: Word) -> Word:
    """a + b modulo 2^32."""
    low = a[1] + b[1]
    return (a[0] + b[0] + (low >> 16)) & HALF, low & HALF


def rotate(a: Word, bits: int) -> Word:
    """a rotated left."""
    high, low = (a[1], a[0]) if bits >= 16 else a
    r = bits % 16
    if r == 0:
        return high, low
    return ((high << r) & HALF) | (low >> (16 - r)), ((low << r) & HALF) | (high >> (16 - r))


def xor(a: Word, b: Word) -> Word:
    return a[0] ^ b[0], a[1] ^ b[1]


def threefry(key: tuple[Word, Word], counter: tuple[Word, Word]) -> tuple[Word, Word]:
    """Threefry-2x32-20: two words of the counter, mixed in 20 rounds, the key added before and after every four of them."""
    third = xor(key[0], key[1])
    keys = (key[0], key[1], (third[0] ^ PARITY[0], third[1] ^ PARITY[1]))
    x, y = add(counter[0], keys[0]), add(counter[1], keys[1])
    for r in range(ROUNDS):
        x = add(x, y)
        y = xor(rotate(y, ROTATIONS[r % 8]), x)
        if r % 4 == 3:
            n = r // 4 + 1
            number = (torch.zeros_like(y[0]), torch.full_like(y[1], n))
            x, y = add(x, keys[n % 3]), add(add(y, keys[(n + 1) % 3]), number)
    return x, y


def uniforms(key: I32[Tensor, "b 2"], position: I32[Tensor, "b"], first: int, lanes: int) -> F32[Tensor, "b lanes"]:
    """A uniform in [0, 1) for each of the lanes first, first + 1, ...

    The upper 24 bits of the first word of threefry(key, (position, lane)), times 2^-24.

    key is (seed, sequence id), position the number of positions that the sequence holds.
    """
    lane = first + torch.arange(lanes, dtype=torch.int32, device=key.device).expand(key.shape[0], -1)
    words = [split(t[:, None].expand_as(lane)) for t in (key[:, 0], key[:, 1], position)]
    (high, low), _ = threefry((words[0], words[1]), (words[2], split(lane)))
    return (high * 256 + (low >> 8)).to(torch.float32) * 2.0**-24
