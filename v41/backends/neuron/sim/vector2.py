# SPDX-License-Identifier: Apache-2.0
"""VectorE instructions with three inputs, scans, reductions over free dimensions, reciprocal, shuffles."""

import numpy as np

from v41.backends.neuron.sim import alu
from v41.backends.neuron.sim.cost import gpsimd_busy, vector_busy
from v41.backends.neuron.sim.dtypes import INT_DTYPES
from v41.backends.neuron.sim.instr import NUMBERS, Instr
from v41.backends.neuron.sim.memory import SBUF
from v41.backends.neuron.sim.vector import operator

KEEP = 255


def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    """dst = (data op0 operand0) op1 operand1 with an immediate or (P, 1) operand0 and a tile operand1; no fused rounding."""
    ins = Instr("nisa.scalar_tensor_tensor")
    dst, data, operand1 = ins.tile("dst", dst), ins.tile("data", data), ins.tile("operand1", operand1)
    ins.match(("dst", dst), ("data", data), ("operand1", operand1))
    ins.not_both_psum(("data", data), ("operand1", operand1))
    first, second = (operator(ins, role, op, alu.ARITHMETIC) for role, op in (("op0", op0), ("op1", op1)))
    value, other = ins.f32("data", data), ins.column("operand0", operand0, data)
    tile = ins.f32("operand1", operand1)
    with np.errstate(all="ignore"):
        value = alu.ARITHMETIC[first](other, value) if reverse0 else alu.ARITHMETIC[first](value, other)
        value = alu.ARITHMETIC[second](tile, value) if reverse1 else alu.ARITHMETIC[second](value, tile)
    ins.put("dst", dst, value)
    ins.finish("vector", vector_busy(dst.size // dst.shape[0], 2.0))


def tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None):
    """r[i] = op1(op0(data0[i], r[i-1]), data1[i]), r[-1] = initial; float32 state, cast on write only."""
    ins = Instr("nisa.tensor_tensor_scan")
    dst, data0, data1 = ins.tile("dst", dst), ins.tile("data0", data0), ins.tile("data1", data1)
    ins.match(("dst", dst), ("data0", data0), ("data1", data1))
    ins.not_both_psum(("data0", data0), ("data1", data1))
    f0, f1 = (alu.ARITHMETIC[operator(ins, role, op, alu.ARITHMETIC)] for role, op in (("op0", op0), ("op1", op1)))
    a, b = ins.f32("data0", data0), ins.f32("data1", data1)
    state = np.broadcast_to(ins.column("initial", initial, data0, _INITIAL), (a.shape[0], 1))[:, 0]
    result = np.empty_like(a)
    with np.errstate(all="ignore"):
        for i in range(a.shape[1]):
            state = f0(state, a[:, i]) if reverse0 else f0(a[:, i], state)
            state = f1(b[:, i], state) if reverse1 else f1(state, b[:, i])
            result[:, i] = state
    ins.put("dst", dst, result)
    ins.finish("vector", vector_busy(dst.size // dst.shape[0], 2.0))


_INITIAL = ("float32", "bfloat16", "float16")


def reciprocal(dst, data, name=None):
    """dst = 1 / data, rounded once to float32, then cast."""
    ins = Instr("nisa.reciprocal")
    dst, data = ins.tile("dst", dst), ins.tile("data", data)
    ins.match(("dst", dst), ("data", data))
    with np.errstate(all="ignore"):
        ins.put("dst", dst, np.float32(1.0) / ins.f32("data", data))
    ins.finish("vector", vector_busy(dst.size // dst.shape[0], 8.0))


def _trailing(ins, axis, data):
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(a % data.ndim for a in axes))
    if not axes or axes != tuple(range(axes[0], data.ndim)) or axes[0] == 0:
        ins.fail("OP-ARG", f"axis {axis} of {data.shape}: the trailing free dimensions only", "axis")
    return axes


def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    """dst = reduction of the trailing free dimensions; float32 (sums in float64, rounded once) or bits."""
    ins = Instr("nisa.tensor_reduce")
    dst, data = ins.tile("dst", dst), ins.tile("data", data)
    kind = operator(ins, "op", op, (*alu.REDUCTIONS, *alu.BIT_REDUCTIONS))
    axes = _trailing(ins, axis, data)
    kept = data.size // int(np.prod([data.shape[a] for a in axes]))
    if dst.shape[0] != data.shape[0] or dst.size != kept:
        ins.fail("MEM-SHAPE", f"dst {dst.shape} for {data.shape} reduced over {axes}", "dst")
    if kind in alu.BIT_REDUCTIONS:
        for role, t in (("dst", dst), ("data", data)):
            ins.dtype(role, t, INT_DTYPES, "TYPE-BITVEC")
        ins.same_dtype(("data", data), ("dst", dst))
        if negate:
            ins.fail("OP-ARG", "negate with a bit reduction", "negate")
        values = ins.raw("data", data).reshape(kept, -1)
        ins.put_raw("dst", dst, alu.BITVEC[kind].reduce(values, axis=1))
    else:
        with np.errstate(all="ignore"):
            result = alu.reduce_float32(kind, ins.f32("data", data, rows=False).reshape(kept, -1))
        ins.put("dst", dst, -result if negate else result)
    ins.finish("vector", vector_busy(data.size // data.shape[0]))


def tensor_partition_reduce(dst, op, data, name=None):
    """dst (1 partition) = reduction of data over its partitions, on GpSimd."""
    ins = Instr("nisa.tensor_partition_reduce")
    dst, data = ins.tile("dst", dst, (SBUF,)), ins.tile("data", data, (SBUF,))
    kind = operator(ins, "op", op, ("add", "average", "maximum", "bitwise_or", "bitwise_and"))
    if dst.shape[0] != 1 or dst.size != data.size // data.shape[0]:
        ins.fail("MEM-SHAPE", f"dst {dst.shape} for data {data.shape}", "dst")
    if kind in alu.BIT_REDUCTIONS:
        ins.dtype("data", data, INT_DTYPES, "TYPE-BITVEC")
        ins.same_dtype(("data", data), ("dst", dst))
        values = ins.raw("data", data).reshape(data.shape[0], -1)
        ins.put_raw("dst", dst, alu.BITVEC[kind].reduce(values, axis=0))
    else:
        values = ins.f32("data", data).T
        result = alu.reduce_float32("add" if kind == "average" else kind, np.ascontiguousarray(values))
        ins.put("dst", dst, result / np.float32(data.shape[0]) if kind == "average" else result)
    ins.finish("gpsimd", gpsimd_busy(data.size // 8))


def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None):
    """dst = src where predicate is nonzero (zero with reverse_pred); the rest of dst is kept."""
    ins = Instr("nisa.tensor_copy_predicated")
    dst, predicate = ins.tile("dst", dst), ins.tile("predicate", predicate)
    ins.dtype("predicate", predicate, ("uint8", "uint16", "uint32"), "TYPE-PREDICATE")
    ins.match(("dst", dst), ("predicate", predicate))
    if isinstance(src, NUMBERS):
        new = ins.cast("src", np.full((1, 1), src, np.float32), dst.dtype)
    else:
        src = ins.tile("src", src)
        ins.match(("dst", dst), ("src", src))
        ins.same_dtype(("dst", dst), ("src", src))
        ins.not_both_psum(("src", src), ("predicate", predicate))
        new = ins.raw("src", src).reshape(dst.shape[0], -1)
    chosen = (ins.raw("predicate", predicate).reshape(dst.shape[0], -1) != 0) != bool(reverse_pred)
    ins.put_where("dst", dst, new, chosen)
    ins.finish("vector", vector_busy(dst.size // dst.shape[0], 2.0))


def nc_stream_shuffle(dst, src, shuffle_mask, name=None):
    """In each 32-partition quadrant dst[i] = src[mask[i]]; 255 keeps dst[i]. A 1-partition src counts as its quadrant's row 0."""
    ins = Instr("nisa.nc_stream_shuffle")
    dst, src = ins.tile("dst", dst), ins.tile("src", src)
    ins.same_dtype(("src", src), ("dst", dst))
    if dst.size // dst.shape[0] != src.size // src.shape[0]:
        ins.fail("MEM-SHAPE", f"dst {dst.shape}, src {src.shape}: elements per partition differ", "dst")
    mask = list(shuffle_mask)
    if len(mask) != 32 or any(not isinstance(m, int) or not (0 <= m < 32 or m == KEEP) for m in mask):
        ins.fail("OP-ARG", f"{shuffle_mask}: 32 entries of 0..31 or 255", "shuffle_mask")
    active = -(-max(dst.shape[0], src.shape[0]) // 32) * 32
    legal = (0,) if active > 64 else (0, 64) if active > 32 else (0, 32, 64, 96)
    for role, t in (("dst", dst), ("src", src)):
        if t.partition not in legal:
            ins.fail("MEM-START", f"{active} active partitions from {t.partition}; legal starts: {legal}", role)
    _shuffle(ins, dst, src, mask)
    ins.finish("vector", vector_busy(dst.size // dst.shape[0]))


def _shuffle(ins, dst, src, mask):
    values = ins.raw("src", src).reshape(src.shape[0], -1).copy()
    for p in range(dst.shape[0]):
        if mask[p % 32] == KEEP:
            continue
        row = p // 32 * 32 + mask[p % 32]
        if row >= src.shape[0]:
            ins.fail("INIT-POISON", f"dst partition {p} takes partition {row} of a src with {src.shape[0]}", "src")
        ins.write("dst", dst[p : p + 1], values[row])
    ins.written.append(("dst", dst))
