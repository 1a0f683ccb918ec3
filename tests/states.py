# SPDX-License-Identifier: Apache-2.0
"""Schedules of calls over caches, and what is dead in a cache: for the tests of states."""

from dataclasses import replace

import torch
from torch import Tensor

import v41
from v41.spec.cache import Cache

NAN = float("nan")


def dead_ring(size: int, length: Tensor, high: Tensor) -> Tensor:
    """Rows of a ring (and its sink) that hold no position below the length: never written, or forgotten by a rewind."""
    slot = torch.arange(size + 1)
    newest = high[:, None] - 1
    held = newest - torch.remainder(newest - slot, size)
    return (held >= length[:, None]) | (held < 0) | (slot == size)


def dead_rows(buffer: Tensor, live: Tensor) -> Tensor:
    """Rows of a compressed buffer behind the live ones."""
    return torch.arange(buffer.shape[1]) >= live[:, None]


def fill(buffer: Tensor | None, dead: Tensor, value: float) -> Tensor | None:
    if buffer is None:
        return None
    return torch.where(dead.reshape(*dead.shape, *(1,) * (buffer.ndim - 2)), torch.tensor(value, dtype=buffer.dtype), buffer)


def poison(cache: Cache) -> Cache:
    """The cache with NaN (a huge id in the history) in every row that is not live."""
    config, length, high = cache.config, cache.length, cache.high
    layers = []
    for state, plan in zip(cache.layers, config.layer_plan, strict=True):
        live = length // max(plan.ratio, 1)
        group = None if state.group_kv is None else dead_ring(cache.group_ring(plan.ratio), length, high)
        layers.append(
            replace(
                state,
                window=fill(state.window, dead_ring(cache.window_ring, length, high), NAN),
                compressed=None if state.compressed is None else fill(state.compressed, dead_rows(state.compressed, live), NAN),
                index_keys=None if state.index_keys is None else fill(state.index_keys, dead_rows(state.index_keys, live), NAN),
                group_kv=fill(state.group_kv, group, NAN),
                group_score=fill(state.group_score, group, NAN),
            )
        )
    history = None if cache.history is None else fill(cache.history, dead_ring(cache.history_ring, length, high), 2**30)
    # The draft rings hold positions below draft_length; what a rewind forgot lies between it and the mark.
    rings = tuple(fill(r, dead_ring(cache.window_ring, cache.draft_length, high), NAN) for r in cache.draft)
    return replace(cache, layers=tuple(layers), history=history, draft=rings)


def same_cache(params: v41.Params, got: Cache, want: Cache, row: int, equal: object) -> None:
    """Live rows of sequence `row` of one cache equal those of a cache of one sequence."""
    a, b = v41.export_cache(params, v41.take(got, [row])), v41.export_cache(params, want)
    assert a.keys() == b.keys()
    for name in a:
        assert equal(a[name], b[name]), name
