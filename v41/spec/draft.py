# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft head (docs/model.md 11): rings of the target's taps, one bidirectional block, Markov bias, confidence."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v41.spec.attention import output, queries, window_kv, write_window
from v41.spec.backend import Backend
from v41.spec.block import block
from v41.spec.cache import Cache
from v41.spec.model import embed_part, start_of
from v41.spec.ops.choose import Sample, best_of
from v41.spec.ops.norm import wide
from v41.spec.ops.place import EMBED, HEAD, MARKOV
from v41.spec.ops.rope import layer_frequencies
from v41.spec.params import Attention, Layer, Params
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
    main_x = ops.all_gather(ops.linear(hidden, p.inp.main_proj, numerics), "main_proj.dim", -1)
    main_x = ops.rms_norm(main_x, p.inp.main_norm, config.rms_norm_eps)
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
    o = ops.sparse_attn(q, torch.cat((ring, kv), 1), listed, kv, listed[..., :0], p.attn_sink, config.head_dim**-0.5, numerics)
    return output(p, o, call.positions, f, config, numerics, ops)


def markov_part(params: Params, token: I32[Tensor, "b"], ops: Backend) -> Act[Tensor, "b markov"]:
    """This rank's part of the Markov embedding of each token."""
    table = params.draft.out.markov_embed
    return ops.embedding(token - ops.first(MARKOV, table.shape[0], token.device), table, params.numerics.act)


def stages(params: Params, cache: Cache, token: I32[Tensor, "b"], held: int | None, ops: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """(stream, pre mix) after the last stage for the inputs [token, noise, noise, ...] at the positions after the ring, and the Markov
    embedding of the token, which is looked up together with the inputs."""
    config, numerics, p = params.config, params.numerics, params.draft
    block_size, batch = config.dspark_block_size, token.shape[0]
    noise = torch.full((batch, block_size - 1), config.dspark_noise_token_id, dtype=torch.int32, device=token.device)
    inputs = embed_part(params, torch.cat((token[:, None], noise), 1), ops)
    h, told = ops.lookups((inputs, markov_part(params, token, ops)), (EMBED, MARKOV))
    stream, pre = start_of(params, h)
    call = call_rows(cache.draft_length, torch.full_like(token, block_size), block_size, None)
    for j, stage in enumerate(p.stages):

        def attend(x: Tensor, stage: Layer = stage, ring: Tensor = cache.draft[j]) -> tuple[Tensor, None]:
            return draft_attention(stage.attn, ring, x, call, held, params, ops), None

        stream, pre, _ = block(stage, stream, pre, attend, config.draft_experts_per_tok, f"mtp.{j}.", config, numerics, ops)
    return stream, pre, told


def pick(
    params: Params, logits: Wide[Tensor, "b vocab"], cut: str, sample: Sample | None, column: int, ops: Backend
) -> tuple[I32[Tensor, "b"], Act[Tensor, "b markov"] | None]:
    """(token, its Markov embedding or None). Where the logits are cut, every rank offers its best token with its embedding."""
    if not cut:
        return ops.choose(logits, sample, column), None
    score, token = best_of(logits, ops.first(cut, logits.shape[-1], logits.device), params.config.vocab_size)
    return ops.elect(score, token, markov_part(params, token, ops), cut)


def draft_head(
    params: Params,
    stream: Act[Tensor, "b s copies dim"],
    pre: Wide[Tensor, "b s copies"],
    told: Act[Tensor, "b markov"],
    sample: Sample | None,
    cut: str,
    ops: Backend,
) -> Drafted:
    """Shared head on the normed stage output; then position by position the Markov bias of the token before, and the choice.

    The confidence reads the stage output before its norm, beside the Markov embedding (`told` is the first one's); it is a raw logit.
    `cut`: the axis like which the logits are cut, "" for whole ones.
    """
    numerics, p, vocab = params.numerics, params.draft.out, params.config.vocab_size
    x = ops.hc_pre(stream, pre)
    base = ops.recut(ops.wide_linear(ops.rms_norm(x, p.norm, params.config.rms_norm_eps), params.head, numerics), HEAD, cut, vocab)
    tokens, logits, embeds = [], [], [told]
    for i in range(x.shape[1]):
        logits.append(base[:, i] + ops.recut(ops.wide_linear(embeds[i], p.markov_head, numerics), MARKOV, cut, vocab))
        token, known = pick(params, logits[i], cut, sample, i, ops)
        tokens.append(token)
        if i + 1 < x.shape[1]:
            embeds.append(ops.lookups((markov_part(params, token, ops),), (MARKOV,))[0] if known is None else known)
    both = torch.cat((wide(x), wide(torch.stack(embeds, 1))), -1)
    confidence = ops.wide_linear(both, p.confidence, numerics)[..., 0]
    return Drafted(torch.stack(tokens, 1), torch.stack(logits, 1), confidence)


def draft_cut(sample: Sample | None, ops: Backend) -> str:
    """How the logits of drafts are cut while they are made: a draw needs all of them, a best token does not."""
    return ops.choice_cut(MARKOV) if sample is None else ""


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
    stream, pre, told = stages(params, cache, token, held, ops)
    cut = draft_cut(sample, ops)
    drafted = draft_head(params, stream, pre, told, sample, cut, ops)
    return replace(drafted, logits=ops.recut(drafted.logits, cut, "", params.config.vocab_size)), cache
