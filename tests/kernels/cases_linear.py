# SPDX-License-Identifier: Apache-2.0
"""Shapes and values of linear layers: (what, rows, inner, out). Inner sizes 64 .. 576 leave a part of a tile of 128; 300 rows are cut over the cores."""

import torch
from torch import Tensor

from v41.backends.neuron.fold import folded
from v41.backends.neuron.prepare import tiled
from v41.spec.ops.quant import dequantize
from v41.spec.table import Folded, Fp8, Tiled

SHAPES = (
    ("one tile", 6, 128, 64),
    ("one row", 1, 256, 128),
    ("half a tile", 5, 64, 96),
    ("four and a half tiles", 6, 576, 96),
    ("many tiles for a few rows", 6, 1280, 160),
    ("columns end inside a block of scales", 6, 288, 80),
    ("an odd number of columns", 3, 128, 65),
    ("more than one bank a core", 6, 128, 1216),
    ("a whole tile of rows", 128, 192, 64),
    ("a tile of rows and two more", 130, 128, 64),
    ("rows over both cores", 300, 128, 96),
    ("many rows and columns", 260, 128, 2112),
)
FULL = (
    ("wq_a", 6, 5120, 1280),
    ("wq_b, 8 heads", 6, 1280, 4096),
    ("wkv in prefill", 512, 5120, 512),
    ("2304 = 18 tiles", 6, 2304, 576),
    ("a long prefill", 4096, 1280, 512),
    ("main_proj in prefill", 512, 15360, 640),
)
NARROW = (("weights_proj", 6, 5120, 4), ("one column", 6, 5376, 1), ("32 and 32", 32, 1152, 32), ("one row", 1, 2048, 3))


def activations(rows: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Rows of several magnitudes; the first are extremes: zeros of both signs, the ends of the range, ties of the round trip, one element alone."""
    x = torch.randn(rows, inner) * torch.logspace(-4, 4, rows)[:, None]
    x[:, 1::7] *= 64  # uneven within a group of 32
    special = (
        torch.zeros(inner),
        -torch.zeros(inner),
        torch.linspace(-240, 240, inner),
        torch.where(torch.arange(inner) % 32 == 0, 241.0, 13.5),
        torch.where(torch.arange(inner) == 5, 2.0**60, 2.0**-60),
    )
    for r, row in enumerate(special[: max(0, rows - 3)]):
        x[r] = row
    return x.to(torch.bfloat16).to(dtype)


def coded(out: int, inner: int) -> Fp8:
    """Every code that is a number, 256 to 448 and the subnormals among them; scales of 64 binades."""
    codes = torch.randint(0, 127, (out, inner)) + 128 * torch.randint(0, 2, (out, inner))
    scales = torch.randint(96, 160, (-(-out // 32), -(-inner // 32)))
    return Fp8(codes.to(torch.uint8).view(torch.float8_e4m3fn), scales.to(torch.uint8).view(torch.float8_e8m0fnu))


def foldable(out: int, inner: int) -> Fp8:
    """Codes without the smallest odd ones, and scales that agree within 32 rows."""
    w = coded(out, inner)
    codes = w.weight.view(torch.uint8)
    coarse = torch.where((codes & 127) < 16, codes & 0xF0, codes)
    return Fp8(coarse.view(torch.float8_e4m3fn), w.scale.view(torch.uint8)[:, :1].expand(w.scale.shape).contiguous().view(torch.float8_e8m0fnu))


def fold32(out: int, inner: int) -> Folded:
    made, inexact = folded(foldable(out, inner), 32 if out >= 32 else out)
    assert not inexact.any()
    return made


def tiles(out: int, inner: int) -> Tiled:
    return tiled(coded(out, inner))


def plain(out: int, inner: int) -> Tensor:
    return dequantize(coded(out, inner), torch.bfloat16)


FORMS = {"codes": coded, "tiled": tiles, "folded": fold32, "values": plain}
