# SPDX-License-Identifier: Apache-2.0
"""Counting SwiGLU inputs beyond the clamp: a backend value that looks at what the experts multiply."""

from dataclasses import replace

from torch import Tensor

from v41.spec.backend import Backend
from v41.spec.numerics import Numerics
from v41.spec.ops.experts import expert_weight
from v41.spec.ops.linear import quantized
from v41.spec.table import Fp4


def count_clamps(ops: Backend) -> tuple[Backend, list[int]]:
    """(backend, counts): one count for each expert of each layer that is run."""
    counts: list[int] = []

    def experts(x: Tensor, weights: Tensor, ids: Tensor, w1: Fp4, w2: Fp4, w3: Fp4, *, limit: float, numerics: Numerics) -> Tensor:
        for e in ids.unique().tolist():
            rows = x[(ids == e).any(-1)]
            gate, up = (quantized(rows, expert_weight(w, e, numerics), numerics) for w in (w1, w3))
            counts.append(int((gate > limit).sum() + (up.abs() > limit).sum()) if limit else 0)
        return ops.experts(x, weights, ids, w1, w2, w3, limit=limit, numerics=numerics)

    return replace(ops, name=f"{ops.name}+clamps", experts=experts), counts
