# SPDX-License-Identifier: Apache-2.0
"""Round trips through fp8 and fp4 codes. Of a few rows the codes are made, of more never: the nearest number with so many significant bits is
one sum in float32.

v + m - m with m = 1.5 * 2^23 steps of v's neighborhood rounds v to a multiple of the step, ties to the even one, which are the ties of the codes.
"""

import torch
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.ops.quant import BLOCK, E2M1_MAX, blocks_of
from v41.spec.types import F32, Act

EXPONENT, MANTISSA = 0x7F800000, 0x7FFFFF  # fields of a float32: the first alone is the power of two below it
E4M3, E2M1 = (2.0**-6, 3), (1.0, 1)  # least normal number, bits behind the point
FEW = 1 << 13  # numbers up to which two conversions cost less than the operations of `nearest`


def nearest(v: F32[Tensor, "*n"], least: float, bits: int) -> F32[Tensor, "*n"]:
    """The nearest number with `bits` bits behind its leading one; below `least` all steps are those at `least`. The sign of zero is v's."""
    power = (v.view(torch.int32) & EXPONENT).view(torch.float32).clamp_min_(least)
    middle = power.mul_(1.5 * 2.0 ** (23 - bits))
    return (v + middle).sub_(middle).copysign_(v)


def power_above(amax: F32[Tensor, "*blocks"], most: float) -> F32[Tensor, "*blocks"]:
    """`pow2_scale`: a mantissa that is not zero carries into the exponent."""
    bits = (amax * (1.0 / most)).view(torch.int32)
    return bits.add_(MANTISSA).bitwise_and_(~MANTISSA).view(torch.float32)


def act_values(x: Act[Tensor, "*rows n"], numerics: Numerics) -> F32[Tensor, "*rows n"]:
    """`act_round` in float32: what products multiply."""
    blocks, most = blocks_of(x, BLOCK), numerics.e4m3_max
    scale = power_above(blocks.abs().amax(-1, keepdim=True).clamp_min_(1e-4), most)
    scaled = (blocks / scale).clamp_(-most, most)
    rounded = scaled.to(torch.float8_e4m3fn).float() if scaled.numel() <= FEW else nearest(scaled, *E4M3)
    return rounded.mul_(scale).view(x.shape)


def act_round(x: Act[Tensor, "*rows n"], numerics: Numerics) -> Act[Tensor, "*rows n"]:
    """The spec's, by `act_values`."""
    return act_values(x, numerics).to(x.dtype)


def index_round(x: Act[Tensor, "*rows n"], numerics: Numerics) -> Act[Tensor, "*rows n"]:
    """The spec's, by `nearest`."""
    blocks = blocks_of(x, BLOCK)
    scale = power_above(blocks.abs().amax(-1, keepdim=True).clamp_min_(E2M1_MAX * 2.0**-126), E2M1_MAX)
    scaled = (blocks / scale).clamp_(-E2M1_MAX, E2M1_MAX)
    return nearest(scaled, *E2M1).mul_(scale).view(x.shape).to(x.dtype)
