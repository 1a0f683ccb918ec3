# SPDX-License-Identifier: Apache-2.0
"""Attention over a slot list with a sink (docs/model.md 7.6)."""

import torch
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.ops.norm import wide
from v41.spec.types import F32, I32, Act

RUN = 64  # list entries that share one step of the running softmax
QUERIES = 256  # queries whose gathered rows are held at once: memory stays linear in the number of rows


def gather_rows(rows: Act[Tensor, "b n d"], idxs: I32[Tensor, "b s k"]) -> Act[Tensor, "b s k d"]:
    """rows[b, idxs[b, s, k]]; a row of zeros for -1."""
    b, s, k = idxs.shape
    found = rows[torch.arange(b, device=rows.device)[:, None], idxs.clamp_min(0).reshape(b, s * k)].unflatten(1, (s, k))
    return torch.where((idxs >= 0)[..., None], found, torch.zeros((), dtype=rows.dtype, device=rows.device))


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
    """softmax(scale * q . kv_j) over window slots, then compressed slots; exp(sink) joins the denominator only; -1 is no slot.

    The list is worked off in runs of 64 with a running maximum that starts at -1e30: p = exp(logit - maximum so far) is summed in fp32
    and rounded to kv's dtype for the product with kv; the output is rounded once. A query without slots gives exactly 0. In `trn2` the
    whole list is one run.
    """
    outs = []
    for a in range(0, q.shape[1], QUERIES):
        part = slice(a, a + QUERIES)
        slots = torch.cat((gather_rows(window, window_idxs[:, part]), gather_rows(compressed, topk_idxs[:, part])), 2)
        live = torch.cat((window_idxs[:, part], topk_idxs[:, part]), 2) >= 0
        outs.append(_attend(q[:, part], slots, live, attn_sink, scale, slots.shape[2] if numerics.device else RUN))
    return torch.cat(outs, 1)


def _attend(q: Tensor, slots: Tensor, live: Tensor, sink: Tensor, scale: float, run: int) -> Tensor:
    """One part of the queries: slots [b s k d] with live [b s k], worked off in runs."""
    maximum = torch.full(q.shape[:-1], -1e30, dtype=wide(q).dtype, device=q.device)
    total, out = torch.zeros_like(maximum), torch.zeros_like(wide(q))
    for a in range(0, slots.shape[2], run):
        kv, seen = wide(slots[:, :, a : a + run]), live[:, :, None, a : a + run]
        logits = (wide(q) @ kv.transpose(-1, -2)) * scale
        logits = torch.where(seen, logits, -torch.inf)
        new = torch.maximum(maximum, logits.amax(-1))
        p = (logits - new[..., None]).exp()
        keep = (maximum - new).exp()
        total = total * keep + p.sum(-1)
        out = out * keep[..., None] + wide(p.to(q.dtype)) @ kv
        maximum = new
    total = total + (wide(sink).to(total.dtype) - maximum).exp()
    return (out / total[..., None]).to(q.dtype)
