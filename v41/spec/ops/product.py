# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, and the order of their sums (docs/numerics.md 4)."""

import torch
from torch import Tensor
from torch.nn import functional

from v41.spec.numerics import Numerics
from v41.spec.types import Act, Wide

ROWS = 4  # a BLAS takes another path for fewer rows, with other last bits
BLOCK = 32  # columns that the release's quantized products sum before they scale


def product(x: Act[Tensor, "*n rows in"], w: Act[Tensor, "*n out in"], numerics: Numerics) -> Wide[Tensor, "*n rows out"]:
    """x @ w.T of operands in fp32 (fp64 in `exact` float64), summed in that dtype and not rounded.

    Rows are padded to a multiple of 4, so that a row's bits do not depend on how many there are. In `released` the terms are added one
    after the other, which is what the released run's bfloat16 products did, on any CPU.
    """
    x, w = x.to(numerics.wide), w.to(numerics.wide)
    return in_order(x, w) if numerics.compact else padded(x, w)


def padded(x: Wide[Tensor, "*n rows in"], w: Wide[Tensor, "*n out in"]) -> Wide[Tensor, "*n rows out"]:
    """x @ w.T by the BLAS, with at least 4 rows."""
    rows = x.shape[-2]
    return (functional.pad(x, (0, 0, 0, -rows % ROWS)) @ w.transpose(-1, -2))[..., :rows, :]


def in_order(x: Wide[Tensor, "*n rows in"], w: Wide[Tensor, "*n out in"]) -> Wide[Tensor, "*n rows out"]:
    """x @ w.T, terms added in increasing order."""
    columns, total = w.transpose(-1, -2), x.new_zeros((*x.shape[:-1], w.shape[-2]))
    for k in range(x.shape[-1]):
        total = total + x[..., k : k + 1] * columns[..., k : k + 1, :]
    return total


def block_product(x: Act[Tensor, "rows in"], w: Act[Tensor, "out in"], numerics: Numerics) -> Wide[Tensor, "rows out"]:
    """The product of dequantized fp8 or fp4 operands; in `released` block by block of 32 columns, the running sum in fp32, as its kernels do.

    A block's sum of products of 4-bit significands is taken in fp64 and rounded once: in fp32 it is exact but for extreme ranges.
    """
    if not numerics.compact:
        return product(x, w, numerics)
    a, b = x.double().unflatten(-1, (-1, BLOCK)).transpose(0, 1), w.double().unflatten(-1, (-1, BLOCK)).permute(1, 2, 0)
    total = torch.zeros((x.shape[0], w.shape[0]), dtype=torch.float32, device=x.device)
    for part in (a @ b).float():
        total = total + part
    return total
