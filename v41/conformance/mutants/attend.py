# SPDX-License-Identifier: Apache-2.0
"""Wrong rotations, attention, compressors and indexers, one mistake each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from v41.spec import attention as attending
from v41.spec import compress
from v41.spec.cache import LayerCache
from v41.spec.numerics import Numerics
from v41.spec.ops import attend, index, rope
from v41.spec.ops.product import product
from v41.spec.ops.quant import act_round

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
