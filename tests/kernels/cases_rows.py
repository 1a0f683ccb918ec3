# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernels that work row by row, as data: shapes and the values that fill them."""

from dataclasses import dataclass

import torch
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
FULL = "full"  # a full-size width that takes long: marked slow


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wide_range(*shape: int, seed: int = 0) -> Tensor:
    """Normal values whose rows differ in size by up to 2^40, in bfloat16, with a row of zeros and one of -0."""
    x = normal(*shape, seed=seed) * torch.exp2(normal(*shape[:-1], 1, seed=seed + 1) * 12)
    flat = x.reshape(-1, shape[-1])
    if flat.shape[0] > 2:
        zeros = torch.zeros(2, shape[-1])
        flat = torch.cat((flat[:-2], torch.stack((zeros[0], -zeros[1]))))
    return flat.reshape(shape).to(BF16)


@dataclass(frozen=True)
class Norm:
    """rms_norm: x (*shape) in dtype; scale multiplies it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0

    def args(self) -> tuple[Tensor, Tensor, float]:
        x = normal(*self.shape) * self.scale
        x[..., 0, :] = 0
        return x.to(self.dtype), normal(self.shape[-1], seed=1).to(BF16), 1e-20


NORMS = (
    Norm((1, 6, 5120), BF16),
    Norm((1, 6, 1280), F32),
    Norm((2, 65, 512), BF16),
    Norm((130, 24), F32),
    Norm((1, 1, 7), BF16),
    Norm((64, 2560), BF16),
    Norm((3, 128), BF16, 1e15),
    Norm((3, 128), F32, 1e-9),
)

# (tokens, heads, n, half, dtype); the positions of the first tokens are the edges.
EDGES = (0, 1, 2, 5, 131071, 777777, 1048575)
ROPES = (
    (7, 8, 512, 32, BF16),
    (7, 8, 512, 32, F32),
    (7, 1, 64, 32, F32),
    (300, 3, 20, 8, F32),
    (256, 1, 16, 8, BF16),
    (1, 64, 128, 32, BF16),
    (40, 8, 64, 32, BF16),
    (22, 12, 24, 8, F32),
    (1, 131, 8, 2, F32),
)

# (batch, rows of the buffer, width, rows written, dtype of the buffer, dtype of the rows)
WRITES = ((1, 143, 512, 6, BF16, BF16), (3, 20, 24, 5, F32, F32), (2, 300, 16, 150, BF16, BF16), (1, 9, 512, 1, F32, F32), (1, 4, 8, 3, BF16, F32))

# (b, groups, ratio, d, dtype out)
POOLS = ((1, 3, 2, 512, BF16), (2, 5, 4, 96, F32), (1, 130, 2, 8, BF16), (1, 20, 2, 512, F32), (1, 1, 1, 64, BF16), (1, 64, 2, 512, BF16))

# (ids, table rows, dim, dtype)
GATHERS = ((6, 100, 5120, BF16), (130, 50, 16, F32), (270, 50, 16, BF16), (1, 1, 8, BF16))
