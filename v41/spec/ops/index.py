# SPDX-License-Identifier: Apache-2.0
"""Index scores, selection and candidate blocks (docs/model.md 7.4, 7.5)."""

import torch
from torch import Tensor
from torch.nn import functional

from v41.spec.numerics import Numerics
from v41.spec.ops.norm import wide
from v41.spec.ops.product import product
from v41.spec.types import I32, I64, Act, Flag, Wide

Scores = Act[Tensor, "b s t"]


def index_scores(
    iq: Act[Tensor, "b s index_heads index_dim"], ik: Act[Tensor, "b t index_dim"], iw: Act[Tensor, "b s index_heads"], numerics: Numerics
) -> Scores:
    """sum_h relu(iq . ik) * iw: dot products, products and sum each rounded to the activation dtype; in `trn2` dot products and sum only."""
    dots = product(iq.flatten(1, 2), ik, numerics).to(iq.dtype).unflatten(1, iq.shape[1:3]).relu()
    if numerics.device:
        return (wide(dots) * wide(iw)[..., None]).sum(2).to(iq.dtype)
    return (dots * iw[..., None]).sum(2)


def mask_rows(scores: Scores, visible: I32[Tensor, "b s"]) -> Scores:
    """-inf at rows that query does not see: row j is complete for it when j < visible."""
    row = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return torch.where(row < visible[..., None], scores, -torch.inf)


def top_k(scores: Act[Tensor, "*rows t"] | Wide[Tensor, "*rows t"], k: int, numerics: Numerics) -> I64[Tensor, "*rows k"]:
    """Indices of the k best, best first. The lower index wins a tie; in `released` torch.topk's choice stands."""
    if numerics.compact:
        return scores.topk(k, dim=-1).indices
    if scores.dtype == torch.float64:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    count = scores.shape[-1]
    later = torch.arange(count - 1, -1, -1, device=scores.device)
    return ((ordered(scores).long() << 32) | later).topk(k, dim=-1).indices


def ordered(x: Act[Tensor, "*n"] | Wide[Tensor, "*n"]) -> I32[Tensor, "*n"]:
    """Integers in the order of x, which fits float32; 0 and -0 are one."""
    bits = (x.float() + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def seen_rows(keys: Act[Tensor, "b t index_dim"], visible: I32[Tensor, "b s"]) -> Act[Tensor, "b n index_dim"]:
    """The leading key rows that some of these queries may see. The whole buffer will do; a backend that may read values takes fewer."""
    return keys


def select(scores: Scores, visible: I32[Tensor, "b s"], k: int, numerics: Numerics) -> I32[Tensor, "b s k"]:
    """The k best rows in ascending order, -1 last. Whether a row counts is decided by its number, not by its score."""
    found = top_k(scores, min(k, scores.shape[-1]), numerics).sort(-1).values.to(torch.int32)
    return torch.where(found < visible[..., None], found, -1)


def candidate_blocks(scores: Scores, visible: I32[Tensor, "b s"], blocks: int, size: int, numerics: Numerics) -> I32[Tensor, "b s blocks"]:
    """The best blocks of `size` rows by their best row, -1 last; the block with the newest visible row is always kept.

    scores must be masked: a block without a visible row scores -inf and is dropped.
    """
    best = functional.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    number = torch.arange(best.shape[-1], dtype=torch.int32, device=scores.device)
    newest = torch.div(visible - 1, size, rounding_mode="floor")
    best = torch.where(number == newest[..., None], torch.inf, best)
    chosen = top_k(best, min(blocks, best.shape[-1]), numerics)
    kept = best.gather(-1, chosen) != -torch.inf
    last = torch.iinfo(torch.int32).max
    chosen = torch.where(kept, chosen.to(torch.int32), last).sort(-1).values
    return torch.where(chosen == last, -1, chosen)


def candidate_rows(blocks: I32[Tensor, "b s blocks"], rows: int, size: int) -> Flag[Tensor, "b s t"]:
    """Whether each of `rows` rows lies in one of the blocks."""
    number = torch.arange(-(-rows // size), dtype=torch.int32, device=blocks.device)
    inside = (blocks[..., None] == number).any(-2)
    return inside.repeat_interleave(size, -1)[..., :rows]
