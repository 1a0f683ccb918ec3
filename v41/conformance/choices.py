# SPDX-License-Identifier: Apache-2.0
"""Ids that a score chose: compared as sets, with the margin that each changed row was decided by (docs/conformance.md 5)."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from v41.conformance.gates import K
from v41.golden.pack_noise import EXACT, TRIPS

if TYPE_CHECKING:
    from v41.conformance.judge import Stored

LAYER = re.compile(r"layers\.(\d+)\.")
SCORES = {"topk_idxs": "index_score", "route_experts": "route_score", "candidates": "index_score", "draft.tokens": "draft.logits"}


def kind_of(name: str) -> str | None:
    """Which kind of choice a tensor is."""
    return next((k for k in SCORES if name.endswith(k)), None)


def scores_name(name: str) -> str:
    kind = kind_of(name)
    return name.removesuffix(kind) + SCORES[kind]


def chosen_rows(name: str, t: Tensor) -> Tensor:
    """[rows, places]: ids of each row; a mask as it is; a token as a set of one."""
    return t.reshape(-1, 1) if name.endswith("tokens") else t.flatten(0, -2)


def margins(name: str, stored: "Stored", trips: bool) -> Tensor:
    """By how much two scores of each row may change places: twice k times the largest error that the stored scores have themselves."""
    suffix = TRIPS if trips and scores_name(name) + TRIPS in stored.far else EXACT
    far = stored.far.get(scores_name(name) + suffix)
    if far is None:
        return torch.zeros(chosen_rows(name, stored.want[name]).shape[0], dtype=torch.float64)
    worst = far.flatten(0, -2).abs().amax(-1).double()
    return 2 * K * torch.maximum(worst, worst.median())


def changed_of(name: str, got: Tensor, want: Tensor, block: int) -> set[int]:
    """Places of one row that changed: blocks of columns, ids on one side only, or (for experts, best first) ids that stand elsewhere."""
    if want.dtype == torch.bool:
        return {int(c) // block for c in (got != want).nonzero().flatten()}
    if name.endswith("route_experts"):
        return {int(i) for side in (got, want) for i in side[got != want]}
    return {int(i) for i in set(got.tolist()) ^ set(want.tolist()) if i >= 0}


def differing(name: str, got: Tensor, want: Tensor) -> list[int]:
    """Rows that differ; of drafts the first of each sequence, since those after it follow another token."""
    rows = (chosen_rows(name, got) != chosen_rows(name, want)).any(-1)
    if name.endswith("tokens"):
        rows = (rows.view(want.shape) & (rows.view(want.shape).int().cumsum(-1) == 1)).flatten()
    return [int(r) for r in rows.nonzero().flatten()]


def decided_by(scores: Tensor, changed: set[int], block: int) -> float:
    """How far the scores of the places that changed lie apart; infinitely where one is the block of the newest row, which is always kept."""
    if block > 1 and int(torch.isfinite(scores).nonzero()[-1]) // block in changed:
        return float("inf")
    listed = [float(scores[c * block : (c + 1) * block].max()) for c in sorted(changed) if c * block < len(scores)]
    return max(listed) - min(listed) if listed else float("inf")


def judge_choice(name: str, got: Tensor, stored: "Stored", trips: bool, bits: bool) -> tuple[str, str, tuple[int, ...], dict[str, Any]]:
    """(status, reason, first row, figures)."""
    want = stored.want[name]
    block = stored.block if want.dtype == torch.bool else 1
    a, b, scores = chosen_rows(name, got), chosen_rows(name, want), stored.want[scores_name(name)].flatten(0, -2)
    rows = [(r, changed_of(name, a[r], b[r], block)) for r in differing(name, got, want)]
    if any(int(a[r].min()) < -1 or int(a[r].max()) >= scores.shape[-1] for r, _ in rows if want.dtype != torch.bool):
        return "differs", "ids outside the rows there are", (rows[0][0],), {}
    orders = [r for r, changed in rows if not changed]
    moved = [(r, decided_by(scores[r].double(), c, block)) for r, c in rows if c]
    allowed = margins(name, stored, trips)
    beyond = [(r, d) for r, d in moved if not d <= float(allowed[r])]
    numbers = {"rows": len(b), "rows_that_differ": len(moved), "margins": [d for _, d in moved[:20]], "allowed": [float(allowed[r]) for r, _ in moved[:20]]}
    if bits:
        return "differs", "other ids, where the backend claims the same bits", (rows[0][0],), numbers
    if beyond:
        r, d = beyond[0]
        return "differs", f"row {r} chose others by {d:.3g}, the margin is {float(allowed[r]):.3g}", (r,), numbers
    if orders:
        return "differs", f"row {orders[0]} has the same ids in another order", (orders[0],), numbers
    return "flip", f"{len(rows)} of {len(b)} rows within the margin", (rows[0][0],), numbers


def behind_candidates(name: str, got: Tensor, want: Mapping[str, Tensor], every: Mapping[str, Tensor]) -> Tensor:
    """A score or selection with the stored rows put in where other candidate blocks were chosen below, which no tap can put right."""
    source = next((n for n in want if n.endswith(".candidates")), None)
    layer = LAYER.match(name)
    if source is None or layer is None or not name.endswith(("index_score", "topk_idxs")) or source not in every:
        return got
    mine, stored = every[source], want[source]
    if int(layer[1]) <= int(LAYER.match(source)[1]) or mine.shape != stored.shape or got.shape != want[name].shape or got.dtype != want[name].dtype:
        return got
    return torch.where((mine != stored).any(-1, keepdim=True), want[name], got)


def masked_rows(name: str, want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> Tensor | None:
    """Rows [rows, 1, ...] of a tensor that another choice of the backend made: routing weights of other experts, logits after another draft."""
    if name.endswith("route_weights"):
        ids = name.replace("route_weights", "route_experts")
        return (got[ids] != want[ids]).any(-1, keepdim=True) if ids in got and got[ids].shape == want[ids].shape else None
    if name == "draft.logits" and "draft.tokens" in got:
        other = (got["draft.tokens"] != want["draft.tokens"]).int().cumsum(-1)
        return (torch.cat((torch.zeros_like(other[:, :1]), other[:, :-1]), -1) > 0)[..., None]
    if name == "draft.confidence" and "draft.tokens" in got:
        other = (got["draft.tokens"] != want["draft.tokens"]).int().cumsum(-1)
        return torch.cat((torch.zeros_like(other[:, :1]), other[:, :-1]), -1) > 0
    return None
