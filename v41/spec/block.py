# SPDX-License-Identifier: Apache-2.0
"""One layer: two sublayers with their hyper-connections (docs/model.md 6, 9), the same for backbone layers and draft stages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from v41.spec.backend import Backend
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.ops.experts import experts_held
from v41.spec.params import Engram, Hyper, Layer, MoE
from v41.spec.types import I32, Act, Wide

Stream = Act[Tensor, "b s copies dim"]
Pre = Wide[Tensor, "b s copies"]


def mixes(p: Hyper, stream: Stream, config: Config, numerics: Numerics, ops: Backend) -> tuple[Pre, Pre, Wide[Tensor, "b s copies copies"]]:
    """pre, post and comb of one sublayer."""
    return ops.hc_mixes(stream, p.fn, p.scale, p.base, iters=config.hc_sinkhorn_iters, eps=config.hc_eps, norm_eps=config.rms_norm_eps, numerics=numerics)


def moe(p: MoE, x: Act[Tensor, "b s dim"], k: int, name: str, config: Config, numerics: Numerics, ops: Backend) -> Act[Tensor, "b s dim"]:
    """Routed experts summed in fp32, plus the shared expert, rounded once."""
    rows = x.flatten(0, 1)
    weights, ids = ops.gate(
        rows,
        p.gate.weight,
        p.gate.bias,
        k=k,
        function=config.scoring_func,
        normalize=config.norm_topk_prob,
        route_scale=config.routed_scaling_factor,
        numerics=numerics,
    )
    weights, ids = ops.tap(name + "route_weights", weights), ops.tap(name + "route_experts", ids)
    e, s = p.experts, p.shared_experts
    own = ids - ops.first("experts", experts_held(e.w1), ids.device)
    total = ops.experts(rows, weights, own, e.w1, e.w2, e.w3, limit=config.swiglu_limit, numerics=numerics)
    shared = ops.shared_expert(rows, s.w1, s.w2, s.w3, limit=config.swiglu_limit, numerics=numerics)
    return ops.sum_terms((total, shared.to(total.dtype)), ("experts moe_inter", "shared_inter")).to(x.dtype).view(x.shape)


def block(
    p: Layer,
    stream: Stream,
    pre: Pre,
    attend: Callable[[Tensor], tuple[Tensor, Any]],
    k: int,
    name: str,
    config: Config,
    numerics: Numerics,
    ops: Backend,
) -> tuple[Stream, Pre, Any]:
    """(stream, pre mix for the next layer, what attend gives besides its output).

    Every pre mix is used one sublayer later than it was made: attention collapses with the one handed in, the FFN with attention's.
    """
    pre_attn, post, comb = mixes(p.hc_attn, stream, config, numerics, ops)
    x = ops.tap(name + "attn_in", ops.rms_norm(ops.hc_pre(stream, pre), p.attn_norm, config.rms_norm_eps))
    y, rest = attend(x)
    stream = ops.hc_post(ops.tap(name + "attn_out", y), stream, post, comb)
    pre_ffn, post, comb = mixes(p.hc_ffn, stream, config, numerics, ops)
    x = ops.rms_norm(ops.hc_pre(stream, pre_attn), p.ffn_norm, config.rms_norm_eps)
    y = ops.tap(name + "ffn_out", moe(p.ffn, x, k, name, config, numerics, ops))
    stream = ops.tap(name + "h_out", ops.hc_post(y, stream, post, comb))
    return stream, ops.tap(name + "pre_mix_out", pre_ffn), rest


def engram_part(p: Engram, hash_ids: I32[Tensor, "b s columns"], numerics: Numerics, ops: Backend) -> Act[Tensor, "b s flat"]:
    """This rank's part of the rows that each position reads."""
    return ops.engram_rows(p.embed, hash_ids - ops.first("engram_rows", p.embed.weight.shape[0], hash_ids.device), numerics)


def engram_memory(tables: tuple[Engram, ...], rows: tuple[Act[Tensor, "b s flat"], ...], numerics: Numerics, ops: Backend) -> tuple[Tensor, ...]:
    """Keys and values of one or all Engram layers from the rows that they read; those of all layers come together where ranks share the work."""
    kv = torch.stack([ops.linear(r, p.wkv, numerics) for p, r in zip(tables, rows, strict=True)])
    return ops.all_gather(kv, "engram.engram_parts*dim", -1).unbind(0)


def engram(p: Engram, stream: Stream, kv: Act[Tensor, "b s flat"], name: str, config: Config, numerics: Numerics, ops: Backend) -> Stream:
    """The stream with the n-gram memory added, before the layer's own mixes."""
    out = ops.engram_gate(stream, kv, p.q_weight, p.k_weight, None, eps=config.rms_norm_eps, numerics=numerics)
    return ops.tap(name + "engram_out", out)
