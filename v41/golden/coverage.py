# SPDX-License-Identifier: Apache-2.0
"""What a run exercised: a fixture that never leaves its window proves nothing about rings."""

from typing import Any

from torch import Tensor

from v41.spec.params import Params


def coverage(params: Params, tokens: Tensor, parts: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Flags that need the prompt only, and those that need taps (None without them)."""
    config, rows = params.config, tokens.shape[1]
    ratios = sorted({p.ratio for p in config.layer_plan if p.ratio > 1})
    taps = parts.get("prefill")
    flags: dict[str, Any] = {
        "leaves_window": rows > config.sliding_window,
        "wraps_ring_twice": rows > 2 * config.sliding_window,
        "ends_in_partial_group": bool(ratios) and any(rows % r for r in ratios),
        "has_engram": bool(config.engram_layer_ids),
        "has_draft": params.draft is not None,
    }
    return flags | {
        "selects_sparsely": None if taps is None else _selects(params, taps),
        "drops_candidates": None if taps is None else _drops(params, taps),
        "experts_used": None if taps is None else _experts(taps),
    }


def _selects(params: Params, taps: dict[str, Tensor]) -> bool:
    """Whether the last query had more visible rows than it may take, at every index source."""
    scores = [t for n, t in taps.items() if n.endswith("index_score")]
    return bool(scores) and all(int((s[:, -1] > float("-inf")).sum(-1).max()) > params.config.index_topk for s in scores)


def _drops(params: Params, taps: dict[str, Tensor]) -> bool:
    """Whether some visible row of the last query is no candidate."""
    name = f"layers.{params.config.candidate_source_layer_id}."
    if name + "candidates" not in taps:
        return False
    visible = taps[name + "index_score"][:, -1] > float("-inf")
    return bool((visible & ~taps[name + "candidates"][:, -1]).any())


def _experts(taps: dict[str, Tensor]) -> dict[str, int]:
    """Distinct experts chosen in each layer."""
    return {n.split(".")[1]: len(t.unique()) for n, t in taps.items() if n.startswith("layers.") and n.endswith("route_experts")}
