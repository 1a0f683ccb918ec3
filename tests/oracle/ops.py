# SPDX-License-Identifier: Apache-2.0
"""One float64 function per primitive, for one position (or one short list of positions), written from the formulas.

`rnd` and `act` stand where the released model rounds to bfloat16 and where a linear rounds its input to fp8. Both
default to the identity, which gives the exact mathematics; tests pass formats.bf16 and formats.a8.
"""

import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray
Rounding = Callable[[Array], Array]
F32 = np.float32


def same(x: Array) -> Array:
    """No rounding."""
    return x


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def softmax(x: Array) -> Array:
    """exp(x_i - max) / sum."""
    p = np.exp(x - x.max())
    return p / p.sum()


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), accurate in both tails."""
    return np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def linear(x: Array, weight: Array, act: Rounding = same) -> Array:
    """weight @ act(x) with an exactly dequantized weight [out, in]."""
    return weight @ act(x)


def grouped_linear(heads: Array, weight: Array) -> Array:
    """Group g of [groups * out, in] applies to the g-th run of heads, flattened: [heads, d] -> [groups * out]."""
    groups = heads.size // weight.shape[1]
    parts, blocks = heads.reshape(groups, -1), weight.reshape(groups, -1, weight.shape[1])
    return np.concatenate([blocks[g] @ parts[g] for g in range(groups)])


# Rotary embedding


def rope_frequencies(dim: int, base: float, original: int, factor: float, fast: float, slow: float) -> Array:
    """float32 frequency of each of the dim / 2 pairs; `original` 0 means no YaRN. Each step is rounded to float32."""
    exponents = np.arange(0, dim, 2).astype(F32) / F32(dim)
    powers = np.array([base ** float(e) for e in exponents]).astype(F32)
    plain = F32(1.0) / powers
    if original == 0:
        return plain
    edges = [dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)]
    low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2).astype(F32) - F32(low)) / F32(span), F32(0), F32(1))
    return plain / F32(factor) * ramp + plain * (F32(1) - ramp)


def rope_angles(position: int, frequencies: Array) -> Array:
    """float32(position) * frequency, the product rounded to float32: the angle that cos and sin are taken of."""
    return (F32(position) * frequencies).astype(np.float64)


def rotate(x: Array, angles: Array, sign: float = 1.0) -> Array:
    """Turn the adjacent pairs (x[2i], x[2i+1]) of the last 2 * len(angles) elements of [.., d]; sign -1 turns back."""
    out = x.copy()
    start = x.shape[-1] - 2 * len(angles)
    cos, sin = np.cos(angles), sign * np.sin(angles)
    even, odd = x[..., start::2], x[..., start + 1 :: 2]
    out[..., start::2] = even * cos - odd * sin
    out[..., start + 1 :: 2] = even * sin + odd * cos
    return out


# Attention


def window_slots(position: int, window: int) -> list[int]:
    """Positions that a query sees in its window, oldest first."""
    return list(range(max(0, position - window + 1), position + 1))


def prefill_list(position: int, window: int, tokens: int) -> list[int]:
    """Window columns of a prefill of `tokens` rows: oldest visible position first, -1 where nothing is left."""
    slots = window_slots(position, window)
    return slots + [-1] * (min(tokens, window) - len(slots))


def ring_list(position: int, window: int) -> list[int]:
    """Window columns of a decode step: slots position % window, oldest first; -1 in front while the ring fills."""
    slots = [p % window for p in window_slots(position, window)]
    return [-1] * (window - len(slots)) + slots


def draft_list(position: int, window: int, block: int) -> list[int]:
    """Columns of every draft query after `position`: the live ring slots by slot number, then the block's own rows."""
    return list(range(min(window, position + 1))) + [window + i for i in range(block)]


def attend(q: Array, rows: Array, sink: Array, scale: float) -> Array:
    """Per head: softmax over the rows with exp(sink) in the denominator only; rows are keys and values. No rows: 0."""
    if len(rows) == 0:
        return np.zeros_like(q)
    logits = q @ rows.T * scale
    top = np.maximum(logits.max(1), sink)[:, None]
    p = np.exp(logits - top)
    return p @ rows / (p.sum(1, keepdims=True) + np.exp(sink[:, None] - top))


def attend_list(q: Array, rows: Array, sink: Array, slots: Array, scale: float) -> Array:
    """`attend` over rows[slots]; slot -1 stands for nothing."""
    return attend(q, rows[[s for s in slots if s >= 0]], sink, scale)


def attend_in_runs(q: Array, rows: Array, sink: Array, slots: Array, scale: float, rnd: Rounding, run: int = 64) -> Array:
    """`attend_list` as the released kernel rounds it: runs of 64 list entries with a running maximum from -1e30.

    The probabilities, relative to the maximum so far, are rounded before they meet the rows but not in their sum.
    """
    if all(s < 0 for s in slots):
        return np.zeros_like(q)
    top, total, mixed = np.full((len(q), 1), -1e30), np.zeros((len(q), 1)), np.zeros_like(q)
    for first in range(0, len(slots), run):
        part = rows[[s for s in slots[first : first + run] if s >= 0]]
        logits = q @ part.T * scale
        new = np.maximum(top, logits.max(1, keepdims=True, initial=-np.inf))
        p, keep = np.exp(logits - new), np.exp(np.maximum(top - new, -745.0))
        total, mixed, top = total * keep + p.sum(1, keepdims=True), mixed * keep + rnd(p) @ part, new
    return mixed / (total + np.exp(sink[:, None] - top))


