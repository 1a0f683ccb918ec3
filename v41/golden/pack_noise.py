# SPDX-License-Identifier: Apache-2.0
"""How far a stored tensor lies from its float64 twin, element by element, in fp8 codes (docs/golden-pack.md 6)."""

import math

import torch
from torch import Tensor

EXACT, TRIPS = "#exact", "#trips"
FLOAT64 = 2.0**-29  # the error of a float64 run is taken for that of a float32 run, times the ratio of their units


def rows_of(tensor: Tensor) -> Tensor:
    """[rows, elements of a row]: the first two dims are rows (the first of a matrix, none of a vector)."""
    lead = 2 if tensor.ndim >= 3 else min(tensor.ndim - 1, 1)
    return tensor.flatten(lead).flatten(0, lead - 1) if lead else tensor.reshape(1, -1)


def encode(difference: Tensor) -> tuple[Tensor, float]:
    """(e4m3 codes, power of two that they count) of differences in float64: within one part in 16 where not tiny beside the largest."""
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    scale = 2.0 ** (math.frexp(largest)[1] - 8) if largest else 0.0  # the largest becomes 128..256
    codes = (difference / scale if scale else torch.zeros_like(difference)).float().to(torch.float8_e4m3fn)
    return codes, scale


def decode(codes: Tensor, scale: float) -> Tensor:
    """The differences in float64."""
    return codes.float().double() * scale


def noise(stored: Tensor, twin: Tensor) -> Tensor:
    """twin - stored where both are finite, else 0."""
    finite = torch.isfinite(stored) & torch.isfinite(twin)
    return torch.where(finite, twin.double() - torch.where(finite, stored, 0).double(), 0)
