# SPDX-License-Identifier: Apache-2.0
"""Cases of the router kernel, as data."""

from dataclasses import dataclass

import torch
from cases_rows import BF16, F32, normal
from torch import Tensor


@dataclass(frozen=True)
class Router:
    """n rows of dim against `experts`, k chosen; `values` says how the numbers are made.

    random: normal ones. ties: small integers, whose dots are exact, few different ones. equal: all weights alike. far: logits up to +-300 and a
    bias that decides.
    """

    n: int
    dim: int
    experts: int
    k: int
    function: str
    dtype: torch.dtype
    values: str = "random"
    normalize: bool = True

    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        x, w, bias = normal(self.n, self.dim), normal(self.experts, self.dim, seed=1) * self.dim**-0.5, normal(self.experts, seed=2) * 0.1
        if self.values == "ties":
            x, w = x.round(), normal(self.experts // 4, self.dim, seed=1).clamp(-1, 1).round().repeat(4, 1)[torch.randperm(self.experts)]
            bias = (bias * 10).round() / 8
        if self.values == "equal":
            w, bias = torch.ones_like(w), torch.full_like(bias, 0.25)
        if self.values == "far":
            # Dots with a one are the weights of the first column.
            x = torch.zeros_like(x).index_fill(1, torch.tensor([0]), 1.0)
            w[:, 0] = torch.linspace(-300, 300, self.experts)
            bias = torch.arange(self.experts).flip(0).float() * 64
        return x.to(self.dtype), w.to(BF16), bias


GATES = (
    Router(6, 5120, 384, 6, "sqrtsoftplus", BF16),
    Router(6, 512, 128, 3, "sqrtsoftplus", F32),
    Router(1, 40, 8, 8, "sigmoid", BF16),
    Router(5, 256, 32, 1, "softmax", F32),
    Router(5, 96, 4, 2, "softmax", F32),
    Router(3, 64, 5, 5, "sqrtsoftplus", BF16),
    Router(130, 192, 24, 12, "sqrtsoftplus", BF16, normalize=False),
    Router(129, 128, 64, 6, "sigmoid", F32),
    Router(6, 96, 384, 6, "sqrtsoftplus", BF16, "ties"),
    Router(7, 12, 32, 20, "sigmoid", BF16, "ties"),
    Router(3, 64, 512, 9, "softmax", BF16, "equal"),
    Router(2, 64, 101, 6, "sqrtsoftplus", F32, "far"),
)
