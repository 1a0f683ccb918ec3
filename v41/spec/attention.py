# SPDX-License-Identifier: Apache-2.0
"""Attention of a backbone layer: window, compressed rows, output (docs/model.md 7)."""

from dataclasses import replace

import torch
from torch import Tensor

from v41.spec.backend import Backend
from v41.spec.cache import LayerCache
from v41.spec.compress import publish
from v41.spec.config import Config
from v41.spec.handed import Handed
from v41.spec.indexer import index
from v41.spec.numerics import Numerics
from v41.spec.ops.rope import layer_frequencies
from v41.spec.params import Attention
from v41.spec.slots import Call, locate, ring_targets, window_list
from v41.spec.types import F32, I32, Act


def queries(
    p: Attention, x: Act[Tensor, "b s dim"], at: I32[Tensor, "b s"], f: F32[Tensor, "half"], config: Config, numerics: Numerics, ops: Backend
) -> tuple[Act[Tensor, "b s q_lora"], Act[Tensor, "b s heads head_dim"]]:
    """The q latent, which the indexer reads too, and the rotated queries: no norm per head, no rounding."""
    qr = ops.rms_norm(ops.linear(x, p.wq_a, numerics), p.q_norm, config.rms_norm_eps)
    q = ops.linear(qr, p.wq_b, numerics).unflatten(-1, (-1, config.head_dim))
    return qr, ops.rope(q, at, f)


def window_kv(
    p: Attention, x: Act[Tensor, "b s dim"], at: I32[Tensor, "b s"], f: F32[Tensor, "half"], config: Config, numerics: Numerics, ops: Backend
) -> Act[Tensor, "b s head_dim"]:
    """The row that is key and value of every head: normed, rotated, through the fp8 round trip with its rotary part."""
    kv = ops.rope(ops.rms_norm(ops.linear(x, p.wkv, numerics), p.kv_norm, config.rms_norm_eps), at, f)
    return ops.act_round(kv, numerics) if numerics.rounds else kv


def output(
    p: Attention, o: Act[Tensor, "b s heads head_dim"], at: I32[Tensor, "b s"], f: F32[Tensor, "half"], config: Config, numerics: Numerics, ops: Backend
) -> Act[Tensor, "b s dim"]:
    """The values carry their rotation, so the output is rotated back at the query's position; then wo_a by groups and wo_b."""
    o = ops.rope_inverse(o, at, f)
    groups = config.o_groups * o.shape[2] // config.num_attention_heads
    y = ops.partial_linear(ops.grouped_linear(o, p.wo_a, groups, numerics), p.wo_b, numerics)
    return ops.all_reduce(y, "o_groups").to(o.dtype)


def write_window(ring: Act[Tensor, "b ring d"], kv: Act[Tensor, "b s d"], call: Call, ops: Backend) -> Act[Tensor, "b ring d"]:
    """The ring with the newest real rows of the call."""
    size = ring.shape[1] - 1
    target = ring_targets(call, size)
    return ops.write_rows(ring, target, torch.where((target < size)[..., None], kv, 0))


def hand_down(handed: Handed, state: LayerCache, call: Call, ratio: int, numerics: Numerics) -> Handed:
    """What the layers up to the next kv source read.

    With `reference` keys the slot changes hands only when this call finished a group (docs/model.md 7.9): a decode step that finishes
    none leaves what an earlier source put there.
    """
    handed = replace(handed, compressed=state.compressed)
    if numerics.index_keys == "reference":
        assert call.start is not None
        if (call.start + call.rows) // ratio == call.start // ratio:
            return handed
    return replace(handed, index_keys=state.index_keys)


def attention(
    p: Attention,
    state: LayerCache,
    handed: Handed,
    x: Act[Tensor, "b s dim"],
    call: Call,
    layer: int,
    config: Config,
    numerics: Numerics,
    ops: Backend,
) -> tuple[Act[Tensor, "b s dim"], LayerCache, Handed]:
    """(output, new state, what later layers read). The window list comes first, then the compressed rows that the indexer chose."""
    plan = config.layer_plan[layer]
    f = layer_frequencies(config, plan.ratio)
    qr, q = queries(p, x, call.positions, f, config, numerics, ops)
    kv = window_kv(p, x, call.positions, f, config, numerics, ops)
    if plan.owns_kv:
        state = publish(p.compressor, p.indexer.keys, state, x, call, layer, config, numerics, ops)
        handed = hand_down(handed, state, call, plan.ratio, numerics)
    if plan.owns_index:
        chosen, candidates = index(p.indexer, x, qr, handed.index_keys, handed.candidates, call, layer, config, numerics, ops)
        handed = replace(handed, topk_idxs=chosen, candidates=candidates)
    listed = locate(window_list(call.positions, config.sliding_window, numerics, call.start), call.length, state.window.shape[1] - 1)
    rows, chosen = (handed.compressed, handed.topk_idxs) if plan.ratio else (kv, listed[..., :0])
    o = ops.sparse_attn(q, torch.cat((state.window, kv), 1), listed, rows, chosen, p.attn_sink, config.head_dim**-0.5, numerics)
    state = replace(state, window=write_window(state.window, kv, call, ops))
    return output(p, o, call.positions, f, config, numerics, ops), state, handed
