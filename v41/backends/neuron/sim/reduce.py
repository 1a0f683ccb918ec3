# SPDX-License-Identifier: Apache-2.0
"""VectorE instructions that share its accumulator: one float32 per lane, kept between instructions."""

import numpy as np

from v41.backends.neuron.sim import alu
from v41.backends.neuron.sim.cost import vector_busy
from v41.backends.neuron.sim.dtypes import EXACT_INT, FLOAT_DTYPES
from v41.backends.neuron.sim.enums import reduce_cmd as cmd
from v41.backends.neuron.sim.instr import NUMBERS, Instr
from v41.backends.neuron.sim.lanes import UNDEFINED
from v41.backends.neuron.sim.vector import operator

FP32_MIN = -3.4028234663852886e38
SMALL = ("bfloat16", "float16", "float32", "float8_e4m3", "float8_e5m2", "uint8", "uint16", "int8", "int16")
maximum = alu.Op("maximum")


def _result(ins, reduce_res, lanes):
    tile = ins.tile("reduce_res", reduce_res)
    if tile.shape[0] != lanes or tile.size != lanes:
        ins.fail("TYPE-ROW", f"{tile.shape}: ({lanes}, 1)", "reduce_res")
    return tile


def _start(ins, command, kind, data, initial):
    """Lanes of `data` before the reduction; INIT-ACCREG."""
    lanes = data.shape[0]
    if command is cmd.reset_reduce:
        return np.full(lanes, alu.IDENTITY[kind], np.float32)
    if command is cmd.load_reduce:
        return np.broadcast_to(initial, (lanes, 1))[:, 0]
    held = ins.program.accumulator["vector"].part(data.partition, lanes)
    if held is None:
        ins.fail("INIT-ACCREG", "reduce into lanes that were not reset, or that idle disturbed", "reduce_cmd")
    return held


def _keep(ins, data, held):
    ins.program.accumulator["vector"] = ins.program.accumulator["vector"].with_part(data.partition, held)


def accumulate(ins, command, kind, data, value, initial=None):
    """The lanes after one instruction, or None when idle disturbs them."""
    if command is cmd.idle:
        ins.program.accumulator["vector"] = UNDEFINED
        return None
    held = _start(ins, command, kind, data, initial)
    with np.errstate(all="ignore"):
        held = alu.ARITHMETIC[kind](held, alu.reduce_float32(kind, value))
    _keep(ins, data, held)
    return held


def _command(ins, command, allowed):
    if command not in allowed:
        ins.fail("OP-ARG", f"{command!r}; allowed: {', '.join(c.name for c in allowed)}", "reduce_cmd")


def _read_out(ins, held, reduce_res, lanes, negate=False):
    if reduce_res is None:
        return
    tile = _result(ins, reduce_res, lanes)
    if held is None:
        ins.fail("HAZ-IDLE", "reduce_res with reduce_cmd.idle", "reduce_res")
    ins.put("reduce_res", tile, -held if negate else held)


