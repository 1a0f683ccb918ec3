# SPDX-License-Identifier: Apache-2.0
"""Experts in the order in which the kernels read them (docs/kernels.md): made once at load, and back.

An item is 32 columns of the inner dimension of one expert, a group of w2's activation rounding: its rows of w1 and w3 and its columns of w2.
Item e * groups + g lies contiguous in HBM, one run a lane:

    lane p: for tile t = (q, s) of dim = (q, p, s), s < fold: 32 elements of w1, then 32 of w3, at column q * 128 * fold + p * fold + s
            then dim / 4 elements of w2: lane p = 32 b + k holds rows b * dim / 4 .. of inner column k
    packed: two e2m1 codes a byte, element i in the low nibble and i + half in the high one; then for every q the e8m0 bytes of w1's and w3's
            scales, which are alike on the 32 / fold lanes of a block of 32 columns. Scales of w2 lie apart, `outer`
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from v41.spec.numerics import Numerics
from v41.spec.ops.quant import dequantize
from v41.spec.table import Folded, Fp4, Fp4Like, Fp8Like
from v41.spec.types import E8M0, F32

P, GROUP, PARTS = 128, 32, 4
CODE = 64.0  # a packed code is decoded as value / 64
NEUTRAL = 127  # e8m0 of 1


@dataclass(frozen=True)
class ExpertTiles:
    """All local experts of a layer for the kernels, in place of `Experts.w1`; w2 and w3 are None then.

    weight  (held, groups, 128, elements) bfloat16 or float32 values, or uint8: legacy e4m3 codes, or packed fp4
    scale   (3, held + 1) of w1, w3, w2; the first column is 1
    outer   (held, groups, dim) uint8 where packed: e8m0 bytes of w2's scales
    shared  (items, 128, elements) values of the shared expert or of this rank's share of it, an even number of items, where it is summed in the same call
    """

    weight: Tensor
    scale: F32[Tensor, "matrices columns"]
    outer: Tensor | None
    shared: Tensor | None
    dim: int = field(metadata={"static": True})
    inner: int = field(metadata={"static": True})
    fold: int = field(metadata={"static": True})
    packed: bool = field(metadata={"static": True})


@dataclass(frozen=True)
class SharedTiles:
    """The shared expert, or this rank's share of it, in place of `SharedExpert.w1`; w2 and w3 are None then.

    weight (items, 128, elements) values, an even number of items; None where `ExpertTiles.shared` holds them, so that the call of the routed
    experts sums both.
    """

    weight: Tensor | None
    dim: int = field(metadata={"static": True})
    fold: int = field(metadata={"static": True})


def fold_of(dim: int, most: int) -> int:
    """Tiles whose columns alternate on a lane: the largest power of two up to `most` that divides dim / 128."""
    return max(m for m in (1, 2, 4, 8) if m <= most and dim % (P * m) == 0)


def padded(w: Tensor, out: int, inner: int, value: int = 0) -> Tensor:
    """w (..., out, in), filled up to multiples."""
    return functional.pad(w, (0, -w.shape[-1] % inner, 0, -w.shape[-2] % out), value=value)


def arranged(w1: Tensor, w2: Tensor, w3: Tensor, fold: int) -> Tensor:
    """(held, groups, 128, dim / 2 + dim / 4) of elements w1, w3 (held, inner, dim) and w2 (held, dim, inner) of one dtype, padded already."""
    rows = [w.unflatten(-2, (-1, GROUP)).unflatten(-1, (-1, P, fold)).permute(0, 1, 4, 3, 5, 2) for w in (w1, w3)]  # e g p q s c
    first = torch.stack(rows, -2).flatten(3)
    second = w2.unflatten(-1, (-1, GROUP)).unflatten(1, (PARTS, -1)).permute(0, 3, 1, 4, 2).flatten(2, 3)  # e g (b k) c
    return torch.cat((first, second), -1).contiguous()


def parted(tiles: Tensor, dim: int, fold: int) -> tuple[Tensor, Tensor, Tensor]:
    """(w1, w2, w3): the inverse of `arranged`."""
    first, second = tiles.split((tiles.shape[-1] - dim // PARTS, dim // PARTS), -1)
    pair = first.unflatten(-1, (-1, fold, 2, GROUP)).permute(5, 0, 1, 6, 3, 2, 4).flatten(-3).flatten(2, 3)  # two e (g c) (q p s)
    w2 = second.unflatten(2, (PARTS, GROUP)).permute(0, 2, 4, 1, 3).flatten(-2).flatten(1, 2)
    return pair[0], w2, pair[1]


def nibbles(w: Fp4) -> Tensor:
    """e2m1 codes, one a byte."""
    raw = w.weight.view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def scale_bytes(w1: E8M0[Tensor, "held inner blocks"], w3: E8M0[Tensor, "held inner blocks"], fold: int, dim: int) -> Tensor:
    """(held, groups, 128, chunks * 64): the bytes that every lane needs."""
    per = fold * PARTS
    rows = []
    for w in (w1, w3):
        raw = padded(w.view(torch.uint8), GROUP, dim // GROUP, NEUTRAL)
        lanes = raw.unflatten(-2, (-1, GROUP)).unflatten(-1, (-1, per)).repeat_interleave(GROUP // fold, -1)
        rows.append(lanes.permute(0, 1, 4, 3, 2))  # e g p q c
    return torch.stack(rows, -2).flatten(3)


def packed_tiles(w1: Fp4, w2: Fp4, w3: Fp4) -> ExpertTiles:
    """fp4 stacks as packed items. ValueError for a scale byte 0 or 255, which the kernel cannot make."""
    for name, w in (("w1", w1), ("w2", w2), ("w3", w3)):
        raw = w.scale.view(torch.uint8)
        wrong = 0 if raw.is_meta else int(((raw == 0) | (raw == 255)).sum())
        if wrong:
            raise ValueError(f"experts: {wrong} scales of {name} have the byte 0 or 255; packed experts take 1 .. 254")
    inner, dim = w1.weight.shape[-2], w1.weight.shape[-1] * 2
    wide = dim + -dim % P
    fold = fold_of(wide, 8)
    codes = arranged(padded(nibbles(w1), GROUP, P), padded(nibbles(w2), P, GROUP), padded(nibbles(w3), GROUP, P), fold)
    low, high = codes.chunk(2, -1)
    weight = torch.cat((low | high << 4, scale_bytes(w1.scale, w3.scale, fold, wide)), -1).contiguous()
    outer = padded(w2.scale.view(torch.uint8), P, 1, NEUTRAL).transpose(-1, -2).contiguous()
    scale = functional.pad(torch.full((3, codes.shape[0]), CODE), (1, 0), value=1.0)
    return ExpertTiles(weight, scale, outer, None, dim, inner, fold, True)


def one_scale(w: Fp4Like) -> Folded | None:
    """A weight that is codes with one scale for each expert, else None."""
    return w if isinstance(w, Folded) and w.scale.shape[-1] == 1 else None


def plain_tiles(w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, numerics: Numerics, fold: int) -> ExpertTiles:
    """Stacks as codes where all three have one scale an expert, else as values in the activation dtype. fold 0 takes the layout's own."""
    single = [w for w in map(one_scale, (w1, w2, w3)) if w is not None]
    if len(single) == 3 and numerics.act == torch.bfloat16:
        a, b, c = (w.weight.view(torch.uint8) for w in single)
        scales = [single[i].scale[:, 0] for i in (0, 2, 1)]
    else:
        a, b, c = (dequantize(w, torch.float32).to(numerics.act) for w in (w1, w2, w3))
        scales = [torch.ones(a.shape[0])] * 3
    inner, dim = a.shape[-2:]
    a, b, c = padded(a, GROUP, P), padded(b, P, GROUP), padded(c, GROUP, P)
    fold = fold or fold_of(a.shape[-1], 2)
    return ExpertTiles(arranged(a, b, c, fold), functional.pad(torch.stack(scales), (1, 0), value=1.0), None, None, dim, inner, fold, False)


