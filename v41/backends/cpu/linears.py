# SPDX-License-Identifier: Apache-2.0
"""Linear layers and the shared expert: by `times`, in `released` in its order; float64 is left to the spec."""

from einops import rearrange
from torch import Tensor

from v41.backends.cpu.product import full_rows, single, times
from v41.backends.cpu.released import in_blocks, in_order, values
from v41.backends.cpu.round import act_values
from v41.spec.numerics import Numerics
from v41.spec.ops import linear as spec
from v41.spec.ops.experts import shared_expert as spec_shared_expert
from v41.spec.ops.experts import swiglu
from v41.spec.ops.partial import shared_expert as spec_partial_shared_expert
from v41.spec.table import Fp4Like, Fp8Like, PlainLike
from v41.spec.types import F32, Act, Wide


def operand(x: Act[Tensor, "*rows in"], numerics: Numerics) -> F32[Tensor, "n in"]:
    """What a quantized product multiplies: x through its fp8 round trip, not in `exact`."""
    rows = x.flatten(0, -2)
    return act_values(rows, numerics) if numerics.rounds else rows


def products(x: F32[Tensor, "n in"], numerics: Numerics, *weights: Fp8Like | Fp4Like) -> F32[Tensor, "n out"]:
    """What `operand` gave times each weight, side by side, summed in the order of the regime and not rounded."""
    return (in_blocks if numerics.compact else times)(x, *weights)


def quantized(x: Act[Tensor, "*rows in"], numerics: Numerics, *weights: Fp8Like | Fp4Like) -> Wide[Tensor, "n out"]:
    """The products of all rows with the weights, side by side, not rounded."""
    return products(operand(x, numerics), numerics, *weights)


def linear(x: Act[Tensor, "*rows in"], w: Fp8Like, numerics: Numerics) -> Act[Tensor, "*rows out"]:
    if not single(numerics):
        return spec.linear(x, w, numerics)
    return quantized(x, numerics, w).to(x.dtype).unflatten(0, x.shape[:-1])


def partial_linear(x: Act[Tensor, "*rows in"], w: Fp8Like, numerics: Numerics) -> Wide[Tensor, "*rows out"]:
    if not single(numerics):
        return spec.partial_linear(x, w, numerics)
    return quantized(x, numerics, w).unflatten(0, x.shape[:-1])


def plain_linear(x: Act[Tensor, "*rows in"], w: PlainLike, numerics: Numerics) -> Act[Tensor, "*rows out"]:
    if not single(numerics):
        return spec.plain_linear(x, w, numerics)
    rows = x.flatten(0, -2).float()
    y = in_order(rows, values(w)) if numerics.compact else times(rows, w)
    return y.to(x.dtype).unflatten(0, x.shape[:-1])


def wide_linear(x: Act[Tensor, "*rows in"], w: PlainLike | F32[Tensor, "out in"], numerics: Numerics) -> Wide[Tensor, "*rows out"]:
    if not single(numerics) or numerics.compact or (isinstance(w, Tensor) and w.dtype == numerics.wide):
        return spec.wide_linear(x, w, numerics)
    return times(x.flatten(0, -2).float(), w).unflatten(0, x.shape[:-1])


def grouped_linear(x: Act[Tensor, "b s heads head_dim"], w: Fp8Like, groups: int, numerics: Numerics) -> Act[Tensor, "b s out"]:
    if not single(numerics):
        return spec.grouped_linear(x, w, groups, numerics)
    b, s = x.shape[:2]
    rows = rearrange(x, "b s (g h) d -> (b s) g (h d)", g=groups).float()
    matrix = values(w).unflatten(0, (groups, -1))
    y = in_order(rows.transpose(0, 1), matrix) if numerics.compact else full_rows(rows.transpose(0, 1)) @ matrix.transpose(1, 2)
    return y[:, : b * s].transpose(0, 1).to(x.dtype).reshape(b, s, groups * y.shape[-1])


def shared_expert(x: Act[Tensor, "n dim"], w1: Fp8Like, w2: Fp8Like, w3: Fp8Like, *, limit: float, numerics: Numerics) -> Act[Tensor, "n dim"]:
    if not single(numerics):
        return spec_shared_expert(x, w1, w2, w3, limit=limit, numerics=numerics)
    y = partial_shared_expert(x, w1, w2, w3, limit=limit, numerics=numerics)
    return y if numerics.device else y.to(x.dtype)


def partial_shared_expert(x: Act[Tensor, "n dim"], w1: Fp8Like, w2: Fp8Like, w3: Fp8Like, *, limit: float, numerics: Numerics) -> Wide[Tensor, "n dim"]:
    if not single(numerics):
        return spec_partial_shared_expert(x, w1, w2, w3, limit=limit, numerics=numerics)
    gate, up = quantized(x, numerics, w1, w3).to(x.dtype).chunk(2, 1)
    return quantized(swiglu(up, gate, limit, numerics).to(x.dtype), numerics, w2)
