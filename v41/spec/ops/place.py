# SPDX-License-Identifier: Apache-2.0
"""Embedding gather and cache writes."""

import torch
from torch import Tensor

from v41.spec.types import BF16, I32, Act


def embedding(ids: I32[Tensor, "*n"], table: BF16[Tensor, "vocab dim"], dtype: torch.dtype) -> Act[Tensor, "*n dim"]:
    """table[ids] in the activation dtype."""
    return table[ids].to(dtype)


def write_rows(buffer: Tensor, index: I32[Tensor, "b s"], rows: Tensor) -> Tensor:
    """buffer with rows[b, s] at buffer[b, index[b, s]].

    The last row of every buffer is a sink: callers send there, as zeros, the rows that must not be written. No other index repeats.
    """
    lead = torch.arange(buffer.shape[0], dtype=torch.int32, device=buffer.device)[:, None]
    return buffer.index_put((lead, index), rows.to(buffer.dtype))
