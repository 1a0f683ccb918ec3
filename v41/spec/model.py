# SPDX-License-Identifier: Apache-2.0
"""The backbone: embed, layers, head, and the step that they make (docs/model.md 5)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v41.spec.attention import attention
from v41.spec.backend import Backend
from v41.spec.block import block, engram, engram_memory, engram_part
from v41.spec.cache import Cache, LayerCache, advance
from v41.spec.handed import Boundary, Handed
from v41.spec.numerics import Numerics
from v41.spec.ops.norm import wide
from v41.spec.ops.place import EMBED, HEAD
from v41.spec.params import Engram, EngramMap, Params
from v41.spec.slots import Call, call_rows, locate, ring_targets
from v41.spec.types import I32, Act, Ids, Wide


@dataclass(frozen=True)
class Output:
    """What a step gives: logits, and the taps of the draft head's target layers."""

    logits: Wide[Tensor, "b rows vocab"] | None
    hidden: Act[Tensor, "b s flat"] | None


def hash_ids(
    p: EngramMap, history: I32[Tensor, "b n"], ids: I32[Tensor, "b s"], call: Call, cache: Cache, ops: Backend
) -> tuple[tuple[I32[Tensor, "b s columns"], ...], I32[Tensor, "b n"]]:
    """(table rows of every Engram layer, history with this call's compressed ids)."""
    config, size = cache.config, cache.history_ring
    known = p.token_map[ids]
    back = torch.arange(config.engram_max_ngram_size, dtype=torch.int32, device=ids.device)
    positions = call.positions[..., None] - back
    row = locate(positions, call.length, size).clamp_min(0).flatten(1)
    lead = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)[:, None]
    ngrams = torch.cat((history, known), 1)[lead, row].view(positions.shape)
    pad, mask = p.token_map[config.engram_pad_token_id], positions >= 0
    rows = tuple(ops.engram_hash(ngrams, mask, pad, p.multipliers[i], p.primes[i], p.offsets[i]) for i in range(len(config.engram_layer_ids)))
    target = ring_targets(call, size)
    return rows, ops.write_rows(history[..., None], target, torch.where(target < size, known, 0)[..., None])[..., 0]


def start_of(params: Params, h: Act[Tensor, "b s dim"]) -> tuple[Act[Tensor, "b s copies dim"], Wide[Tensor, "b s copies"]]:
    """(stream, pre mix) before the first layer: copies of the embedding, the first of which is all that the first collapse sees."""
    stream = h[:, :, None].expand(-1, -1, params.config.hc_mult, -1).contiguous()
    pre = torch.zeros(stream.shape[:3], dtype=params.numerics.wide, device=h.device)
    return stream, torch.cat((torch.ones_like(pre[..., :1]), pre[..., 1:]), -1)


def embed_part(params: Params, ids: I32[Tensor, "b s"], ops: Backend) -> Act[Tensor, "b s dim"]:
    """This rank's part of the token embedding."""
    return ops.embedding(ids - ops.first(EMBED, params.embed.shape[0], ids.device), params.embed, params.numerics.act)


def hashed(
    params: Params, cache: Cache, tokens: Ids[Tensor, "b s"], valid: I32[Tensor, "b"], start: int | None, ops: Backend
) -> tuple[Call, I32[Tensor, "b s"], tuple[I32[Tensor, "b s columns"], ...], Cache]:
    """(where the rows lie, their ids, their Engram rows, the cache with its length and token history advanced)."""
    call = call_rows(cache.length, valid, tokens.shape[1], start)
    ids = torch.where(call.live, tokens, 0).to(torch.int32)
    rows: tuple[Tensor, ...] = ()
    history = cache.history
    if params.engram_map is not None:
        rows, history = hash_ids(params.engram_map, cache.history, ids, call, cache, ops)
        rows = ops.tap("engram_hash_ids", torch.stack(rows, 2)).unbind(2)
    return call, ids, rows, replace(advance(cache, valid), history=history)


def embed(params: Params, cache: Cache, tokens: Ids[Tensor, "b s"], valid: I32[Tensor, "b"], start: int | None, ops: Backend) -> tuple[Boundary, Cache]:
    """The boundary before layer 0, and the cache with its length and token history advanced."""
    call, ids, rows, cache = hashed(params, cache, tokens, valid, start, ops)
    (h,) = ops.lookups((embed_part(params, ids, ops),), (EMBED,))
    return Boundary(*start_of(params, h), call, Handed(None, cache.index_slot, None, None), rows, (), 0), cache


def embed_ahead(params: Params, cache: Cache, tokens: Ids[Tensor, "b s"], valid: I32[Tensor, "b"], start: int | None, ops: Backend) -> tuple[Boundary, Cache]:
    """`embed` with the Engram rows of all layers read at the same time: ranks that hold parts of the tables then meet once."""
    call, ids, rows, cache = hashed(params, cache, tokens, valid, start, ops)
    tables = tuple(params.layers[i].engram for i in params.config.engram_layer_ids)
    parts = tuple(engram_part(p, r, params.numerics, ops) for p, r in zip(tables, rows, strict=True))
    h, *read = ops.lookups((embed_part(params, ids, ops), *parts), (EMBED, *("engram_rows" for _ in parts)))
    memory = engram_memory(tables, tuple(read), params.numerics, ops) if tables else ()
    return Boundary(*start_of(params, h), call, Handed(None, cache.index_slot, None, None), rows, (), 0, memory), cache


