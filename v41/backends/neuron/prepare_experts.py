# SPDX-License-Identifier: Apache-2.0
"""Experts as the kernels read them, made once at load from a rank's parameters (docs/kernels.md 11)."""

from dataclasses import replace
from typing import Any

from v41.backends.neuron.fold import Count, fold
from v41.backends.neuron.kernels.experts_layout import SharedTiles, prepared, prepared_shared
from v41.sharding.rules import Rules
from v41.spec.numerics import Numerics
from v41.spec.params import MoE, Params
from v41.spec.table import Fp4, Fp4Like

FORMS = ("codes", "fp4")


def form_of(rules: Rules) -> str:
    """How the experts of a table of rules stay in HBM: one byte a weight in `fast`, which is faster, fp4 where memory counts."""
    return "codes" if rules.name == "fast" else "fp4"


def joint(rules: Rules) -> bool:
    """Whether one call may sum routed and shared experts: their sums are then closed by the same ranks, each with a share of its own."""
    return set(rules.of("shared_inter")) == set(rules.of("experts")) | set(rules.of("moe_inter"))


def prepare_moe(p: MoE, form: str, rules: Rules, numerics: Numerics) -> tuple[MoE, Count]:
    """One layer's experts in a form, and how many of their matrices did not fold: one is enough for the layer to stay in fp4."""
    e, s = p.experts, p.shared_experts
    stacks, count = (e.w1, e.w2, e.w3), Count(0, 0)
    if form == "codes":
        stacks, count = folded_stacks(stacks)
    shared = (s.w1, s.w2, s.w3)
    none: Any = None
    if joint(rules):
        routed: Any = prepared(*stacks, numerics, shared)
        alone: Any = SharedTiles(None, routed.dim, routed.fold)
    else:
        routed, alone = prepared(*stacks, numerics), prepared_shared(*shared, numerics)
    return replace(p, experts=replace(e, w1=routed, w2=none, w3=none), shared_experts=replace(s, w1=alone, w2=none, w3=none)), count


def folded_stacks(stacks: tuple[Fp4, Fp4, Fp4]) -> tuple[tuple[Any, Any, Any], Count]:
    """(all three folded with one scale an expert, or as they were if any does not fold; groups and inexact ones)."""
    made: list[Fp4Like] = []
    count = Count(0, 0)
    for w in stacks:
        folded, here = fold(w)
        made.append(folded)  # type: ignore[arg-type]
        count = count + here
    return (stacks if count.inexact else (made[0], made[1], made[2])), count


def prepare_experts(params: Params, form: str, rules: Rules) -> tuple[Params, Count]:
    """A rank's parameters with the experts of every layer and draft stage in a form of `FORMS`, the rest shared with params; and the count of all layers."""
    if form not in FORMS:
        raise ValueError(f"experts: form {form!r} is none of {', '.join(FORMS)}")
    stages = () if params.draft is None else params.draft.stages
    made = [prepare_moe(p.ffn, form, rules, params.numerics) for p in (*params.layers, *stages)]
    ffns = [replace(p, ffn=ffn) for p, (ffn, _) in zip((*params.layers, *stages), made, strict=True)]
    layers, rest = tuple(ffns[: len(params.layers)]), tuple(ffns[len(params.layers) :])
    draft = None if params.draft is None else replace(params.draft, stages=rest)
    return replace(params, layers=layers, draft=draft), sum((count for _, count in made), Count(0, 0))