def shared_items(w1: Fp8Like, w2: Fp8Like, w3: Fp8Like, numerics: Numerics, fold: int) -> Tensor:
    """The shared expert as items of values; an odd number is filled up by one of zeros."""
    values = [dequantize(w, torch.float32).to(numerics.act)[None] for w in (w1, w2, w3)]
    items = plain_tiles(values[0], values[1], values[2], numerics, fold).weight.flatten(0, 1)
    return functional.pad(items, (0, 0, 0, 0, 0, len(items) % 2))


def prepared(w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, numerics: Numerics, shared: tuple[Fp8Like, Fp8Like, Fp8Like] | None = None) -> ExpertTiles:
    """Stacks of experts as the kernels read them: Fp4 packed, `Folded` with one scale an expert as codes, all else as values; in `exact` values.

    shared: w1, w2, w3 of the shared expert where the rules let one call sum both.
    """
    if isinstance(w1, Fp4) and isinstance(w2, Fp4) and isinstance(w3, Fp4) and numerics.act == torch.bfloat16:
        made = packed_tiles(w1, w2, w3)
    else:
        made = plain_tiles(w1, w2, w3, numerics, 0)
    if shared is None:
        return made
    items = shared_items(*shared, numerics, made.fold)
    return ExpertTiles(made.weight, made.scale, made.outer, items, made.dim, made.inner, made.fold, made.packed)


