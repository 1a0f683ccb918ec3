# SPDX-License-Identifier: Apache-2.0
"""The compressor of a kv source: latents of finished groups, their index keys and rows, and the carried group (docs/model.md 7.3)."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from v41.spec.backend import Backend
from v41.spec.cache import LayerCache
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.ops.rope import layer_frequencies
from v41.spec.params import Compressor, IndexKeys
from v41.spec.slots import Call, locate, ring_targets
from v41.spec.types import I32, Act, Flag


class Groups(NamedTuple):
    """Groups that this call may finish: their numbers, and which of them it does finish."""

    number: I32[Tensor, "b g"]
    done: Flag[Tensor, "b g"]


def groups_of(call: Call, ratio: int) -> Groups:
    """As many columns as a call of so many rows can finish; in `released` and with its keys exactly those that it finishes."""
    first = torch.div(call.length, ratio, rounding_mode="floor")
    count = (call.rows + ratio - 1) // ratio
    if call.start is not None:
        count = (call.start + call.rows) // ratio - call.start // ratio
    number = first[:, None] + torch.arange(count, dtype=torch.int32, device=first.device)
    return Groups(number, (number + 1) * ratio <= call.end[:, None])


def latents(
    p: Compressor, state: LayerCache, x: Act[Tensor, "b s dim"], call: Call, groups: Groups, ratio: int, config: Config, numerics: Numerics, ops: Backend
) -> tuple[Act[Tensor, "b g head_dim"], LayerCache]:
    """The normed latent of each group, unrotated, and the state with this call's tokens in its carry.

    Ratio 1 is one linear layer in the activation dtype; above it everything up to the pooled sum is fp32.
    """
    if ratio == 1:
        return ops.rms_norm(ops.plain_linear(x, p.wkv, numerics), p.norm, config.rms_norm_eps), state
    kv, score = ops.wide_linear(x, p.wkv, numerics), ops.wide_linear(x, p.wgate, numerics)
    size = state.group_kv.shape[1] - 1
    member = groups.number[..., None] * ratio + torch.arange(ratio, dtype=torch.int32, device=x.device)
    row = locate(member, call.length, size).clamp(0, size + call.rows).flatten(1)
    lead = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)[:, None]
    members = [torch.cat((ring, new), 1)[lead, row].unflatten(1, (-1, ratio)) for ring, new in ((state.group_kv, kv), (state.group_score, score))]
    z = ops.rms_norm(ops.softmax_pool(*members, numerics.act), p.norm, config.rms_norm_eps)
    return z, _carry(state, kv, score, call, size, ops)


def _carry(state: LayerCache, kv: Tensor, score: Tensor, call: Call, size: int, ops: Backend) -> LayerCache:
    """The state with the call's newest tokens in the group ring."""
    target = ring_targets(call, size)
    kept = (target < size)[..., None]
    return replace(
        state,
        group_kv=ops.write_rows(state.group_kv, target, torch.where(kept, kv, 0)),
        group_score=ops.write_rows(state.group_score, target, torch.where(kept, score, 0)),
    )


def publish(
    p: Compressor, k: IndexKeys, state: LayerCache, x: Act[Tensor, "b s dim"], call: Call, layer: int, config: Config, numerics: Numerics, ops: Backend
) -> LayerCache:
    """The state with the index keys and compressed rows of every group that this call finishes.

    The key comes from the latent before rotation and rounding; then the latent is rotated at the group's first position and rounded.
    """
    ratio = config.layer_plan[layer].ratio
    groups = groups_of(call, ratio)
    z, state = latents(p, state, x, call, groups, ratio, config, numerics, ops)
    f, at = layer_frequencies(config, ratio), groups.number * ratio
    key = ops.rope(ops.rms_norm(ops.plain_linear(z, k.wk, numerics), k.k_norm, config.rms_norm_eps), at, f)
    row = ops.rope(z, at, f)
    if numerics.rounds:
        key, row = ops.index_round(key, numerics), ops.kv_round(row, numerics)
    sink = state.compressed.shape[1] - 1
    target, done = torch.where(groups.done, groups.number, sink), groups.done[..., None]
    return replace(
        state,
        index_keys=ops.write_rows(state.index_keys, target, torch.where(done, key, 0)),
        compressed=ops.write_rows(state.compressed, target, torch.where(done, row, 0)),
    )
