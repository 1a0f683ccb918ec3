# SPDX-License-Identifier: Apache-2.0
"""Elementwise instructions of VectorE (some also on ScalarE or GpSimd)."""

import numpy as np

from v41.backends.neuron.sim import alu
from v41.backends.neuron.sim.cost import gpsimd_busy, scalar_busy, vector_busy
from v41.backends.neuron.sim.dtypes import INT_DTYPES
from v41.backends.neuron.sim.enums import engine as engines
from v41.backends.neuron.sim.instr import NUMBERS, Instr
from v41.backends.neuron.sim.memory import PSUM, SBUF

INT32 = ("int32", "uint32")
ALL_ONES = -1
# Largest finite values; fp8 has a rule of its own.
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


def operator(ins, role, op, allowed):
    """Canonical name of an operator that is legal here; OP-HARDWARE, OP-ABSMAX, OP-GEN4, OP-ALU."""
    name = alu.canonical(op)
    if name in alu.NOT_ON_HARDWARE:
        ins.fail("OP-HARDWARE", f"nl.{name}", role)
    if name in alu.ABS_EXTREMA:
        ins.fail("OP-ABSMAX", f"nl.{name}", role)
    if name in ("square", "relu", "bypass") and name not in allowed:
        ins.fail("OP-GEN4", f"nl.{name} as an ALU operator", role)
    if name not in allowed:
        ins.fail("OP-ALU", f"{getattr(op, 'name', op)!r}; allowed: {', '.join(sorted(allowed))}", role)
    return name


def book(ins, engine, elements, cycles=1.0):
    """Book `elements` per partition on an engine."""
    busy = {
        engines.scalar: lambda: scalar_busy(elements),
        engines.gpsimd: lambda: gpsimd_busy(elements * cycles),
        engines.vector: lambda: vector_busy(elements, cycles),
    }[engine]()
    ins.finish(engine.name, busy)


def pick(ins, engine, default, allowed):
    """The engine asked for, or the default; PLACE-ENGINE, and PLACE-BUFFER for PSUM on GpSimd."""
    chosen = default if engine is engines.unknown else engine
    if chosen not in allowed:
        ins.fail("PLACE-ENGINE", f"{chosen!r}; allowed: {', '.join(e.name for e in allowed)}", "engine")
    return chosen


def no_psum(ins, *operands):
    """PLACE-BUFFER for (role, tensor) pairs of a GpSimd instruction."""
    for role, t in operands:
        if t.buffer == PSUM:
            ins.fail("PLACE-BUFFER", "GpSimd cannot reach PSUM", role)


def _fast(t):
    """Cycles per element of a copy-like instruction: 16-bit contiguous SBUF data runs 4x."""
    return 0.25 if t.itemsize <= 2 and t.buffer == SBUF and t.is_contiguous() else 1.0


