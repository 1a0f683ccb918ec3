# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft head (docs/model.md 11): rings of the target's taps, one bidirectional block, Markov bias, confidence."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v41.spec.attention import output, queries, window_kv, write_window
from v41.spec.backend import Backend
from v41.spec.block import block
from v41.spec.cache import Cache
from v41.spec.numerics import Numerics
from v41.spec.ops.choose import Sample
from v41.spec.ops.norm import wide
from v41.spec.ops.rope import layer_frequencies
from v41.spec.params import Attention, Params
from v41.spec.slots import Call, call_rows, draft_list, locate
from v41.spec.types import I32, Act, Ids, Wide


@dataclass(frozen=True)
class Drafted:
    """One block: tokens, the logits they were chosen from (Markov bias included), and the raw confidence of each."""

    tokens: I32[Tensor, "b block"]
    logits: Wide[Tensor, "b block vocab"]
    confidence: Wide[Tensor, "b block"]


def fill_rings(params: Params, cache: Cache, hidden: Act[Tensor, "b s flat"], valid: I32[Tensor, "b"], ops: Backend) -> Cache:
    """The cache with the draft rings extended by the valid rows of `hidden`, the positions from `draft_length` on."""
    config, numerics, p = params.config, params.numerics, params.draft
    call = call_rows(cache.draft_length, valid, hidden.shape[1], None)
    main_x = ops.rms_norm(ops.linear(hidden, p.inp.main_proj, numerics), p.inp.main_norm, config.rms_norm_eps)
    main_x = ops.tap("mtp.main_x", main_x)
    f = layer_frequencies(config, 0)
    rows = (window_kv(stage.attn, main_x, call.positions, f, config, numerics, ops) for stage in p.stages)
    rings = tuple(write_window(ring, kv, call, ops) for ring, kv in zip(cache.draft, rows, strict=True))
    return replace(cache, draft=rings, draft_length=cache.draft_length + valid)


def draft_attention(
    p: Attention, ring: Act[Tensor, "b ring d"], x: Act[Tensor, "b s dim"], call: Call, held: int | None, params: Params, ops: Backend
) -> Act[Tensor, "b s dim"]:
    """Every query of the block sees the ring and the whole block: there is no mask inside it. The block's rows are not stored."""
    config, numerics = params.config, params.numerics
    f, size, s = layer_frequencies(config, 0), ring.shape[1] - 1, x.shape[1]
    _, q = queries(p, x, call.positions, f, config, numerics, ops)
    kv = window_kv(p, x, call.positions, f, config, numerics, ops)
    seen = locate(draft_list(call.length - 1, config.sliding_window, numerics, held), call.length, size)
    own = torch.arange(size + 1, size + 1 + s, dtype=torch.int32, device=x.device).expand(x.shape[0], 1, -1)
    listed = torch.cat((seen, own), -1).expand(-1, s, -1)
    o = ops.sparse_attn(q, torch.cat((ring, kv), 1), listed, kv, listed[..., :0], p.attn_sink, config.head_dim**-0.5)
    return output(p, o, call.positions, f, config, numerics, ops)


def stages(params: Params, cache: Cache, token: I32[Tensor, "b"], held: int | None, ops: Backend) -> tuple[Tensor, Tensor]:
    """(stream, pre mix) after the last stage for the inputs [token, noise, noise, ...] at the positions after the ring."""
    config, numerics, p = params.config, params.numerics, params.draft
    block_size, batch = config.dspark_block_size, token.shape[0]
    noise = torch.full((batch, block_size - 1), config.dspark_noise_token_id, dtype=torch.int32, device=token.device)
    h = ops.embedding(torch.cat((token[:, None], noise), 1), params.embed, numerics.act)
    stream = h[:, :, None].expand(-1, -1, config.hc_mult, -1).contiguous()
    pre = torch.zeros(stream.shape[:3], dtype=numerics.wide, device=h.device)
    pre = torch.cat((torch.ones_like(pre[..., :1]), pre[..., 1:]), -1)
    call = call_rows(cache.draft_length, torch.full_like(token, block_size), block_size, None)
    for j, stage in enumerate(p.stages):

        def attend(x: Tensor, stage: object = stage, ring: Tensor = cache.draft[j]) -> tuple[Tensor, None]:
            return draft_attention(stage.attn, ring, x, call, held, params, ops), None

        stream, pre, _ = block(stage, stream, pre, attend, config.draft_experts_per_tok, f"mtp.{j}.", config, numerics, ops)
    return stream, pre


def draft_head(
    params: Params, stream: Act[Tensor, "b s copies dim"], pre: Wide[Tensor, "b s copies"], token: I32[Tensor, "b"], sample: Sample | None, ops: Backend
) -> Drafted:
    """Shared head on the normed stage output; then position by position the Markov bias of the token before, and the choice.

    The confidence reads the stage output before its norm, beside the Markov embedding; it is a raw logit.
    """
    numerics, p = params.numerics, params.draft.out
    x = ops.hc_pre(stream, pre)
    base = ops.all_gather(ops.wide_linear(ops.rms_norm(x, p.norm, params.config.rms_norm_eps), params.head, numerics), "vocab", -1)
    tokens, logits, embeds = [], [], []
    for i in range(x.shape[1]):
        embeds.append(ops.embedding(token, p.markov_embed, numerics.act))
        logits.append(base[:, i] + ops.all_gather(ops.wide_linear(embeds[i], p.markov_head, numerics), "vocab", -1))
        token = ops.choose(logits[i], sample, i)
        tokens.append(token)
    told = torch.cat((wide(x), wide(torch.stack(embeds, 1))), -1)
    confidence = ops.wide_linear(told, p.confidence, numerics)[..., 0]
    return Drafted(torch.stack(tokens, 1), torch.stack(logits, 1), confidence)


def draft(
    params: Params,
    cache: Cache,
    hidden: Act[Tensor, "b s flat"],
    valid: I32[Tensor, "b"],
    token: Ids[Tensor, "b"] | None,
    sample: Sample | None,
    held: int | None,
    ops: Backend,
) -> tuple[Drafted | None, Cache]:
    """Fills the rings, then drafts from `token`, the one after the newest position; without a token only fills them."""
    cache = fill_rings(params, cache, hidden, valid, ops)
    if token is None:
        return None, cache
    token = token.to(torch.int32)
    stream, pre = stages(params, cache, token, held, ops)
    return draft_head(params, stream, pre, token, sample, ops), cache
