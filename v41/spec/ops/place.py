# SPDX-License-Identifier: Apache-2.0
"""Embedding gather and cache writes."""

import torch
from torch import Tensor

from v41.spec.types import BF16, I32, Act

EMBED, HEAD, MARKOV = "embed.vocab", "head.vocab", "markov_head.vocab"  # the vocabulary of each table, for rules that cut one otherwise


def embedding(ids: I32[Tensor, "*n"], table: BF16[Tensor, "vocab dim"], dtype: torch.dtype) -> Act[Tensor, "*n dim"]:
    """table[ids] in the activation dtype; zeros for an id that the table does not hold, so that parts of a table can be read and summed."""
    held = (ids >= 0) & (ids < table.shape[0])
    return torch.where(held[..., None], table[torch.where(held, ids, 0)], 0).to(dtype)


def write_rows(buffer: Tensor, index: I32[Tensor, "b s"], rows: Tensor) -> Tensor:
    """buffer with rows[b, s] at buffer[b, index[b, s]].

    The last row of every buffer is a sink: callers send there, as zeros, the rows that must not be written. No other index repeats.
    """
    lead = torch.arange(buffer.shape[0], dtype=torch.int32, device=buffer.device)[:, None]
    return buffer.index_put((lead, index), rows.to(buffer.dtype))