def prepared_shared(w1: Fp8Like, w2: Fp8Like, w3: Fp8Like, numerics: Numerics) -> SharedTiles:
    """The shared expert as the kernels read it."""
    dim = dequantize(w2, torch.float32).shape[0]
    fold = fold_of(dim + -dim % P, 2)
    return SharedTiles(shared_items(w1, w2, w3, numerics, fold), dim, fold)


def restored(tiles: ExpertTiles) -> tuple[Fp4Like, Fp4Like, Fp4Like]:
    """(w1, w2, w3) of `prepared`, byte for byte: Fp4, `Folded` without its stored scales, or values."""
    wide = tiles.dim + -tiles.dim % P
    n, weight = wide // 2 + wide // PARTS, tiles.weight
    if tiles.packed:
        raw = weight[..., : n // 2]
        codes = parted(torch.cat((raw & 15, raw >> 4), -1), wide, tiles.fold)
    else:
        codes = parted(weight, wide, tiles.fold)
    inner, dim = tiles.inner, tiles.dim
    a, b, c = codes[0][:, :inner, :dim], codes[1][:, :dim, :inner], codes[2][:, :inner, :dim]
    if tiles.packed:
        return packed_back(tiles, a, b, c, wide)
    if weight.dtype != torch.uint8:
        return a, b, c
    s1, s3, s2 = tiles.scale[:, 1:, None]
    found = [Folded(w.view(torch.float8_e4m3fn), s, None, w.shape[1], "fp4") for w, s in ((a, s1), (b, s2), (c, s3))]
    return found[0], found[1], found[2]


def packed_back(tiles: ExpertTiles, a: Tensor, b: Tensor, c: Tensor, wide: int) -> tuple[Fp4, Fp4, Fp4]:
    """The checkpoint's form of packed codes."""
    lanes = tiles.weight[..., (wide // 2 + wide // PARTS) // 2 :].unflatten(-1, (-1, 2, GROUP))  # e g p q two c
    pair = lanes[:, :, :: GROUP // tiles.fold].permute(4, 0, 1, 5, 3, 2).flatten(-2).flatten(2, 3)  # two e (g c) (q block)
    s1, s3 = pair[:, :, : tiles.inner, : tiles.dim // GROUP].contiguous().view(torch.float8_e8m0fnu)
    assert tiles.outer is not None
    s2 = tiles.outer.transpose(-1, -2)[:, : tiles.dim].contiguous().view(torch.float8_e8m0fnu)

    def joined(w: Tensor) -> Tensor:
        return (w[..., 0::2] | w[..., 1::2] << 4).view(torch.int8)

    return Fp4(joined(a), s1), Fp4(joined(b), s2), Fp4(joined(c), s3)
