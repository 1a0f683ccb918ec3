# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections at the released width: 4 copies of 5120, 24 mixes, 20 Sinkhorn steps."""

from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.bench.case import BenchCase
from v41.backends.neuron.kernels.folded import one_block
from v41.spec.numerics import Numerics

COPIES, DIM, MIXES, ITERS = 4, 5120, 24, 20
# A result that waits for an input: two DMAs. Sinkhorn: 39 halves of a step, each a sum and a quotient, two instructions of 0.1 us at least.
DMAS, SINKHORN = 4.0, 39 * 0.2


def stream(n: int) -> Tensor:
    return torch.randn(1, n, COPIES, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()


def part(n: int, *shape: int) -> Tensor:
    return torch.rand(1, n, *shape, generator=torch.Generator().manual_seed(1))


def phase(n: int) -> str:
    return "decode" if n <= 8 else "prefill"


def mixes(n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        fn = torch.randn(MIXES, COPIES * DIM, generator=torch.Generator().manual_seed(2)) * (COPIES * DIM) ** -0.5
        return stream(n), one_block(fn), torch.ones(3), torch.zeros(MIXES), ITERS, 1e-6, 1e-20, Numerics("trn2")

    moved = COPIES * DIM * (2 * n + 4 * MIXES) + n * MIXES * 4
    macs = 4 * n * MIXES * COPIES * DIM
    note = f"two DMAs, {ITERS} Sinkhorn steps: {DMAS + SINKHORN:.1f} us"
    return BenchCase("hc_mixes", f"{n} x {COPIES} x {DIM}", "small", phase(n), make, moved, macs, DMAS + SINKHORN, note)


def collapse(n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        return stream(n), part(n, COPIES)

    moved = n * DIM * 2 * (COPIES + 1) + n * COPIES * 4
    return BenchCase("hc_pre", f"{n} x {COPIES} x {DIM}", "small", phase(n), make, moved, 0, DMAS, "two DMAs")


def expand(n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        return stream(n)[:, :, 0].contiguous(), stream(n), part(n, COPIES), part(n, COPIES, COPIES)

    moved = n * DIM * 2 * (2 * COPIES + 1) + n * COPIES * (COPIES + 1) * 4
    return BenchCase("hc_post", f"{n} x {COPIES} x {DIM}", "small", phase(n), make, moved, 0, DMAS, "two DMAs")


CASES = tuple(kind(n) for kind in (mixes, collapse, expand) for n in (6, 128, 512))
