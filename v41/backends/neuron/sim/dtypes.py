# SPDX-License-Identifier: Apache-2.0
"""NKI dtypes as strings, their numpy containers, and the rounding between them.

bfloat16 is held as uint16 codes and every 8-bit float as uint8 codes; the
other dtypes use the numpy dtype of the same name (tfloat32: float32 whose low
13 bits are zero). Every conversion goes source -> float32 -> destination, as
the engines and the DMA do (docs/nki-simulator.md, Numerics).
"""

from dataclasses import dataclass

import numpy as np

GEN4_PACKED = ("float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4")


@dataclass(frozen=True)
class Spec:
    """Container, size in bytes and kind ("float", "int", "code") of one dtype."""

    name: str
    container: np.dtype
    size: int
    kind: str


def _spec(name, container, kind):
    return Spec(name, np.dtype(container), np.dtype(container).itemsize, kind)


SPECS = {
    s.name: s
    for s in (
        _spec("bool", np.uint8, "int"),
        _spec("int8", np.int8, "int"),
        _spec("int16", np.int16, "int"),
        _spec("int32", np.int32, "int"),
        _spec("uint8", np.uint8, "int"),
        _spec("uint16", np.uint16, "int"),
        _spec("uint32", np.uint32, "int"),
        _spec("float16", np.float16, "float"),
        _spec("float32", np.float32, "float"),
        _spec("tfloat32", np.float32, "float"),
        _spec("bfloat16", np.uint16, "code"),
        _spec("float8_e4m3", np.uint8, "code"),
        _spec("float8_e4m3fn", np.uint8, "code"),
        _spec("float8_e5m2", np.uint8, "code"),
        _spec("float8_e8m0fnu", np.uint8, "code"),
    )
}

INT_DTYPES = tuple(n for n, s in SPECS.items() if s.kind == "int")
FLOAT_DTYPES = tuple(n for n, s in SPECS.items() if s.kind != "int")
FP8 = ("float8_e4m3", "float8_e5m2")
# Largest finite value and (mantissa bits, exponent bias) of the two fp8 formats that gen3 engines compute with.
FP8_FORMAT = {"float8_e4m3": (240.0, 3, 7), "float8_e5m2": (57344.0, 2, 15)}
EXACT_INT = 1 << 24


class CastError(ValueError):
    """A conversion whose result no document states; `rule` names it."""

    def __init__(self, rule, text):
        super().__init__(text)
        self.rule = rule


def as_dtype(dtype):
    """NKI dtype name of a name, a numpy dtype or a torch dtype; ValueError when there is none."""
    if isinstance(dtype, str) and dtype in SPECS:
        return dtype
    name = str(dtype)
    if name.startswith("torch."):
        name = name[len("torch.") :]
    elif not isinstance(dtype, str):
        name = getattr(dtype, "__name__", None) or name
    name = {"bool_": "bool", "float8e4": "float8_e4m3", "float8e5": "float8_e5m2"}.get(name, name)
    if name not in SPECS:
        raise ValueError(f"no NKI dtype on trn2 for {dtype!r}; known: {', '.join(SPECS)}")
    return name


def size_of(dtype):
    """Bytes per element."""
    return SPECS[dtype].size


def _decode_table(mantissa, bias):
    """Values of an IEEE-like 8-bit float: the top exponent is infinity and NaN."""
    code = np.arange(256)
    exponent = (code & 0x7F) >> mantissa
    fraction = code & ((1 << mantissa) - 1)
    scale = 2.0 ** (np.maximum(exponent, 1) - bias - mantissa)
    value = (fraction + (exponent > 0) * (1 << mantissa)) * scale
    top = exponent == (0x7F >> mantissa)
    value = np.where(top, np.where(fraction == 0, np.inf, np.nan), value)
    return np.where(code & 0x80, -value, value).astype(np.float32)


def _e4m3fn_table():
    """As e4m3, but the top exponent is ordinary (256 to 448) except for the two NaN codes."""
    table = _decode_table(3, 7)
    top = np.arange(0x78, 0x7F)
    table[top] = 256.0 + 32.0 * np.arange(7)
    table[top | 0x80] = -table[top]
    table[[0x7F, 0xFF]] = np.nan
    return table


def _e8m0_table():
    table = (2.0 ** (np.minimum(np.arange(256.0), 254) - 127)).astype(np.float32)
    table[255] = np.nan
    return table


TABLES = {
    "float8_e4m3": _decode_table(3, 7),
    "float8_e4m3fn": _e4m3fn_table(),
    "float8_e5m2": _decode_table(2, 15),
    "float8_e8m0fnu": _e8m0_table(),
}


def to_float32(codes, dtype):
    """Values of a container array as float32; integers of magnitude >= 2**24 raise CastError("NUM-INT24")."""
    if dtype in ("float32", "tfloat32"):
        return codes
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in TABLES:
        return TABLES[dtype][codes]
    if dtype in ("int32", "uint32") and codes.size:
        largest = max(abs(int(codes.min())), abs(int(codes.max())))
        if largest >= EXACT_INT:
            raise CastError("NUM-INT24", f"{dtype} value of magnitude {largest} goes through float32")
    return codes.astype(np.float32)


def round_bfloat16(values):
    """uint16 codes of float32 values, to nearest even; NaN stays a quiet NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    low = (bits >> np.uint32(16)) & np.uint32(1)
    codes = ((bits + (low + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        codes[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return codes


def _round_tfloat32(values):
    bits = np.ascontiguousarray(values).view(np.uint32)
    low = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + (low + np.uint32(0xFFF))) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))


def _round_fp8(values, dtype):
    limit, mantissa, bias = FP8_FORMAT[dtype]
    magnitude = np.abs(values).astype(np.float64)
    nan = np.isnan(magnitude)
    if (magnitude > limit).any():
        worst = float(magnitude[~nan].max())
        raise CastError("NUM-FP8", f"|{worst:g}| exceeds {limit:g}, the largest {dtype}; clamp before the cast")
    magnitude = np.where(nan, 0.0, magnitude)
    # frexp(0) is (0, 0): without the mask zero would be coded with exponent -1.
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, 1 - bias), 1 - bias)
    steps = np.rint(np.ldexp(magnitude, mantissa - exponent)).astype(np.int64)
    # steps counts units of 2**(exponent - mantissa); a carry into the next binade is the same integer addition.
    codes = steps + ((exponent - (1 - bias)) << mantissa)
    codes = np.where(nan, 0x7F, codes) | np.where(np.signbit(values), 0x80, 0)
    return codes.astype(np.uint8)


def _round_int(values, dtype):
    if np.isnan(values).any():
        raise CastError("NUM-NAN-INT", f"NaN cast to {dtype}")
    if dtype == "bool":
        return (values != 0).astype(np.uint8)
    info = np.iinfo(SPECS[dtype].container)
    return np.clip(np.rint(values.astype(np.float64)), info.min, info.max).astype(SPECS[dtype].container)


def from_float32(values, dtype):
    """Container array of float32 values: round to nearest even, integers saturate, fp8 beyond its range is an error."""
    if dtype == "float32":
        return values
    if dtype == "bfloat16":
        return round_bfloat16(values)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    if dtype == "tfloat32":
        return _round_tfloat32(values)
    if dtype in FP8_FORMAT:
        return _round_fp8(values, dtype)
    if SPECS[dtype].kind == "int":
        return _round_int(values, dtype)
    raise CastError("TYPE-CARRIER", f"{dtype} is storage only on trn2 and cannot be the result of a cast")
