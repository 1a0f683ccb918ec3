# SPDX-License-Identifier: Apache-2.0
"""Cases of gathered attention, as data."""

from dataclasses import dataclass

import torch

from v41.spec.numerics import Numerics

BF16, F32 = torch.bfloat16, torch.float32
NUMERICS = {BF16: Numerics("trn2"), F32: Numerics("exact")}


@dataclass(frozen=True)
class Attention:
    """b sequences of s queries with `heads` heads of d; w of n window rows and k of t compressed rows listed; q is multiplied by `size`.

    The first query lacks half of its window, the second (where there is one) has no slot at all, the last lacks half of its selection.
    Rows that nobody lists are NaN.
    """

    b: int
    s: int
    heads: int
    d: int
    n: int
    w: int
    t: int
    k: int
    dtype: torch.dtype
    size: float = 1.0
    sink: float = 1.0

    def args(self) -> tuple:
        g = torch.Generator().manual_seed(self.heads + self.s)
        q = (torch.randn(self.b, self.s, self.heads, self.d, generator=g) * self.size).to(self.dtype)
        rows, lists = [], []
        for n, listed in ((self.n, self.w), (self.t, self.k)):
            index = torch.stack([torch.randperm(n, generator=g)[:listed] for _ in range(self.b * self.s)]).view(self.b, self.s, listed)
            lists.append(index.to(torch.int32))
            rows.append(torch.randn(self.b, n, self.d, generator=g).to(self.dtype))
        lists[0][:, 0, : self.w // 2] = -1
        lists[1][:, -1, self.k // 2 :] = -1
        if self.s > 1:
            lists[0][:, 1] = lists[1][:, 1] = -1
        for kv, index in zip(rows, lists, strict=True):
            for b in range(self.b):
                named = torch.zeros(kv.shape[1] + 1, dtype=torch.bool)
                named[index[b].flatten().long()] = True
                kv[b, ~named[:-1]] = torch.nan
        sink = torch.randn(self.heads, generator=g) * self.sink
        return q, rows[0], lists[0], rows[1], lists[1], sink, self.d**-0.5, NUMERICS[self.dtype]


CASES = (
    Attention(1, 6, 8, 512, 143, 128, 700, 512, BF16),
    Attention(1, 6, 8, 512, 143, 128, 700, 512, F32),
    Attention(1, 2, 64, 512, 143, 128, 300, 256, BF16),
    Attention(2, 3, 4, 32, 20, 8, 13, 6, BF16),
    Attention(2, 3, 4, 32, 20, 8, 13, 6, F32, 30.0),
    Attention(1, 1, 3, 128, 140, 128, 1, 0, BF16),
    Attention(3, 4, 40, 64, 9, 8, 300, 130, F32),
    Attention(1, 5, 100, 256, 9, 8, 40, 33, BF16, 4.0),
    Attention(1, 2, 8, 64, 9, 8, 40, 33, BF16, 1.0, 60.0),
)
FULL = (
    Attention(1, 6, 64, 512, 143, 128, 2049, 512, BF16),
    Attention(1, 32, 8, 512, 169, 128, 2049, 512, BF16),
    Attention(1, 4, 8, 512, 143, 128, 4097, 2900, BF16),
    Attention(1, 4, 8, 512, 143, 128, 4097, 2900, F32),
    Attention(1, 2, 100, 1024, 143, 128, 300, 200, F32),
)
