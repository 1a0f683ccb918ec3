# SPDX-License-Identifier: Apache-2.0
"""Number formats and the rounding of activations, written from their definitions.

Every value is a float64, which holds all numbers of all formats here exactly. Codes are unsigned integers.
"""

import numpy as np

F32 = np.float32
GROUP = 32  # columns that share a scale, except for compressed rows
ROW_GROUP = 16  # columns that share a scale in a compressed row


# A code splits into sign, exponent field and fraction field; field 0 is the subnormal range.
def _from_fields(codes, exponent_bits: int, fraction_bits: int, bias: int) -> np.ndarray:
    codes = np.asarray(codes).astype(np.int64)
    fraction = codes & ((1 << fraction_bits) - 1)
    field = (codes >> fraction_bits) & ((1 << exponent_bits) - 1)
    negative = (codes >> (fraction_bits + exponent_bits)) & 1
    whole = np.where(field > 0, fraction + (1 << fraction_bits), fraction).astype(np.float64)
    value = np.ldexp(whole, np.maximum(field, 1) - bias - fraction_bits)
    return np.where(negative == 1, -value, value)


def bf16_values(codes) -> np.ndarray:
    """The value of each 16-bit bfloat16 code."""
    codes = np.asarray(codes).astype(np.int64)
    value = _from_fields(codes, 8, 7, 127)
    special = ((codes >> 7) & 0xFF) == 0xFF
    infinite = np.where(codes >> 15 == 1, -np.inf, np.inf)
    return np.where(special, np.where(codes & 0x7F == 0, infinite, np.nan), value)


def round_bits(values, digits: int, lowest: int) -> np.ndarray:
    """Nearest number with `digits` significant bits that is a multiple of 2**lowest; ties to the even one."""
    values = np.asarray(values, np.float64)
    exponent = np.frexp(values)[1]
    step = np.maximum(exponent - digits, lowest)
    return np.ldexp(np.rint(np.ldexp(values, -step)), step)


def bf16(values) -> np.ndarray:
    """Nearest bfloat16, ties to even, infinity beyond the largest (8 significant bits, subnormals down to 2**-133)."""
    rounded = round_bits(values, 8, -133)
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, rounded), rounded)


def bf16_codes(values) -> np.ndarray:
    """The code of the nearest bfloat16 of each value; the sign of zero is kept. NaN is not supported."""
    value = bf16(values)
    size = np.abs(value)
    fraction, exponent = np.frexp(np.where(np.isfinite(size), size, 0.0))
    normal = exponent >= -125
    whole = np.ldexp(fraction, 8).astype(np.int64)
    code = np.where(normal, ((exponent.astype(np.int64) + 126) << 7) + whole - 128, 0)
    small = np.ldexp(np.where(normal, 0.0, np.where(np.isfinite(size), size, 0.0)), 133).astype(np.int64)
    code = np.where(size == 0, 0, np.where(normal, code, small))
    code = np.where(np.isinf(size), 0x7F80, code)
    return (code | (np.signbit(value).astype(np.int64) << 15)).astype(np.uint16)


E4M3 = _from_fields(np.arange(127), 4, 3, 7)  # the finite values >= 0 in code order; 126 is 448, 127 is NaN
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _nearest(table: np.ndarray, values) -> np.ndarray:
    """Index of the nearest entry of an ascending table to |value|; a tie goes to the even index."""
    size = np.abs(np.asarray(values, np.float64))
    if (size > table[-1]).any():
        raise ValueError(f"a value of size {size.max()} is beyond the largest number {table[-1]}")
    above = np.searchsorted(table, size)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - size, size - table[below]
    tie = np.where(below % 2 == 0, below, above)
    return np.where(up < down, above, np.where(up > down, below, np.where(above == below, above, tie)))


def e4m3_values(codes) -> np.ndarray:
    """The value of each e4m3fn byte; 0x7f and 0xff are NaN, there is no infinity."""
    codes = np.asarray(codes).astype(np.int64)
    return np.where(codes & 0x7F == 0x7F, np.nan, _from_fields(codes, 4, 3, 7))


def e4m3_codes(values) -> np.ndarray:
    """The nearest e4m3fn byte, ties to the even code, sign of zero kept; |value| <= 448."""
    return (_nearest(E4M3, values) | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)


def e2m1_values(codes) -> np.ndarray:
    """The value of each 4-bit code: bit 3 is the sign, and code 8 is -0."""
    codes = np.asarray(codes).astype(np.int64)
    value = E2M1[codes & 7]
    return np.where(codes >> 3 == 1, -value, value)


