# SPDX-License-Identifier: Apache-2.0
"""Router and experts (docs/model.md 9)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.ops.activation import sigmoid, silu, softplus
from v41.spec.ops.index import top_k
from v41.spec.ops.linear import linear, partial_linear, partial_quantized, quantized, wide_linear
from v41.spec.ops.norm import wide
from v41.spec.ops.quant import dequantize
from v41.spec.table import Fp4Like, Fp8Like, PlainLike
from v41.spec.types import F32, I32, Act, Wide

TINY = 1e-20


def score(logits: Wide[Tensor, "n experts"], function: str, numerics: Numerics) -> Wide[Tensor, "n experts"]:
    """Router scores: sqrt(softplus), sigmoid or softmax."""
    if function == "softmax":
        return logits.softmax(-1)
    return sigmoid(logits, numerics) if function == "sigmoid" else softplus(logits, numerics).sqrt()


def gate(
    x: Act[Tensor, "n dim"],
    weight: PlainLike,
    bias: F32[Tensor, "experts"],
    *,
    k: int,
    function: str,
    normalize: bool,
    route_scale: float,
    numerics: Numerics,
) -> tuple[Wide[Tensor, "n k"], I32[Tensor, "n k"]]:
    """(weights, experts) of the k experts with the largest score + bias, in fp32.

    Weights are the scores without bias, divided by their sum + 1e-20 (not for a single expert), times route_scale.
    """
    scores = score(wide_linear(x, weight, numerics), function, numerics)
    experts = top_k(scores + bias.to(scores.dtype), k, numerics)
    weights = scores.gather(-1, experts)
    if normalize and k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * route_scale, experts.to(torch.int32)


def swiglu(up: Act[Tensor, "n inter"], gate: Act[Tensor, "n inter"], limit: float, numerics: Numerics) -> Wide[Tensor, "n inter"]:
    """silu(gate) * up in fp32; gate is clamped from above only, up on both sides; limit 0 means no clamp."""
    up, gate = wide(up), wide(gate)
    if limit > 0:
        up, gate = up.clamp(-limit, limit), gate.clamp_max(limit)
    return silu(gate, numerics) * up


def shared_expert(x: Act[Tensor, "n dim"], w1: Fp8Like, w2: Fp8Like, w3: Fp8Like, *, limit: float, numerics: Numerics) -> Act[Tensor, "n dim"]:
    """w2 (silu(w1 x) * w3 x), clamped; the product is rounded to the activation dtype before w2. The output is rounded, but not in `trn2`."""
    hidden = swiglu(linear(x, w3, numerics), linear(x, w1, numerics), limit, numerics)
    return (partial_linear if numerics.device else linear)(hidden.to(x.dtype), w2, numerics)


def experts_held(w: Fp4Like) -> int:
    """How many experts a stack holds."""
    return (w if isinstance(w, Tensor) else w.weight).shape[0]


def one_of(w: Fp4Like, index: int) -> Fp4Like:
    """One expert of the stack, in its form."""
    return w[index] if isinstance(w, Tensor) else replace(w, weight=w.weight[index], scale=w.scale[index])


def expert_weight(w: Fp4Like, index: int, numerics: Numerics) -> Wide[Tensor, "out in"]:
    """One expert's dequantized matrix out of the stack."""
    return dequantize(one_of(w, index), numerics.wide)


def expert(
    x: Act[Tensor, "n dim"], weight: Wide[Tensor, "n"], w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, index: int, *, limit: float, numerics: Numerics
) -> Act[Tensor, "n dim"] | Wide[Tensor, "n dim"]:
    """One routed expert: the routing weight goes in before w2 and so before w2's activation rounding. Its output is rounded, but not in `trn2`."""
    hidden = expert_hidden(x, weight, w1, w3, index, limit=limit, numerics=numerics)
    last = expert_weight(w2, index, numerics)
    return partial_quantized(hidden, last, numerics) if numerics.device else quantized(hidden, last, numerics)


def expert_hidden(
    x: Act[Tensor, "n dim"], weight: Wide[Tensor, "n"], w1: Fp4Like, w3: Fp4Like, index: int, *, limit: float, numerics: Numerics
) -> Act[Tensor, "n inter"]:
    """What w2 of one routed expert multiplies."""
    gated, up = (quantized(x, expert_weight(w, index, numerics), numerics) for w in (w1, w3))
    return (weight[:, None] * swiglu(up, gated, limit, numerics)).to(x.dtype)


def experts(
    x: Act[Tensor, "n dim"], weights: Wide[Tensor, "n k"], ids: I32[Tensor, "n k"], w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, *, limit: float, numerics: Numerics
) -> Wide[Tensor, "n dim"]:
    """The sum of the routed experts in fp32, in increasing expert order. Every expert sees every row; rows not routed to it add nothing."""

    def one(weight: Tensor, e: int) -> Tensor:
        return expert(x, weight, w1, w2, w3, e, limit=limit, numerics=numerics)

    return sum_over(one, weights, ids, experts_held(w1))


def sum_over(one: Callable[[Tensor, int], Tensor], weights: Wide[Tensor, "n k"], ids: I32[Tensor, "n k"], held: int) -> Wide[Tensor, "n dim"]:
    """sum_e one(weight of each row, e) over the experts held, in the dtype of the weights; rows that did not choose e get nothing from it."""
    total = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for e in range(held):
        here = ids == e
        y = one(torch.where(here, weights, 0).sum(-1), e).to(weights.dtype)
        total = torch.where(here.any(-1, keepdim=True), total + y, total)
    return total
