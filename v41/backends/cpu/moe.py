# SPDX-License-Identifier: Apache-2.0
"""Routed experts that have rows, and only their rows."""

import torch
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.ops.experts import expert, expert_hidden, expert_weight, experts_held
from v41.spec.ops.linear import partial_quantized
from v41.spec.table import Fp4Like
from v41.spec.types import I32, Act, Wide


def experts(
    x: Act[Tensor, "n dim"], weights: Wide[Tensor, "n k"], ids: I32[Tensor, "n k"], w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, *, limit: float, numerics: Numerics
) -> Wide[Tensor, "n dim"]:
    """The spec's sum with the experts that no row chose left out, and of the others only the rows that chose them.

    Equal to it bit for bit in bfloat16, where the rows of a product do not depend on each other (docs/numerics.md 4).
    """
    total = torch.zeros(x.shape, dtype=numerics.wide, device=x.device)
    for e in own_experts(ids, w1):
        row, column = (ids == e).nonzero(as_tuple=True)
        y = expert(x[row], weights[row, column], w1, w2, w3, e, limit=limit, numerics=numerics)
        total[row] += y.to(total.dtype)
    return total


def partial_experts(
    x: Act[Tensor, "n dim"], weights: Wide[Tensor, "n k"], ids: I32[Tensor, "n k"], w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, *, limit: float, numerics: Numerics
) -> Wide[Tensor, "n dim"]:
    """The same for experts whose inner axis is cut (v41/spec/ops/partial.py): nothing is rounded."""
    total = torch.zeros(x.shape, dtype=numerics.wide, device=x.device)
    for e in own_experts(ids, w1):
        row, column = (ids == e).nonzero(as_tuple=True)
        hidden = expert_hidden(x[row], weights[row, column], w1, w3, e, limit=limit, numerics=numerics)
        total[row] += partial_quantized(hidden, expert_weight(w2, e, numerics), numerics)
    return total


def own_experts(ids: I32[Tensor, "n k"], w: Fp4Like) -> list[int]:
    """The experts that some row chose and that this stack holds."""
    return [e for e in ids.unique().tolist() if 0 <= e < experts_held(w)]
