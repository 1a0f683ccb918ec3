# SPDX-License-Identifier: Apache-2.0
"""The shipped rules. Every table lists every logical axis; docs/sharding.md 2 compares them."""

from v41.sharding.rules import LOOKUPS, Axes, Rules

WORLD = ("replica", "attn")
# Logical axes that no table cuts: what they index is small, or no sum over them can be closed by one collective.
WHOLE: dict[str, Axes] = dict.fromkeys(
    (
        *("dim", "group_heads", "head_dim", "q_lora", "o_lora", "index_dim", "copies", "mixes", "mix_scales"),
        *("engram_columns", "engram_dim", "engram_parts", "taps", "markov", "one", "confidence_in"),
        *("b", "ring", "t", "carry", "lookback", "tables", "sizes", "engram_heads", "columns"),
    )
)
# The router is whole on every rank: all ranks compute the same routing.
ROUTER: dict[str, Axes] = {"gate.experts": None}
# Every part of attention that has heads, cut over the attention group; the 8 output groups hold 8 heads each.
HEADS: dict[str, Axes] = {"heads": "attn", "o_groups": "attn", "index_heads": "attn"}
UNCUT: dict[str, Axes] = {"heads": None, "o_groups": None, "index_heads": None}
# The Engram projection, main_proj and the Markov head over the attention group, cut on their outputs: no partial sums, just a gather.
GROUP: dict[str, Axes] = {
    **{"engram.engram_parts*dim": "attn", "main_proj.dim": "attn", "main_proj.taps*dim": None},
    **{"markov_head.vocab": "attn"},
}

# Whole experts by id over the replicas, each cut 8 ways (288 = 9 x 32 of 2304 columns) inside an attention group.
TP8_EP8: dict[str, Axes] = {"experts": "replica", "moe_inter": "attn"}

single = Rules("single", WHOLE | ROUTER | UNCUT | dict.fromkeys(("vocab", "experts", "moe_inter", "shared_inter", "engram_rows")))

pr71 = Rules(
    "pr71",
    WHOLE | ROUTER | HEADS | {"vocab": WORLD, "experts": WORLD, "moe_inter": None, "shared_inter": None, "engram_rows": WORLD},
    padding={"vocab": 128, "engram_rows": 1},
)

lean = Rules(
    "lean",
    WHOLE | ROUTER | HEADS | GROUP | TP8_EP8 | {"vocab": WORLD, "shared_inter": WORLD, "engram_rows": WORLD},
    padding={"vocab": 1, "engram_rows": 1, "shared_inter": 32},
    merged=LOOKUPS,
    choice="candidates",
)

fast = Rules("fast", lean.axes, lean.padding, lean.merged, lean.choice)

tp = Rules(
    "tp",
    WHOLE | ROUTER | HEADS | {"vocab": "attn", "experts": None, "moe_inter": "attn", "shared_inter": "attn", "engram_rows": "attn"},
    padding={"vocab": 1, "engram_rows": 1},
)

ep = Rules(
    "ep",
    WHOLE | ROUTER | UNCUT | {"vocab": None, "experts": WORLD, "moe_inter": None, "shared_inter": None, "engram_rows": WORLD},
    padding={"engram_rows": 1},
)

tpxep = Rules(
    "tpxep",
    WHOLE | ROUTER | HEADS | TP8_EP8 | {"vocab": WORLD, "shared_inter": "attn", "engram_rows": WORLD},
    padding={"vocab": 1, "engram_rows": 1},
)

TABLES: dict[str, Rules] = {r.name: r for r in (pr71, lean, fast, tp, ep, tpxep, single)}


def rules_named(name: str) -> Rules:
    """A shipped table; ValueError that lists them."""
    if name not in TABLES:
        raise ValueError(f"rules {name!r}: shipped are {', '.join(TABLES)}")
    return TABLES[name]
