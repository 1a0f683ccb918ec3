# SPDX-License-Identifier: Apache-2.0
"""The e2m1 round trips: index queries and keys with power-of-two scales, compressed rows with e4m3 scales (docs/model.md 2).

Rounding to e2m1 adds and subtracts a number: with m = 1.5 * 2^22 * max(2^floor(log2 |v|), 1), v + m keeps one significant bit below the
leading one and none below a half, rounded to nearest even, which is e2m1's rounding and its ties; v's sign is put back, since -0 is a code.
"""

from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, converted, loaded, power_above, power_inverse, spread
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics

INDEX_BLOCK, KV_BLOCK = 32, 16
TOP = 6.0  # the largest e2m1
SMALLEST_INDEX, SMALLEST_KV = TOP * 2.0**-126, TOP * 2.0**-9
WIDEST = 2048  # columns of one step


@nki.jit
def index_trip(x, width):
    """x (rows, n) through the index round trip, groups of 32: s = P2(max(amax, 6 * 2^-126) / 6), y = e2m1(x / s) * s. width: columns of a lane."""
    return trips(x, width, INDEX_BLOCK, 0.0)


@nki.jit
def kv_trip(x, width, limit):
    """x (rows, n) through the round trip of compressed rows, groups of 16: s = e4m3(min(max(amax, 6 * 2^-9) / 6, limit)), y = e2m1(x * (1 / s)) * s."""
    return trips(x, width, KV_BLOCK, limit)


def trips(x, width, size, limit):
    """Pieces of `width` columns, a lane each, shared among the cores; a limit of 0 means power-of-two scales."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    mine = x.shape[0] * x.shape[1] // width // nl.num_programs(0)
    start = nl.program_id(0) * mine
    for first in range(start, start + mine, P):
        lanes = min(P, start + mine - first)
        view = [[width, lanes], [1, width]]
        t = loaded(x.ap(view, offset=first * width), (lanes, width // size, size), x.dtype)
        nisa.dma_copy(dst=out.ap(view, offset=first * width), src=trip(t, lanes, width // size, size, limit))
    return out


def trip(x, lanes, blocks, size, limit):
    """The round trip of a tile (lanes, blocks, size), in its dtype: exact but for the rounding to e2m1 (and to e4m3)."""
    magnitude = nl.ndarray((lanes, blocks, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=magnitude, data=x, op0=nl.abs, operand0=None)
    top = nl.ndarray((lanes, blocks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=magnitude, axis=2)
    smallest = SMALLEST_KV if limit > 0 else SMALLEST_INDEX
    nisa.tensor_scalar(dst=top, data=top, op0=nl.maximum, operand0=smallest, op1=nl.multiply, operand1=1.0 / TOP)
    if limit > 0:
        code = nl.ndarray((lanes, blocks), dtype=nl.float8_e4m3, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=code, data=top, op0=nl.minimum, operand0=limit)
        scale = converted(code, nl.float32)
        inverse = nl.ndarray((lanes, blocks), dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=inverse, data=scale)
    else:
        scale = power_above(top, lanes, blocks)
        inverse = power_inverse(scale, lanes, blocks, nl.float32)
    v = nl.ndarray((lanes, blocks, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=v, data1=x, data2=spread(inverse, lanes, blocks, size), op=nl.multiply)
    nisa.tensor_scalar(dst=v, data=v, op0=nl.minimum, operand0=TOP, op1=nl.maximum, operand1=-TOP)
    y = nl.ndarray((lanes, blocks, size), dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=y, data1=e2m1(v, lanes, blocks, size), data2=spread(scale, lanes, blocks, size), op=nl.multiply)
    return y


def e2m1(v, lanes, blocks, size):
    """The nearest e2m1 value of each of v (float32, -6 .. 6), ties to the even code, -0 kept."""
    step = nl.ndarray((lanes, blocks, size), dtype=nl.int32, buffer=nl.sbuf)
    sign = nl.ndarray((lanes, blocks, size), dtype=nl.int32, buffer=nl.sbuf)
    bits = v.view(nl.int32)
    nisa.tensor_scalar(dst=sign, data=bits, op0=nl.right_shift, operand0=31, op1=nl.left_shift, operand1=31)
    # The exponent field alone: the sign falls off to the left, the mantissa to the right.
    nisa.tensor_scalar(dst=step, data=bits, op0=nl.left_shift, operand0=1, op1=nl.right_shift, operand1=24)
    nisa.tensor_scalar(dst=step, data=step, op0=nl.left_shift, operand0=23)
    m = nl.ndarray((lanes, blocks, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=m, data=step.view(nl.float32), op0=nl.maximum, operand0=1.0, op1=nl.multiply, operand1=1.5 * 2.0**22)
    q = nl.ndarray((lanes, blocks, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=q, data1=v, data2=m, op=nl.add)
    nisa.tensor_tensor(dst=q, data1=q, data2=m, op=nl.subtract)
    # 0 - 0.25 + 0.25 is +0: q has v's sign or none, so that or-ing the sign in is exact.
    signed = nl.ndarray((lanes, blocks, size), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=signed, data1=q.view(nl.int32), data2=sign, op=nl.bitwise_or)
    return signed.view(nl.float32)


def width_of(rows: int, n: int, size: int) -> int:
    """Columns of a lane: n, halved to whole groups while few rows leave lanes idle or it is above 2048."""
    width = n
    while width % (2 * size) == 0 and (width > WIDEST or (width > 2 * size and 2 * rows * (n // width) <= 2 * P)):
        width = width // 2
    return width


def _round(name: str, run: Run, kernel: Any, x: Tensor, size: int, *limit: float) -> Tensor:
    if x.dtype != torch.bfloat16 or x.shape[-1] % size:
        raise ValueError(f"{name}: x is {x.dtype} with {x.shape[-1]} columns; the kernel takes torch.bfloat16 and a multiple of {size}")
    if x.numel() == 0:
        return x
    flat = dense(x, -1, x.shape[-1])
    width = width_of(flat.shape[0], flat.shape[1], size)
    return run(kernel, 2 if flat.numel() // width % 2 == 0 else 1, flat, width, *limit).view(x.shape)


def index_round(run: Run, x: Tensor, numerics: Numerics) -> Tensor:
    """As `v41.spec.ops.quant.index_round` in `faithful` and `trn2`, bit for bit: x (*rows, n) in bfloat16, n a multiple of 32."""
    return _round("index_round", run, index_trip, x, INDEX_BLOCK)


def kv_round(run: Run, x: Tensor, numerics: Numerics) -> Tensor:
    """As `v41.spec.ops.quant.kv_round` in `trn2`, bit for bit: x (*rows, n) in bfloat16, n a multiple of 16."""
    if not numerics.device:
        raise ValueError(f"kv_round: regime {numerics.regime!r}; the kernel computes trn2, whose scale is a product with fp32(1/6) and a reciprocal")
    return _round("kv_round", run, kv_trip, x, KV_BLOCK, numerics.e4m3_max)
