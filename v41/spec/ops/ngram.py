# SPDX-License-Identifier: Apache-2.0
"""Engram: hash, row gather, gate (docs/model.md 8)."""

import torch
from torch import Tensor

from v41.spec.numerics import Numerics
from v41.spec.ops.activation import sigmoid
from v41.spec.ops.norm import wide
from v41.spec.ops.quant import dequantize
from v41.spec.table import Fp8Rows
from v41.spec.types import BF16, I32, I64, Act, Flag, Wide


def engram_hash(
    ids: I32[Tensor, "b s lookback"],
    mask: Flag[Tensor, "b s lookback"],
    pad: I32[Tensor, ""],
    multipliers: I64[Tensor, "lookback"],
    primes: I64[Tensor, "sizes engram_heads"],
    offsets: I64[Tensor, "columns"],
) -> I32[Tensor, "b s columns"]:
    """Table rows of every n-gram that ends at a position: ids[..., j] is the compressed id j positions back.

    `mask` is false where nothing stands there or an image does; that one and all behind it read the pad id. The products id * multiplier are
    xored cumulatively, in 64 bits; each n-gram size and head takes its own prime modulo and its own range of rows.
    """
    known = torch.where(mask.int().cumprod(-1) > 0, ids, pad).long()
    products = known * multipliers
    rows, mixed = [], products[..., 0]
    for n in range(1, products.shape[-1]):
        mixed = mixed ^ products[..., n]
        rows.append(mixed[..., None] % primes[n - 1])
    return (torch.cat(rows, -1) + offsets).to(torch.int32)


def engram_rows(table: Fp8Rows, hash_ids: I32[Tensor, "b s columns"], numerics: Numerics) -> Act[Tensor, "b s flat"]:
    """The rows read by each position, dequantized, columns concatenated; zeros for a row that the table does not hold."""
    held = (hash_ids >= 0) & (hash_ids < table.weight.shape[0])
    at = torch.where(held, hash_ids, 0).flatten()
    found = Fp8Rows(table.weight[at], table.scale.view(torch.uint8)[at].view(torch.float8_e8m0fnu))
    return torch.where(held[..., None], dequantize(found, numerics.act).unflatten(0, hash_ids.shape), 0).flatten(2)


def engram_gate(
    stream: Act[Tensor, "b s copies dim"],
    kv: Act[Tensor, "b s flat"],
    q_weight: BF16[Tensor, "copies dim"],
    k_weight: BF16[Tensor, "copies dim"],
    mask: Flag[Tensor, "b s"] | None,
    *,
    eps: float,
    numerics: Numerics,
) -> Act[Tensor, "b s copies dim"]:
    """h_c + g_c v: g_c = sigmoid(copysign(sqrt(max(|dot_c|, 1e-6)), dot_c)), dot_c of stream and key, each normalized on its own.

    kv holds one key per copy, then the value that all copies share; `mask` is false at image positions, whose gate is 0. fp32, rounded once.
    """
    copies, dim = stream.shape[2:]
    keys, value = wide(kv).split((copies * dim, dim), -1)
    keys, h = keys.unflatten(-1, (copies, dim)), wide(stream)
    weight = wide(q_weight).to(h.dtype) * wide(k_weight).to(h.dtype)
    norm = torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (h * weight * keys).sum(-1) * norm * dim**-0.5
    g = engram_sigmoid(dot, numerics)
    if mask is not None:
        g = torch.where(mask[..., None], g, torch.zeros_like(g))
    return (h + g[..., None] * value[..., None, :]).to(stream.dtype)


def engram_sigmoid(dot: Wide[Tensor, "b s copies"], numerics: Numerics) -> Wide[Tensor, "b s copies"]:
    """The gate of a dot product; -0 counts as negative, and 0 gives sigmoid(0.001), not 1/2."""
    return sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot), numerics)
