# SPDX-License-Identifier: Apache-2.0
"""Primitives as a rank computes them that holds part of what they sum over: in the wide dtype and not rounded.

They take the place of their namesakes where rules cut the axis of the sum (docs/sharding.md 3); the sum over ranks is rounded, once.
"""

from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.ops.experts import expert_hidden, expert_weight, experts_held, sum_over, swiglu
from v41.spec.ops.linear import linear, partial_linear, partial_quantized
from v41.spec.ops.norm import wide
from v41.spec.ops.product import product
from v41.spec.table import Fp4Like, Fp8Like
from v41.spec.types import I32, Act, Wide


def index_scores(
    iq: Act[Tensor, "b s index_heads index_dim"], ik: Act[Tensor, "b t index_dim"], iw: Act[Tensor, "b s index_heads"], numerics: Numerics
) -> Wide[Tensor, "b s t"]:
    """Scores from this rank's heads: dot products and products rounded as in the whole, their sum not."""
    dots = product(iq.flatten(1, 2), ik, numerics).to(iq.dtype).unflatten(1, iq.shape[1:3]).relu()
    if numerics.device:
        return (wide(dots) * wide(iw)[..., None]).sum(2)
    return (dots * iw[..., None]).sum(2, dtype=numerics.wide)


def shared_expert(x: Act[Tensor, "n dim"], w1: Fp8Like, w2: Fp8Like, w3: Fp8Like, *, limit: float, numerics: Numerics) -> Wide[Tensor, "n dim"]:
    """The shared expert from this rank's share of its inner axis."""
    hidden = swiglu(linear(x, w3, numerics), linear(x, w1, numerics), limit, numerics)
    return partial_linear(hidden.to(x.dtype), w2, numerics)


def experts(
    x: Act[Tensor, "n dim"], weights: Wide[Tensor, "n k"], ids: I32[Tensor, "n k"], w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, *, limit: float, numerics: Numerics
) -> Wide[Tensor, "n dim"]:
    """The routed experts from this rank's share of their inner axis."""

    def one(weight: Tensor, e: int) -> Tensor:
        hidden = expert_hidden(x, weight, w1, w3, e, limit=limit, numerics=numerics)
        return partial_quantized(hidden, expert_weight(w2, e, numerics), numerics)

    return sum_over(one, weights, ids, experts_held(w1))