def pool(keys: Array, gates: Array | None) -> Array:
    """One group [ratio, d] to one latent [d]: per channel the softmax of the gates over the tokens weighs the keys."""
    if gates is None:
        return keys[0]
    total = np.zeros(keys.shape[1])
    for channel in range(keys.shape[1]):
        total[channel] = softmax(gates[:, channel]) @ keys[:, channel]
    return total


def compress(x: Array, wkv: Array, wgate: Array | None, norm: Array, ratio: int, eps: float, rnd: Rounding = same) -> list[Array]:
    """The latent of every complete group of `ratio` tokens of x [n, dim]; the rest of the tokens give nothing."""
    latents = []
    for first in range(0, len(x) - ratio + 1, ratio):
        group = x[first : first + ratio]
        keys = np.array([wkv @ token for token in group])
        gates = None if wgate is None else np.array([wgate @ token for token in group])
        latents.append(rms_norm(rnd(pool(keys, gates)), norm, eps))
    return latents


def index_scores(q: Array, keys: Array, weights: Array, rnd: Rounding = same) -> Array:
    """score_j = sum over heads of relu(q_h . k_j) * w_h, for q [heads, d], keys [n, d], weights [heads]."""
    dots = np.maximum(rnd(q @ keys.T), 0.0)
    return rnd(rnd(dots * weights[:, None]).sum(0))


def top_k(scores: Array, k: int) -> list[int]:
    """Indices of the k largest, best first; among equals the lower index."""
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:k]


def select(scores: Array, k: int) -> list[int]:
    """The k best rows in ascending order; all of them when there are no more than k."""
    return sorted(top_k(scores, min(k, len(scores))))


def candidate_rows(scores: Array, visible: int, blocks: int, size: int) -> Array:
    """Mask [n] of the rows in the `blocks` best blocks of `size` rows, by the largest score of a visible row.

    The block of the newest visible row comes first of all; blocks without a visible row are never taken. The mask is
    true for a whole block, its invisible rows included.
    """
    count = -(-len(scores) // size)
    best = np.full(count, -np.inf)
    for row in range(visible):
        best[row // size] = max(best[row // size], scores[row])
    if visible:
        best[(visible - 1) // size] = np.inf
    kept = [b for b in top_k(best, min(blocks, count)) if best[b] > -np.inf]
    return np.array([row // size in kept for row in range(len(scores))], bool)


# Mixture of experts


def route(x: Array, weight: Array, bias: Array, top: int, score: str, scale: float, normalize: bool = True) -> tuple[list[int], Array]:
    """Experts with the largest score + bias, best first, and their scores without bias, normalized (top > 1) and scaled."""
    logits = weight @ x
    scores = {"sqrtsoftplus": lambda v: np.sqrt(softplus(v)), "sigmoid": sigmoid, "softmax": softmax}[score](logits)
    experts = top_k(scores + bias, top)
    weights = scores[experts]
    if normalize and top > 1:
        weights = weights / (weights.sum() + 1e-20)
    return experts, weights * scale


def expert(x: Array, w1: Array, w2: Array, w3: Array, limit: float, weight: float = 1.0, act: Rounding = same, rnd: Rounding = same) -> Array:
    """w2 @ (silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * weight); the weight comes before w2."""
    gate, up = rnd(linear(x, w1, act)), rnd(linear(x, w3, act))
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return rnd(linear(rnd(silu(gate) * up * weight), w2, act))


# Hyper-connections


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Row softmax + eps, a column step, then iterations - 1 times a row and a column step; a step divides by sum + eps."""
    c = np.array([softmax(row) for row in logits]) + eps
    c = c / (c.sum(0) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(1)[:, None] + eps)
        c = c / (c.sum(0) + eps)
    return c


def split_mixes(m: Array, scale: Array, base: Array, copies: int, iterations: int, eps: float) -> tuple[Array, Array, Array]:
    """The (2 + copies) * copies numbers m as pre [copies], post [copies] and C [source copy, target copy]."""
    pre = sigmoid(m[:copies] * scale[0] + base[:copies]) + eps
    post = 2.0 * sigmoid(m[copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    logits = (m[2 * copies :] * scale[2] + base[2 * copies :]).reshape(copies, copies)
    return pre, post, sinkhorn(logits, iterations, eps)


def mixes(h: Array, fn: Array, scale: Array, base: Array, iterations: int, eps: float, norm_eps: float) -> tuple[Array, Array, Array]:
    """Mixes of a stream [copies, dim]: m = (fn u) / sqrt(mean(u**2) + eps) with u the copies one after another."""
    u = h.reshape(-1)
    return split_mixes(fn @ u / math.sqrt((u * u).mean() + norm_eps), scale, base, len(h), iterations, eps)


def collapse(h: Array, pre: Array) -> Array:
    """sum_i pre_i h_i."""
    return pre @ h


def expand(y: Array, h: Array, post: Array, c: Array) -> Array:
    """Copy k becomes post_k * y + sum_i C[i, k] * h_i."""
    return post[:, None] * y + c.T @ h


# Head


def greedy(logits: Array) -> int:
    """Index of the largest logit; among equals the first."""
    return top_k(logits, 1)[0]
