# SPDX-License-Identifier: Apache-2.0
"""Further mistakes, of kinds that the other mutants leave out: formats, heads, chunks, history, positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from v41.conformance.mutants.kit import Mutant, patch, swap
from v41.spec import compress, model
from v41.spec.ops import attend, experts, index, mix, norm, place, rope
from v41.spec.ops.quant import E2M1, act_round, index_round, kv_round


def fewer_iterations(stream: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iters: int, eps: float, norm_eps: float, numerics: Any) -> Any:
    return mix.hc_mixes(stream, fn, scale, base, iters=max(iters - 1, 1), eps=eps, norm_eps=norm_eps, numerics=numerics)


def usual_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """eps of other models."""
    return norm.rms_norm(x, weight, 1e-6)


def shifted_sinks(q: Tensor, window: Tensor, listed: Tensor, rows: Tensor, chosen: Tensor, sink: Tensor, scale: float, numerics: Any) -> Tensor:
    """Another head's sink."""
    return attend.sparse_attn(q, window, listed, rows, chosen, sink.roll(1), scale, numerics)


def wrong_head(q: Tensor, window: Tensor, listed: Tensor, rows: Tensor, chosen: Tensor, sink: Tensor, scale: float, numerics: Any) -> Tensor:
    """The first head a fifth too large."""
    out = attend.sparse_attn(q, window, listed, rows, chosen, sink, scale, numerics)
    factor = torch.ones(out.shape[2], dtype=out.dtype)
    factor[0] = 1.2
    return out * factor[:, None]


def exclusive(q: Tensor, window: Tensor, listed: Tensor, rows: Tensor, chosen: Tensor, sink: Tensor, scale: float, numerics: Any) -> Tensor:
    """No slot gives the mean of nothing: NaN."""
    out = attend.sparse_attn(q, window, listed, rows, chosen, sink, scale, numerics)
    empty = ((listed < 0).all(-1) & (chosen < 0).all(-1))[..., None, None]
    return torch.where(empty, torch.nan, out)


def higher_in_a_tie(scores: Tensor, visible: Tensor, k: int, numerics: Any) -> Tensor:
    """The higher row wins a tie."""
    n = scores.shape[-1]
    found = n - 1 - index.top_k(scores.flip(-1), min(k, n), numerics)
    found = found.sort(-1).values.to(torch.int32)
    return torch.where(found < visible[..., None], found, -1)


def bf16_positions(right: Callable) -> Callable:
    """Positions through bfloat16, as a compiler may cast them."""
    return lambda x, positions, f: right(x, positions.bfloat16().to(torch.int32), f)


def nothing_written(buffer: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    """Rows of calls of one row are lost."""
    return buffer if rows.shape[1] == 1 else place.write_rows(buffer, at, rows)


def clamped_to_240(x: Tensor, numerics: Any) -> Tensor:
    """Codes end at 240."""
    return act_round(torch.where(x.abs() > 0, x, x), replace(numerics, regime="trn2") if numerics.rounds else numerics)


def no_gate_bias(x: Tensor, weight: Tensor, bias: Tensor, *, k: int, function: str, normalize: bool, route_scale: float, numerics: Any) -> Any:
    """Weights not normalized where they are tiny."""
    weights, ids = experts.gate(x, weight, bias, k=k, function=function, normalize=False, route_scale=1.0, numerics=numerics)
    return weights / (weights.sum(-1, keepdim=True) + 1e-2) * route_scale, ids


def twice(x: Tensor, weights: Tensor, ids: Tensor, w1: Any, w2: Any, w3: Any, *, limit: float, numerics: Any) -> Tensor:
    """Reduced twice."""
    return 2 * experts.experts(x, weights, ids, w1, w2, w3, limit=limit, numerics=numerics)


def last_expert_only(x: Tensor, weights: Tensor, ids: Tensor, w1: Any, w2: Any, w3: Any, *, limit: float, numerics: Any) -> Tensor:
    """Experts of a row overwrite each other."""
    return experts.experts(x, weights[:, -1:], ids[:, -1:], w1, w2, w3, limit=limit, numerics=numerics)


def nearest_scale(x: Tensor, numerics: Any) -> Tensor:
    """e2m1 by truncation."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1).clamp_min(1e-30) / 6)))[..., None]
    table = torch.tensor(E2M1)
    code = torch.bucketize((blocks / scale).abs().clamp_max(6), table, right=True) - 1
    return (torch.copysign(table[code.clamp(0, 7)], blocks) * scale).flatten(-2).to(x.dtype)


def short_history(right: Callable) -> Callable:
    """Look-back stops at the start of the call."""

    def hashed(p: Any, history: Tensor, ids: Tensor, call: Any, cache: Any, ops: Any) -> Any:
        return right(p, torch.zeros_like(history), ids, call, cache, ops)

    return hashed


def early_groups(right: Callable) -> Callable:
    """Groups count from the call's own first row."""

    def groups_of(call: Any, ratio: int) -> Any:
        found = right(call, ratio)
        return found._replace(number=found.number - torch.div(call.length, ratio, rounding_mode="floor")[:, None])

    return groups_of


MORE = [
    Mutant("one Sinkhorn iteration less", "6", "", "", swap(hc_mixes=fewer_iterations)),
    Mutant("the usual eps in norms", "3", "", "", swap(rms_norm=usual_eps)),
    Mutant("sinks of the next head", "7.6", "", "", swap(sparse_attn=shifted_sinks)),
    Mutant("first head a fifth too large", "7.6", "", "", swap(sparse_attn=wrong_head)),
    Mutant("no slot gives NaN", "7.6", "", "", swap(sparse_attn=exclusive)),
    Mutant("the higher row wins a tie", "7.4", "", "", swap(select=higher_in_a_tie)),
    Mutant("positions cast to bfloat16", "4", "", "", swap(rope=bf16_positions(rope.rope), rope_inverse=bf16_positions(rope.rope_inverse))),
    Mutant("rows of decode steps not written", "7.8", "", "", swap(write_rows=nothing_written)),
    Mutant("fp8 codes end at 240", "2", "", "", swap(act_round=clamped_to_240)),
    Mutant("routing weights with a floor", "9", "", "", swap(gate=no_gate_bias)),
    Mutant("experts summed twice", "9", "", "", swap(experts=twice)),
    Mutant("experts overwrite each other", "9", "", "", swap(experts=last_expert_only)),
    Mutant("index codes truncated", "2", "", "", swap(index_round=nearest_scale)),
    Mutant("window and compressed formats exchanged", "2", "", "", swap(act_round=kv_round, kv_round=act_round)),
    Mutant("index format for compressed rows", "2", "", "", swap(kv_round=index_round)),
    Mutant("token history lost between calls", "8", "", "", patch((model, "hash_ids", short_history(model.hash_ids)))),
    Mutant("groups counted from the call", "7.3", "", "", patch((compress, "groups_of", early_groups(compress.groups_of)))),
]
