# SPDX-License-Identifier: Apache-2.0
"""Linear layers: the wrappers of `gemm.product` (docs/kernels.md 3).

A quantized weight is a `Tiled` or `Folded` one (prepared at load: v41/backends/neuron/prepare.py), checkpoint codes, or a bfloat16 tensor. Regimes:
`trn2`, and `exact` in float32; without a round trip also `faithful`, which is the same there. Numbers of rows, columns and inner columns are free;
per call x is padded to whole tiles, and for checkpoint codes the scales are laid out by lane, which belongs to load time. Limits: codes
with scale bytes 1 to 254 (byte 0, 2^-127, reads as 0 there), values that are finite in fp32.
"""

import torch
from torch import Tensor
from torch.nn import functional

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.gemm import product
from v41.backends.neuron.kernels.narrow import narrow_product
from v41.backends.neuron.kernels.tiles import BLOCK, P
from v41.backends.neuron.kernels.weights import pair
from v41.backends.neuron.launch import Run
from v41.spec.numerics import E4M3_MAX_TRN2, Numerics
from v41.spec.ops.quant import dequantize
from v41.spec.table import Folded, Fp8, Fp8Like, PlainLike, Tiled
from v41.spec.types import F32, Act, Wide

NARROW, BROAD = 64, 2048  # columns: fewer are left to one core; with more the cores share columns also where there are many rows
FEW = 32  # rows and columns of `narrow_product`
SPLIT = 256  # rows from which the cores share rows


def linear(run: Run, x: Act[Tensor, "*rows in"], w: Fp8Like, numerics: Numerics) -> Act[Tensor, "*rows out"]:
    """x @ w.T with x through its fp8 round trip (not in `exact`), summed in fp32 and rounded once to x's dtype."""
    return _product(run, x, w, 1, _limit("linear", numerics), False)


def partial_linear(run: Run, x: Act[Tensor, "*rows in"], w: Fp8Like, numerics: Numerics) -> Wide[Tensor, "*rows out"]:
    """`linear` without its last rounding."""
    return _product(run, x, w, 1, _limit("partial_linear", numerics), True)


def plain_linear(run: Run, x: Act[Tensor, "*rows in"], w: PlainLike, numerics: Numerics) -> Act[Tensor, "*rows out"]:
    """x @ w.T, summed in fp32 and rounded once to x's dtype; no round trip."""
    _known("plain_linear", numerics)
    return _product(run, x, w, 1, 0.0, False)


def wide_linear(run: Run, x: Act[Tensor, "*rows in"], w: PlainLike | F32[Tensor, "out in"], numerics: Numerics) -> Wide[Tensor, "*rows out"]:
    """x @ w.T in fp32, not rounded: products of two bfloat16 operands are exact on TensorE; where one is float32, both are widened."""
    _known("wide_linear", numerics)
    return _product(run, x.float() if isinstance(w, Tensor) and w.dtype == torch.float32 else x, w, 1, 0.0, True)


def grouped_linear(run: Run, x: Act[Tensor, "b s heads head_dim"], w: Fp8Like, groups: int, numerics: Numerics) -> Act[Tensor, "b s out"]:
    """Group g of the heads times rows g * out / groups .. of w, concatenated; no round trip."""
    _known("grouped_linear", numerics)
    return _product(run, x.flatten(2), w, groups, 0.0, False)


def _known(name: str, numerics: Numerics) -> None:
    if numerics.regime == "released" or numerics.dtype == "float64":
        raise ValueError(f"{name}: a kernel computes trn2, faithful or exact float32, not {numerics.regime} {numerics.dtype}")


def _limit(name: str, numerics: Numerics) -> float:
    """The largest code of the round trip, 0 where there is none."""
    if numerics.rounds != numerics.device or numerics.dtype == "float64":
        raise ValueError(f"{name}: a kernel computes trn2 or exact float32, not {numerics.regime} {numerics.dtype}")
    return E4M3_MAX_TRN2 if numerics.rounds else 0.0


