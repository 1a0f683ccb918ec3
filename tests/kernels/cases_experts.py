# SPDX-License-Identifier: Apache-2.0
"""Experts, rows and routings as data.

Values are such that the products of w1 and w3 are exact sums in float32: rows are multiples of 1/8 up to 4, weights multiples of 2^-5 up to 3. What
may differ between a kernel and the definition is then the last bits of silu, and what they do to the roundings after it.
"""

import math

import torch
from torch import Tensor

from v41.backends.neuron.fold import fold
from v41.spec.numerics import Numerics
from v41.spec.ops.experts import one_of, swiglu
from v41.spec.ops.linear import partial_quantized
from v41.spec.ops.quant import act_round, dequantize
from v41.spec.table import Folded, Fp4, Fp4Like, Fp8

LIMIT = 10.0
U = 2.0**-24
FORMS = ("fp4", "codes", "values")


def bytes_of(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape).to(torch.uint8)


def stack(held: int, out: int, inner: int) -> Fp4:
    """All 256 bytes, scales 2^-4 .. 2^-1."""
    return Fp4(bytes_of(0, 256, held, out, inner // 2).view(torch.int8), bytes_of(123, 127, held, out, inner // 32).view(torch.float8_e8m0fnu))


def in_form(w: Fp4, form: str) -> Fp4Like:
    if form == "values":
        return dequantize(w, torch.bfloat16)
    if form == "fp4":
        return w
    made, count = fold(w)
    assert count.inexact == 0 and isinstance(made, Folded)
    return made


def experts_of(held: int, dim: int, inner: int) -> tuple[Fp4, Fp4, Fp4]:
    """w1, w2, w3."""
    return stack(held, inner, dim), stack(held, dim, inner), stack(held, inner, dim)


def shared_of(dim: int, inner: int) -> tuple[Fp8, Fp8, Fp8]:
    """w1, w2, w3 of a shared expert: codes of at most 4 significant bits and all scales one size."""

    def one(out: int, columns: int) -> Fp8:
        codes = (torch.randint(-7, 8, (out, columns)) / 4).to(torch.float8_e4m3fn)
        return Fp8(codes, bytes_of(124, 126, -(-out // 32), -(-columns // 32)).view(torch.float8_e8m0fnu))

    return one(inner, dim), one(dim, inner), one(inner, dim)


def rows_of(n: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiples of 1/8 up to 4, some groups of 32 small; the first row is zeros."""
    x = torch.randint(-32, 33, (n, dim)) / 8
    x[:, 32:64] = x[:, 32:64].sign() / 8
    x[0] = 0
    return x.to(dtype)


def routing(kind: str, n: int, k: int, held: int) -> tuple[Tensor, Tensor]:
    """(weights, ids) of n rows; ids lie in -2 .. held + 1, so some are of other ranks."""
    weights = torch.rand(n, k) + 0.1
    ids = torch.stack([torch.randperm(held + 4)[:k] - 2 for _ in range(n)]) if k <= held + 4 else torch.randint(-2, held + 2, (n, k))
    if kind == "one expert":
        ids = torch.full((n, k), -1)
        ids[:, k // 2] = held - 1
    elif kind == "none":
        ids = torch.where(torch.arange(k) % 2 == 0, -1 - torch.arange(k), held + torch.arange(k)).expand(n, k)
    elif kind == "duplicates":
        ids = torch.randint(0, 2, (n, 1)).expand(n, k).clone()
        ids[:, -1] = held - 1
    elif kind == "no weight":
        weights[:, 0] = 0.0
    return weights, ids.to(torch.int32).contiguous()


def bound(x: Tensor, weights: Tensor, ids: Tensor, w: tuple[Fp4, Fp4, Fp4], numerics: Numerics) -> tuple[Tensor, Tensor]:
    """(exact, error): the definition in float64 with its roundings, and how far float32 may be from it.

    The hidden value before its rounding has 8 last places of float32 of room (silu by a table, three products); both ends go through the
    roundings. Then sums of inner * experts terms, of which every 128 are one product.
    """
    n, dim = x.shape
    total, error = torch.zeros(n, dim, dtype=torch.float64), torch.zeros(n, dim, dtype=torch.float64)
    for e in range(w[0].weight.shape[0]):
        given = torch.where(ids == e, weights, 0).sum(-1)
        rows = given.nonzero()[:, 0]
        if len(rows):
            y, off = one_expert(x[rows], given[rows], tuple(one_of(m, e) for m in w), numerics)
            total[rows] += y
            error[rows] += off
    return total, error + 8 * U * total.abs()


def one_expert(x: Tensor, given: Tensor, w: tuple[Fp4Like | Fp8, ...], numerics: Numerics) -> tuple[Tensor, Tensor]:
    """`bound` of one expert and the rows that chose it."""
    w1, w2, w3 = (dequantize(m, torch.float32) for m in w)
    gate, up = (partial_quantized(x, m, numerics).to(x.dtype) for m in (w1, w3))
    product = swiglu(up.double(), gate.double(), LIMIT, Numerics("exact", dtype="float64"))
    hidden = given.double()[:, None] * product
    ends = [(hidden * (1 + s * 8 * U)).float().to(x.dtype) for s in (-1, 1)]
    if numerics.rounds:
        ends = [act_round(h, numerics) for h in ends]
    low, high = (h.double() for h in ends)
    w64 = w2.double()
    middle = (low + high) / 2
    terms = middle.abs() @ w64.abs().T
    depth = 128 + math.ceil(w64.shape[1] / 128)
    return middle @ w64.T, (high - low).abs() @ w64.abs().T + depth * U * terms


def shared_bound(x: Tensor, w: tuple[Fp8, Fp8, Fp8], numerics: Numerics) -> tuple[Tensor, Tensor]:
    return one_expert(x, torch.ones(len(x)), w, numerics)
