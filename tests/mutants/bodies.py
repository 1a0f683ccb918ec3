# SPDX-License-Identifier: Apache-2.0
"""Wrong bodies of primitives and of functions of the spec, one mistake each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from v41.spec import attention as attending
from v41.spec import compress
from v41.spec import draft as drafting
from v41.spec.cache import LayerCache
from v41.spec.numerics import Numerics
from v41.spec.ops import attend, experts, index, linear, mix, ngram, norm, place, quant, rope
from v41.spec.ops.product import product
from v41.spec.ops.quant import act_round, index_round, kv_round

FAITHFUL = Numerics()


# Rotation


def split_halves(x: Tensor) -> Tensor:
    """(x0 .. xn, y0 .. yn) as pairs (x0, y0, x1, y1, ...)."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def joined_halves(x: Tensor) -> Tensor:
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def half_split(op: Callable) -> Callable:
    """A rotation that pairs element i with element i + half."""

    def rotated(x: Tensor, positions: Tensor, f: Tensor) -> Tensor:
        n = x.shape[-1] - 2 * f.shape[0]
        y = op(torch.cat((x[..., :n], split_halves(x[..., n:])), -1), positions, f)
        return torch.cat((y[..., :n], joined_halves(y[..., n:])), -1)

    return rotated


def rotated_front(op: Callable) -> Callable:
    """A rotation of the first dims instead of the last."""

    def rotated(x: Tensor, positions: Tensor, f: Tensor) -> Tensor:
        n = x.shape[-1] - 2 * f.shape[0]
        y = op(torch.cat((x[..., 2 * f.shape[0] :], x[..., : 2 * f.shape[0]]), -1), positions, f)
        return torch.cat((y[..., n:], y[..., :n]), -1)

    return rotated


def as_is(x: Tensor, positions: Tensor, f: Tensor) -> Tensor:
    return x


def frequencies_of(ratio_of: Callable[[int], int]) -> Callable:
    """Another choice of the table by the layer's ratio."""
    right = rope.layer_frequencies
    return lambda config, ratio: right(config, ratio_of(ratio))


def bf16_frequencies(config: Any, ratio: int) -> Tensor:
    return RIGHT_FREQUENCIES(config, ratio).bfloat16().float()


RIGHT_FREQUENCIES = rope.layer_frequencies


def head_normed_queries(p: Any, x: Tensor, at: Tensor, f: Tensor, config: Any, numerics: Any, ops: Any) -> tuple[Tensor, Tensor]:
    """V4's norm of each query head."""
    qr = ops.rms_norm(ops.linear(x, p.wq_a, numerics), p.q_norm, config.rms_norm_eps)
    q = ops.linear(qr, p.wq_b, numerics).unflatten(-1, (-1, config.head_dim))
    return qr, ops.rope(ops.rms_norm(q, torch.ones(config.head_dim, dtype=torch.bfloat16), config.rms_norm_eps), at, f)


# Attention

RIGHT_ATTENTION = attend.sparse_attn
RIGHT_LIST = attending.window_list
RIGHT_TARGETS = attending.ring_targets
RIGHT_HAND_DOWN = attending.hand_down
RIGHT_CALL_ROWS = drafting.call_rows


def attention_with(**changes: Callable[[Any], Any]) -> Callable:
    """Attention with one argument changed."""

    def body(q, window, window_idxs, compressed, topk_idxs, attn_sink, scale, numerics):
        args = dict(zip(NAMES, (q, window, window_idxs, compressed, topk_idxs, attn_sink, scale, numerics), strict=True))
        return RIGHT_ATTENTION(**(args | {n: f(args) for n, f in changes.items()}))

    return body


NAMES = ("q", "window", "window_idxs", "compressed", "topk_idxs", "attn_sink", "scale", "numerics")


def unrounded_attention(q, window, window_idxs, compressed, topk_idxs, attn_sink, scale, numerics):
    """Probabilities stay in float32."""
    return RIGHT_ATTENTION(q.float(), window.float(), window_idxs, compressed.float(), topk_idxs, attn_sink, scale, numerics).to(q.dtype)


def shorter_list(positions: Tensor, window: int, numerics: Any, start: int | None) -> Tensor:
    """The oldest position of the window is left out."""
    listed = RIGHT_LIST(positions, window, numerics, start)
    return torch.where(listed == positions[..., None] - window + 1, -1, listed)


def late_targets(call: Any, size: int) -> Tensor:
    """Rows go one slot too far round the ring."""
    at = RIGHT_TARGETS(call, size)
    return torch.where(at < size, torch.remainder(at + 1, size), at)


def head_only_rounding(x: Tensor, numerics: Any) -> Tensor:
    """The rotary part of the window row keeps bfloat16."""
    return torch.cat((act_round(x[..., :-32], numerics), x[..., -32:]), -1)


