# SPDX-License-Identifier: Apache-2.0
"""Cases of the hyper-connection kernels, as data."""

from dataclasses import dataclass

import torch
from cases_rows import BF16, F32, normal
from torch import Tensor


@dataclass(frozen=True)
class Stream:
    """tokens x copies x dim in dtype; scale multiplies the stream, spread the logits of the mixes."""

    tokens: int
    dim: int
    dtype: torch.dtype
    copies: int = 4
    scale: float = 1.0
    spread: float = 1.0

    def stream(self) -> Tensor:
        h = normal(1, self.tokens, self.copies, self.dim) * self.scale
        h[:, -1] = 0  # a row of zeros
        return h.to(self.dtype)

    def x(self) -> Tensor:
        return (normal(1, self.tokens, self.dim, seed=1) * self.scale).to(self.dtype)

    def coefficients(self) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post, comb with values of every size, one of them 0."""
        n, c = self.tokens, self.copies
        pre, post, comb = (torch.rand(1, n, *s, generator=torch.Generator().manual_seed(2)) ** 3 for s in ((c,), (c,), (c, c)))
        pre[0, 0, 0] = comb[0, 0, 0, 0] = 0
        return pre, 2 * post, comb

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """fn, scale, base of hc_mixes."""
        count = (2 + self.copies) * self.copies
        fn = normal(count, self.copies * self.dim, seed=3) * (self.copies * self.dim) ** -0.5
        return fn, normal(3, seed=4) * self.spread, normal(count, seed=5) * self.spread


COMBINED = (
    Stream(6, 5120, BF16),
    Stream(6, 5120, F32),
    Stream(1, 5120, BF16),
    Stream(7, 64, BF16, scale=1e30),
    Stream(70, 192, BF16),
    Stream(33, 10, F32),
    Stream(5, 2, BF16),
    Stream(9, 96, BF16, copies=2, scale=1e-30),
)
MIXED = (
    Stream(6, 5120, BF16),
    Stream(1, 96, F32),
    Stream(7, 64, BF16, scale=1e12),
    Stream(32, 40, F32, spread=30.0),
    Stream(33, 40, BF16, spread=30.0),
    Stream(70, 40, F32, scale=1e-6),
    Stream(130, 64, BF16),
    Stream(5, 64, BF16, copies=2),
    Stream(32, 8192, F32, copies=1),
)
