# SPDX-License-Identifier: Apache-2.0
"""Linear layers (docs/model.md 3)."""

from einops import rearrange
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.ops.product import block_product, padded, product
from v41.spec.ops.quant import act_round, dequantize
from v41.spec.table import Fp8Like, PlainLike
from v41.spec.types import F32, Act, Wide


def linear(x: Act[Tensor, "*rows in"], w: Fp8Like, numerics: Numerics) -> Act[Tensor, "*rows out"]:
    """x @ w.T with x through its fp8 round trip (not in `exact`), accumulated in fp32 and rounded once to x's dtype.

    fp8 and fp4 values times powers of two are exact, so one product of dequantized operands is the release's loop over blocks of 32 up to
    the order of its sums.
    """
    return quantized(x, dequantize(w, numerics.wide), numerics)


def quantized(x: Act[Tensor, "*rows in"], w: Wide[Tensor, "out in"], numerics: Numerics) -> Act[Tensor, "*rows out"]:
    """`linear` with its weight dequantized before."""
    return partial_quantized(x, w, numerics).to(x.dtype)


def partial_linear(x: Act[Tensor, "*rows in"], w: Fp8Like, numerics: Numerics) -> Wide[Tensor, "*rows out"]:
    """`linear` without its rounding: where ranks hold parts of the inner axis, their sum is rounded, once."""
    return partial_quantized(x, dequantize(w, numerics.wide), numerics)


def partial_quantized(x: Act[Tensor, "*rows in"], w: Wide[Tensor, "out in"], numerics: Numerics) -> Wide[Tensor, "*rows out"]:
    """`partial_linear` with its weight dequantized before."""
    rows = act_round(x, numerics) if numerics.rounds else x
    return block_product(rows.flatten(0, -2), w, numerics).unflatten(0, x.shape[:-1])


def plain_linear(x: Act[Tensor, "*rows in"], w: PlainLike, numerics: Numerics) -> Act[Tensor, "*rows out"]:
    """x @ w.T, accumulated in fp32 and rounded once to x's dtype; x is not quantized."""
    return product(x.flatten(0, -2), dequantize(w, numerics.wide), numerics).to(x.dtype).unflatten(0, x.shape[:-1])


def wide_linear(x: Act[Tensor, "*rows in"], w: PlainLike | F32[Tensor, "out in"], numerics: Numerics) -> Wide[Tensor, "*rows out"]:
    """x @ w.T with both operands widened to fp32 (fp64 in `exact` float64); nothing is rounded.

    The released run did these with the BLAS, at the row count of the call.
    """
    rows, weight = x.to(numerics.wide).flatten(0, -2), dequantize(w, numerics.wide)
    y = rows @ weight.T if numerics.compact else padded(rows, weight)
    return y.unflatten(0, x.shape[:-1])


def grouped_linear(x: Act[Tensor, "b s heads head_dim"], w: Fp8Like, groups: int, numerics: Numerics) -> Act[Tensor, "b s out"]:
    """wo_a: group g of the heads times its own slice of w, concatenated; x is not quantized, w is dequantized exactly."""
    rows = rearrange(x, "b s (g h) d -> g (b s) (h d)", g=groups)
    weight = rearrange(dequantize(w, numerics.wide), "(g o) i -> g o i", g=groups)
    return rearrange(product(rows, weight, numerics).to(x.dtype), "g (b s) o -> b s (g o)", b=x.shape[0])
