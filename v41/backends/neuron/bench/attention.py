# SPDX-License-Identifier: Apache-2.0
"""Gathered attention: 8 heads (a rank of 8) or all 64, the window alone or with 512 selected rows, for a step of 6 rows and in prefill."""

from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.bench.case import BenchCase
from v41.spec.numerics import Numerics

D, WINDOW, CHOSEN, RING, ROWS = 512, 128, 512, 143, 8193
# One query with its whole list, which its maximum needs: list in 2.0; index 0.8; rows in 2.0, and 0.73 for each 128 of them at 1 KiB a row; the last
# 128 turned 0.1 and carried 0.6; scores 0.2; maximum and exp 0.1 + n / 960 us and 0.3 + n / 1200 us for n slots; p turned 0.1; mixed 0.21 each 128;
# scaled 0.6; out 2.1.
FIXED, EACH_128 = 9.1, 0.73 + 0.13 + 0.11 + 0.21


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def lists(rows: int, n: int, k: int) -> Tensor:
    """k different rows of n for each query, ascending."""
    g = torch.Generator().manual_seed(n)
    return torch.stack([torch.randperm(n, generator=g)[:k].sort().values for _ in range(rows)]).view(1, rows, k).to(torch.int32)


def case(rows: int, heads: int, chosen: int) -> BenchCase:
    """`rows` queries whose lists are full."""

    def make() -> tuple[Any, ...]:
        cache = (numbers(1, 1, RING, D), lists(rows, RING, WINDOW), numbers(2, 1, ROWS, D), lists(rows, ROWS, chosen))
        return numbers(0, 1, rows, heads, D), *cache, torch.zeros(heads), D**-0.5, Numerics("trn2")

    slots = WINDOW + chosen
    moved = rows * (slots * D * 2 + slots * 4 + 2 * heads * D * 2)
    chain = FIXED + slots / 128 * EACH_128
    note = f"chain: list, index, one query's rows, scores, maximum, exp, mix, out: {chain:.1f} us"
    shape = f"{rows} x {heads} heads x {D}, {WINDOW} + {chosen} slots"
    return BenchCase("sparse_attn", shape, "attention", "decode" if rows <= 6 else "prefill", make, moved, rows * heads * slots * D * 2, chain, note)


CASES: tuple[BenchCase, ...] = (
    case(6, 8, CHOSEN),
    case(6, 64, CHOSEN),
    case(6, 8, 0),
    case(1, 8, CHOSEN),
    case(128, 8, CHOSEN),
)
