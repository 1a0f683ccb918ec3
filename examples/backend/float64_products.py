# SPDX-License-Identifier: Apache-2.0
"""A third-party backend: the spec with its plain products summed in float64 and rounded once."""

from dataclasses import replace

from torch import Tensor

from v41.spec.backend import Backend
from v41.spec.numerics import Numerics


def plain_linear(x: Tensor, w: Tensor, numerics: Numerics) -> Tensor:
    return (x.double() @ w.double().T).to(x.dtype)


def wide_linear(x: Tensor, w: Tensor, numerics: Numerics) -> Tensor:
    return (x.double() @ w.double().T).to(numerics.wide)


backend = replace(Backend("float64-products"), plain_linear=plain_linear, wide_linear=wide_linear)
