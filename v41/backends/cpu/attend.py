# SPDX-License-Identifier: Apache-2.0
"""Attention over slot lists: the products of all runs at once, then the running maximum and sums over them."""

from typing import NamedTuple

import torch
from torch import Tensor

from v41.backends.cpu.product import single
from v41.spec.numerics import Numerics
from v41.spec.ops import attend as spec
from v41.spec.ops.attend import RUN
from v41.spec.types import F32, I32, Act, Flag

GATHERED = 1 << 20  # numbers of gathered rows that are held at once: they are written, and read twice, in the cache
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class Running(NamedTuple):
    """The softmax so far."""

    maximum: F32[Tensor, "b s heads"]
    total: F32[Tensor, "b s heads"]
    out: F32[Tensor, "b s heads d"]


def sparse_attn(
    q: Act[Tensor, "b s heads d"],
    window: Act[Tensor, "b n d"],
    window_idxs: I32[Tensor, "b s w"],
    compressed: Act[Tensor, "b t d"],
    topk_idxs: I32[Tensor, "b s k"],
    attn_sink: F32[Tensor, "heads"],
    scale: float,
    numerics: Numerics,
) -> Act[Tensor, "b s heads d"]:
    if not single(numerics):
        return spec.sparse_attn(q, window, window_idxs, compressed, topk_idxs, attn_sink, scale, numerics)
    listed = window_idxs.shape[2] + topk_idxs.shape[2]
    step, outs = max(GATHERED // max(listed * q.shape[0] * window.shape[2], 1), 1), []
    for a in range(0, q.shape[1], step):
        near, far = window_idxs[:, a : a + step], topk_idxs[:, a : a + step]
        live = torch.cat((near, far), 2) >= 0
        first, end = (0, listed) if numerics.device else live_runs(live)
        near, far = near[:, :, first:end], far[:, :, max(first - near.shape[2], 0) : max(end - near.shape[2], 0)]
        kv = gather(window, near, compressed, far)
        outs.append(attend(q[:, a : a + step], kv, live[:, :, first:end], attn_sink, scale, listed if numerics.device else RUN))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def live_runs(live: Flag[Tensor, "b s n"]) -> tuple[int, int]:
    """The slots from the first run with a slot that some query lists to the last one. The runs around them add exact zeros."""
    at = live.flatten(0, 1).any(0).nonzero()
    if not len(at):
        return 0, 0
    return int(at[0]) // RUN * RUN, min(-(-(int(at[-1]) + 1) // RUN) * RUN, live.shape[2])


def gather(window: Tensor, near: Tensor, compressed: Tensor, far: Tensor) -> F32[Tensor, "b s n d"]:
    """The rows of both lists, in float32; zeros for -1, whatever the buffers hold."""
    kv = torch.empty((*near.shape[:2], near.shape[2] + far.shape[2], window.shape[2]), dtype=torch.float32, device=window.device)
    for rows, listed, into in ((window, near, kv[:, :, : near.shape[2]]), (compressed, far, kv[:, :, near.shape[2] :])):
        for b in range(len(rows) if listed.shape[2] else 0):
            at = listed[b].flatten()
            found = rows[b].index_select(0, at.clamp_min(0))
            if (at < 0).any():
                bits = found.view(BITS[found.dtype])
                bits.bitwise_and_((at >= 0).to(bits.dtype).neg_()[:, None])
            into[b].copy_(found.view(*listed.shape[1:], -1))
    return kv


def attend(q: Tensor, kv: Tensor, live: Flag[Tensor, "b s n"], sink: Tensor, scale: float, run: int) -> Tensor:
    """The spec's running softmax: whole runs together, then what is left."""
    wide, dead = q.to(torch.float32), live.logical_not()[:, :, None]
    maximum = torch.full(q.shape[:-1], -1e30, dtype=torch.float32, device=q.device)
    state, listed = Running(maximum, torch.zeros_like(maximum), torch.zeros_like(wide)), kv.shape[2]
    whole = listed - listed % run if run else 0
    for a, b, length in ((0, whole, run), (whole, listed, listed - whole)):
        if a < b:
            state = over_runs(state, wide, kv[:, :, a:b], dead[..., a:b], scale, length, q.dtype)
    total = state.total.add_((sink.to(torch.float32) - state.maximum).exp_())
    return state.out.div_(total[..., None]).to(q.dtype)


def over_runs(state: Running, q: Tensor, kv: Tensor, dead: Tensor, scale: float, run: int, dtype: torch.dtype) -> Running:
    """The softmax after further runs of equal length. A short run has its own product: few columns take another path in the BLAS."""
    logits = torch.matmul(q, kv.transpose(-1, -2)).mul_(scale).masked_fill_(dead, -torch.inf).unflatten(-1, (-1, run))
    maxima = torch.cat((state.maximum[..., None], logits.amax(-1)), -1).cummax(-1).values
    before, after = maxima[..., :-1], maxima[..., 1:]
    p, keep = logits.sub_(after[..., None]).exp_(), (before - after).exp_()
    rounded = torch.empty_like(p.transpose(2, 3), dtype=dtype, memory_format=torch.contiguous_format).copy_(p.transpose(2, 3))
    parts = torch.matmul(rounded.to(torch.float32), kv.unflatten(2, (-1, run)))
    total, out = state.total, state.out
    for kept, added, part in zip(keep.unbind(-1), p.sum(-1).unbind(-1), parts.unbind(2), strict=True):
        total = total.mul_(kept).add_(added)
        out = out.mul_(kept[..., None]).add_(part)
    return Running(maxima[..., -1], total, out)
