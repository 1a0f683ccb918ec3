# SPDX-License-Identifier: Apache-2.0
"""The cache rows that one call writes, by position: a state is the state before with these rows put in (docs/golden-pack.md 4)."""

from dataclasses import replace

import torch
from torch import Tensor

from v41.spec.cache import Cache, LayerCache, advance
from v41.spec.export import rows_at
from v41.spec.ops.place import write_rows
from v41.spec.slots import Call, call_rows, ring_targets

Rows = dict[str, Tensor]
CARRIED = ("group_kv", "group_score")


def groups(call: Call, ratio: int) -> tuple[Tensor, Tensor]:
    """(numbers [batch, most that a call of so many rows finishes], which of them it finishes)."""
    first = torch.div(call.length, ratio, rounding_mode="floor")
    number = first[:, None] + torch.arange(-(-call.rows // ratio), dtype=torch.int32)
    return number, (number + 1) * ratio <= call.end[:, None]


def slots_of(call: Call, size: int) -> Tensor:
    """Ring slot of each row, -1 where it is not kept."""
    target = ring_targets(call, size)
    return torch.where(target < size, target, -1)


def rows_written(before: Cache, after: Cache, rows: int) -> Rows:
    """What a step of `rows` rows wrote: zeros for rows that are not real and groups that were not finished."""
    call, found = call_rows(before.length, after.length - before.length, rows, None), Rows()
    for i, state in enumerate(after.layers):
        name = f"rows.layers.{i}."
        found[name + "window"] = rows_at(state.window, slots_of(call, before.window_ring))
        if state.compressed is not None:
            number, done = groups(call, before.config.layer_plan[i].ratio)
            at = torch.where(done, number, -1)
            found |= {name + "compressed": rows_at(state.compressed, at), name + "index_keys": rows_at(state.index_keys, at)}
        if state.group_kv is not None:
            at = slots_of(call, state.group_kv.shape[1] - 1)
            found |= {name + part: rows_at(getattr(state, part), at) for part in CARRIED}
    if after.history is not None:
        found["rows.history"] = rows_at(after.history, slots_of(call, before.history_ring))
    if after.index_slot is not None:
        found["rows.index_slot"] = torch.tensor([slot_source(before, after)], dtype=torch.int32)
    return found


def slot_source(before: Cache, after: Cache) -> int:
    """The layer whose index keys the slot of `reference` keys took in this call, -1 where it kept what it had."""
    if after.index_slot is before.index_slot:
        return -1
    return next(i for i, state in enumerate(after.layers) if state.index_keys is after.index_slot)


def draft_rows_written(before: Cache, after: Cache, rows: int) -> Rows:
    """What filling the draft rings with `rows` rows wrote."""
    call = call_rows(before.draft_length, after.draft_length - before.draft_length, rows, None)
    at = slots_of(call, before.window_ring)
    return {f"rows.mtp.{j}.window": rows_at(ring, at) for j, ring in enumerate(after.draft)}


def put(buffer: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    """The buffer with rows at their places; -1 goes to the sink as zeros."""
    sink = buffer.shape[1] - 1
    wide = (at >= 0).reshape(*at.shape, *(1,) * (rows.ndim - 2))
    return write_rows(buffer, torch.where(at < 0, sink, at), torch.where(wide, rows, 0).to(buffer.dtype))


def with_rows(before: Cache, valid: Tensor, rows: Rows) -> Cache:
    """The state after a step whose rows are given."""
    call = call_rows(before.length, valid, rows["rows.layers.0.window"].shape[1], None)

    def layer(i: int, state: LayerCache) -> LayerCache:
        name = f"rows.layers.{i}."
        changed = {"window": put(state.window, slots_of(call, before.window_ring), rows[name + "window"])}
        if state.compressed is not None:
            number, done = groups(call, before.config.layer_plan[i].ratio)
            at = torch.where(done, number, -1)
            changed |= {part: put(getattr(state, part), at, rows[name + part]) for part in ("compressed", "index_keys")}
        if state.group_kv is not None:
            at = slots_of(call, state.group_kv.shape[1] - 1)
            changed |= {part: put(getattr(state, part), at, rows[name + part]) for part in CARRIED}
        return replace(state, **changed)

    layers = tuple(layer(i, state) for i, state in enumerate(before.layers))
    history, slot = before.history, before.index_slot
    if history is not None:
        history = put(history[..., None], slots_of(call, before.history_ring), rows["rows.history"][..., None])[..., 0]
    if slot is not None and int(rows["rows.index_slot"]) >= 0:
        slot = layers[int(rows["rows.index_slot"])].index_keys
    return replace(advance(before, valid), layers=layers, history=history, index_slot=slot)


def with_draft_rows(before: Cache, valid: Tensor, rows: Rows) -> Cache:
    """The state after the draft rings were filled with the given rows."""
    call = call_rows(before.draft_length, valid, rows["rows.mtp.0.window"].shape[1], None)
    at = slots_of(call, before.window_ring)
    rings = tuple(put(ring, at, rows[f"rows.mtp.{j}.window"]) for j, ring in enumerate(before.draft))
    return replace(before, draft=rings, draft_length=before.draft_length + valid)
