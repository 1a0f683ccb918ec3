# SPDX-License-Identifier: Apache-2.0
"""When a float tensor passes: its error against exact arithmetic is no more than that of the stored tensor, times k (docs/conformance.md 4).

The error of a row of n elements is taken for a chi-distributed number: of two equally noisy ones the larger may be sqrt(q(n)) times the usual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from v41.golden.pack_noise import rows_of

K = 1.5  # between one more rounding of the same size (1.41) and truncation instead of rounding (2)
RARE = 4.75  # one in a million, in standard deviations
SHARED = 16  # elements of a row share factors (a norm, an angle): a row counts for no more than so many independent errors
FREEDOM = 8  # behind a round trip few elements that fall on the other side of a step carry the error of a row
UNITS = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass(frozen=True)
class Gate:
    """Ratios of errors and their limits: of the whole tensor, and of the worst row and element."""

    tensor: float
    tensor_limit: float
    row: float
    row_limit: float
    row_at: int
    element: float
    element_at: int

    @property
    def passes(self) -> bool:
        return self.tensor <= self.tensor_limit and self.row <= self.row_limit and self.element <= 1.0


def spread(n: int) -> float:
    """sqrt(q / n), q the one-in-a-million quantile of chi-squared with n degrees of freedom (Wilson and Hilferty)."""
    return (1 - 2 / (9 * n) + RARE * (2 / (9 * n)) ** 0.5) ** 1.5


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b; 0 / 0 is 0."""
    return torch.where(a == 0, 0, a / b)


def gate(got: Tensor, want: Tensor, far: Tensor, trips: bool) -> Gate:
    """got and want finite (or the same infinity); far: exact minus want. trips: whether a round trip lies between the input and the tensor."""
    known = torch.isfinite(want)
    b, v, d = (rows_of(torch.where(known, t.double(), 0)) for t in (got, want, far))
    n = b.shape[-1]
    mine, own, size = (b - v - d).norm(dim=-1), d.norm(dim=-1), v.norm(dim=-1)
    usual = float(ratio(own.norm(), size.norm()))
    base = torch.maximum(own, usual * size)
    by_row = ratio(mine, base)
    freedom = min(n, FREEDOM if trips else SHARED)
    largest = torch.maximum(d.abs().amax(-1), 6 * base / n**0.5) * (spread(freedom) if trips else 1)
    one = largest[:, None] + UNITS[want.dtype] * v.abs()
    by_element = ratio((b - v - d).abs(), K * one)
    return Gate(
        tensor=float(ratio(mine.norm(), own.norm())),
        tensor_limit=K * spread(freedom * len(b)),
        row=float(by_row.max()),
        row_limit=K * spread(freedom),
        row_at=int(by_row.argmax()),
        element=float(by_element.max()),
        element_at=int(by_element.argmax()),
    )
