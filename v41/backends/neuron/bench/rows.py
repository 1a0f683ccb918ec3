# SPDX-License-Identifier: Apache-2.0
"""Row kernels around attention: norms, rotations, fp4 round trips, pooling, embedding rows, cache writes. Each is bound by its DMAs one after the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.bench.attention import numbers
from v41.backends.neuron.bench.case import BenchCase
from v41.spec.numerics import Numerics
from v41.spec.ops.rope import frequencies

TRN2 = Numerics("trn2")
# A DMA in and one out with nothing between them; a gather or a scatter waits for its index as well.
IN_OUT, INDEXED, INDEXED_OUT = 4.2, 4.2, 6.4


def small(kernel: str, shape: str, rows: int, make: Callable[[], tuple[Any, ...]], moved: int, chain: float, work: str) -> BenchCase:
    return BenchCase(kernel, shape, "small", "decode" if rows <= 6 else "prefill", make, moved, 0, chain, f"chain: {work}: {chain:.1f} us")


def norm(rows: int, n: int) -> BenchCase:
    return small(
        "rms_norm",
        f"{rows} x {n}",
        rows,
        lambda: (numbers(0, 1, rows, n), numbers(1, n), 1e-20),
        (2 * rows + 1) * n * 2,
        IN_OUT + 1.2,
        "in, squares, mean, rsqrt, scale, out",
    )


def positions(rows: int) -> Tensor:
    return torch.arange(100_000, 100_000 + rows, dtype=torch.int32).view(1, rows)


def turn(kernel: str, rows: int, heads: int, n: int) -> BenchCase:
    return small(
        kernel,
        f"{rows} x {heads} heads x {n}, 64 turned",
        rows,
        lambda: (numbers(0, 1, rows, heads, n), positions(rows), frequencies(64, 160000.0, None)),
        2 * rows * heads * n * 2,
        IN_OUT + 2.8,
        "in, angle, 7 parts of 2 pi, sine, 6 products and sums, out",
    )


def trip(kernel: str, rows: int, n: int) -> BenchCase:
    return small(kernel, f"{rows} x {n}", rows, lambda: (numbers(0, 1, rows, n), TRN2), 2 * rows * n * 2, IN_OUT + 2.2, "in, scale, 14 passes, out")


def pool(groups: int) -> BenchCase:
    shape = (1, groups, 2, 512)
    return small(
        "softmax_pool",
        f"{groups} groups of 2 x 512",
        groups,
        lambda: (numbers(0, *shape).float(), numbers(1, *shape).float(), torch.bfloat16),
        groups * 512 * (4 * 4 + 2),
        IN_OUT + 2.2,
        "in, maximum, exp, sums, out",
    )


def rows_of_table(rows: int) -> BenchCase:
    ids = torch.arange(0, 3 * rows, 3, dtype=torch.int32).view(1, rows)
    return small(
        "embedding", f"{rows} rows of 5120", rows, lambda: (ids, numbers(0, 2020, 5120), torch.bfloat16), 2 * rows * 5120 * 2, INDEXED_OUT, "index, rows, out"
    )


def write(rows: int, n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        return numbers(0, 1, 1025, n), torch.arange(rows, dtype=torch.int32).view(1, rows), numbers(1, 1, rows, n)

    return small("write_rows", f"{rows} rows of {n}", rows, make, 2 * rows * n * 2, INDEXED, "index, rows")


CASES: tuple[BenchCase, ...] = (
    norm(6, 5120),
    norm(6, 1280),
    norm(6, 512),
    norm(128, 5120),
    turn("rope", 6, 8, 512),
    turn("rope", 6, 1, 512),
    turn("rope", 128, 8, 512),
    turn("rope_inverse", 6, 8, 512),
    trip("index_round", 6, 512),
    trip("index_round", 128, 512),
    trip("kv_round", 6, 512),
    trip("kv_round", 128, 512),
    pool(3),
    pool(64),
    rows_of_table(6),
    rows_of_table(128),
    write(6, 512),
    write(128, 512),
)
