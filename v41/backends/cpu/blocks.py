# SPDX-License-Identifier: Apache-2.0
"""The spec as the released kernels evaluate it, to measure against: weights dequantized at every call, and products of quantized operands
summed block by block of 32 columns with a running sum in float32 (docs/performance.md 1).

Only experts that some row chose are computed, on their rows, as in the release.
"""

import torch
from torch import Tensor

from v41.backends.cpu.moe import own_experts
from v41.spec.backend import Backend
from v41.spec.numerics import Numerics
from v41.spec.ops.experts import expert_weight, swiglu
from v41.spec.ops.quant import BLOCK, act_round, dequantize
from v41.spec.table import Fp4Like, Fp8Like
from v41.spec.types import I32, Act, Wide

TOGETHER = 1 << 24  # partial sums that are held at once


def blockwise(x: Act[Tensor, "n in"], w: Wide[Tensor, "out in"], numerics: Numerics) -> Wide[Tensor, "n out"]:
    """The sum of x_k @ w_k.T over blocks k of 32 columns, in increasing order."""
    rows = act_round(x, numerics) if numerics.rounds else x
    rows = rows.to(numerics.wide).unflatten(-1, (-1, BLOCK)).transpose(0, 1)
    step = max(TOGETHER // max(rows.shape[0] * rows.shape[1], 1), BLOCK)
    return torch.cat([in_blocks(rows, part) for part in w.split(step)], 1)


def in_blocks(rows: Wide[Tensor, "blocks n 32"], w: Wide[Tensor, "out in"]) -> Wide[Tensor, "n out"]:
    parts = torch.bmm(rows, w.unflatten(-1, (-1, BLOCK)).permute(1, 2, 0))
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def partial_linear(x: Act[Tensor, "*rows in"], w: Fp8Like, numerics: Numerics) -> Wide[Tensor, "*rows out"]:
    return blockwise(x.flatten(0, -2), dequantize(w, numerics.wide), numerics).unflatten(0, x.shape[:-1])


def linear(x: Act[Tensor, "*rows in"], w: Fp8Like, numerics: Numerics) -> Act[Tensor, "*rows out"]:
    return partial_linear(x, w, numerics).to(x.dtype)


def shared_expert(x: Act[Tensor, "n dim"], w1: Fp8Like, w2: Fp8Like, w3: Fp8Like, *, limit: float, numerics: Numerics) -> Act[Tensor, "n dim"]:
    hidden = swiglu(linear(x, w3, numerics), linear(x, w1, numerics), limit, numerics)
    return linear(hidden.to(x.dtype), w2, numerics)


def experts(
    x: Act[Tensor, "n dim"], weights: Wide[Tensor, "n k"], ids: I32[Tensor, "n k"], w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, *, limit: float, numerics: Numerics
) -> Wide[Tensor, "n dim"]:
    total = torch.zeros(x.shape, dtype=numerics.wide, device=x.device)
    for e in own_experts(ids, w1):
        row, column = (ids == e).nonzero(as_tuple=True)
        gate, up = (blockwise(x[row], expert_weight(w, e, numerics), numerics).to(x.dtype) for w in (w1, w3))
        hidden = (weights[row, column, None] * swiglu(up, gate, limit, numerics)).to(x.dtype)
        total[row] += blockwise(hidden, expert_weight(w2, e, numerics), numerics).to(x.dtype).to(total.dtype)
    return total


backend = Backend("blocks", linear=linear, partial_linear=partial_linear, shared_expert=shared_expert, experts=experts)
