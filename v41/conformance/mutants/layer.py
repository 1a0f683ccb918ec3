# SPDX-License-Identifier: Apache-2.0
"""Wrong mixes, experts, formats, Engrams and draft heads, one mistake each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from v41.spec import draft as drafting
from v41.spec.numerics import Numerics
from v41.spec.ops import experts, index, linear, mix, ngram, norm, place, quant
from v41.spec.ops.quant import act_round, index_round, kv_round

# Hyper-connections

RIGHT_MIXES, RIGHT_POST, RIGHT_PRE = mix.hc_mixes, mix.hc_post, mix.hc_pre


def mixes_with(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Callable:
    def body(stream, fn, scale, base, *, iters, eps, norm_eps, numerics):
        return change(*RIGHT_MIXES(stream, fn, scale, base, iters=iters, eps=eps, norm_eps=norm_eps, numerics=numerics))

    return body


def own_pre(ops: Any) -> Any:
    """Each sublayer collapses with the pre mix that it just made."""
    last: list[Tensor] = []

    def hc_mixes(stream, fn, scale, base, *, iters, eps, norm_eps, numerics):
        made = RIGHT_MIXES(stream, fn, scale, base, iters=iters, eps=eps, norm_eps=norm_eps, numerics=numerics)
        last.append(made[0])
        return made

    return replace(ops, hc_mixes=hc_mixes, hc_pre=lambda stream, pre: RIGHT_PRE(stream, last[-1]))


def normed_late(stream, fn, scale, base, *, iters, eps, norm_eps, numerics):
    """The stream is normalized and rounded before its projection."""
    flat = norm.rms_norm(stream.flatten(2), torch.ones(stream[0, 0].numel(), dtype=torch.bfloat16), norm_eps)
    return RIGHT_MIXES(flat.view(stream.shape), fn, scale, base, iters=iters, eps=eps, norm_eps=norm_eps, numerics=numerics)


# Mixture of experts

RIGHT_GATE, RIGHT_EXPERT, RIGHT_SWIGLU = experts.gate, experts.expert, experts.swiglu


def gate_with(**changes: Any) -> Callable:
    def body(x, weight, bias, *, k, function, normalize, route_scale, numerics):
        options = {"k": k, "function": function, "normalize": normalize, "route_scale": route_scale, "numerics": numerics}
        return RIGHT_GATE(x, weight, bias, **(options | changes))

    return body


def unbiased_choice(x, weight, bias, *, k, function, normalize, route_scale, numerics):
    return RIGHT_GATE(x, weight, bias * 0, k=k, function=function, normalize=normalize, route_scale=route_scale, numerics=numerics)


def biased_weights(x, weight, bias, *, k, function, normalize, route_scale, numerics):
    """The bias goes into the weights."""
    scores = experts.score(linear.wide_linear(x, weight, numerics), function, numerics) + bias
    chosen = index.top_k(scores, k, numerics)
    weights = scores.gather(-1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + experts.TINY) * route_scale, chosen.to(torch.int32)


def bf16_gate(x, weight, bias, *, k, function, normalize, route_scale, numerics):
    """Router logits rounded to bfloat16."""
    logits = linear.plain_linear(x, weight, numerics).float()
    scores = experts.score(logits, function, numerics)
    chosen = index.top_k(scores + bias, k, numerics)
    weights = scores.gather(-1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + experts.TINY) * route_scale, chosen.to(torch.int32)


def weight_last(x, weight, w1, w2, w3, at, *, limit, numerics):
    """The routing weight multiplies the expert's output."""
    y = RIGHT_EXPERT(x, torch.ones_like(weight), w1, w2, w3, at, limit=limit, numerics=numerics)
    return (y.float() * weight[:, None]).to(y.dtype)


def swapped_gate_and_up(x, weight, w1, w2, w3, at, *, limit, numerics):
    return RIGHT_EXPERT(x, weight, w3, w2, w1, at, limit=limit, numerics=numerics)


def no_shared_expert(x, w1, w2, w3, *, limit, numerics):
    return torch.zeros_like(x)


def swiglu_with(clamped: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]) -> Callable:
    """Other clamps of (up, gate)."""

    def body(up, gate, limit, numerics):
        return RIGHT_SWIGLU(*clamped(up.float(), gate.float(), limit), 0.0, numerics)

    return body


