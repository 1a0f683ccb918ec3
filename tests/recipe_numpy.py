# SPDX-License-Identifier: Apache-2.0
"""The weight recipe a second time, in plain numpy, from docs/recipe.md and its tables; shares no code with v41/recipe.py."""

import re
from fractions import Fraction
from math import isqrt
from pathlib import Path

import numpy as np

PAGE = (Path(__file__).parent.parent / "docs" / "recipe.md").read_text(encoding="utf-8")
FULL = (1 << 64) - 1
JITTER = np.array([int(part) for part in re.search(r"^JITTER = ([-0-9 ]+)\.", PAGE, re.M)[1].split()])
CODES = np.frombuffer(bytes.fromhex(re.search(r"```codes\n(.*?)```", PAGE, re.S)[1]), np.uint8)
ROLES = [line.split() for line in re.search(r"```roles\n(.*?)```", PAGE, re.S)[1].splitlines()]


def name_key(seed, name):
    x = 0xCBF29CE484222325
    for byte in seed.to_bytes(8, "little") + name.encode("utf-8"):
        x = ((x ^ byte) * 0x100000001B3) & FULL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & FULL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & FULL
    return x ^ (x >> 31)


def mix(x):
    """uint32 arithmetic wraps by itself."""
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
    x = (x ^ (x >> np.uint32(12))) * np.uint32(0x297A2D39)
    return x ^ (x >> np.uint32(15))


def word(key, j):
    j = np.asarray(j, np.uint64)
    low, high = (j & np.uint64(0xFFFFFFFF)).astype(np.uint32), (j >> np.uint64(32)).astype(np.uint32)
    return mix(mix(low ^ np.uint32(key & 0xFFFFFFFF)) ^ np.uint32(key >> 32) ^ high * np.uint32(0x9E3779B1))


def one_byte(key, i):
    return (word(key, i // 4) >> (8 * (i % 4)).astype(np.uint32) & np.uint32(255)).astype(np.uint8)


def role(name):
    local = re.sub(r"\.(weight|scale)$", "", re.sub(r"^(layers|mtp)\.\d+\.", "", name))
    row = next(row for row in ROLES if re.fullmatch(row[0], local))
    return int(row[2]), row[3] == "yes", int(row[4]), int(row[5])


def wide_shift(name, seed):
    parts = re.match(r"(.*ffn\.experts)\.(\d+)\.(w.)", name)
    if not parts or (int(parts[2]) + name_key(seed, parts[1])) % 8:
        return 0
    return {"w1": 2, "w2": -2, "w3": 2}[parts[3]]


def scale_bytes(name, key, shape, seed, i):
    gain, linear, _, _ = role(name)
    square = Fraction(137, 16) if "ffn.experts" in name else Fraction(721342838329, 33554432)
    wanted = Fraction(gain**2, 10000 * (32 * shape[-1] if linear else 1)) / square / Fraction(185, 128)
    e = next(e for e in range(50, -200, -1) if Fraction(4) ** e <= wanted)
    p = int(256 * (wanted / Fraction(4) ** e - 1) / 3)
    w = word(key, i)
    code = 127 + e + wide_shift(name, seed) + JITTER[(w % 8).astype(int)] + (w // 256 % 256 < p)
    return np.clip(code, 0, 254).astype(np.uint8)


def bfloat16_bits(value):
    """float32 to the upper 16 bits, to the nearest, ties to even."""
    bits = value.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def bell(name, dtype, key, shape, i):
    gain, linear, mean, head_mean = role(name)
    square, least = (21845, 128) if dtype == "BF16" else (1431655765, 32)
    k = 0
    while (m := isqrt((gain**2 << (2 * k)) // (10000 * square * (shape[-1] if linear else 1)))) < least:
        k += 1
    if dtype == "BF16":
        s = sum((word(key, i) >> np.uint32(8 * part) & np.uint32(255)).astype(np.int64) for part in range(4)) - 510
    else:
        pair = word(key, 2 * i), word(key, 2 * i + 1)
        s = sum((w >> np.uint32(16 * part) & np.uint32(65535)).astype(np.int64) for w in pair for part in range(2)) - 131070
    head = np.where(i * (i + 2) < shape[0], 1, 0) * ((head_mean << k) >> 4)  # i < hc
    value = np.ldexp((s * m + ((mean << k) >> 4) + head).astype(np.float32), -k)
    return bfloat16_bits(value) if dtype == "BF16" else value


def elements(name, dtype, shape, seed, i):
    """The stored bytes of flat elements i (int64 array), as uint8."""
    i, key = np.asarray(i, np.int64), name_key(seed, name)
    if dtype == "I8":
        found = one_byte(key, i)
    elif dtype == "F8_E4M3":
        byte = one_byte(key, i)
        found = CODES[byte % 128] + np.uint8(128) * (byte // 128)
    elif dtype == "F8_E8M0":
        found = scale_bytes(name, key, shape, seed, i)
    else:
        found = bell(name, dtype, key, shape, i)
    return np.ascontiguousarray(found).view(np.uint8)
