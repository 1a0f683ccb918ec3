# SPDX-License-Identifier: Apache-2.0
"""RMSNorm (docs/model.md 3)."""

import torch
from torch import Tensor

from v41.spec.types import BF16, Act


def wide(x: Tensor) -> Tensor:
    """x in the dtype that sums run in: float64 stays, all else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Act[Tensor, "*rows n"], weight: BF16[Tensor, "n"], eps: float) -> Act[Tensor, "*rows n"]:
    """x * rsqrt(mean(x^2) + eps) * weight in fp32, rounded once to x's dtype; a row of zeros gives zeros."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight.to(y.dtype) * y).to(x.dtype)
