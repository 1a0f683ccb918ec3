# SPDX-License-Identifier: Apache-2.0
"""The router at the released sizes: 384 experts of which 6, and the draft stages' 128 of which 3. It is whole on every rank."""

from typing import Any

import torch

from v41.backends.neuron.bench.case import BenchCase
from v41.backends.neuron.kernels.folded import one_block
from v41.spec.numerics import Numerics

DIM = 5120
# Two DMAs, softplus, sqrt, minimum, bias, max8 and the search of a row of experts, three instructions for the weights.
FIXED, EACH = 4.0 + 0.19 * 2 + 0.1 * 7, (2 / 1200 + 6 / 960)


def case(n: int, experts: int, k: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(0)
        x, weight = torch.randn(n, DIM, generator=g).bfloat16(), (torch.randn(experts, DIM, generator=g) * 0.02).bfloat16()
        return x, one_block(weight), torch.randn(experts, generator=g) * 0.1, k, "sqrtsoftplus", True, 1.5, Numerics("trn2")

    chain = FIXED + EACH * experts
    moved = 2 * DIM * (n + experts) + 4 * experts + 8 * n * k
    note = f"chain: in, scores, bias, maximum, search, weights, out: {chain:.1f} us"
    phase = "decode" if n <= 8 else "prefill"
    return BenchCase("gate", f"{n} x {DIM} -> {k} of {experts}", "small", phase, make, moved, n * experts * DIM, chain, note)


CASES = (case(6, 384, 6), case(6, 128, 3), case(128, 384, 6), case(512, 384, 6))
