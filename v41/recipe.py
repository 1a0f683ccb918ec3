# SPDX-License-Identifier: Apache-2.0
"""Weight recipe: the bytes of any tensor from its name and a seed, in integer arithmetic (docs/recipe.md).

torch.randn differs between processors; this does not. Element i of a tensor depends on (seed, name, i) only, so any rows can be made alone.

key    FNV-1a (64 bit: offset 0xCBF29CE484222325, prime 0x100000001B3) over the seed as 8 little-endian bytes, then the UTF-8 name; then
       x ^= x >> 30, x *= 0xBF58476D1CE4E5B9, x ^= x >> 27, x *= 0x94D049BB133111EB, x ^= x >> 31, modulo 2^64. k0, k1: low and high half.
word   word(j) = mix(mix(j % 2^32 ^ k0) ^ k1 ^ (j // 2^32) * 0x9E3779B1 % 2^32); 32 bits, where mix(x) is x ^= x >> 15, x *= 0x2C1B3C6D,
       x ^= x >> 12, x *= 0x297A2D39, x ^= x >> 15 modulo 2^32. torch has no full unsigned arithmetic: words lie in int64, every product is
       below 2^62, and a mask cuts it to 32 bits, so nothing ever overflows.
I8     byte i of the tensor is byte i % 4 (little-endian) of word(i // 4): two FP4 codes, all 16 equally likely.
F8     the same byte b gives the code CODES[b % 128] with sign b // 128: a bell from the subnormals to 448, never NaN.
BF16   s = sum of the four bytes of word(i), minus 510; the value is (mean * 2^k + s * M) / 2^k, rounded to float32, then to bfloat16,
       to the nearest, ties to even.
F32    s = sum of the four 16-bit halves of word(2i) and word(2i + 1), minus 131070; the value as above, rounded to float32 only.
E8M0   w = word(i): byte 127 + E + JITTER[w % 8] + (1 if w // 256 % 256 < P else 0), limited to 0..254.

The mean comes from the role of the tensor (v41/recipe_roles.py); M, k (`multiplier`) and E, P (`exponent`) from its gain and fan-in.
"""

from math import isqrt

import torch
from torch import Tensor

from v41.recipe_roles import Role, role_of
from v41.recipe_words import key, words

CHUNK = 1 << 16  # words at a time: 512 KiB, in the second-level cache
JITTER = (-2, -1, -1, 0, 0, 0, 1, 1)  # mean square of 2^JITTER is 185 / 128
CODES = bytes.fromhex(
    "0001020304050607080b131922282f353643494c505253555758595a5b5c5d5e"
    "5f6060616162626263636464656566666767686868696969696a6a6a6a6b6b6b"
    "6b6c6c6c6c6d6d6d6d6e6e6e6f6f6f6f70707070707171717171717272727272"
    "73737373737474747475757575767676777777787878787979797a7a7b7b7c7e"
)
# Mean squares as (numerator, denominator): what one stored code is worth before its scale, and one sum of random parts.
FP8_SQUARE = (721342838329, 128 << 18)  # of CODES; values are multiples of 2^-9
FP4_SQUARE = (137, 16)  # of 0, 0.5, 1, 1.5, 2, 3, 4, 6
BYTES_SQUARE = 21845  # four uniform bytes: 4 * (256^2 - 1) / 12
HALVES_SQUARE = 1431655765  # four uniform 16-bit halves: 4 * (65536^2 - 1) / 12
LIMITS = {torch.bfloat16: (BYTES_SQUARE, 128), torch.float32: (HALVES_SQUARE, 32)}  # square of s, smallest M


