# SPDX-License-Identifier: Apache-2.0
"""Cases of the Engram kernels, as data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from v41.engram_map import is_prime
from v41.spec.table import Fp8Rows


def from_seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def primes_above(n: int, count: int) -> list[int]:
    """The first `count` primes above n."""
    found: list[int] = []
    while len(found) < count:
        n += 1
        if is_prime(n):
            found.append(n)
    return found


SMALL = (2, 3, 5, 7, 11, 13, 4093, 4099)  # beside a half of 12 bits too
LARGE = (16777213, 16777199, 16777183, 8388593, 8388617, 65537, 65521, 255 + 2)


@dataclass(frozen=True)
class Hash:
    """n positions with `lookback` ids up to `top`; multipliers of `bits` bits, or of both signs ("signed"); primes of every n-gram size."""

    n: int
    top: int
    bits: int
    primes: tuple[int, ...]
    lookback: int = 4
    signed: bool = False

    def args(self) -> tuple[Tensor, ...]:
        ids = torch.randint(0, self.top + 1, (1, self.n, self.lookback), generator=from_seed(1), dtype=torch.int64).to(torch.int32)
        mask = torch.rand(ids.shape, generator=from_seed(2)) < 0.8
        ids[0, 0], mask[0, 0] = self.top, True
        ids[0, -1, -1] = self.top
        multipliers = torch.randint(0, 2**self.bits - 1, (self.lookback,), generator=from_seed(3)) | 1
        if self.signed:
            multipliers = torch.tensor([-1, -(2**63), 2**63 - 1, 3])[: self.lookback]
        primes = torch.tensor(self.primes).repeat(self.lookback - 1).view(self.lookback - 1, -1)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), primes.flatten().cumsum(0)[:-1]))
        return ids, mask, torch.tensor(2, dtype=torch.int32), multipliers, primes, offsets


RELEASED = Hash(6, 99091, 46, tuple(primes_above(15999999, 8)))
HASHES = (
    RELEASED,
    Hash(1, 99091, 46, tuple(primes_above(15999999, 8))),
    Hash(130, 99091, 46, tuple(primes_above(15999999, 3))),
    Hash(128, 2**31 - 1, 63, SMALL, signed=True),
    Hash(40, 2**31 - 1, 62, LARGE),
    Hash(9, 31, 58, SMALL, lookback=2),
    Hash(3, 0, 46, (16777213,), lookback=3),
)


@dataclass(frozen=True)
class Rows:
    """n positions x columns ids into `rows` rows of `width` codes; some ids are not held."""

    n: int
    columns: int
    rows: int
    width: int
    regime: str

    def args(self) -> tuple[Fp8Rows, Tensor]:
        """Rows 0 .. 7 hold every code but NaN; the last row is poison that no id names."""
        codes = torch.randint(0, 256, (self.rows, self.width), generator=from_seed(1), dtype=torch.int64).to(torch.uint8)
        every = torch.arange(256, dtype=torch.int64).to(torch.uint8)
        flat = every.repeat(-(-codes[:8].numel() // 256))[: codes[:8].numel()].view(8, -1)
        codes[:8] = flat
        codes = codes.where((codes & 0x7F) != 0x7F, codes - 1)
        codes[-1] = 0x7F
        scales = torch.randint(1, 255 if self.regime == "exact" else 230, (self.rows, self.width // 32), generator=from_seed(2)).to(torch.uint8)
        scales = scales.clamp(12, 230)
        ids = torch.randint(-9, self.rows - 1, (1, self.n, self.columns), generator=from_seed(3), dtype=torch.int64).to(torch.int32)
        edges = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, -1, self.rows, -(2**31), 2**31 - 1], dtype=torch.int32)[: ids.numel()]
        ids.view(-1)[: edges.numel()] = edges
        return Fp8Rows(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)), ids


ROWS = (
    Rows(6, 24, 500, 256, "trn2"),
    Rows(1, 12, 40, 32, "exact"),
    Rows(20, 24, 100, 64, "trn2"),
    Rows(3, 16, 100, 96, "exact"),
    Rows(1, 1, 20, 32, "trn2"),
)


@dataclass(frozen=True)
class Gate:
    """n tokens x copies x dim; scale multiplies stream and keys; kinds of dots: see `args`."""

    n: int
    dim: int
    regime: str
    copies: int = 4
    scale: float = 1.0
    masked: bool = True

    def args(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Token 0 has a stream of zeros (dot 0), token 1 keys of -0 (dot 0 or -0), token 2 equals its keys (the largest dot)."""
        h = torch.randn(1, self.n, self.copies, self.dim, generator=from_seed(1)) * self.scale
        kv = torch.randn(1, self.n, (self.copies + 1) * self.dim, generator=from_seed(2))
        kv[..., : self.copies * self.dim] *= self.scale
        h[:, 0] = 0
        if self.n > 2:
            kv[:, 1, : self.copies * self.dim] = -0.0
            kv[:, 2, : self.copies * self.dim] = h[:, 2].flatten()
        q, k = (torch.randn(self.copies, self.dim, generator=from_seed(s)).bfloat16() for s in (3, 4))
        mask = (torch.arange(self.n) % 4 != 3)[None] if self.masked else None
        return h.to(dtype), kv.to(dtype), q, k, mask


GATED = (
    Gate(6, 5120, "trn2"),
    Gate(1, 64, "exact", masked=False),
    Gate(71, 48, "trn2"),
    Gate(5, 96, "exact"),
    Gate(4, 64, "trn2", scale=1e12),
    Gate(4, 64, "exact", scale=1e-12),
    Gate(9, 30, "exact", copies=2),
)
