# SPDX-License-Identifier: Apache-2.0
"""Experts at the sizes that a rank of 64 holds: whole by id (EP64), cut over 4 (TP4 x EP16) and over 8 ranks (TP8 x EP8, rules `lean` and `fast`).

Weights are prepared and of one value: what a weight is does not change what it costs.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.bench.case import HBM_BYTES_PER_US, BenchCase
from v41.backends.neuron.kernels.experts_layout import ExpertTiles, SharedTiles, fold_of
from v41.spec.numerics import Numerics

TRN2 = Numerics("trn2")
DIM, INNER, EXPERTS, CHOSEN, LIMIT = 5120, 2304, 384, 6, 10.0
# ids in, weights in, sums out at 2.1 us each; between them the weights of the experts hit pass TensorE once, 128 a cycle and core.
CHAIN, PE_WEIGHTS_PER_US = 6.3, 2 * 128 * 2400.0
BYTES = {"codes": 1.0, "fp4": 17 / 32, "values": 2.0}
SHARES = {"EP64": (6, INNER), "TP4 x EP16": (24, INNER // 4), "TP8 x EP8": (48, INNER // 8)}


def tiles(held: int, inner: int, form: str, shared: int = 0) -> ExpertTiles:
    """Experts of one weight, in the form in which the kernel reads them."""
    groups, fold = inner // 32, fold_of(DIM, 8 if form == "fp4" else 2)
    n = DIM // 2 + DIM // 4
    if form == "fp4":
        raw = torch.full((held, groups, 128, n // 2 + DIM // (128 * fold) * 64), 0x21, dtype=torch.uint8)
        raw[..., n // 2 :] = 120
        made = ExpertTiles(raw, torch.full((3, held + 1), 64.0), torch.full((held, groups, DIM), 120, dtype=torch.uint8), None, DIM, inner, fold, True)
    else:
        one = torch.full((held, groups, 128, n), 0x38, dtype=torch.uint8)
        weight = one if form == "codes" else torch.full((held, groups, 128, n), 0.5, dtype=torch.bfloat16)
        made = ExpertTiles(weight, torch.full((3, held + 1), 2.0**-6), None, None, DIM, inner, fold, False)
    return replace(made, shared=shared_tiles(shared, fold)) if shared else made


def shared_tiles(inner: int, fold: int) -> Tensor:
    """The shared expert's share in bfloat16."""
    return torch.full((inner // 32, 128, DIM // 2 + DIM // 4), 0.01, dtype=torch.bfloat16)


def routed(rows: int, held: int, hit: int) -> tuple[Tensor, Tensor]:
    """(weights, ids): `hit` experts spread over those held have a row each, the other places name experts of other ranks."""
    ids = torch.full((rows, CHOSEN), -1, dtype=torch.int32)
    for i in range(hit):
        ids[i % rows, i // rows] = i * held // hit
    return torch.full((rows, CHOSEN), 0.25), ids


def drawn(rows: int) -> tuple[Tensor, Tensor]:
    """(weights, ids): every row chooses 6 of 384 evenly; ids of this rank's group of experts lie in 0 .. held - 1."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(rows, EXPERTS, generator=g).argsort(-1)[:, :CHOSEN]
    return torch.full((rows, CHOSEN), 0.25), ids.to(torch.int32)


def numbers(rows: int) -> Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()


def moved(hit: int, inner: int, form: str, shared: int, rows: int) -> int:
    """Bytes that must move: the weights of the experts hit and of the shared expert's share, rows in and out."""
    return int(hit * 3 * DIM * inner * BYTES[form] + 3 * DIM * shared * 2 + rows * DIM * 6)


def decode(share: str, hit: int, form: str = "codes", shared: int = 0, rows: int = 6) -> BenchCase:
    """6 rows of which `hit` local experts have any."""
    held, inner = SHARES[share]

    def make() -> tuple[Any, ...]:
        weights, ids = routed(rows, held, hit)
        return numbers(rows), weights, ids, tiles(held, inner, form, shared), None, None, LIMIT, TRN2

    weights, bytes_ = 3 * DIM * (hit * inner + shared), moved(hit, inner, form, shared, rows)
    chain = CHAIN + weights / PE_WEIGHTS_PER_US
    shape = f"{share}, {form}: {rows} rows, {hit} of {held} experts of {inner}" + (f", shared {shared}" if shared else "")
    note = f"ids, weights, sums 2.1 us each, {chain - CHAIN:.1f} us of weights past TensorE; bytes alone {bytes_ / HBM_BYTES_PER_US:.1f} us"
    return BenchCase("experts", shape, "gemm", "decode", make, bytes_, rows * weights, chain, note)


def prefill(share: str, rows: int) -> BenchCase:
    """Rows that choose evenly: nearly every expert has some."""
    held, inner = SHARES[share]
    weights, ids = drawn(rows)
    local = ids[ids < held]
    hit = len(local.unique())

    def make() -> tuple[Any, ...]:
        return numbers(rows), weights, ids, tiles(held, inner, "codes"), None, None, LIMIT, TRN2

    bytes_ = moved(hit, inner, "codes", 0, rows)
    chain = CHAIN + 3 * DIM * hit * inner / PE_WEIGHTS_PER_US
    note = f"{len(local)} pairs of row and expert; bytes alone {bytes_ / HBM_BYTES_PER_US:.0f} us"
    return BenchCase(
        "experts",
        f"{share}, codes: {rows} rows, {hit} of {held} experts of {inner}",
        "gemm",
        "prefill",
        make,
        bytes_,
        len(local) * 3 * DIM * inner,
        chain,
        note,
    )


def shared(rows: int, inner: int) -> BenchCase:
    """The shared expert's share in a call of its own."""

    def make() -> tuple[Any, ...]:
        return numbers(rows), SharedTiles(shared_tiles(inner, 2), DIM, 2), None, None, LIMIT, TRN2

    weights = 3 * DIM * inner
    chain = CHAIN - 2.1 + weights / PE_WEIGHTS_PER_US
    phase = "decode" if rows <= 32 else "prefill"
    note = "weights and sums 2.1 us each; weights past TensorE"
    return BenchCase("shared_expert", f"{rows} rows, {inner} of {INNER}", "gemm", phase, make, moved(0, 0, "codes", inner, rows), rows * weights, chain, note)


CASES: tuple[BenchCase, ...] = (
    *(decode("TP8 x EP8", hit) for hit in (0, 1, 7, 8)),
    *(decode("TP4 x EP16", hit) for hit in (4, 5)),
    *(decode("EP64", hit) for hit in (2, 3)),
    decode("TP8 x EP8", 7, shared=64),
    decode("TP8 x EP8", 7, "fp4"),
    decode("TP4 x EP16", 5, "fp4"),
    decode("EP64", 3, "fp4"),
    decode("TP8 x EP8", 7, "values"),
    decode("TP8 x EP8", 30, rows=32),
    shared(6, 64),
    shared(6, 288),
    prefill("TP8 x EP8", 128),
    prefill("TP8 x EP8", 512),
    shared(512, 64),
)
