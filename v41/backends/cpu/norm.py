# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in place."""

import torch
from torch import Tensor

from v41.spec.ops import norm as spec
from v41.spec.types import BF16, Act


def rms_norm(x: Act[Tensor, "*rows n"], weight: BF16[Tensor, "n"], eps: float) -> Act[Tensor, "*rows n"]:
    if x.dtype == torch.float64:
        return spec.rms_norm(x, weight, eps)
    y = x.to(torch.float32)
    y = y * y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return y.mul_(weight).to(x.dtype)
