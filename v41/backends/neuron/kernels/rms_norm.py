# SPDX-License-Identifier: Apache-2.0
"""RMSNorm: x * rsqrt(mean(x^2) + eps) * weight in float32, rounded once (docs/model.md 3)."""

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, loaded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl

NARROWEST, WIDEST = 128, 1024  # columns of a lane when a row is cut over lanes
MANY = 32  # rows from which both cores are started


@nki.jit
def norm(x, weight, parts, eps):
    """out (rows, n) of x (rows, n) and weight (1, n); a row lies on `parts` lanes, which divide n.

    for a tile of up to 128 / parts rows, shared among the cores:
        s = sum of squares of each lane (ScalarE); summed over the lanes of a row on one lane, where a row that is NaN stays apart
        r = rsqrt(mean + eps); out = x * r * weight
    """
    rows, n = x.shape
    width = n // parts
    out = nl.ndarray((rows, n), dtype=x.dtype, buffer=nl.shared_hbm)
    mine = rows // nl.num_programs(0)
    start = nl.program_id(0) * mine
    for first in range(start, start + mine, P // parts):
        count = min(P // parts, start + mine - first)
        lanes = count * parts
        t = loaded(x.ap([[width, lanes], [1, width]], offset=first * n), (lanes, width), x.dtype)
        gamma = loaded(weight.ap([[0, count], [1, n]]), (lanes, width), weight.dtype)
        mean = mean_square(t, lanes, width, parts, n)
        scale = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=scale, data=mean, op0=nl.add, operand0=eps)
        nisa.tensor_scalar(dst=scale, data=scale, op0=nl.rsqrt, operand0=0.0)
        y = nl.ndarray((lanes, width), dtype=x.dtype, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(dst=y, data=t, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=gamma)
        nisa.dma_copy(dst=out.ap([[width, lanes], [1, width]], offset=first * n), src=y)
    return out


def mean_square(t, lanes, width, parts, n):
    """(lanes, 1): the mean of squares of the row that each lane is part of."""
    squares = nl.ndarray((lanes, width), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(dst=squares, op=nl.square, data=t, reduce_op=nl.add, reduce_res=total)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=1.0 / n)
    return total if parts == 1 else over_groups(total, lanes, parts)


def over_groups(column, lanes, parts):
    """PSUM (lanes, 1): the sum of the `parts` neighboring lanes that each lane is one of. No product mixes rows, so that 0 * NaN has no place to occur."""
    row = nl.ndarray((1, lanes), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=row, data=column)
    sums = nl.ndarray((1, lanes // parts, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=row.reshape((1, lanes // parts, parts)), axis=2)
    spread = nl.ndarray((1, lanes // parts, parts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=spread, src=sums.broadcast(2, parts))
    one = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=one, value=1.0)
    ps = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=spread.reshape((1, lanes)), moving=one, accumulate=False)
    return ps


def parts_of(rows: int, n: int) -> int:
    """On how many lanes a row is cut: as many as few rows leave idle, with at least 128 columns each; of many rows as few as keep 1024 columns."""
    widths = [p for p in range(1, P + 1) if n % p == 0]
    few = [p for p in widths if p * rows <= P and n // p >= min(NARROWEST, n)]
    many = [p for p in widths if n // p <= WIDEST]
    return max(max(few, default=1), min(many, default=1))


def rms_norm(run: Run, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `v41.spec.ops.norm.rms_norm`: x (*rows, n) in bfloat16 or float32, weight (n) in bfloat16; a row of zeros gives zeros.

    Rounding: sums of squares in another order than torch's, rsqrt to the last place; out rounded once.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"rms_norm: x is {x.dtype}; the kernel takes torch.bfloat16 (trn2) and torch.float32 (exact)")
    flat = dense(x, -1, x.shape[-1])
    if flat.shape[0] == 0:
        return x
    rows = flat.shape[0]
    cores = 2 if rows % 2 == 0 and rows >= MANY else 1
    return run(norm, cores, flat, dense(weight, 1, -1), parts_of(rows // cores, flat.shape[1]), eps).view(x.shape)