def memory_of(p: Engram, boundary: Boundary, table: int, numerics: Numerics, ops: Backend) -> Act[Tensor, "b s flat"]:
    """Keys and value of one Engram layer: as read ahead, or read now."""
    if boundary.memory:
        return boundary.memory[table]
    rows = ops.lookups((engram_part(p, boundary.engram_hash_ids[table], numerics, ops),), ("engram_rows",))
    return engram_memory((p,), rows, numerics, ops)[0]


def layer(params: Params, state: LayerCache, boundary: Boundary, ops: Backend) -> tuple[Boundary, LayerCache]:
    """One backbone layer: its Engram, its tap for the draft head, its two sublayers."""
    config, numerics, number = params.config, params.numerics, boundary.layer
    p, plan, name = params.layers[number], config.layer_plan[number], f"layers.{number}."
    stream, taps = boundary.stream, boundary.taps
    if plan.engram is not None:
        stream = engram(p.engram, stream, memory_of(p.engram, boundary, plan.engram, numerics, ops), name, config, numerics, ops)
    if plan.tap is not None:
        taps = (*taps, wide(stream).mean(2).to(stream.dtype))

    def attend(x: Tensor) -> tuple[Tensor, tuple[LayerCache, Handed]]:
        y, new, handed = attention(p.attn, state, boundary.handed, x, boundary.call, number, config, numerics, ops)
        return y, (new, handed)

    stream, pre, (state, handed) = block(p, stream, boundary.pre, attend, config.num_experts_per_tok, name, config, numerics, ops)
    return replace(boundary, stream=stream, pre=pre, handed=handed, taps=taps, layer=number + 1), state


def layers(params: Params, cache: Cache, boundary: Boundary, end: int, ops: Backend) -> tuple[Boundary, Cache]:
    """The layers from the boundary's own up to, not including, `end`."""
    states = list(cache.layers)
    while boundary.layer < end:
        at = boundary.layer
        boundary, states[at] = layer(params, states[at], boundary, ops)
    slot = boundary.handed.index_keys if cache.index_slot is not None else None
    return boundary, replace(cache, layers=tuple(states), index_slot=slot)


def hidden(boundary: Boundary, ops: Backend) -> Act[Tensor, "b s flat"] | None:
    """The taps side by side; rows that are not real are zero. None for a model without a draft head."""
    if not boundary.taps:
        return None
    return ops.tap("main_hidden", torch.where(boundary.call.live[..., None], torch.cat(boundary.taps, -1), 0))


def head(params: Params, boundary: Boundary, rows: str, ops: Backend) -> Wide[Tensor, "b rows vocab"] | None:
    """Logits of all rows, or of each sequence's last real one: the last layer's pre mix collapses the stream, then norm and fp32 head.

    Logits of rows that are not real are zero.
    """
    return None if rows == "none" else scores(params, boundary, rows, "", ops)


def scores(params: Params, boundary: Boundary, rows: str, cut: str, ops: Backend) -> Wide[Tensor, "b rows vocab"]:
    """The logits of `head`, with the vocabulary cut like the axis `cut`."""
    stream, pre, live = boundary.stream, boundary.pre, boundary.call.live
    if rows == "last":
        lead, row = torch.arange(live.shape[0], dtype=torch.int32, device=live.device), (boundary.call.valid - 1).clamp_min(0)
        stream, pre, live = stream[lead, row][:, None], pre[lead, row][:, None], (boundary.call.valid > 0)[:, None]
    x = ops.rms_norm(ops.hc_pre(stream, pre), params.norm, params.config.rms_norm_eps)
    logits = ops.recut(ops.wide_linear(x, params.head, params.numerics), HEAD, cut, params.config.vocab_size)
    return ops.tap("logits", torch.where(live[..., None], logits, 0))


def backbone(params: Params, cache: Cache, tokens: Ids[Tensor, "b s"], valid: I32[Tensor, "b"], start: int | None, ops: Backend) -> tuple[Boundary, Cache]:
    """The boundary behind the last layer."""
    boundary, cache = embed_ahead(params, cache, tokens, valid, start, ops)
    return layers(params, cache, boundary, params.config.num_hidden_layers, ops)


def step(params: Params, cache: Cache, tokens: Ids[Tensor, "b s"], valid: I32[Tensor, "b"], start: int | None, rows: str, ops: Backend) -> tuple[Output, Cache]:
    """embed, all layers, head."""
    boundary, cache = backbone(params, cache, tokens, valid, start, ops)
    return Output(head(params, boundary, rows, ops), hidden(boundary, ops)), cache
