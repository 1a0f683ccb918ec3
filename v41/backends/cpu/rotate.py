# SPDX-License-Identifier: Apache-2.0
"""Rotation as one product of complex numbers."""

import torch
from torch import Tensor

from v41.spec.ops import rope as spec
from v41.spec.types import F32, I32, Act

LANES = 8  # complex numbers in a vector register: what is left of a row is multiplied by another instruction, with other last bits
ONE = torch.ones(())


def rope(x: Act[Tensor, "*rows n"], positions: I32[Tensor, "*lead"], f: F32[Tensor, "half"]) -> Act[Tensor, "*rows n"]:
    return turned(x, positions, f, 1.0) if fits(x, f) else spec.rope(x, positions, f)


def rope_inverse(x: Act[Tensor, "*rows n"], positions: I32[Tensor, "*lead"], f: F32[Tensor, "half"]) -> Act[Tensor, "*rows n"]:
    return turned(x, positions, f, -1.0) if fits(x, f) else spec.rope_inverse(x, positions, f)


def fits(x: Tensor, f: Tensor) -> bool:
    """Whether the product has the spec's bits."""
    return x.dtype != torch.float64 and f.shape[0] % LANES == 0


def turned(x: Tensor, positions: Tensor, f: Tensor, sign: float) -> Tensor:
    angle = positions.to(torch.float32)[..., None] * (f if sign > 0 else -f)
    circle = torch.polar(ONE, angle).view(positions.shape + (1,) * (x.ndim - positions.ndim - 1) + f.shape)
    out = x.clone(memory_format=torch.contiguous_format)
    turn = out[..., x.shape[-1] - 2 * f.shape[0] :]
    pairs = torch.view_as_complex(turn.to(torch.float32).unflatten(-1, (-1, 2)))
    turn.copy_(torch.view_as_real(pairs * circle).flatten(-2))
    return out
