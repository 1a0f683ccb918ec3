# SPDX-License-Identifier: Apache-2.0
"""When a tensor of a call is computed: the first that differs is the cause of the others."""

import re
from typing import Any

NAME = re.compile(r"(rows\.)?(?:(layers|mtp)\.(\d+)\.)?(.*)")
INNER = (
    *("engram_out", "attn_in", "window", "group_kv", "group_score", "compressed", "index_keys", "candidates", "index_score", "topk_idxs"),
    *("attn_out", "route_score", "route_weights", "route_experts", "ffn_out", "h_out", "pre_mix_out"),
)
FIRST = ("engram_hash_ids", "history")
LAST = ("index_slot", "main_hidden", "logits", "accepted", "next")
DRAFT = ("mtp.main_x", "draft.logits", "draft.tokens", "draft.confidence")


def computed_at(name: str) -> tuple[Any, ...]:
    """A key that sorts the tensors of one call."""
    rows, kind, layer, rest = NAME.fullmatch(name).groups()
    if rest in FIRST:
        return (0, 0, FIRST.index(rest), rest)
    if kind == "layers":
        return (1, int(layer), INNER.index(rest) if rest in INNER else len(INNER), rest)
    if name == DRAFT[0] or (rows and kind == "mtp"):
        return (3, 0 if name == DRAFT[0] else 1, int(layer or 0), rest)
    if kind == "mtp":
        return (4, int(layer), INNER.index(rest) if rest in INNER else len(INNER), rest)
    if name in DRAFT:
        return (5, DRAFT.index(name), 0, rest)
    return (2, LAST.index(rest) if rest in LAST else len(LAST), 0, rest)