def tensor_copy(dst, src, engine=engines.unknown, name=None):
    """dst = src; bits when the dtypes agree, else through float32."""
    ins = Instr("nisa.tensor_copy")
    dst, src = ins.tile("dst", dst), ins.tile("src", src)
    ins.match(("dst", dst), ("src", src))
    chosen = pick(ins, engine, engines.vector, (engines.vector, engines.scalar, engines.gpsimd))
    if chosen is engines.gpsimd:
        no_psum(ins, ("dst", dst), ("src", src))
    if dst.dtype == src.dtype:
        ins.put_raw("dst", dst, ins.raw("src", src))
    else:
        ins.put("dst", dst, ins.f32("src", src))
    book(ins, chosen, dst.size // dst.shape[0], min(_fast(src), 1.0))


def memset(dst, value, engine=engines.unknown, name=None):
    """dst = value; an integer tile takes an int it can hold, a float tile a finite value within its range or +-inf."""
    ins = Instr("nisa.memset")
    dst = ins.tile("dst", dst)
    chosen = pick(ins, engine, engines.vector, (engines.vector, engines.gpsimd))
    if chosen is engines.gpsimd:
        no_psum(ins, ("dst", dst))
    if not isinstance(value, NUMBERS):
        ins.fail("TYPE-MEMSET", f"{value!r} is no number", "value")
    codes = _constant(ins, value, dst.dtype)
    filled = np.empty(dst.shape, codes.dtype)
    filled[...] = codes
    ins.put_raw("dst", dst, filled)
    book(ins, chosen, dst.size // dst.shape[0], _fast(dst))


def _constant(ins, value, dtype):
    if dtype in INT_DTYPES:
        info = np.iinfo(np.uint8 if dtype == "bool" else dtype)
        if value != int(value) or not info.min <= value <= info.max:
            ins.fail("TYPE-MEMSET", f"{value!r} in {dtype}", "value")
        return np.array(int(value), info.dtype)
    if np.isfinite(value) and abs(value) > LARGEST.get(dtype, LARGEST["float32"]):
        ins.fail("TYPE-MEMSET", f"{value!r} overflows {dtype}", "value")
    return ins.cast("value", np.array([value], np.float32), dtype)[0]


def tensor_tensor(dst, data1, data2, op, engine=engines.unknown, name=None):
    """dst = data1 op data2: bits, exact 32-bit integers on GpSimd, or float32."""
    ins = Instr("nisa.tensor_tensor")
    dst, data1, data2 = ins.tile("dst", dst), ins.tile("data1", data1), ins.tile("data2", data2)
    operands = (("dst", dst), ("data1", data1), ("data2", data2))
    ins.match(*operands)
    ins.not_both_psum(*operands[1:])
    kind = operator(ins, "op", op, (*alu.ARITHMETIC, *alu.BITVEC))
    exact = all(t.dtype in INT32 and t.buffer == SBUF for _, t in operands) and engine is not engines.vector
    gpsimd = kind == "power" or (exact and kind not in alu.BITVEC)
    chosen = pick(ins, engine, engines.gpsimd if gpsimd else engines.vector, (engines.vector, engines.gpsimd))
    if chosen is engines.gpsimd:
        no_psum(ins, *operands)
    if kind == "power" and chosen is engines.vector:
        ins.fail("PLACE-ENGINE", "nl.power runs on GpSimd", "engine")
    if kind in alu.BITVEC:
        _bits(ins, dst, kind, [("data1", data1), ("data2", data2)])
    elif exact and chosen is engines.gpsimd and kind != "power":
        a, b = (ins.raw(role, t).astype(np.int64).reshape(t.shape[0], -1) for role, t in operands[1:])
        ins.put_raw("dst", dst, _integers(kind, a, b, dst.dtype))
    else:
        a, b = ins.f32("data1", data1), ins.f32("data2", data2)
        with np.errstate(all="ignore"):
            ins.put("dst", dst, alu.ARITHMETIC[kind](a, b))
    fast = 1.0 if all(t.itemsize == 2 and t.buffer == SBUF for _, t in operands) else 2.0
    book(ins, chosen, dst.size // dst.shape[0], fast)


def _integers(kind, a, b, dtype):
    # Overflow on GpSimd is not documented; wrapping modulo 2**32 is assumed.
    result = {"multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum}.get(kind, alu.ARITHMETIC[kind])(a, b)
    return (result.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(dtype)


def _bits(ins, dst, kind, operands):
    """Bit operation of (role, tensor or int) operands on unsigned patterns of dst's width."""
    unsigned = np.dtype(f"u{dst.itemsize}")
    ins.dtype("dst", dst, INT_DTYPES, "TYPE-BITVEC")
    values = []
    for role, value in operands:
        if isinstance(value, NUMBERS):
            values.append(_immediate(ins, role, value, unsigned))
            continue
        ins.dtype(role, value, INT_DTYPES, "TYPE-BITVEC")
        if value.itemsize != dst.itemsize:
            ins.fail("TYPE-SAME", f"{value.dtype} and {dst.dtype} differ in width", role)
        values.append(ins.raw(role, value).view(unsigned).reshape(value.shape[0], -1))
    result = alu.BITVEC[kind](*values)
    ins.put_raw("dst", dst, result.view(dst.codes().dtype))


def _immediate(ins, role, value, unsigned):
    if value != int(value):
        ins.fail("TYPE-BITVEC", f"immediate {value!r}", role)
    value = int(value)
    if value not in (0, ALL_ONES) and value & (value - 1) and value > 32:
        ins.fail("OP-IMMEDIATE", f"{value:#x}", role)
    return np.array(value & ((1 << (8 * unsigned.itemsize)) - 1), unsigned)


def tensor_scalar(
    dst,
    data,
    op0,
    operand0,
    reverse0=False,
    op1=None,
    operand1=None,
    reverse1=False,
    engine=engines.unknown,
    name=None,
):
    """dst = (data op0 operand0) op1 operand1; operands are immediates or (P, 1) tiles, float32 after each step."""
    ins = Instr("nisa.tensor_scalar")
    dst, data = ins.tile("dst", dst), ins.tile("data", data)
    ins.match(("dst", dst), ("data", data))
    allowed = (*alu.ARITHMETIC, *alu.BITVEC, "abs", "rsqrt", "reciprocal", "invert")
    kinds = [operator(ins, role, op, allowed) for role, op in (("op0", op0), ("op1", op1)) if op is not None]
    if op1 is None and operand1 is not None:
        ins.fail("OP-ARG", "operand1 without op1", "operand1")
    bits = [k in alu.BITVEC or k == "invert" for k in kinds]
    if any(bits) != all(bits):
        ins.fail("TYPE-BITVEC", f"{kinds[0]} and {kinds[1]} mix bits and arithmetic", "op1")
    chosen = _scalar_engine(ins, kinds, engine, (("dst", dst), ("data", data)))
    steps = list(zip(kinds, (operand0, operand1), (reverse0, reverse1), ("operand0", "operand1"), strict=False))
    if all(bits):
        _bit_steps(ins, dst, data, steps)
    else:
        _float_steps(ins, dst, data, steps)
    book(ins, chosen, dst.size // dst.shape[0], _fast(data) if chosen is engines.vector else 1.0)


def _scalar_engine(ins, kinds, engine, operands):
    gpsimd = "rsqrt" in kinds or "power" in kinds
    chosen = pick(ins, engine, engines.gpsimd if gpsimd else engines.vector, (engines.vector, engines.scalar, engines.gpsimd))
    if gpsimd != (chosen is engines.gpsimd):
        ins.fail("PLACE-ENGINE", f"{' '.join(kinds)} on {chosen.name}: rsqrt and power are GpSimd's, the others are not", "engine")
    if chosen is engines.scalar and tuple(kinds) not in (("multiply", "add"), ("multiply",), ("add",)):
        ins.fail("PLACE-ENGINE", f"ScalarE on trn2 does multiply+add, multiply or add, not {'+'.join(kinds)}", "engine")
    if chosen is engines.gpsimd:
        no_psum(ins, *operands)
    return chosen


def _float_steps(ins, dst, data, steps):
    value = ins.f32("data", data)
    for kind, operand, reverse, role in steps:
        with np.errstate(all="ignore"):
            if kind in alu.UNARY:
                if operand is not None and not (isinstance(operand, NUMBERS) and operand == 0):
                    ins.fail("OP-ARG", f"{kind} is unary: None or 0", role)
                value = alu.UNARY[kind](value)
                continue
            if operand is None:
                ins.fail("OP-ARG", f"{kind} needs an operand", role)
            other = ins.column(role, operand, data)
            value = alu.ARITHMETIC[kind](other, value) if reverse else alu.ARITHMETIC[kind](value, other)
    ins.put("dst", dst, value)


def _bit_steps(ins, dst, data, steps):
    ins.dtype("dst", dst, INT_DTYPES, "TYPE-BITVEC")
    ins.dtype("data", data, INT_DTYPES, "TYPE-BITVEC")
    if data.itemsize != dst.itemsize:
        ins.fail("TYPE-SAME", f"{data.dtype} and {dst.dtype} differ in width", "data")
    unsigned = np.dtype(f"u{dst.itemsize}")
    value = ins.raw("data", data).view(unsigned).reshape(data.shape[0], -1)
    for kind, operand, reverse, role in steps:
        if kind == "invert":
            value = ~value
            continue
        if isinstance(operand, NUMBERS):
            other = _immediate(ins, role, operand, unsigned)
        else:
            tile = ins.tile(role, operand)
            ins.dtype(role, tile, INT_DTYPES, "TYPE-BITVEC")
            if tile.size != tile.shape[0] or tile.shape[0] != data.shape[0]:
                ins.fail("TYPE-ROW", f"{tile.shape}: a (P, 1) column", role)
            other = (ins.raw(role, tile).reshape(-1, 1).astype(np.int64) & np.iinfo(unsigned).max).astype(unsigned)
        value = alu.BITVEC[kind](other, value) if reverse else alu.BITVEC[kind](value, other)
    ins.put_raw("dst", dst, value.astype(unsigned).view(dst.codes().dtype))
