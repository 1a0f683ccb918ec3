# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions. torch's sigmoid and softplus give other last bits in the tail of a vector than in its body, so that a row would
depend on where it lies; outside `released` they are written with exp, which does not (docs/numerics.md 4)."""

import torch
from torch import Tensor
from torch.nn import functional

from v41.spec.numerics import Numerics
from v41.spec.types import Wide

LINEAR_FROM = 20.0  # softplus is the identity above


def sigmoid(x: Wide[Tensor, "*n"], numerics: Numerics) -> Wide[Tensor, "*n"]:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x) if numerics.compact else 1 / (1 + torch.exp(-x))


def silu(x: Wide[Tensor, "*n"], numerics: Numerics) -> Wide[Tensor, "*n"]:
    """x * sigmoid(x)."""
    return functional.silu(x) if numerics.compact else x / (1 + torch.exp(-x))


def softplus(x: Wide[Tensor, "*n"], numerics: Numerics) -> Wide[Tensor, "*n"]:
    """log(1 + exp(x)), by log1p so that small values keep their tail; x itself above 20."""
    if numerics.compact:
        return functional.softplus(x)
    return torch.where(x > LINEAR_FROM, x, torch.log1p(torch.exp(x.clamp_max(LINEAR_FROM))))