def tensor_scalar_reduce(
    dst,
    data,
    op0,
    operand0,
    reduce_op,
    reduce_res=None,
    reverse0=False,
    reduce_cmd=cmd.reset_reduce,
    reduce_init=None,
    reduce_res_negate=False,
    name=None,
):
    """dst = data op0 operand0, and the accumulator reduces the float32 result over all free dimensions."""
    ins = Instr("nisa.tensor_scalar_reduce")
    dst, data = ins.tile("dst", dst), ins.tile("data", data)
    ins.match(("dst", dst), ("data", data))
    kind = operator(ins, "op0", op0, (*alu.ARITHMETIC, "abs"))
    fold = operator(ins, "reduce_op", reduce_op, ("add", "multiply", "maximum", "minimum"))
    _command(ins, reduce_cmd, (cmd.reset_reduce, cmd.reduce, cmd.load_reduce))
    if reverse0:
        ins.fail("OP-ARG", "reverse0 is not supported", "reverse0")
    if (reduce_init is not None) != (reduce_cmd is cmd.load_reduce):
        ins.fail("OP-ARG", "reduce_init goes with load_reduce", "reduce_init")
    value = ins.f32("data", data)
    with np.errstate(all="ignore"):
        value = np.abs(value) if kind == "abs" else alu.ARITHMETIC[kind](value, ins.column("operand0", operand0, data))
    initial = None if reduce_init is None else ins.column("reduce_init", reduce_init, data)
    ins.put("dst", dst, value)
    held = accumulate(ins, reduce_cmd, fold, data, value, initial)
    _read_out(ins, held, reduce_res, data.shape[0], reduce_res_negate)
    ins.finish("vector", vector_busy(data.size // data.shape[0]))


def tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1=None, reduce_cmd=cmd.reset_reduce, name=None):
    """reg = op1(op0(src[i], imm0), reg); dst[i] = reg, over the flattened free dimensions."""
    ins = Instr("nisa.tensor_scalar_cumulative")
    dst, src = ins.tile("dst", dst), ins.tile("src", src)
    ins.match(("dst", dst), ("src", src))
    for role, t in (("dst", dst), ("src", src)):
        ins.dtype(role, t, SMALL)
    first = alu.ARITHMETIC[operator(ins, "op0", op0, alu.ARITHMETIC)]
    kind = operator(ins, "op1", op1, ("add", "subtract", "multiply", "maximum", "minimum"))
    _command(ins, reduce_cmd, (cmd.reset_reduce, cmd.reduce, cmd.load_reduce))
    if (imm1 is not None) != (reduce_cmd is cmd.load_reduce):
        ins.fail("OP-ARG", "imm1 goes with load_reduce", "imm1")
    x = first(ins.f32("src", src), ins.column("imm0", imm0, src))
    initial = None if imm1 is None else ins.column("imm1", imm1, src)
    state, result = _start(ins, reduce_cmd, kind, src, initial), np.empty_like(x)
    for i in range(x.shape[1]):
        state = alu.ARITHMETIC[kind](x[:, i], state)
        result[:, i] = state
    _keep(ins, src, state)
    ins.put("dst", dst, result)
    ins.finish("vector", vector_busy(src.size // src.shape[0]))


def range_select(
    dst,
    on_true_tile,
    comp_op0,
    comp_op1,
    bound0,
    bound1,
    reduce_cmd=cmd.reset_reduce,
    reduce_res=None,
    reduce_op=maximum,
    range_start=0,
    on_false_value=FP32_MIN,
    name=None,
):
    """Keep on_true where cmp0(range_start + i, bound0) and cmp1(range_start + i, bound1); else FP32_MIN, then the cast."""
    ins = Instr("nisa.range_select")
    dst, tile = ins.tile("dst", dst), ins.tile("on_true_tile", on_true_tile)
    ins.match(("dst", dst), ("on_true_tile", tile))
    ins.dtype("on_true_tile", tile, FLOAT_DTYPES)
    compares = ("equal", "less", "less_equal", "greater", "greater_equal")
    c0, c1 = (alu.ARITHMETIC[operator(ins, r, o, compares)] for r, o in (("comp_op0", comp_op0), ("comp_op1", comp_op1)))
    operator(ins, "reduce_op", reduce_op, ("maximum",))
    _command(ins, reduce_cmd, (cmd.reset_reduce, cmd.reduce, cmd.idle))
    count = tile.size // tile.shape[0]
    if not isinstance(range_start, int) or range_start + count > EXACT_INT or range_start < -EXACT_INT:
        ins.fail("NUM-INT24", f"range_start {range_start} plus {count} exceeds 2**24", "range_start")
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        ins.fail("OP-ARG", f"{on_false_value}: only {FP32_MIN}", "on_false_value")
    for role, bound in (("bound0", bound0), ("bound1", bound1)):
        if isinstance(bound, NUMBERS):
            ins.fail("OP-ARG", "a bound is a (P, 1) tile", role)
    index = np.float32(range_start) + np.arange(count, dtype=np.float32)[None]
    keep = c0(index, ins.column("bound0", bound0, tile)) * c1(index, ins.column("bound1", bound1, tile))
    _select(ins, dst, tile, np.where(keep != 0, ins.f32("on_true_tile", tile), np.float32(FP32_MIN)), reduce_cmd, reduce_res)


def _select(ins, dst, tile, value, command, reduce_res):
    ins.put("dst", dst, value)
    held = accumulate(ins, command, "maximum", tile, value)
    _read_out(ins, held, reduce_res, value.shape[0])
    ins.finish("vector", vector_busy(value.shape[1], 2.0))


def select_reduce(
    dst,
    predicate,
    on_true,
    on_false,
    reduce_res=None,
    reduce_cmd=cmd.idle,
    reduce_op=maximum,
    reverse_pred=False,
    name=None,
):
    """dst = on_true where the predicate holds, else on_false (immediate or (P, 1) float32); optional max."""
    ins = Instr("nisa.select_reduce")
    dst, predicate, tile = ins.tile("dst", dst), ins.tile("predicate", predicate), ins.tile("on_true", on_true)
    ins.match(("dst", dst), ("predicate", predicate), ("on_true", tile))
    ins.dtype("predicate", predicate, ("int8", "uint8", "int16", "uint16"), "TYPE-PREDICATE")
    if tile.dtype in ("int32", "uint32", "tfloat32"):
        ins.fail("TYPE-SELECT", f"{tile.dtype}", "on_true")
    ins.not_both_psum(("predicate", predicate), ("on_true", tile))
    operator(ins, "reduce_op", reduce_op, ("maximum",))
    _command(ins, reduce_cmd, (cmd.idle, cmd.reset_reduce, cmd.reduce))
    keep = (ins.raw("predicate", predicate).reshape(dst.shape[0], -1) != 0) != bool(reverse_pred)
    other = ins.column("on_false", on_false, tile)
    _select(ins, dst, tile, np.where(keep, ins.f32("on_true", tile), other), reduce_cmd, reduce_res)


def bn_stats(dst, data, name=None):
    """(count, mean, variance * count) of the even elements, then of the odd ones, per partition."""
    ins = Instr("nisa.bn_stats")
    dst, data = ins.tile("dst", dst), ins.tile("data", data)
    n = data.size // data.shape[0]
    if n > 512:
        ins.fail("MEM-RANGE", f"{n} elements per partition; at most 512", "data")
    if dst.shape[0] != data.shape[0] or dst.size != 6 * dst.shape[0]:
        ins.fail("MEM-SHAPE", f"dst {dst.shape}: 6 elements per partition", "dst")
    x, out = ins.f32("data", data).astype(np.float64), []
    for part in (x[:, 0::2], x[:, 1::2]):
        count = part.shape[1]
        mean = part.mean(axis=1) if count else np.zeros(len(x))
        out += [np.full(len(x), float(count)), mean, ((part - mean[:, None]) ** 2).sum(axis=1)]
    ins.put("dst", dst, np.stack(out, axis=1).astype(np.float32))
    ins.finish("vector", vector_busy(n))


def bn_aggr(dst, data, name=None):
    """Mean and variance per partition from (count, mean, variance * count) triples."""
    ins = Instr("nisa.bn_aggr")
    dst, data = ins.tile("dst", dst), ins.tile("data", data)
    n = data.size // data.shape[0]
    if n % 3 or dst.shape[0] != data.shape[0] or dst.size != 2 * dst.shape[0]:
        ins.fail("MEM-SHAPE", f"dst {dst.shape} (2 per partition) for data {data.shape} (a multiple of 3)", "data")
    t = ins.f32("data", data).astype(np.float64).reshape(len(data), -1, 3)
    total = t[..., 0].sum(axis=1)
    mean = (t[..., 0] * t[..., 1]).sum(axis=1) / total
    spread = (t[..., 2] + t[..., 0] * (t[..., 1] - mean[:, None]) ** 2).sum(axis=1) / total
    ins.put("dst", dst, np.stack([mean, spread], axis=1).astype(np.float32))
    ins.finish("vector", vector_busy(n))