def other_sides(up: Tensor, gate: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """The gate's clamp and the up's exchanged."""
    return up.clamp_max(limit), gate.clamp(-limit, limit)


def plain_softplus(logits: Tensor, function: str, numerics: Numerics) -> Tensor:
    """No square root."""
    return RIGHT_SCORE(logits, function, numerics).square()


RIGHT_SCORE = experts.score


# Formats

RIGHT_P2, RIGHT_UNPACK = quant.pow2_scale, quant.e2m1_unpack


def doubled(x: Tensor, numerics: Any) -> Tensor:
    """Scale codes one too large."""
    return act_round(x, numerics) * 2


def high_first(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The even column in the high nibble."""
    return RIGHT_UNPACK(packed, dtype).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def floor_scale(amax: Tensor, maximum: float) -> Tensor:
    """The power of two below."""
    return (RIGHT_P2(amax, maximum).view(torch.int32) - (1 << 23)).view(torch.float32)


def scale_for(limit: float) -> Callable:
    """A smaller largest code."""
    return lambda amax, maximum: RIGHT_P2(amax, limit if maximum == 448.0 else maximum)


def always_above(amax: Tensor, maximum: float) -> Tensor:
    """An exact power of two is rounded up as well."""
    bits = (amax * torch.tensor(1.0 / maximum)).view(torch.int32)
    return (((bits >> 23) + 1) << 23).view(torch.float32)


def ties_away(v: Tensor) -> Tensor:
    """Ties go to the larger value."""
    code = sum(((v.abs() >= middle).int() for middle in quant.MIDDLES), torch.zeros_like(v, dtype=torch.int32))
    return torch.copysign(torch.tensor(quant.E2M1)[code.long()], v)


def same(x: Tensor, numerics: Any) -> Tensor:
    return x


swapped_formats = {"index_round": kv_round, "kv_round": index_round}


# Engram

RIGHT_HASH, RIGHT_ENGRAM_GATE, RIGHT_EMBEDDING = ngram.engram_hash, ngram.engram_gate, place.embedding


def hash_with(change: Callable[[dict], dict]) -> Callable:
    def body(ids, mask, pad, multipliers, primes, offsets):
        args = {"ids": ids, "mask": mask, "pad": pad, "multipliers": multipliers, "primes": primes, "offsets": offsets}
        return RIGHT_HASH(**(args | change(args)))

    return body


def per_slot_mask(ids, mask, pad, multipliers, primes, offsets):
    """A dead token hides itself, not what lies behind it."""
    known = torch.where(mask, ids, pad)
    return RIGHT_HASH(known, torch.ones_like(mask), pad, multipliers, primes, offsets)


def heads_outside(ids, mask, pad, multipliers, primes, offsets):
    """Columns ordered by head, then by n-gram size."""
    rows = RIGHT_HASH(ids, mask, pad, multipliers, primes, offsets)
    return rows.unflatten(-1, primes.shape).transpose(-1, -2).flatten(-2)


def unsigned_sigmoid(dot: Tensor, numerics: Numerics) -> Tensor:
    return torch.sigmoid(dot.abs().clamp_min(1e-6).sqrt())


def floorless_sigmoid(dot: Tensor, numerics: Numerics) -> Tensor:
    return torch.sigmoid(torch.copysign(dot.abs().sqrt(), dot))


def deaf_gate(stream, kv, q_weight, k_weight, mask, *, eps, numerics):
    """Images are not masked."""
    return RIGHT_ENGRAM_GATE(stream, kv, q_weight, k_weight, None, eps=eps, numerics=numerics)


def no_rows(table, hash_ids, numerics):
    return torch.zeros((*hash_ids.shape[:2], hash_ids.shape[2] * table.weight.shape[1]), dtype=numerics.act)


# Taps, head, draft


def tap_before_engram(right: Callable) -> Callable:
    """The draft head's tap is taken before the layer's Engram."""

    def layer(params, state, boundary, ops):
        after, state = right(params, state, boundary, ops)
        if len(after.taps) > len(boundary.taps):
            before = boundary.stream.float().mean(2).to(boundary.stream.dtype)
            after = replace(after, taps=(*boundary.taps, before))
        return after, state

    return layer


def flat_head(right: Callable) -> Callable:
    """The head collapses the copies to their mean."""

    def head(params, boundary, rows, ops):
        return right(params, replace(boundary, pre=torch.full_like(boundary.pre, 0.25)), rows, ops)

    return head


def markov_of_first(params: Any, ops: Any) -> Any:
    """The Markov bias always follows from the token given."""
    first: list[Tensor] = []

    def embedding(ids, table, dtype):
        if table is params.draft.out.markov_embed:
            first.append(ids)
            ids = first[0]
        return RIGHT_EMBEDDING(ids, table, dtype)

    return replace(ops, embedding=embedding)


def normed_confidence(params: Any, ops: Any) -> Any:
    """The confidence reads the normed stage output."""

    def wide_linear(x, w, numerics):
        if w is params.draft.out.confidence:
            n = params.config.hidden_size
            x = torch.cat((norm.rms_norm(x[..., :n].bfloat16(), params.draft.out.norm, params.config.rms_norm_eps).float(), x[..., n:]), -1)
        return linear.wide_linear(x, w, numerics)

    return replace(ops, wide_linear=wide_linear)


RIGHT_CALL_ROWS = drafting.call_rows


def late_block(length: Tensor, valid: Tensor, rows: int, start: int | None) -> Any:
    """The block stands one position too far."""
    return RIGHT_CALL_ROWS(length + (rows > 1), valid, rows, start)
