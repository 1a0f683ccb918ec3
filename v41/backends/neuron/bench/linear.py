# SPDX-License-Identifier: Apache-2.0
"""Linear layers at the sizes that a rank of 64 holds (rules `lean`), with 6 rows (a token and 5 drafts) and in prefill."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.bench.case import BenchCase
from v41.backends.neuron.prepare import tiled
from v41.spec.numerics import Numerics
from v41.spec.table import Folded, Fp8, Tiled

TRN2 = Numerics("trn2")
# Every product waits for x and the result waits for every product. The shortest launch: x in (2.1 us), transpose, one product, rounding, result
# out (2.1); 1.3 us more for the round trip of one group. Between them every weight of a core passes TensorE once, 128 a cycle.
CHAIN, TRIP = 5.1, 1.3
STATED = "x in, {}transpose, all weights past TensorE, rounding, out: {:.1f} us"


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def coded(out: int, inner: int) -> Fp8:
    """Checkpoint codes of every magnitude, with scales as a released weight has them."""
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 127, (out, inner), generator=g) + 128 * torch.randint(0, 2, (out, inner), generator=g)
    scales = torch.randint(111, 116, (-(-out // 32), -(-inner // 32)), generator=g)
    return Fp8(codes.to(torch.uint8).view(torch.float8_e4m3fn), scales.to(torch.uint8).view(torch.float8_e8m0fnu))


def prepared(out: int, inner: int) -> Tiled:
    return tiled(coded(out, inner))


def values(out: int, inner: int) -> Tiled:
    """A plain weight, prepared."""
    return tiled(numbers(out, inner))


def foldable(out: int, inner: int) -> Folded:
    """Codes of at most 240 with one scale for 128 rows."""
    codes = coded(out, inner).weight.view(torch.uint8)
    return Folded(codes.where((codes & 127) < 120, codes - 8).view(torch.float8_e4m3fn), torch.full((out // 128,), 2.0**-12), None, 128, "fp8")


def case(kernel: str, what: str, rows: int, out: int, inner: int, weight: Callable[[int, int], Any] = prepared, bytes_a_weight: int = 2) -> BenchCase:
    """One product of x (rows, inner) and a weight (out, inner); the result is float32 where the kernel's name says so."""
    trip = kernel in ("linear", "partial_linear")
    wide = kernel in ("partial_linear", "wide_linear")

    def make() -> tuple[Any, ...]:
        if kernel == "grouped_linear":
            return numbers(1, rows, inner // 512, 512), weight(out, inner), 1, TRN2
        return numbers(rows, inner), weight(out, inner), TRN2

    moved = out * inner * bytes_a_weight + rows * (2 * inner + (4 if wide else 2) * out)
    chain = CHAIN + TRIP * trip + out * inner / (2 * 128 * 2400.0)
    phase = "decode" if rows <= 8 else "prefill"
    shape = f"{what}: {rows} x {inner} -> {out}"
    return BenchCase(kernel, shape, "gemm", phase, make, moved, rows * out * inner, chain, STATED.format("round trip, " if trip else "", chain))


def rounding(rows: int, n: int) -> BenchCase:
    """The round trip alone."""
    make = partial(lambda: (numbers(rows, n), TRN2))
    return BenchCase("act_round", f"{rows} x {n}", "small", "decode" if rows <= 8 else "prefill", make, 4 * rows * n, 0, 4.0 + TRIP, "in, round trip, out")


DECODE = (
    case("linear", "wq_a", 6, 1280, 5120),
    case("linear", "wq_b, 8 heads", 6, 4096, 1280),
    case("linear", "wkv", 6, 512, 5120),
    case("linear", "indexer wq_b, 4 heads", 6, 512, 1280),
    case("linear", "Engram wkv, 1/8", 6, 3200, 6144),
    case("linear", "main_proj, 1/8", 6, 640, 15360),
    case("partial_linear", "wo_b, 1/8", 6, 5120, 1024),
    case("grouped_linear", "wo_a, one group", 6, 1024, 4096),
    case("plain_linear", "indexer weights_proj, 4 heads", 6, 4, 5120, numbers),
    case("plain_linear", "index keys wk", 6, 128, 512, numbers),
    case("wide_linear", "compressor wkv", 6, 512, 5120, values),
    case("wide_linear", "head, 1/64", 6, 2020, 5120, values),
    case("wide_linear", "Markov head, 1/8", 6, 16160, 256, values),
    rounding(6, 5120),
)
PREFILL = (
    case("linear", "wq_a", 128, 1280, 5120),
    case("linear", "wq_a", 512, 1280, 5120),
    case("linear", "wq_b, 8 heads", 128, 4096, 1280),
    case("linear", "wq_b, 8 heads", 512, 4096, 1280),
    case("partial_linear", "wo_b, 1/8", 512, 5120, 1024),
    case("grouped_linear", "wo_a, one group", 512, 1024, 4096),
    case("wide_linear", "compressor wkv", 512, 512, 5120, values),
    rounding(512, 5120),
)
CASES = DECODE + PREFILL
# Weight forms that are not used, for comparison (docs/kernels.md 3).
OTHERS = (
    case("linear", "wq_b from checkpoint codes, decoded in the kernel", 6, 4096, 1280, coded, 1),
    case("linear", "wq_b folded: e4m3 codes of at most 240", 6, 4096, 1280, foldable, 1),
    case("linear", "wq_b in bfloat16 as (out, in), turned by the DMA", 6, 4096, 1280, numbers),
)
