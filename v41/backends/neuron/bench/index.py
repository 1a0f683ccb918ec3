# SPDX-License-Identifier: Apache-2.0
"""The indexer: scores with 4 heads (a rank of 8) or all 32, selection of 512 rows, 2048 candidate blocks of 8, at contexts of 16384 and in prefill."""

from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.bench.attention import numbers
from v41.backends.neuron.bench.case import BenchCase
from v41.spec.numerics import Numerics

TRN2 = Numerics("trn2")
D, TOP, BLOCKS, SIZE = 128, 512, 2048, 8
LANES = 32  # of a row of scores on each core
# Keys in 2.1, scores out 2.1.
SCORE_FIXED = 4.2
# Scores in 2.1; 15 bits of the threshold, each waiting for the one before: candidate 0.1, count, sum over lanes 0.1, comparison 0.1, choice 0.1;
# ranks and columns; out 2.1.
SEARCH_FIXED, BITS, BIT_FIXED = 5.6, 16, 0.5


def phase(rows: int) -> str:
    return "decode" if rows <= 6 else "prefill"


def scores(rows: int, heads: int, t: int) -> BenchCase:
    """`rows` queries against t keys; every key of a core passes TensorE once to be turned and once for each 128 pairs, and so do the dots."""

    def make() -> tuple[Any, ...]:
        return numbers(0, 1, rows, heads, D), numbers(1, 1, t, D), numbers(2, 1, rows, heads), TRN2

    parts, together = -(-rows * heads // 128), 4 if rows * heads <= 32 else 2 if rows * heads <= 64 else 1
    chain = SCORE_FIXED + t / 2 * (0.105 / 128 + parts / 2400 + parts / 2400 / together)
    moved = t * D * 2 + rows * heads * (D + 1) * 2 + rows * t * 2
    note = f"chain: keys in, all keys of a core turned and multiplied by TensorE, out: {chain:.1f} us"
    return BenchCase("index_scores", f"{rows} x {heads} heads x {D}, {t} keys", "attention", phase(rows), make, moved, rows * heads * t * D, chain, note)


def masked(rows: int, t: int) -> tuple[Tensor, Tensor]:
    """Scores and visible rows of queries at the end of a context of t - 1."""
    visible = torch.arange(t - rows, t, dtype=torch.int32).view(1, rows)
    return torch.where(torch.arange(t) < visible[..., None], numbers(3, 1, rows, t), -torch.inf), visible


def search(kernel: str, rows: int, t: int) -> BenchCase:
    """An exact choice from t scores a query."""
    select = kernel == "select"

    def make() -> tuple[Any, ...]:
        return (*masked(rows, t), TOP, TRN2) if select else (*masked(rows, t), BLOCKS, SIZE, TRN2)

    columns = (t if select else t / SIZE) / LANES * max(1, rows / 8)
    once = 0.1 + columns / 960
    chain = SEARCH_FIXED + BITS * (BIT_FIXED + once) + 7 * once
    chosen = TOP if select else BLOCKS
    note = f"chain: {BITS} bits of the threshold one after the other, ranks, columns: {chain:.1f} us"
    return BenchCase(kernel, f"{rows} x {t} scores, {chosen} chosen", "small", phase(rows), make, rows * (t * 2 + chosen * 4), 0, chain, note)


CASES: tuple[BenchCase, ...] = (
    scores(6, 4, 16385),
    scores(6, 4, 8193),
    scores(6, 32, 16385),
    scores(64, 4, 8193),
    search("select", 6, 16385),
    search("select", 6, 8193),
    search("select", 64, 8193),
    search("candidate_blocks", 6, 16385),
    search("candidate_blocks", 6, 32769),
)
