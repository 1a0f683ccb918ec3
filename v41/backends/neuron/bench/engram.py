# SPDX-License-Identifier: Apache-2.0
"""Engram at the released sizes: 24 columns of primes above 16 million, rows of 256 codes, gates over 4 copies of 5120."""

from typing import Any

import torch

from v41.backends.neuron.bench.case import BenchCase
from v41.backends.neuron.kernels.engram_hash import tables
from v41.spec.numerics import Numerics
from v41.spec.table import Fp8Rows

COLUMNS, LOOKBACK, WIDTH, COPIES, DIM, HELD = 24, 4, 256, 4, 5120, 4096
TRN2 = Numerics("trn2")
DMAS = 4.0
# Seven carries of a 64-bit product, one after the other, two instructions each; a product and sum before, a quotient and its remainder after.
HASH = DMAS + (14 + 4 + 6 + 8) * 0.1


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def phase(n: int) -> str:
    return "decode" if n <= 8 else "prefill"


def hashed(n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        primes = 16000000 + torch.arange(1, 2 * COLUMNS, 2)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), primes.cumsum(0)[:-1]))
        multipliers = torch.randint(0, 2**45, (LOOKBACK,), generator=seeded(0)) * 2 + 1
        ids = torch.randint(0, 99092, (1, n, LOOKBACK), generator=seeded(1), dtype=torch.int64).to(torch.int32)
        return ids, torch.ones(1, n, LOOKBACK, dtype=torch.bool), torch.tensor(2, dtype=torch.int32), *tables(multipliers, primes.view(3, 8), offsets)

    moved = n * (LOOKBACK * 5 + COLUMNS * 4)
    note = f"two DMAs, carries of a product, a remainder: {HASH:.1f} us"
    return BenchCase("engram_hash", f"{n} x {COLUMNS} columns", "small", phase(n), make, moved, 0, HASH, note)


def rows(n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        codes = torch.randint(0, 127, (HELD, WIDTH), generator=seeded(0), dtype=torch.int64).to(torch.uint8)
        scales = torch.full((HELD, WIDTH // 32), 120, dtype=torch.uint8)
        ids = torch.randint(0, HELD, (1, n, COLUMNS), generator=seeded(1), dtype=torch.int64).to(torch.int32)
        return Fp8Rows(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)), ids, TRN2

    moved = n * COLUMNS * (4 + WIDTH + WIDTH // 32 + 2 * WIDTH)
    note = "ids in, rows in, rows out: three DMAs"
    return BenchCase("engram_rows", f"{n} x {COLUMNS} rows of {WIDTH}", "small", phase(n), make, moved, 0, 6.0, note)


def gated(n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        stream = torch.randn(1, n, COPIES, DIM, generator=seeded(0)).bfloat16()
        kv = torch.randn(1, n, (COPIES + 1) * DIM, generator=seeded(1)).bfloat16()
        q, k = (torch.randn(COPIES, DIM, generator=seeded(s)).bfloat16() for s in (2, 3))
        return stream, kv, q, k, None, 1e-20, TRN2

    moved = n * DIM * 2 * (3 * COPIES + 1) + COPIES * DIM * 4
    chain = DMAS + 12 * 0.1 + 2 * 0.19
    note = f"two DMAs, sums, norms, root, sigmoid, one product: {chain:.1f} us"
    return BenchCase("engram_gate", f"{n} x {COPIES} x {DIM}", "small", phase(n), make, moved, 0, chain, note)


CASES = tuple(kind(n) for kind in (hashed, rows, gated) for n in (6, 128))
