# SPDX-License-Identifier: Apache-2.0
"""Softmax pooling of token groups, one softmax per channel (docs/model.md 7.3)."""

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl

CHANNELS = 64  # that a lane has at least: 256 contiguous bytes


@nki.jit
def pooled(kv, score, ratio, parts, narrow):
    """out (rows, d) of kv and score (rows * ratio, d) float32; bfloat16 where narrow, else float32.

    A lane holds d / parts channels of one group, its tokens one after the other; tiles are shared among the cores:
    m = max_i score_i; e_i = exp(score_i - m); out = sum_i (e_i / sum_i e_i) kv_i
    """
    d = kv.shape[1]
    rows, width = kv.shape[0] // ratio, d // parts
    out = nl.ndarray((rows, d), dtype=nl.bfloat16 if narrow else nl.float32, buffer=nl.shared_hbm)
    mine = rows // nl.num_programs(0)
    start = nl.program_id(0) * mine
    for first in range(start, start + mine, P // parts):
        count = min(P // parts, start + mine - first)
        values = grouped(kv, ratio, first, count, parts, width)
        s = grouped(score, ratio, first, count, parts, width)
        y = pool(values, s, ratio, count * parts, width, out.dtype)
        nisa.dma_copy(dst=out.ap([[d, count], [width, parts], [1, width]], offset=first * d), src=y)
    return out


def pool(values, s, ratio, lanes, width, dtype):
    """(lanes, width) of values and scores (lanes, ratio, width); s is used up."""
    top = nl.ndarray((lanes, 1, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=s.permute((0, 2, 1)), axis=2)
    nisa.tensor_tensor(dst=s, data1=s, data2=top.broadcast(1, ratio), op=nl.subtract)
    nisa.activation(dst=s, op=nl.exp, data=s)
    total = nl.ndarray((lanes, 1, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=s.permute((0, 2, 1)), axis=2)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_tensor(dst=s, data1=s, data2=total.broadcast(1, ratio), op=nl.multiply)
    nisa.tensor_tensor(dst=s, data1=s, data2=values, op=nl.multiply)
    y = nl.ndarray((lanes, width), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=y, op=nl.add, data=s.permute((0, 2, 1)), axis=2)
    return y


def grouped(src, ratio, first, count, parts, width):
    """(count * parts, ratio, width): the tokens of each group side by side."""
    d = src.shape[1]
    t = nl.ndarray((count * parts, ratio, width), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(ratio):
        view = src.ap([[ratio * d, count], [width, parts], [1, width]], offset=(first * ratio + i) * d)
        nisa.dma_copy(dst=t[:, i, :], src=view)
    return t


def softmax_pool(run: Run, kv: Tensor, score: Tensor, dtype: torch.dtype) -> Tensor:
    """As `v41.spec.ops.pool.softmax_pool`: kv, score (b, g, ratio, d) in float32; out (b, g, d) in bfloat16 or float32, rounded once.

    ratio * d <= 4096. Quotients are products with a reciprocal.
    """
    b, g, ratio, d = kv.shape
    if kv.dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"softmax_pool: {kv.dtype} to {dtype}; the kernel takes torch.float32 to torch.bfloat16 (trn2) or torch.float32 (exact)")
    if ratio * d > 4096:
        raise ValueError(f"softmax_pool: groups of {ratio} x {d}; the kernel takes up to 4096 values")
    if b * g == 0:
        return kv.new_zeros((b, g, d), dtype=dtype)
    cores = 2 if b * g % 2 == 0 else 1
    parts = max(p for p in range(1, P + 1) if d % p == 0 and (p == 1 or (d // p >= CHANNELS and p * b * g <= cores * P)))
    return run(pooled, cores, dense(kv, -1, d), dense(score, -1, d), ratio, parts, dtype == torch.bfloat16).view(b, g, d)
