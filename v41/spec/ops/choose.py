# SPDX-License-Identifier: Apache-2.0
"""Token choice (docs/model.md 10)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from v41.spec.types import F32, I32, Flag, Wide

COLDEST = 1e-5


@dataclass(frozen=True)
class Sample:
    """How draft tokens are drawn: temperature and top-p of each sequence (0: the best token), one uniform per drafted token."""

    temperature: F32[Tensor, "b"]
    top_p: F32[Tensor, "b"]
    uniforms: F32[Tensor, "b block"]


def greedy(logits: Wide[Tensor, "b vocab"]) -> I32[Tensor, "b"]:
    """The best token; the lower id wins a tie."""
    return logits.argmax(-1).to(torch.int32)


def first_of(true: Flag[Tensor, "*n size"]) -> I32[Tensor, "*n"]:
    """The first index of the last dim that is true, the last one where none is; argmax in 32 bits."""
    row = torch.arange(true.shape[-1], dtype=torch.int32, device=true.device)
    return torch.where(true, row, true.shape[-1] - 1).amin(-1)


def best_of(logits: Wide[Tensor, "*n vocab"], first: I32[Tensor, ""], size: int) -> tuple[Wide[Tensor, "*n"], I32[Tensor, "*n"]]:
    """(score, token) of the best of a share of the vocabulary that begins at `first`; what lies behind `size` is padding and never wins.

    A share of nothing but padding offers its first column with -inf.
    """
    token = first + torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    held = torch.where(token < size, logits, -torch.inf)
    best = held.amax(-1)
    return best, first + first_of(held == best[..., None])


def distribution(logits: Wide[Tensor, "b vocab"], temperature: F32[Tensor, "b"], top_p: F32[Tensor, "b"]) -> Wide[Tensor, "b vocab"]:
    """softmax(logits / temperature) on the smallest set of best tokens whose probability reaches top_p, renormalized.

    The best token always stays; equal probabilities enter lower id first. A top_p of 1 keeps every token, whatever the sums round to.
    """
    p = (logits / temperature.clamp_min(COLDEST)[:, None]).softmax(-1)
    order = p.sort(dim=-1, descending=True, stable=True)
    before = order.values.cumsum(-1) - order.values
    inside = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order.indices, inside)
    kept = kept | (torch.arange(p.shape[-1], device=p.device) == order.indices[:, :1])
    p = torch.where(kept, p, 0)
    return p / p.sum(-1, keepdim=True)


def chosen_from(logits: Wide[Tensor, "b n vocab"], temperature: F32[Tensor, "b"], top_p: F32[Tensor, "b"]) -> Wide[Tensor, "b n vocab"]:
    """What a token of each row is drawn from: its `distribution`, or all on the best token where the temperature is 0."""
    rows, n = logits.flatten(0, 1), logits.shape[1]
    heat, most = (t[:, None].expand(-1, n).flatten() for t in (temperature, top_p))
    best = torch.arange(rows.shape[-1], device=rows.device) == greedy(rows)[:, None]
    return torch.where((heat > 0)[:, None], distribution(rows, heat, most), best.to(rows.dtype)).view(logits.shape)


def draw(p: Wide[Tensor, "b vocab"], uniform: F32[Tensor, "b"]) -> I32[Tensor, "b"]:
    """The first token whose cumulative probability exceeds the uniform in [0, 1); never one of probability 0."""
    total = p.cumsum(-1)
    over = (total > uniform[:, None] * total[:, -1:]) & (p > 0)
    return over.int().argmax(-1).to(torch.int32)


def choose(logits: Wide[Tensor, "b vocab"], sample: Sample | None, column: int) -> I32[Tensor, "b"]:
    """The best token, or the one drawn with the uniform of this column where a temperature is above 0."""
    best = greedy(logits)
    if sample is None:
        return best
    drawn = draw(distribution(logits, sample.temperature, sample.top_p), sample.uniforms[:, column])
    return torch.where(sample.temperature > 0, drawn, best)
