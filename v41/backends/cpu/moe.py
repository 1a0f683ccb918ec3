# SPDX-License-Identifier: Apache-2.0
"""Routed experts that have rows, and only their rows."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from v41.backends.cpu.linears import operand, products
from v41.backends.cpu.product import single
from v41.spec.numerics import Numerics
from v41.spec.ops.experts import expert, expert_hidden, expert_weight, experts_held, one_of, swiglu
from v41.spec.ops.linear import partial_quantized
from v41.spec.ops.product import ROWS
from v41.spec.table import Fp4Like
from v41.spec.types import F32, I32, I64, Act, Wide

TOGETHER = 1 << 9  # rows of the operations between products
AT_ONCE = 1 << 12  # rows that are held at once, so that memory does not grow with rows times experts of each


def experts(
    x: Act[Tensor, "n dim"], weights: Wide[Tensor, "n k"], ids: I32[Tensor, "n k"], w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, *, limit: float, numerics: Numerics
) -> Wide[Tensor, "n dim"]:
    """The spec's sum with the experts that no row chose left out, and of the others only the rows that chose them.

    Equal to it bit for bit in bfloat16, where the rows of a product do not depend on each other (docs/numerics.md 4).
    """
    if single(numerics):
        return packed_experts(x, weights, ids, w1, w2, w3, limit, numerics, x.dtype if not numerics.device else numerics.wide)
    total = torch.zeros(x.shape, dtype=numerics.wide, device=x.device)
    for e in own_experts(ids, w1):
        row, column = (ids == e).nonzero(as_tuple=True)
        y = expert(x[row], weights[row, column], w1, w2, w3, e, limit=limit, numerics=numerics)
        total[row] += y.to(total.dtype)
    return total


def partial_experts(
    x: Act[Tensor, "n dim"], weights: Wide[Tensor, "n k"], ids: I32[Tensor, "n k"], w1: Fp4Like, w2: Fp4Like, w3: Fp4Like, *, limit: float, numerics: Numerics
) -> Wide[Tensor, "n dim"]:
    """The same for experts whose inner axis is cut (v41/spec/ops/partial.py): nothing is rounded."""
    if single(numerics):
        return packed_experts(x, weights, ids, w1, w2, w3, limit, numerics, numerics.wide)
    total = torch.zeros(x.shape, dtype=numerics.wide, device=x.device)
    for e in own_experts(ids, w1):
        row, column = (ids == e).nonzero(as_tuple=True)
        hidden = expert_hidden(x[row], weights[row, column], w1, w3, e, limit=limit, numerics=numerics)
        total[row] += partial_quantized(hidden, expert_weight(w2, e, numerics), numerics)
    return total


def own_experts(ids: I32[Tensor, "n k"], w: Fp4Like) -> list[int]:
    """The experts that some row chose and that this stack holds."""
    return [e for e in ids.unique().tolist() if 0 <= e < experts_held(w)]


class Packed(NamedTuple):
    """Rows sorted by their expert, each expert's filled up to a multiple of 4: an expert's part of a packed tensor is one slice."""

    place: I64[Tensor, "k n"]  # where the row of each choice lies, choices of a row by increasing expert; `size` for another's expert
    source: I64[Tensor, "m"]  # which choice a packed row is; 0 where it fills up
    slices: list[tuple[int, int, int]]  # expert, first row, end
    size: int


def pack(ids: I32[Tensor, "n k"], first: int, end: int) -> Packed:
    """The packing of the choices of experts first .. end - 1."""
    held, chosen = end - first, ids.numpy().astype(np.int64) - first
    expert = np.where((chosen >= 0) & (chosen < held), chosen, held).ravel()
    counts = np.bincount(expert, minlength=held + 1)
    full = -(-counts // ROWS) * ROWS
    begins = full.cumsum() - full
    size, order = int(begins[held]), expert.argsort(kind="stable")
    ordered = expert[order]
    place, source = np.full(expert.shape, size), np.zeros(size + 1, np.int64)
    place[order] = np.where(ordered < held, begins[ordered] + np.arange(len(order)) - (counts.cumsum() - counts)[ordered], size)
    source[place] = np.arange(len(place))
    ascending = np.take_along_axis(place.reshape(chosen.shape), chosen.argsort(-1, kind="stable"), 1)
    slices = [(first + e, int(begins[e]), int(begins[e] + full[e])) for e in counts[:held].nonzero()[0].tolist()]
    return Packed(torch.from_numpy(np.ascontiguousarray(ascending.T)), torch.from_numpy(source[:-1]), slices, size)


def batches(ids: I32[Tensor, "n k"], held: int) -> list[tuple[int, int]]:
    """Ranges of experts with about `AT_ONCE` chosen rows each."""
    if ids.numel() <= AT_ONCE:
        return [(0, held)]
    counts = [int((ids == e).sum()) for e in range(held)]
    found, first, rows = [], 0, 0
    for e, count in enumerate(counts):
        if rows and rows + count > AT_ONCE:
            found.append((first, e))
            first, rows = e, 0
        rows += count
    return [*found, (first, held)]


def packed_experts(
    x: Act[Tensor, "n dim"],
    weights: F32[Tensor, "n k"],
    ids: I32[Tensor, "n k"],
    w1: Fp4Like,
    w2: Fp4Like,
    w3: Fp4Like,
    limit: float,
    numerics: Numerics,
    rounded: torch.dtype,
) -> F32[Tensor, "n dim"]:
    """Each expert's products on its slice of the packed rows, everything between them on many rows at once. `rounded`: the dtype of an output."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    rows, flat, choices = operand(x, numerics), weights.flatten(), max(ids.shape[1], 1)
    for first, end in batches(ids, experts_held(w1)):
        packed = pack(ids, first, end)
        out = torch.zeros((packed.size + 1, x.shape[1]), dtype=torch.float32, device=x.device)  # the last row is another's expert
        for slices in parts(packed.slices):
            a, b = slices[0][1], slices[-1][2]
            source = packed.source[a:b]
            gated, up = over(rows.index_select(0, source // choices), slices, numerics, w1, w3).to(x.dtype).chunk(2, 1)
            hidden = flat.index_select(0, source)[:, None] * swiglu(up, gated, limit, numerics)
            out[a:b] = over(operand(hidden.to(x.dtype), numerics), slices, numerics, w2).to(rounded)
        for at in packed.place:
            total += out.index_select(0, at)
    return total


def parts(slices: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """The slices of experts with up to about `TOGETHER` rows, so that memory of what lies between products is reused."""
    held: list[tuple[int, int, int]] = []
    for e, a, b in slices:
        if held and b - held[0][1] > TOGETHER:
            yield held
            held = []
        held.append((e, a, b))
    if held:
        yield held


def over(x: F32[Tensor, "m in"], slices: list[tuple[int, int, int]], numerics: Numerics, *weights: Fp4Like) -> F32[Tensor, "m out"]:
    """Each expert's products on its rows, those with all weights side by side. Row 0 is the first of the slices."""
    first = slices[0][1]
    return torch.cat([products(x[a - first : b - first], numerics, *(one_of(w, e) for w in weights)) for e, a, b in slices])
