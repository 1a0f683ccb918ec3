# SPDX-License-Identifier: Apache-2.0
"""Parameters without memory in the forms that stay in HBM: what `prepare` makes of a checkpoint, for captures at full size.

Whether a weight folds to one byte follows from its values, which are not there: dense weights become bfloat16 in tiles, which takes any of
them, and experts what the placement says. The checkpoint's own scales are dropped where a kernel does not read them.
"""

from dataclasses import replace
from typing import Any

import torch

from v41.backends.neuron.kernels.experts_layout import prepared, prepared_shared
from v41.backends.neuron.prepare import _changed, tiled
from v41.spec.numerics import Numerics
from v41.spec.params import Layer, MoE, Params
from v41.spec.table import Folded, Fp4, Fp8, Tiled


def bare(w: Tiled) -> Tiled:
    """Tiles without the checkpoint's scales."""
    return replace(w, scale=None)


def refolded(w: Fp4) -> Folded:
    """A stack of experts with one byte a weight and one scale an expert."""
    held, out, half = w.weight.shape
    codes = torch.empty((held, out, 2 * half), dtype=torch.float8_e4m3fn, device=w.weight.device)
    return Folded(codes, torch.empty((held, 1), device=w.weight.device), None, out, "fp4")


def moe(p: MoE, experts: str, numerics: Numerics) -> MoE:
    """Routed and shared experts in their kernels' layout."""
    e, s = p.experts, p.shared_experts
    stacks: Any = (e.w1, e.w2, e.w3) if experts.startswith("fp4") else tuple(refolded(w) for w in (e.w1, e.w2, e.w3))
    w1, w2, w3 = stacks
    routed: Any = prepared(w1, w2, w3, numerics)
    shared: Any = prepared_shared(s.w1, s.w2, s.w3, numerics)
    none: Any = None
    return replace(p, experts=replace(e, w1=routed, w2=none, w3=none), shared_experts=replace(s, w1=shared, w2=none, w3=none))


def resident(params: Params, experts: str) -> Params:
    """params on the meta device as they stay in HBM. experts: a format of `v41.sharding.placement.FORMATS`."""

    def layer(p: Layer) -> Layer:
        return replace(p, ffn=moe(p.ffn, experts, params.numerics))

    made: Params = _changed(params, lambda w: bare(tiled(w)) if isinstance(w, Fp8) else None, lambda w: bare(tiled(w)))
    draft = None if made.draft is None else replace(made.draft, stages=tuple(layer(p) for p in made.draft.stages))
    return replace(made, layers=tuple(layer(p) for p in made.layers), draft=draft)
