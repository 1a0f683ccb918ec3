# SPDX-License-Identifier: Apache-2.0
"""Cases of index scores, selection and candidate blocks, as data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from v41.spec.numerics import Numerics

BF16, F32 = torch.bfloat16, torch.float32
NUMERICS = {BF16: Numerics("trn2"), F32: Numerics("exact")}

# (b, s, heads, d, t, dtype)
SCORES = (
    (1, 6, 4, 128, 2049, BF16),
    (1, 6, 32, 128, 1025, BF16),
    (1, 6, 32, 128, 300, F32),
    (2, 3, 4, 32, 13, BF16),
    (1, 64, 4, 128, 300, BF16),
    (2, 2, 16, 24, 2048, F32),
    (1, 1, 1, 8, 1, BF16),
)
SCORES_FULL = (
    (1, 6, 4, 128, 16385, BF16),
    (1, 6, 32, 128, 16385, BF16),
    (1, 64, 32, 128, 2049, BF16),
    (1, 6, 4, 128, 140001, BF16),
    (1, 2, 32, 128, 40001, BF16),
)


def drawn(kind: str, rows: int, t: int, dtype: torch.dtype) -> Tensor:
    """Scores (rows, t) of one kind."""
    x = torch.randn(rows, t, generator=torch.Generator().manual_seed(rows + t))
    if kind == "ties":
        x = (x * 2).round() / 2
    if kind == "equal":
        x = torch.full((rows, t), -3.0)
    if kind == "nothing":
        x = torch.full((rows, t), -torch.inf)
    if kind == "zeros":
        x = torch.where(x > 0.4, 0.0, -0.0)
    if kind == "negative":
        x = -x.abs() - 1
    if kind == "mostly -inf":
        x = torch.where(x > 1, x, -torch.inf)
    if kind == "extremes":
        ends = torch.tensor(
            [torch.finfo(BF16).max, -torch.finfo(BF16).max, torch.finfo(BF16).tiny, -torch.finfo(BF16).tiny, 0.0, -torch.inf, torch.inf, 2.0**-133]
        )
        x = ends[(x * 1000).long() % 8]
    if kind == "neighbors":
        x = (torch.tensor(0x40490FDB) + (x * 3).to(torch.int32)).to(torch.int32).view(torch.float32)
        x[:, ::2] *= -1
    return x.to(dtype)


KINDS = ("normal", "ties", "equal", "nothing", "zeros", "negative", "mostly -inf", "extremes", "neighbors")


@dataclass(frozen=True)
class Choice:
    """Scores (b, s, t) of a kind, k to choose; visible runs through the edges. masked: what a query does not see is -infinity."""

    b: int
    s: int
    t: int
    k: int
    dtype: torch.dtype
    kind: str = "normal"
    masked: bool = True

    def args(self) -> tuple[Tensor, Tensor]:
        scores = drawn(self.kind, self.b * self.s, self.t, self.dtype).view(self.b, self.s, self.t)
        edges = torch.tensor([self.t - 1, self.t, self.t // 2, min(self.k, self.t), 1, 0], dtype=torch.int32)
        visible = edges.repeat(self.b * self.s)[: self.b * self.s].view(self.b, self.s)
        if self.masked:
            scores = torch.where(torch.arange(self.t) < visible[..., None], scores, -torch.inf)
        return scores, visible


CHOICES = (
    *(Choice(1, 6, 300, 32, dtype, kind, masked) for kind in KINDS for dtype in (BF16, F32) for masked in (True, False)),
    Choice(1, 6, 1025, 512, BF16),
    Choice(2, 3, 100, 16, F32, "ties"),
    Choice(1, 1, 257, 130, BF16, "ties"),
    Choice(1, 1, 7, 16, F32),
    Choice(1, 1, 1, 1, BF16),
    Choice(1, 2, 5000, 1, BF16, "ties"),
    Choice(1, 9, 70, 69, BF16, "ties", False),
    Choice(1, 6, 16385, 512, BF16),
)
CHOICES_FULL = (Choice(1, 6, 16385, 512, F32), Choice(1, 64, 4097, 512, BF16, "ties"), Choice(1, 2, 70001, 512, BF16, "ties"), Choice(1, 6, 140001, 512, BF16))
# (choice, rows of a block)
BLOCKS = (
    *((Choice(1, 6, 320, 5, dtype, kind), 8) for kind in KINDS for dtype in (BF16, F32)),
    (Choice(1, 6, 300, 400, BF16, "ties"), 8),
    (Choice(2, 3, 101, 6, F32, "ties"), 4),
    (Choice(1, 1, 33, 3, BF16), 3),
    (Choice(1, 6, 4097, 300, BF16), 8),
)
BLOCKS_FULL = ((Choice(1, 6, 16385, 2048, BF16), 8), (Choice(1, 6, 140001, 2048, BF16, "ties"), 8))
