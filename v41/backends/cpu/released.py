# SPDX-License-Identifier: Apache-2.0
"""Products in the order of the regime `released` (v41/spec/ops/product.py), without its tables.

Terms are exact in float32: an activation has up to 8 significant bits, a weight up to 8.
"""

import torch
from torch import Tensor

from v41.backends.cpu.product import full_rows
from v41.backends.cpu.round import EXPONENT, MANTISSA
from v41.backends.cpu.widen import Matrix, plain, room, sizes, widen
from v41.spec.ops.quant import BLOCK
from v41.spec.table import Fp4, Fp4Like, Fp8Like
from v41.spec.types import F32, Flag

HELD = 1 << 21  # partial sums that are float64 at once
TOGETHER = 128  # rows of them
EXACT = 0.99 * 2.0**24 / 12  # a block of fp4 weights has values of up to 12 times the lowest bit of one
SCALES, LARGEST, LOWEST = (127 - 60, 127 + 60), 2.0**50, 2.0**-80  # bytes and numbers between which no product over- or underflows


def values(w: Fp8Like | Fp4Like | Matrix) -> F32[Tensor, "out in"]:
    """The whole matrix in float32."""
    matrix = plain(w)
    rows, columns = sizes(matrix)
    out = room(rows, columns, torch.device("cpu"))
    widen(matrix, out)
    return out


def in_blocks(x: F32[Tensor, "m in"], *weights: Fp8Like | Fp4Like | Matrix) -> F32[Tensor, "m out"]:
    """`block_product` of rounded activations with each weight, side by side: a block's sum is exact and rounded once, then added in float32."""
    exact = exact_blocks(x) if any(isinstance(w, Fp4) for w in weights) else None
    found = []
    for w in weights:
        if isinstance(w, Fp4) and exact is not None and moderate(w):
            found.append(single_blocks(x, values(w), exact))
        else:
            found.append(double_blocks(x, values(w)))
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def moderate(w: Fp4) -> bool:
    """Whether all scales lie within 2^-60 and 2^60."""
    least, most = w.scale.view(torch.uint8).aminmax()
    return SCALES[0] <= int(least) and int(most) <= SCALES[1]


def exact_blocks(x: F32[Tensor, "m in"]) -> Flag[Tensor, "m blocks"]:
    """Where a block's sum with any fp4 values is exact in float32, in any order: it stays below 2^24 times the lowest bit of its terms."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    bits = blocks.view(torch.int32)
    significand = (bits & MANTISSA) | (MANTISSA + 1)
    lowest = (significand & -significand).to(torch.float32).mul_((bits & EXPONENT).view(torch.float32)).mul_(2.0**-23)
    lowest = torch.where(blocks == 0, torch.inf, lowest).amin(-1)
    total = blocks.abs().sum(-1)
    return (total <= EXACT * lowest) & (total <= LARGEST) & (lowest >= LOWEST)


def single_blocks(x: F32[Tensor, "m in"], w: F32[Tensor, "out in"], exact: Flag[Tensor, "m blocks"]) -> F32[Tensor, "m out"]:
    """Each block's product is added in float32 to the sum of those before it; the few blocks that are not exact are taken in float64."""
    rows = full_rows((x.unflatten(-1, (-1, BLOCK)) * exact[..., None]).flatten(1))
    total = torch.zeros((len(rows), len(w)), dtype=torch.float32)
    inexact = (~exact).any(0).tolist()
    for k, a in enumerate(range(0, x.shape[1], BLOCK)):
        part = w[:, a : a + BLOCK]
        total.addmm_(rows[:, a : a + BLOCK], part.T)
        if inexact[k]:
            at = (~exact[:, k]).nonzero()[:, 0]
            total[at] += (x[at, a : a + BLOCK].double() @ part.double().T).to(torch.float32)
    return total[: len(x)]


def double_blocks(x: F32[Tensor, "m in"], w: F32[Tensor, "out in"]) -> F32[Tensor, "m out"]:
    """Each block's product in float64, where it is exact, for some rows and some outputs at once."""
    return torch.cat([torch.cat([some_blocks(rows, part) for part in w.split(outputs_of(rows))], 1) for rows in x.split(TOGETHER)])


def outputs_of(rows: F32[Tensor, "m in"]) -> int:
    """Outputs whose partial sums are held at once."""
    return max(HELD // max(rows.numel() // BLOCK, 1), BLOCK)


def some_blocks(x: F32[Tensor, "m in"], w: F32[Tensor, "out in"]) -> F32[Tensor, "m out"]:
    blocks = w.double().unflatten(-1, (-1, BLOCK)).permute(1, 2, 0)
    total = torch.zeros((len(x), len(w)), dtype=torch.float32)
    for block in torch.bmm(x.double().unflatten(-1, (-1, BLOCK)).transpose(0, 1), blocks):
        total += block.to(torch.float32)
    return total


def in_order(x: F32[Tensor, "*n rows in"], w: F32[Tensor, "*n out in"]) -> F32[Tensor, "*n rows out"]:
    """`in_order` of the spec: the terms are exact, so that one fused operation a column adds them with the same bits."""
    columns = w.transpose(-1, -2).contiguous()
    total = x.new_zeros((*x.shape[:-1], w.shape[-2]))
    for k in range(x.shape[-1]):
        total.addcmul_(x[..., k : k + 1], columns[..., k : k + 1, :])
    return total
