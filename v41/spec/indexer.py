# SPDX-License-Identifier: Apache-2.0
"""The indexer: which compressed rows each query attends to (docs/model.md 7.4, 7.5)."""

import torch
from torch import Tensor
from torch.nn import functional

from v41.spec.backend import Backend
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.ops.index import candidate_rows, mask_rows
from v41.spec.ops.rope import layer_frequencies
from v41.spec.params import Indexer
from v41.spec.plan import QUERIES
from v41.spec.slots import Call, visible_rows
from v41.spec.types import I32, Act

Selection = I32[Tensor, "b s k"]


def reachable(keys: Act[Tensor, "b t index_dim"], call: Call, ratio: int) -> Act[Tensor, "b n index_dim"]:
    """The key rows that are scored: the whole buffer, or in calls with a known start just the rows that exist then.

    The slot of the released decode may hold another source's buffer, which may be shorter: what lies behind it reads as zeros.
    """
    if call.start is None:
        return keys
    count = (call.start + call.rows) // ratio
    held = keys[:, : min(count, keys.shape[1] - 1)]
    return functional.pad(held, (0, 0, 0, count - held.shape[1]))


def index(
    p: Indexer,
    x: Act[Tensor, "b s dim"],
    qr: Act[Tensor, "b s q_lora"],
    keys: Act[Tensor, "b t index_dim"],
    candidates: I32[Tensor, "b s blocks"] | None,
    call: Call,
    layer: int,
    config: Config,
    numerics: Numerics,
    ops: Backend,
) -> tuple[Selection, I32[Tensor, "b s blocks"] | None]:
    """(selection, candidates): the `index_topk` best visible rows of each query, ascending, -1 last.

    A source of candidates makes them from its own scores and is not masked by them; later sources score only rows inside them.
    """
    plan = config.layer_plan[layer]
    keys = reachable(keys, call, plan.ratio)
    if keys.shape[1] == 0:
        return torch.zeros((*x.shape[:2], 0), dtype=torch.int32, device=x.device), candidates
    iq = ops.linear(qr, p.wq_b, numerics).unflatten(-1, (-1, config.index_head_dim))
    iq = ops.rope(iq, call.positions, layer_frequencies(config, plan.ratio))
    iq = ops.index_round(iq, numerics) if numerics.rounds else iq
    iw = ops.plain_linear(x, p.weights_proj, numerics) * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
    visible = visible_rows(call.positions, plan.ratio)
    parts = [
        _select(iq[:, a], iw[:, a], keys, visible[:, a], None if candidates is None else candidates[:, a], layer, config, numerics, ops)
        for a in (slice(i, i + QUERIES) for i in range(0, x.shape[1], QUERIES))
    ]
    selection = torch.cat([s for s, _ in parts], 1)
    if not plan.makes_candidates:
        return selection, candidates
    return selection, torch.cat([c for _, c in parts], 1)


def _select(
    iq: Tensor, iw: Tensor, keys: Tensor, visible: Tensor, candidates: Tensor | None, layer: int, config: Config, numerics: Numerics, ops: Backend
) -> tuple[Tensor, Tensor | None]:
    """Selection (and, at their source, candidate blocks) of some of the queries."""
    plan, name, rows = config.layer_plan[layer], f"layers.{layer}.", keys.shape[1]
    keys = keys if numerics.compact else ops.seen_rows(keys, visible)
    scores = mask_rows(ops.all_reduce(ops.index_scores(iq, keys, iw, numerics), "index_heads").to(iq.dtype), visible)
    size = config.candidate_block_size
    blocks = None
    if plan.makes_candidates:
        blocks = ops.candidate_blocks(scores, visible, config.candidate_topk_blocks, size, numerics)
        blocks = functional.pad(blocks, (0, config.candidate_topk_blocks - blocks.shape[-1]), value=-1)
        ops.tap(name + "candidates", candidate_rows(blocks, rows, size))
    elif plan.reads_candidates:
        scores = torch.where(candidate_rows(candidates, keys.shape[1], size), scores, -torch.inf)
    unseen = rows - keys.shape[1]
    scores = ops.tap(name + "index_score", functional.pad(scores, (0, unseen), value=-torch.inf))[..., : keys.shape[1]]
    selection = ops.select(scores, visible, config.index_topk, numerics)
    if not numerics.compact:
        selection = functional.pad(selection, (0, config.index_topk - selection.shape[-1]), value=-1)
    return ops.tap(name + "topk_idxs", selection), blocks