def multiplier(role: Role, fan_in: int, dtype: torch.dtype) -> tuple[int, int]:
    """(M, k): M / 2^k times the root mean square of s is gain / 100, over sqrt(fan_in) if linear; M has 8 (BF16) or 6 (F32) bits."""
    square, least = LIMITS[dtype]
    bottom = 10000 * square * (fan_in if role.linear else 1)
    k = next(k for k in range(64) if isqrt((role.gain**2 << 2 * k) // bottom) >= least)
    return isqrt((role.gain**2 << 2 * k) // bottom), k


def exponent(role: Role, fan_in: int, square: tuple[int, int]) -> tuple[int, int]:
    """(E, P): 4^E (1 + 3 P / 256) times the squares of code and jitter is the wanted mean square (gain / 100)^2, over fan_in if linear."""
    top = role.gain**2 * square[1] * 128
    bottom = 10000 * square[0] * 185 * (fan_in if role.linear else 1)
    assert top < bottom, "every role has a mean square below that of the unscaled codes"
    low = next(e for e in range(128) if top << 2 * e >= bottom)  # 1 <= 4^low * top / bottom < 4
    return role.shift - low, 256 * ((top << 2 * low) - bottom) // (3 * bottom)


def _bell(random: Tensor, role: Role, fan_in: int, shape: tuple[int, ...], first: int, dtype: torch.dtype) -> Tensor:
    """Words [n] (BF16) or [2n] (F32) to n values that start at flat element `first`."""
    m, k = multiplier(role, fan_in, dtype)
    pairs = (random & 0x00FF00FF).add_((random >> 8).bitwise_and_(0x00FF00FF)) if dtype == torch.bfloat16 else random
    halves = (pairs & 0xFFFF).add_(pairs >> 16)
    value = halves.sub_(510) if dtype == torch.bfloat16 else halves.view(-1, 2).sum(-1).sub_(131070)
    value.mul_(m)
    if role.head_mean:  # hyper-connection base: the first hc of hc * (hc + 2) entries are the pre part
        position = torch.arange(first, first + len(value))
        value += torch.where(position < isqrt(shape[0] + 1) - 1, (role.head_mean << k) >> 4, 0)
    if role.mean:
        value += (role.mean << k) >> 4
    return (value.to(torch.float32) * 2.0**-k).to(dtype)  # k < 64: the factor is exact


def _bytes(random: Tensor, offset: int, count: int) -> Tensor:
    """The low four bytes of each word in order, from byte `offset`, as uint8 [count] (little-endian hosts)."""
    return random.view(torch.int32)[::2].contiguous().view(torch.uint8)[offset : offset + count]


def _scales(random: Tensor, role: Role, fan_in: int) -> Tensor:
    e, p = exponent(role, fan_in, FP4_SQUARE if role.fp4 else FP8_SQUARE)
    code = torch.tensor(JITTER).index_select(0, random & 7) + ((random >> 8 & 255) < p).to(torch.int64) + (127 + e)
    return code.clamp_(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)


def _elements(seed_key: int, role: Role, dtype: torch.dtype, shape: tuple[int, ...], first: int, count: int) -> Tensor:
    """Flat elements first .. first + count - 1."""
    if dtype in (torch.int8, torch.float8_e4m3fn):
        start = first // 4
        raw = _bytes(words(seed_key, start, (first + count + 3) // 4 - start), first % 4, count)
        if dtype == torch.int8:
            return raw.view(torch.int8)
        table = torch.tensor(list(CODES) + [code | 128 for code in CODES], dtype=torch.uint8)
        return table.index_select(0, raw.to(torch.int32)).view(torch.float8_e4m3fn)
    if dtype == torch.float8_e8m0fnu:
        return _scales(words(seed_key, first, count), role, 32 * shape[-1])
    wide = 2 if dtype == torch.float32 else 1
    return _bell(words(seed_key, wide * first, wide * count), role, shape[-1], shape, first, dtype)


def generate(name: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, rows: slice | None = None) -> Tensor:
    """The tensor `name` of the released layout, or its rows a..b - 1, by the recipe in the module's description.

    name: a released tensor name; dtype: its stored dtype (I8 with the packed shape); shape: of the whole tensor; rows: slice(a, b), step 1.
    Raises ValueError for a name without a role, a dtype that the role does not have and rows outside the shape.
    """
    shape = tuple(shape)
    role = role_of(name, dtype, seed)
    first_row, last_row = (0, shape[0]) if rows is None else (rows.start, rows.stop)
    if not shape or (rows is not None and rows.step not in (None, 1)) or not 0 <= first_row <= last_row <= shape[0]:
        raise ValueError(f"{name}: rows {rows} of shape {list(shape)}; expected slice(a, b) with 0 <= a <= b <= the first size")
    width = 1
    for size in shape[1:]:
        width *= size
    out = torch.empty((last_row - first_row) * width, dtype=dtype)
    seed_key, begin, end = key(seed, name), first_row * width, last_row * width
    per_chunk = CHUNK * 4 if dtype in (torch.int8, torch.float8_e4m3fn) else CHUNK // (1 + (dtype == torch.float32))
    for first in range(begin, end, per_chunk):
        count = min(per_chunk, end - first)
        out[first - begin : first - begin + count] = _elements(seed_key, role, dtype, shape, first, count)
    return out.view(last_row - first_row, *shape[1:])
