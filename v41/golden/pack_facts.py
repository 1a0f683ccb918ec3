# SPDX-License-Identifier: Apache-2.0
"""What a pack says of itself: the smallest gaps that its choices were made by, and what its scenarios exercise."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from v41.spec.config import Config
from v41.spec.params import Params

Scenarios = Mapping[str, Mapping[str, Tensor]]


def chosen(ids: Tensor, size: int) -> Tensor:
    """Whether each of `size` places is among the ids of its row."""
    flags = torch.zeros((*ids.shape[:-1], size + 1), dtype=torch.bool)
    return flags.scatter(-1, torch.where(ids < 0, size, ids).long(), True)[..., :size]


def gap(scores: Tensor, ids: Tensor) -> Tensor:
    """Least score chosen minus best score left, of every row where something finite was left."""
    taken = chosen(ids, scores.shape[-1])
    least = torch.where(taken, scores, torch.inf).amin(-1)
    left = torch.where(taken, -torch.inf, scores).amax(-1)
    return (least.double() - left.double())[torch.isfinite(least) & torch.isfinite(left)]


def choices(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """(kind, name, scores, ids) of every choice with its scores beside it."""
    for name, scores in tensors.items():
        for kind, suffix in (("topk_idxs", "index_score"), ("route_experts", "route_score")):
            if name.endswith(suffix):
                yield kind, name.removesuffix(suffix) + kind, scores, tensors[name.removesuffix(suffix) + kind]
        if name.endswith("logits"):
            live = scores[(scores != 0).any(-1)]
            yield "tokens", name, live, live.argmax(-1, keepdim=True)


def gaps(config: Config, scenarios: Scenarios) -> dict[str, dict[str, Any]]:
    """By kind of choice: rows that had something to choose from, ties among them, the smallest gap."""
    found: dict[str, list[Tensor]] = {}
    for tensors in scenarios.values():
        for kind, _, scores, ids in choices(tensors):
            found.setdefault(kind, []).append(gap(scores, ids))
    every = {kind: torch.cat(parts) for kind, parts in found.items()}
    return {kind: {"rows": len(g), "ties": int((g == 0).sum()), "smallest": float(g.min()) if len(g) else None} for kind, g in sorted(every.items())}


def covers(params: Params, listed: list[dict[str, Any]], scenarios: Scenarios) -> dict[str, Any]:
    """Flags of docs/golden-pack.md 2, all from the stored tensors."""
    config, window = params.config, params.config.sliding_window
    ends = end_positions(listed, scenarios)
    ops = {c["op"] for s in listed for c in s["calls"]}
    experts: dict[str, set[int]] = {}
    dropped = sparse = False
    for tensors in scenarios.values():
        for name, t in tensors.items():
            if name.endswith("route_experts"):
                experts.setdefault(name.partition(".")[2].removesuffix(".route_experts"), set()).update(t.unique().tolist())
            if name.endswith("candidates") and ".in." not in name:
                dropped |= bool((torch.isfinite(tensors[name.replace("candidates", "index_score")]) & ~t).any())
            if name.endswith("index_score"):
                sparse |= int(torch.isfinite(t).sum(-1).max()) > config.index_topk
    steps = [(p, n) for p, n in ends if n == 1]
    return {
        "leaves_window": any(p >= window for p, _ in ends),
        "wraps_ring_twice": any(p >= 2 * window for p, _ in ends),
        "decodes_over_window_edge": any(p == window for p, _ in steps),
        "decodes_that_finish_a_group_of_two": any(p % 2 == 1 for p, _ in steps),
        "decodes_that_finish_none": any(p % 2 == 0 for p, _ in steps),
        "selects_sparsely": sparse,
        "drops_candidates": dropped,
        "has_engram": bool(config.engram_layer_ids),
        "has_draft": params.draft is not None,
        "calls": sorted(ops),
        "experts_used": {n: len(e) for n, e in sorted(experts.items())},
    }


def end_positions(listed: list[dict[str, Any]], scenarios: Scenarios) -> list[tuple[int, int]]:
    """(newest position, rows) of every step in the first sequence."""
    held: dict[str | None, int] = {None: 0}
    found = []
    for scenario in listed:
        at, tensors = held[scenario["start"]], scenarios[scenario["name"]]
        for call in scenario["calls"]:
            name = call["name"]
            if call["op"] == "step":
                rows = int(tensors[f"{name}.valid"][0])
                found += [(at + r, tensors[f"{name}.tokens"].shape[1]) for r in range(rows)]
                at += rows
            elif call["op"] == "block":
                at, rows = int(tensors[f"{name}.in.length"][0]), tensors[f"{name}.in.stream"].shape[1]
                found += [(at + r, rows) for r in range(rows)]
            elif call["op"] == "verify":
                at += int(tensors[f"{name}.accepted"][0]) + 1
            elif call["op"] == "rewind":
                at = int(tensors[f"{name}.length"][0])
        held[scenario["name"]] = at
    return found
