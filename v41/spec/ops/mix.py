# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: mixes with Sinkhorn, collapse, expand (docs/model.md 6)."""

import torch
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.ops.activation import sigmoid
from v41.spec.ops.linear import wide_linear
from v41.spec.ops.norm import wide
from v41.spec.table import Tiled
from v41.spec.types import F32, Act, Wide

Pre = Wide[Tensor, "b s copies"]
Comb = Wide[Tensor, "b s copies copies"]


def hc_split_sinkhorn(
    mixes: Wide[Tensor, "b s mixes"], scale: F32[Tensor, "3"], base: F32[Tensor, "mixes"], copies: int, iters: int, eps: float, numerics: Numerics
) -> tuple[Pre, Pre, Comb]:
    """pre = sigmoid + eps, post = 2 sigmoid, comb = softmax over destinations + eps, a column step, then iters - 1 times rows and columns.

    comb[j, k]: j is the source copy, k the destination; rows sum over k, columns over j; eps stands in every denominator.
    """
    scale, base = scale.to(mixes.dtype), base.to(mixes.dtype)
    pre_in, post_in, comb_in = mixes.split((copies, copies, copies * copies), -1)
    pre_base, post_base, comb_base = base.split((copies, copies, copies * copies))
    pre = sigmoid(pre_in * scale[0] + pre_base, numerics) + eps
    post = 2 * sigmoid(post_in * scale[1] + post_base, numerics)
    comb = row_softmax((comb_in * scale[2] + comb_base).unflatten(-1, (copies, copies))) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def row_softmax(x: Wide[Tensor, "*rows n"]) -> Wide[Tensor, "*rows n"]:
    """Softmax as the release's kernel divides it: torch.softmax multiplies by a reciprocal, which moves the last bit."""
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def hc_mixes(
    stream: Act[Tensor, "b s copies dim"],
    fn: F32[Tensor, "mixes flat"] | Tiled,
    scale: F32[Tensor, "3"],
    base: F32[Tensor, "mixes"],
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    numerics: Numerics,
) -> tuple[Pre, Pre, Comb]:
    """The mixes of one sublayer from the stream before it, normalized after the projection: (fn u) * rsqrt(mean(u^2) + norm_eps)."""
    flat = wide(stream).flatten(2)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    mixes = wide_linear(flat, fn, numerics) * inverse
    return hc_split_sinkhorn(mixes, scale, base, stream.shape[2], iters, eps, numerics)


def hc_pre(stream: Act[Tensor, "b s copies dim"], pre: Pre) -> Act[Tensor, "b s dim"]:
    """Collapse: sum_i pre_i h_i in fp32, rounded once."""
    return (pre[..., None] * wide(stream)).sum(2).to(stream.dtype)


def hc_post(x: Act[Tensor, "b s dim"], stream: Act[Tensor, "b s copies dim"], post: Pre, comb: Comb) -> Act[Tensor, "b s copies dim"]:
    """Expand: h'_k = post_k x + sum_j comb[j, k] h_j in fp32, rounded once."""
    mixed = (comb[..., None] * wide(stream)[..., None, :]).sum(2)
    return (post[..., None] * wide(x)[..., None, :] + mixed).to(stream.dtype)
