# SPDX-License-Identifier: Apache-2.0
"""Hyper-connection mixes with a Sinkhorn of two operations a half step."""

import torch
from torch import Tensor

from v41.backends.cpu.product import single
from v41.spec.numerics import Numerics
from v41.spec.ops import mix as spec
from v41.spec.ops.activation import sigmoid
from v41.spec.ops.linear import wide_linear
from v41.spec.table import Tiled
from v41.spec.types import F32, Act

TERMS = 4  # up to here torch adds one term after the other in every layout, in sums and in products of small matrices
FEW = 64  # rows from which operations that run along the rows of the call pay
AT_ONCE = 256  # rows whose stream is float32 at once; a multiple of 4
TOGETHER = 128  # rows whose products are held at once
LONG = 8  # rows from which the passes over memory cost more than the operations


def hc_mixes(
    stream: Act[Tensor, "b s copies dim"],
    fn: F32[Tensor, "mixes flat"] | Tiled,
    scale: F32[Tensor, "3"],
    base: F32[Tensor, "mixes"],
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    numerics: Numerics,
) -> tuple[spec.Pre, spec.Pre, spec.Comb]:
    if not single(numerics) or numerics.compact:
        return spec.hc_mixes(stream, fn, scale, base, iters=iters, eps=eps, norm_eps=norm_eps, numerics=numerics)
    copies = stream.shape[2]
    parts = [projected(part, fn, norm_eps, numerics) for part in stream.flatten(0, 1).split(AT_ONCE)]
    mixes = (parts[0] if len(parts) == 1 else torch.cat(parts)).unflatten(0, stream.shape[:2])
    mixes = mixes.mul_(scale.repeat_interleave(parts_of(copies))).add_(base)
    gates = sigmoid(mixes[..., : 2 * copies], numerics)
    comb = spec.row_softmax(mixes[..., 2 * copies :].unflatten(-1, (copies, copies))).add_(eps)
    return gates[..., :copies] + eps, gates[..., copies:] * 2, sinkhorn(comb, iters, eps)


def projected(rows: Act[Tensor, "n copies dim"], fn: F32[Tensor, "mixes flat"] | Tiled, eps: float, numerics: Numerics) -> F32[Tensor, "n mixes"]:
    """The projection of each row, normalized."""
    flat = rows.to(torch.float32).flatten(1)
    inverse = flat.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide_linear(flat, fn, numerics).mul_(inverse)


def parts_of(copies: int) -> Tensor:
    """How many mixes each scale serves."""
    return torch.tensor((copies, copies, copies * copies))


def sinkhorn(comb: F32[Tensor, "b s copies copies"], iters: int, eps: float) -> F32[Tensor, "b s copies copies"]:
    """A column step, then iters - 1 times rows and columns: each divides by its sums + eps."""
    rows, steps = comb.flatten(0, 1), 2 * iters - 1
    if comb.shape[-1] > TERMS:
        last = by_sums(rows, steps, eps, (1, 2))
    elif len(rows) < FEW:
        last = by_products(rows, steps, eps)
    else:
        last = by_sums(rows.permute(1, 2, 0).contiguous(), steps, eps, (0, 1)).permute(2, 0, 1).contiguous()
    return last.view(comb.shape)


def by_products(comb: Tensor, steps: int, eps: float) -> Tensor:
    """Sums by a product with ones, added to a matrix of eps: the same terms in the same order."""
    ones, every = torch.ones_like(comb), torch.full_like(comb, eps)
    comb, total = comb.clone(), torch.empty_like(comb)
    for step in range(steps):
        torch.baddbmm(every, *((comb, ones) if step % 2 else (ones, comb)), out=total)
        comb.div_(total)
    return comb


def by_sums(comb: Tensor, steps: int, eps: float, dims: tuple[int, int]) -> Tensor:
    """Sums over the dims of sources and of destinations in turn."""
    for step in range(steps):
        comb = comb / comb.sum(dims[step % 2], keepdim=True).add_(eps)
    return comb


def hc_post(x: Act[Tensor, "b s dim"], stream: Act[Tensor, "b s copies dim"], post: spec.Pre, comb: spec.Comb) -> Act[Tensor, "b s copies dim"]:
    """One source copy after the other, so that the products of all of them are never held."""
    if stream.dtype == torch.float64 or x[..., 0].numel() < LONG:
        return spec.hc_post(x, stream, post, comb)
    parts = [t.flatten(0, 1).split(TOGETHER) for t in (x, stream, post, comb)]
    return torch.cat([expanded(*p) for p in zip(*parts, strict=True)]).view(stream.shape)


def expanded(x: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`hc_post` of rows [n]."""
    first, *others = stream.to(torch.float32)[:, :, None].unbind(1)
    shares, *weights = comb[..., None].unbind(1)
    mixed, term = shares * first, torch.empty(stream.shape, dtype=torch.float32, device=stream.device)
    for weight, h in zip(weights, others, strict=True):
        mixed += torch.mul(weight, h, out=term)
    return torch.mul(post[..., None], x.to(torch.float32)[:, None], out=term).add_(mixed).to(stream.dtype)
