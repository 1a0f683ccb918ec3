# SPDX-License-Identifier: Apache-2.0
"""What ranks do together, where nothing is sharded (docs/sharding.md 3): one rank holds every axis whole.

Every collective names the logical axis that it closes, with the part of the checkpoint name in front where a rule may differ there:
`embed.vocab`, `head.vocab`. Which ranks that means is the business of `v41.sharding`.
"""

import torch
from torch import Tensor

from v41.spec.types import I32, Act, Wide


def all_reduce(tensor: Act[Tensor, "*n"], axis: str) -> Act[Tensor, "*n"]:
    """The sum over ranks of partial sums over this rank's share of a logical axis; the identity where nothing is sharded."""
    return tensor


def all_gather(tensor: Tensor, axis: str, dim: int) -> Tensor:
    """The shares of all ranks of a logical axis, side by side along dim; the identity where nothing is sharded."""
    return tensor


def sum_terms(terms: tuple[Wide[Tensor, "*n"], ...], axes: tuple[str, ...]) -> Wide[Tensor, "*n"]:
    """The sum of terms, each a partial sum over its own axes (several with blanks between), closed by one reduction for all of them."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def lookups(found: tuple[Act[Tensor, "b ..."], ...], axes: tuple[str, ...]) -> tuple[Act[Tensor, "b ..."], ...]:
    """Rows looked up in tables whose rows are cut: each rank has its own rows and zeros for the others, so that sums are exact in any dtype.

    Lookups that are known at the same time are given together: rules may let them share one reduction.
    """
    return found


def first(axis: str, size: int, device: torch.device) -> I32[Tensor, ""]:
    """The first index of this rank's share of an axis, of which every rank holds `size`; a tensor, so that all ranks share one graph."""
    return torch.zeros((), dtype=torch.int32, device=device)


def recut(tensor: Tensor, axis: str, to: str, size: int) -> Tensor:
    """A tensor whose last dim is cut like `axis`, cut like the axis `to` instead ("": whole, without padding); `size` is the whole axis."""
    return tensor


def choice_cut(axis: str) -> str:
    """How logits whose only use is their best token stay cut: like `axis`, or "" where rules gather them."""
    return ""


def elect(score: Wide[Tensor, "*n"], token: I32[Tensor, "*n"], row: Act[Tensor, "*n d"], axis: str) -> tuple[I32[Tensor, "*n"], Act[Tensor, "*n d"]]:
    """(token, row) of the rank with the best score; the lower token wins a tie. `row` is what the rank knows of its token, maybe nothing."""
    return token, row