def causal_block(q, window, window_idxs, compressed, topk_idxs, attn_sink, scale, numerics):
    """Draft queries that do not see later rows of their block."""
    s = q.shape[1]
    later = torch.arange(s) > torch.arange(s)[:, None]
    own = torch.where(later, -1, window_idxs[..., -s:])
    return RIGHT_ATTENTION(q, window, torch.cat((window_idxs[..., :-s], own), -1), compressed, topk_idxs, attn_sink, scale, numerics)


def always_handed_down(handed: Any, state: Any, call: Any, ratio: int, numerics: Any) -> Any:
    """Every source publishes its index keys in every call."""
    return replace(handed, compressed=state.compressed, index_keys=state.index_keys)


# Compressor


def publish_with(position: Callable[[Tensor, int], Tensor], key_of: str = "latent", rotate_rows: bool = True) -> Callable:
    """`publish` with another position of a group, and keys from the latent, from its rotation or from its rounded row."""

    def publish(p, k, state, x, call, layer, config, numerics, ops) -> LayerCache:
        ratio = config.layer_plan[layer].ratio
        groups = compress.groups_of(call, ratio)
        z, state = compress.latents(p, state, x, call, groups, ratio, config, numerics, ops)
        f, at = compress.layer_frequencies(config, ratio), position(groups.number, ratio)
        turned = ops.rope(z, at, f) if rotate_rows else z
        row = ops.kv_round(turned, numerics)
        source = {"latent": z, "rotated": turned, "rounded": row}[key_of]
        key = ops.index_round(ops.rope(ops.rms_norm(ops.plain_linear(source, k.wk, numerics), k.k_norm, config.rms_norm_eps), at, f), numerics)
        target = groups.number
        return replace(state, index_keys=ops.write_rows(state.index_keys, target, key), compressed=ops.write_rows(state.compressed, target, row))

    return publish


def first_token(number: Tensor, ratio: int) -> Tensor:
    return number * ratio


def kept_carry(state: LayerCache, kv: Tensor, score: Tensor, call: Any, size: int, ops: Any) -> LayerCache:
    """The tokens of an unfinished group are forgotten."""
    return state


def mean_pool(kv: Tensor, score: Tensor, dtype: torch.dtype) -> Tensor:
    return kv.mean(2).to(dtype)


def channel_pool(kv: Tensor, score: Tensor, dtype: torch.dtype) -> Tensor:
    """The softmax runs over channels."""
    return (kv * score.softmax(3)).sum(2).to(dtype)


# Indexer


def scores_without_relu(iq: Tensor, ik: Tensor, iw: Tensor, numerics: Numerics) -> Tensor:
    dots = product(iq.flatten(1, 2), ik, numerics).to(iq.dtype).unflatten(1, iq.shape[1:3])
    return (dots * iw[..., None]).sum(2)


def scores_with_late_relu(iq: Tensor, ik: Tensor, iw: Tensor, numerics: Numerics) -> Tensor:
    dots = product(iq.flatten(1, 2), ik, numerics).to(iq.dtype).unflatten(1, iq.shape[1:3])
    return (dots * iw[..., None]).relu().sum(2)


def best_first(scores: Tensor, visible: Tensor, k: int, numerics: Numerics) -> Tensor:
    """The selection in order of score."""
    found = index.top_k(scores, min(k, scores.shape[-1]), numerics).to(torch.int32)
    return torch.where(found < visible[..., None], found, -1)


def unpinned_blocks(scores: Tensor, visible: Tensor, blocks: int, size: int, numerics: Numerics) -> Tensor:
    """The newest block has to win its place."""
    best = functional.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    chosen = index.top_k(best, min(blocks, best.shape[-1]), numerics)
    last = torch.iinfo(torch.int32).max
    chosen = torch.where(best.gather(-1, chosen) != -torch.inf, chosen.to(torch.int32), last).sort(-1).values
    return torch.where(chosen == last, -1, chosen)


def self_masked(params: Any, ops: Any) -> Any:
    """A candidate source that reads its own candidates."""
    made: list[tuple[Tensor, int]] = []

    def candidate_blocks(scores, visible, blocks, size, numerics):
        made.append((index.candidate_blocks(scores, visible, blocks, size, numerics), size))
        return made[-1][0]

    def select(scores, visible, k, numerics):
        if made:
            chosen, size = made.pop()
            scores = torch.where(index.candidate_rows(chosen, scores.shape[-1], size), scores, -torch.inf)
        return index.select(scores, visible, k, numerics)

    return replace(ops, candidate_blocks=candidate_blocks, select=select)


def early_rows(positions: Tensor, ratio: int) -> Tensor:
    """A group is seen before its last token."""
    return torch.div(positions + ratio, ratio, rounding_mode="floor")


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
    code = sum((v.abs() >= middle).int() for middle in quant.MIDDLES)
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


def late_block(length: Tensor, valid: Tensor, rows: int, start: int | None) -> Any:
    """The block stands one position too far."""
    return RIGHT_CALL_ROWS(length + (rows > 1), valid, rows, start)
