# SPDX-License-Identifier: Apache-2.0
"""Slot lists and positions: which cache rows a query reads, in which order (docs/numerics.md 3).

Everything that a sequence remembers is addressed by position. Rings hold `size` positions, position p in row p % size, and one more row
that no one reads (`write_rows`). A call reads its own rows behind the ring: row size + 1 + i of the two together is row i of the call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.table import static
from v41.spec.types import I32, Flag


@dataclass(frozen=True)
class Call:
    """Where the rows of one call lie. `start` is the first position as a number, where the regime needs it (equal lengths), else None."""

    length: I32[Tensor, "b"]  # positions held before the call
    valid: I32[Tensor, "b"]  # leading rows that are real
    positions: I32[Tensor, "b s"]
    live: Flag[Tensor, "b s"]
    start: int | None = static()

    @property
    def rows(self) -> int:
        return self.positions.shape[1]

    @property
    def end(self) -> I32[Tensor, "b"]:
        """Positions held after the call."""
        return self.length + self.valid


def call_rows(length: I32[Tensor, "b"], valid: I32[Tensor, "b"], rows: int, start: int | None) -> Call:
    """Row r of sequence b is position length[b] + r; the first valid[b] rows are real."""
    row = torch.arange(rows, dtype=torch.int32, device=length.device)
    return Call(length, valid, length[:, None] + row, row < valid[:, None], start)


def visible_rows(positions: I32[Tensor, "b s"], ratio: int) -> I32[Tensor, "b s"]:
    """Compressed rows complete at each position: a group is visible to its own last token."""
    return torch.div(positions + 1, ratio, rounding_mode="floor")


def window_list(positions: I32[Tensor, "b s"], window: int, numerics: Numerics, start: int | None) -> I32[Tensor, "b s w"]:
    """Positions t - window + 1 .. t of each query, -1 in front where there are none.

    The released prefill packs them instead: min(rows, window) columns from max(t - window + 1, 0) on, -1 behind.
    """
    rows = positions.shape[1]
    packed = numerics.compact and start == 0
    column = torch.arange(min(rows, window) if packed else window, dtype=torch.int32, device=positions.device)
    first = positions[..., None] - window + 1
    if packed:
        listed = first.clamp_min(0) + column
        return torch.where(listed > positions[..., None], -1, listed)
    return torch.where(first + column < 0, -1, first + column)


def draft_list(newest: I32[Tensor, "b"], window: int, numerics: Numerics, held: int | None) -> I32[Tensor, "b 1 w"]:
    """Positions of the draft ring that a draft query sees: the last `window` ones up to `newest`, ascending, -1 in front.

    The release lists its ring by slot instead: slots 0 .. min(window, held) - 1, slot s holding the newest position that is s modulo
    window. `held` is newest + 1 as a number.
    """
    if not numerics.compact:
        return window_list(newest[:, None], window, numerics, None)
    assert held is not None
    slot = torch.arange(min(window, held), dtype=torch.int32, device=newest.device)
    return (newest[:, None] - torch.remainder(newest[:, None] - slot, window))[:, None]


def locate(positions: I32[Tensor, "b *n"], length: I32[Tensor, "b"], size: int) -> I32[Tensor, "b *n"]:
    """The row of each position in a ring of `size` followed by the rows of the call that starts at `length`; -1 for none."""
    first = length.reshape(-1, *(1,) * (positions.ndim - 1))
    row = torch.where(positions >= first, size + 1 + positions - first, torch.remainder(positions, size))
    return torch.where(positions < 0, -1, row)


def ring_targets(call: Call, size: int) -> I32[Tensor, "b s"]:
    """Where each row of a call goes in a ring: its slot, or the sink where it is not real or newer rows of the call take the slot."""
    kept = call.live & (call.positions >= call.end[:, None] - size)
    return torch.where(kept, torch.remainder(call.positions, size), size)
