# SPDX-License-Identifier: Apache-2.0
"""Weights refolded once at load to bytes that the tensor engine multiplies: legacy e4m3 codes and one coarse power of two (docs/kernels.md).

The power of two of a group is the smallest at which no value is above 240; what a stored scale differs from it goes into the exponents of the
codes. An fp4 value v * 2^d is such a code, without rounding, for d = -8..5: 6 * 2^5 = 192, and 0.5 * 2^-8 is the smallest subnormal. fp8 codes
fill more of the format: only groups with few binades fold. What does not fold exactly is left as it is, and counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from v41.spec.ops.quant import BLOCK, dequantize, e2m1_pack, scale_value
from v41.spec.table import Folded, Fp4, Fp8
from v41.spec.types import F32, Flag

LARGEST = 240.0  # of the e4m3 with infinities


@dataclass(frozen=True)
class Count:
    """How many groups a weight has, and in how many some value does not fold exactly."""

    groups: int
    inexact: int

    def __add__(self, other: "Count") -> "Count":
        return Count(self.groups + other.groups, self.inexact + other.inexact)


def coarse(values: F32[Tensor, "*groups n"]) -> F32[Tensor, "*groups"]:
    """The smallest 2^c with |value| <= 240 * 2^c in a group; 1 for a group of zeros."""
    top = values.abs().amax(-1).double()
    exponent = torch.where(top > 0, torch.ceil(torch.log2(top / LARGEST)), torch.zeros_like(top))
    return torch.exp2(exponent.clamp(-126, 127)).float()


def folded(w: Fp4 | Fp8, rows: int = 0) -> tuple[Folded, Flag[Tensor, "*groups"]]:
    """(w with one scale for `rows` output rows, 0 for all of them; which groups are inexact, and so hold rounded codes).

    Groups follow each other along the output rows; the last may be shorter. Codes keep their signs, also that of zero.
    """
    values = dequantize(w, torch.float32)
    out, inner = values.shape[-2:]
    rows = rows or out
    if not 1 <= rows <= out:
        raise ValueError(f"fold: groups of {rows} of {out} rows")
    grouped = functional.pad(values, (0, 0, 0, -out % rows)).unflatten(-2, (-1, rows)).flatten(-2)
    scale = coarse(grouped)
    codes = (grouped / scale[..., None]).to(torch.float8_e4m3fn)
    inexact = (codes.float() * scale[..., None] != grouped).any(-1)
    stored = codes.unflatten(-1, (rows, inner)).flatten(-3, -2)[..., :out, :]
    return Folded(stored.contiguous(), scale, w.scale, rows, "fp4" if isinstance(w, Fp4) else "fp8"), inexact


def fold(w: Fp4 | Fp8, rows: int = 0) -> tuple[Folded | Fp4 | Fp8, Count]:
    """w folded where every group is exact, else w itself; and the count."""
    made, inexact = folded(w, rows)
    count = Count(inexact.numel(), int(inexact.sum()))
    return (w if count.inexact else made), count


def unfold(w: Folded) -> Fp4 | Fp8:
    """The stored bytes of an exactly folded weight; ValueError where its stored scales were dropped."""
    if w.blocks is None:
        raise ValueError(f"unfold: the stored scales of a weight {tuple(w.weight.shape)} were dropped")
    scale = scale_value(w.blocks)
    if w.stored == "fp8":
        scale = scale.repeat_interleave(BLOCK, -2)[..., : w.weight.shape[-2], :]
    values = dequantize(w, torch.float32) / scale.repeat_interleave(BLOCK, -1)[..., : w.weight.shape[-1]]
    return Fp4(e2m1_pack(values), w.blocks) if w.stored == "fp4" else Fp8(values.to(torch.float8_e4m3fn), w.blocks)