def e2m1_unpack(packed) -> np.ndarray:
    """Values of packed bytes [.., n] as [.., 2n]: the even column is in the low nibble."""
    packed = np.asarray(packed).view(np.uint8).astype(np.int64)
    pairs = np.stack([packed & 15, packed >> 4], -1)
    return e2m1_values(pairs).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def e2m1_codes(values) -> np.ndarray:
    """The nearest 4-bit code, ties to the even code; |value| <= 6. The sign bit is kept on a zero."""
    return (_nearest(E2M1, values) | (np.signbit(values).astype(np.int64) << 3)).astype(np.uint8)


def e2m1_pack(codes) -> np.ndarray:
    """4-bit codes [.., 2n] as bytes [.., n]."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def e8m0_values(codes) -> np.ndarray:
    """2**(byte - 127); byte 255 is NaN and byte 0 is 2**-127."""
    codes = np.asarray(codes).astype(np.int64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))


def e8m0_codes(values) -> np.ndarray:
    """The byte of each exact power of two from 2**-127 to 2**127."""
    fraction, exponent = np.frexp(np.asarray(values, np.float64))
    code = exponent.astype(np.int64) + 126
    if (fraction != 0.5).any() or (code < 0).any() or (code > 254).any():
        raise ValueError("not a power of two between 2**-127 and 2**127")
    return code.astype(np.uint8)


def power_scale(largest, limit: float) -> np.ndarray:
    """P2: the smallest power of two >= y, where y = float32(largest) * float32(1 / limit), rounded to float32."""
    y = np.asarray(largest).astype(F32) * F32(1.0 / limit)
    fraction, exponent = np.frexp(y.astype(np.float64))
    return np.ldexp(1.0, np.where(fraction == 0.5, exponent - 1, exponent))


def _groups(x, width: int) -> np.ndarray:
    return np.asarray(x, np.float64).reshape(*x.shape[:-1], x.shape[-1] // width, width)


def _scaled(groups, scale, limit: float) -> np.ndarray:
    quotient = (groups.astype(F32) / scale[..., None].astype(F32)).astype(np.float64)
    return np.clip(quotient, -limit, limit)


def a8_codes(x, limit: float = 448.0) -> tuple[np.ndarray, np.ndarray]:
    """A8 of [.., n]: e4m3 codes [.., n] and e8m0 scale bytes [.., n / 32]; the group maximum counts as at least 1e-4."""
    groups = _groups(x, GROUP)
    scale = power_scale(np.maximum(np.abs(groups).max(-1), float(F32(1e-4))), limit)
    return e4m3_codes(_scaled(groups, scale, limit)).reshape(x.shape), e8m0_codes(scale)


def a8(x, limit: float = 448.0) -> np.ndarray:
    """The round trip of A8: the values that its codes and scales stand for."""
    codes, scales = a8_codes(x, limit)
    return (_groups(e4m3_values(codes), GROUP) * e8m0_values(scales)[..., None]).reshape(x.shape)


def f4e_codes(x) -> tuple[np.ndarray, np.ndarray]:
    """F4E of [.., n]: 4-bit codes [.., n] and e8m0 scale bytes [.., n / 32]."""
    groups = _groups(x, GROUP)
    scale = power_scale(np.maximum(np.abs(groups).max(-1), 6 * 2.0**-126), 6.0)
    return e2m1_codes(_scaled(groups, scale, 6.0)).reshape(x.shape), e8m0_codes(scale)


def f4e(x) -> np.ndarray:
    """The round trip of F4E."""
    codes, scales = f4e_codes(x)
    return (_groups(e2m1_values(codes), GROUP) * e8m0_values(scales)[..., None]).reshape(x.shape)


def f4s_codes(x) -> tuple[np.ndarray, np.ndarray]:
    """F4S of [.., n]: 4-bit codes [.., n] and e4m3 scale bytes [.., n / 16]; the scale may round down, then values clamp."""
    groups = _groups(x, ROW_GROUP)
    largest = np.maximum(np.abs(groups).max(-1), 6 * 2.0**-9)
    scales = e4m3_codes(np.minimum((largest.astype(F32) / F32(6.0)).astype(np.float64), 448.0))
    return e2m1_codes(_scaled(groups, e4m3_values(scales), 6.0)).reshape(x.shape), scales


def f4s(x) -> np.ndarray:
    """The round trip of F4S."""
    codes, scales = f4s_codes(x)
    return (_groups(e2m1_values(codes), ROW_GROUP) * e4m3_values(scales)[..., None]).reshape(x.shape)
