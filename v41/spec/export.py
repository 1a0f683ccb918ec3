# SPDX-License-Identifier: Apache-2.0
"""Live cache rows under the release's names and in its layout (tests/golden/tiny/README.md)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from v41.spec.cache import Cache
from v41.spec.types import I32


def by_slot(ring: Tensor, length: I32[Tensor, "b"], slots: int) -> Tensor:
    """The newest `slots` positions, position p in slot p % slots; slots never written are zero."""
    size = ring.shape[1] - 1
    slot = torch.arange(slots, dtype=torch.int32, device=ring.device)
    newest = length[:, None] - 1
    position = newest - torch.remainder(newest - slot, slots)
    return rows_at(ring, torch.where(position < 0, -1, torch.remainder(position, size)))


def rows_at(buffer: Tensor, index: I32[Tensor, "b n"]) -> Tensor:
    """buffer[b, index], zeros where the index is -1."""
    lead = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    found = buffer[lead, index.clamp_min(0).long()]
    return torch.where((index >= 0).reshape(*index.shape, *(1,) * (buffer.ndim - 2)), found, 0)


def first_rows(buffer: Tensor, count: I32[Tensor, "b"], most: int) -> Tensor:
    """The first rows of each sequence, zeros behind its own count."""
    row = torch.arange(most, dtype=torch.int32, device=buffer.device)
    return rows_at(buffer, torch.where(row < count[:, None], row, -1))


def unfinished(ring: Tensor, length: I32[Tensor, "b"], ratio: int) -> Tensor:
    """The tokens of the unfinished group, token i of it in slot i; zeros behind them."""
    first = torch.div(length, ratio, rounding_mode="floor") * ratio
    position = first[:, None] + torch.arange(ratio, dtype=torch.int32, device=ring.device)
    return rows_at(ring, torch.where(position < length[:, None], torch.remainder(position, ring.shape[1] - 1), -1))


def export_cache(cache: Cache, longest: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything live; `longest` is the largest length as a number. Only what a later step can read is given."""
    config, length = cache.config, cache.length
    for i, state in enumerate(cache.layers):
        name, ratio = f"layers.{i}.", config.layer_plan[i].ratio
        yield name + "window_kv_cache", by_slot(state.window, length, config.sliding_window)
        if state.compressed is not None:
            count = torch.div(length, ratio, rounding_mode="floor")
            yield name + "compress_kv_cache", first_rows(state.compressed, count, longest // ratio)
            yield name + "index_k_cache", first_rows(state.index_keys, count, longest // ratio)
        if state.group_kv is not None:
            yield name + "kv_state", unfinished(state.group_kv, length, ratio)
            yield name + "score_state", unfinished(state.group_score, length, ratio)
    for j, ring in enumerate(cache.draft):
        yield f"mtp.{j}.window_kv_cache", by_slot(ring, cache.draft_length, config.sliding_window)
    if cache.history is not None:
        keep = min(config.engram_max_ngram_size - 1, longest)
        position = length[:, None] - keep + torch.arange(keep, dtype=torch.int32, device=length.device)
        row = torch.where(position < 0, -1, torch.remainder(position, cache.history_ring))
        yield "engram_token_cache", rows_at(cache.history, row).long()
