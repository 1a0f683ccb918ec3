# SPDX-License-Identifier: Apache-2.0
"""ScalarE: activation with scale, bias and an accumulated sum."""

import numpy as np

from v41.backends.neuron.sim import alu
from v41.backends.neuron.sim.cost import scalar_busy
from v41.backends.neuron.sim.dtypes import FLOAT_DTYPES
from v41.backends.neuron.sim.enums import reduce_cmd as cmd
from v41.backends.neuron.sim.instr import Instr

BIAS = tuple(d for d in FLOAT_DTYPES if d not in ("tfloat32", "float8_e4m3fn", "float8_e8m0fnu"))
ACCUMULATOR_READ = 64 / 1.2e3


def activation(
    dst,
    op,
    data,
    bias=None,
    scale=1.0,
    reduce_op=None,
    reduce_res=None,
    reduce_cmd=cmd.idle,
    name=None,
):
    """dst = op(data * scale + bias); the per-lane sum of the float32 result goes to the engine's accumulator."""
    _activation("nisa.activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None):
    """activation with reduce_cmd.reset_reduce."""
    _activation("nisa.activation_reduce", dst, op, data, bias, scale, reduce_op, reduce_res, cmd.reset_reduce)


def _activation(call, dst, op, data, bias, scale, reduce_op, reduce_res, command):
    ins = Instr(call)
    dst, data = ins.tile("dst", dst), ins.tile("data", data)
    ins.match(("dst", dst), ("data", data))
    kind = alu.canonical(op)
    if kind not in alu.ACTIVATIONS:
        ins.fail("OP-ALU", f"{getattr(op, 'name', op)!r} is no activation function of trn2 here", "op")
    x = ins.f32("data", data)
    with np.errstate(all="ignore"):
        x = x * ins.column("scale", scale, data)
        if bias is not None:
            x = x + ins.column("bias", bias, data, BIAS)
        bad = alu.outside(kind, x)
        if bad.any():
            ins.fail("NUM-RANGE", f"{kind} of {x[bad][0]:g}; valid: {alu.ACTIVATIONS[kind][1]}", "data")
        value = alu.ACTIVATIONS[kind][0](x.astype(np.float64)).astype(np.float32)
    ins.put("dst", dst, value)
    _accumulate(ins, data, value, reduce_op, reduce_res, command)
    extra = ACCUMULATOR_READ if reduce_res is not None else 0.0
    ins.finish("scalar", scalar_busy(data.size // data.shape[0]) + extra)


def _accumulate(ins, data, value, reduce_op, reduce_res, command):
    if command not in (cmd.idle, cmd.reset, cmd.reduce, cmd.reset_reduce):
        ins.fail("OP-ARG", f"{command!r}", "reduce_cmd")
    adds = command in (cmd.reduce, cmd.reset_reduce)
    if adds and alu.canonical(reduce_op) != "add":
        ins.fail("OP-ALU", f"{getattr(reduce_op, 'name', reduce_op)!r}; only nl.add", "reduce_op")
    lanes, first = data.shape[0], data.partition
    registers = ins.program.accumulator["scalar"]
    if command in (cmd.reset, cmd.reset_reduce):
        registers = registers.with_part(first, np.zeros(lanes, np.float32))
    held = registers.part(first, lanes)
    if held is None and (adds or reduce_res is not None):
        ins.fail("INIT-ACCREG", "the accumulator of these lanes was never reset", "reduce_cmd")
    if adds:
        held = held + alu.reduce_float32("add", value)
        registers = registers.with_part(first, held)
    ins.program.accumulator["scalar"] = registers
    if reduce_res is None:
        return
    result = ins.tile("reduce_res", reduce_res)
    if result.shape[0] != lanes or result.size != lanes:
        ins.fail("TYPE-ROW", f"{result.shape}: ({lanes}, 1)", "reduce_res")
    ins.put("reduce_res", result, held)