def _product(run: Run, x: Tensor, w: Fp8Like, groups: int, limit: float, wide: bool) -> Tensor:
    """One launch; x (*rows, groups * inner)."""
    rows = x.flatten(0, -2)
    n, out = rows.shape[0], _outer(w)
    if limit and x.dtype != torch.bfloat16:
        raise ValueError(f"linear: the round trip takes bfloat16, not {x.dtype}")
    if n == 0:
        return x.new_zeros((*x.shape[:-1], out), dtype=torch.float32 if wide else x.dtype)
    if isinstance(w, Tensor) and not limit and groups == 1 and max(n, out) <= FEW and rows.shape[1] > FEW * P // 4:
        return _narrow(run, rows, w, wide).unflatten(0, x.shape[:-1])
    if isinstance(w, Fp8) and groups > 1 and out // groups % BLOCK:
        w = dequantize(w, torch.bfloat16)  # a group ends inside a scale's block
    weight, scales, kind, blocks = _operands(w)
    step = pair(kind) * P
    inner = rows.shape[1] // groups
    padded = -(-inner // step) * step
    by_rows = n >= SPLIT and not (out >= BROAD and _even(blocks, out, groups))
    height = n if n <= P else P
    more = -n % (2 * P if by_rows else height)
    rows = dense(functional.pad(rows.unflatten(1, (groups, inner)), (0, padded - inner, 0, 0, 0, more)), -1, groups * padded)
    cores = 2 if by_rows or _even(blocks, out, groups) else 1
    fold = _fold(padded // P, height, step // P)
    y = run(product, cores, rows, weight, scales, kind, out, blocks, groups, fold, height, by_rows, limit, wide)
    return y[:n].unflatten(0, x.shape[:-1])


def _narrow(run: Run, rows: Tensor, w: Tensor, wide: bool) -> Tensor:
    """Few rows, few columns, many inner ones; the mask is a constant of the shape."""
    n, out = rows.shape[0], w.shape[0]
    more = -rows.shape[1] % P
    tiles = (rows.shape[1] + more) // P
    fold = _fold(tiles, max(n, out), 1)
    mask = torch.eye(tiles // fold).repeat_interleave(n, 0).repeat_interleave(out, 1)
    x, weight = (dense(functional.pad(t, (0, more)), -1, tiles * P) for t in (rows, w))
    return run(narrow_product, 1, x, weight, mask, fold, wide)


def _outer(w: Fp8Like) -> int:
    return w.weight.shape[0] * w.weight.shape[3] if isinstance(w, Tiled) else w.shape[0] if isinstance(w, Tensor) else w.weight.shape[0]


def _operands(w: Fp8Like) -> tuple[Tensor, Tensor | None, str, int]:
    """(weights, scales, kind, blocks of columns) as the kernel takes them."""
    if isinstance(w, Tiled):
        return dense(w.weight, *w.weight.shape), None, "tiled", w.weight.shape[0]
    if isinstance(w, Tensor):
        return dense(w, *w.shape), None, "natural", 2 if w.shape[0] % 2 == 0 and w.shape[0] >= NARROW else 1
    if w.weight.shape[1] % 2:
        raise ValueError(f"a weight of {tuple(w.weight.shape)}: codes are read in pairs, and the inner size is odd")
    pairs, out = dense(w.weight, *w.weight.shape).view(torch.int16), w.weight.shape[0]
    if isinstance(w, Folded):
        return pairs, w.scale.repeat_interleave(w.rows)[:out].contiguous(), "folded", 2 if out % 2 == 0 and out >= NARROW else 1
    return pairs, lane_scales(w), "codes", 2 if out % (2 * BLOCK) == 0 else 1


def lane_scales(w: Fp8) -> Tensor:
    """Scale bytes by lane: (128, pairs of tiles, blocks of 32 columns); lane q of pair p has inner columns 256 p + 2 q and + 1."""
    byte = w.scale.view(torch.uint8).T
    pairs = -(-byte.shape[0] // 8)
    return functional.pad(byte, (0, 0, 0, pairs * 8 - byte.shape[0])).unflatten(0, (pairs, 8)).repeat_interleave(16, 1).transpose(0, 1).contiguous()


def _even(blocks: int, out: int, groups: int) -> bool:
    """Whether both cores can take equal shares of the columns, in the same steps."""
    columns, share = out // blocks, out // groups
    return blocks % 2 == 0 and out >= NARROW and (columns % share == 0 or share % columns == 0)


def _fold(tiles: int, rows: int, step: int) -> int:
    """The fewest tiles a lane, a multiple of step that divides tiles, with tiles / fold * rows <= 128."""
    return next(f for f in range(step, tiles + 1, step) if tiles % f == 0 and tiles // f * rows <= P)
