# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered cache rows with a sink (docs/model.md 7.6).

    a group of up to 4 queries, query i on lanes i * stride .. of every tile with heads on lanes (stride: 32, 64 or 128 for up to as many heads):
        index      lists as columns; a slot of -1 becomes an index beyond any buffer
        rows       128 slots of a query by one gathering DMA each; rows out of range are skipped and stay 0: no row is read that is not listed
        scores     -1e32 where a slot is -1 (a product of lists of ones), plus q . row: rows are turned by TensorE, as is q
        maximum    over the whole list, at least -1e30; p = exp(scale * score - maximum), summed in float32, rounded to the rows' dtype
        out        (p . rows) / (sum of p + exp(sink - maximum)), rounded once

A query without slots has the maximum -1e30, p = 0 and a large sink term: its output is 0 exactly.
"""

import torch
from torch import Tensor
from torch.nn import functional

from v41.backends.neuron.kernels.bands import band
from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, loaded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics

BANK = 512  # float32 of a PSUM bank
AWAY = float(1 << 22)  # above any row of a buffer, and a float32 integer
DEAD = -1e32  # score of a slot that is not there
LOWEST = 1e30  # the maximum is at least -LOWEST
HELD = 65536  # bytes of gathered rows on a lane
SLOTS, DEPTH = 3072, 1024  # of a list, of a row: scores and sums fit PSUM
SINK_TOP = 88.0  # exp of it is finite; a sink further above the maximum leaves less than 1e-38 of the values


@nki.jit
def attended(q, window, compressed, window_idxs, topk_idxs, sink, heads, sequences, chosen, scale):
    """out (rows * heads, d) of q (rows * heads, d); window, compressed (sequences * n, d); lists (rows, slots), slots a multiple of 128; sink (1, heads).

    Rows are queries, `rows / sequences` a sequence; each core takes its share of those of every sequence. chosen: 0 leaves the second list out.
    """
    rows = q.shape[0] // heads
    out = nl.ndarray(q.shape, dtype=q.dtype, buffer=nl.shared_hbm)
    stride = 32 if heads <= 32 else 64 if heads <= 64 else P
    chunks = (window_idxs.shape[1] // P, chosen // P)
    mine = rows // sequences // nl.num_programs(0)
    each = chunks[0] + chunks[1]
    room = HELD // (each * q.shape[1] * (4 if q.dtype == nl.float32 else 2))
    group = max(1, min(mine, P // stride, P // each, room))
    sinks = columns_of(sink, group, heads, stride)
    for b in range(sequences):
        start = b * (rows // sequences) + nl.program_id(0) * mine
        for first in range(start, start + mine, group):
            count = min(group, start + mine - first)
            attend(out, q, window, compressed, window_idxs, topk_idxs, sinks, heads, stride, chunks, first, count, b, sequences, scale)
    return out


def attend(out, q, window, compressed, window_idxs, topk_idxs, sinks, heads, stride, chunks, first, count, b, sequences, scale):
    """One group of `count` queries from row `first` on."""
    d, each = q.shape[1], chunks[0] + chunks[1]
    lists = nl.ndarray((count * each, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=lists[0 : count * chunks[0], :], src=window_idxs[first : first + count, :])
    if chunks[1] > 0:
        nisa.dma_copy(dst=lists[count * chunks[0] : count * each, :], src=topk_idxs[first : first + count, :])
    rows = nl.ndarray((P, count * each, d), dtype=q.dtype, buffer=nl.sbuf)
    nisa.memset(dst=rows, value=0.0, engine=nisa.engine.gpsimd)
    index = places(lists, count * each)
    for j in range(count * each):
        base = window if j < count * chunks[0] else compressed
        n = base.shape[0] // sequences
        source = base.ap([[d, P], [1, d]], offset=b * n * d, vector_offset=index[:, j : j + 1], indirect_dim=0)
        nisa.dma_copy(dst=rows[:, j, :], src=source, oob_mode=nisa.oob_mode.skip)
    scores = nl.ndarray((count * stride, each * P), dtype=nl.float32, buffer=nl.psum)
    forbid(scores, lists, count, stride, chunks, q.dtype)
    queries = turned_queries(q, first, count, heads, stride)
    for i in range(count):
        score(scores[i * stride : (i + 1) * stride, :], queries[:, :, i, :], rows, i, count, chunks)
    weights, inverse = softmax(scores, sinks, count * stride, each * P, scale, q.dtype)
    mixed = nl.ndarray((count * stride, d), dtype=nl.float32, buffer=nl.psum)
    for i in range(count):
        mix(mixed[i * stride : (i + 1) * stride, :], weights, rows, i, count, stride, chunks)
    result = nl.ndarray((count * stride, d), dtype=q.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=mixed, op0=nl.multiply, operand0=inverse)
    for i in range(count):
        at = (first + i) * heads
        nisa.dma_copy(dst=out[at : at + heads, :], src=result[i * stride : i * stride + heads, :])


def place_of(i, c, count, chunks):
    """Where chunk c of query i stands: window lists of all queries first."""
    return i * chunks[0] + c if c < chunks[0] else count * chunks[0] + i * chunks[1] + c - chunks[0]


def places(lists, n):
    """(128, n) uint32: list j as column j, -1 as an index beyond any buffer."""
    beyond = nl.ndarray((n, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=beyond, data=lists, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=AWAY)
    nisa.tensor_tensor(dst=beyond, data1=beyond, data2=lists, op=nl.add)
    ps = nl.ndarray((P, n), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=ps, data=beyond)
    index = nl.ndarray((P, n), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=index, src=ps)
    return index


def forbid(scores, lists, count, stride, chunks, dtype):
    """scores = DEAD in every lane of a query where its list has -1, else 0."""
    each = chunks[0] + chunks[1]
    dead = nl.ndarray((count * each, P), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=dead, data=lists, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=DEAD)
    for c in range(each):
        # ones[p, (i, lane)] where p is the place of chunk c of query i
        step = chunks[0] if c < chunks[0] else chunks[1]
        at = place_of(0, c, count, chunks)
        ones = band(count * each, count * stride, [[-step, count], [0, stride]], at, at, 1.0, dtype)
        nisa.nc_matmul(dst=scores[:, c * P : (c + 1) * P], stationary=ones, moving=dead, accumulate=False)


def turned_queries(q, first, count, heads, stride):
    """(depth, d / depth, count, stride): q turned, zeros for lanes without a head; depth = min(d, 128)."""
    d = q.shape[1]
    depth = min(d, P)
    t = loaded(q[first * heads : (first + count) * heads, :], (count * heads, d), q.dtype)
    result = nl.ndarray((depth, d // depth, count, stride), dtype=q.dtype, buffer=nl.sbuf)
    if heads < stride:
        nisa.memset(dst=result, value=0.0)
    for i in range(d // depth):
        ps = nl.ndarray((depth, count, heads), dtype=q.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=ps, data=t[:, i * depth : (i + 1) * depth])
        nisa.tensor_copy(dst=result[:, i, :, 0:heads], src=ps)
    return result


def score(scores, q, rows, i, count, chunks):
    """scores (stride, slots) += q . rows of query i, whose 128 x 128 pieces are turned by TensorE and carried to SBUF by VectorE and ScalarE in turn."""
    d, each, depth = rows.shape[2], chunks[0] + chunks[1], q.shape[0]
    pieces = d // depth
    turned = nl.ndarray((depth, pieces, each, P), dtype=rows.dtype, buffer=nl.sbuf)
    for c in range(each):
        j = place_of(i, c, count, chunks)
        ps = nl.ndarray((depth, pieces, P), dtype=rows.dtype, buffer=nl.psum)
        for k in range(pieces):
            nisa.nc_transpose(dst=ps[:, k, :], data=rows[:, j, k * depth : (k + 1) * depth])
        nisa.tensor_copy(dst=turned[:, :, c, :], src=ps, engine=nisa.engine.vector if j % 2 == 0 else nisa.engine.scalar)
    flat = turned.reshape((depth, pieces, each * P))
    for k in range(pieces):
        for a in range(0, each * P, BANK):
            z = min(a + BANK, each * P)
            nisa.nc_matmul(dst=scores[:, a:z], stationary=q[:, k, :], moving=flat[:, k, a:z], accumulate=True)


def softmax(scores, sinks, lanes, slots, scale, dtype):
    """(p turned: (128, slots / 128, lanes), 1 / (sum + sink term): (lanes, 1))."""
    least = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=least, op=nl.maximum, data=scores, axis=1, negate=True)
    nisa.tensor_scalar(dst=least, data=least, op0=nl.multiply, operand0=scale, op1=nl.minimum, operand1=LOWEST)
    p = nl.ndarray((lanes, slots), dtype=dtype, buffer=nl.sbuf)
    total = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(dst=p, op=nl.exp, data=scores, reduce_op=nl.add, reduce_res=total, bias=least, scale=scale)
    extra = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=extra, data=sinks[0:lanes, :], op0=nl.add, operand0=least, op1=nl.minimum, operand1=SINK_TOP)
    nisa.activation(dst=extra, op=nl.exp, data=extra)
    nisa.tensor_tensor(dst=total, data1=total, data2=extra, op=nl.add)
    nisa.reciprocal(dst=total, data=total)
    weights = nl.ndarray((P, slots // P, lanes), dtype=dtype, buffer=nl.sbuf)
    for c in range(slots // P):
        ps = nl.ndarray((P, lanes), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=ps, data=p[:, c * P : (c + 1) * P])
        nisa.tensor_copy(dst=weights[:, c, :], src=ps)
    return weights, total


def mix(mixed, weights, rows, i, count, stride, chunks):
    """mixed (stride, d) = p . rows of query i."""
    d, each = rows.shape[2], chunks[0] + chunks[1]
    for a in range(0, d, BANK):
        z = min(a + BANK, d)
        for c in range(each):
            moving = rows[:, place_of(i, c, count, chunks), a:z]
            nisa.nc_matmul(dst=mixed[:, a:z], stationary=weights[:, c, i * stride : (i + 1) * stride], moving=moving, accumulate=c > 0)


def columns_of(sink, group, heads, stride):
    """(group * stride, 1): the sink of each lane's head, 0 for lanes without one."""
    t = nl.ndarray((group * stride, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=t, value=0.0)
    for i in range(group):
        nisa.dma_copy(dst=t[i * stride : i * stride + heads, :], src=sink.ap([[1, heads], [1, 1]]))
    return t


def sparse_attn(
    run: Run, q: Tensor, window: Tensor, window_idxs: Tensor, compressed: Tensor, topk_idxs: Tensor, attn_sink: Tensor, scale: float, numerics: Numerics
) -> Tensor:
    """As `v41.spec.ops.attend.sparse_attn` in `trn2` and `exact` float32: q (b, s, heads, d); window (b, n, d); lists (b, s, w), (b, s, k) int32; out like q.

    heads <= 128; d at most 128 or a multiple of it up to 1024; w + k <= 3072; b * n < 2^22. Lists are padded with -1 to a multiple of 128.
    Rounding: p to q's dtype, out once; scores and sums in float32 in another order than torch's.
    """
    b, s, heads, d = q.shape
    if not (numerics.device or q.dtype == torch.float32):
        raise ValueError(f"sparse_attn: regime {numerics.regime!r} in {q.dtype}; the kernel computes trn2, and exact in float32")
    slots, most = window_idxs.shape[-1] + topk_idxs.shape[-1], max(window.shape[0] * window.shape[1], compressed.shape[0] * compressed.shape[1])
    if heads > P or d > DEPTH or (d > P and d % P) or slots > SLOTS or most >= AWAY:
        limits = f"{P} heads of at most {P} or a multiple of it up to {DEPTH}, {SLOTS} slots, rows below {int(AWAY)}"
        raise ValueError(f"sparse_attn: {heads} heads of {d}, {slots} slots, {most} rows; the kernel takes {limits}")
    if b * s == 0:
        return q
    listed, picked = (functional.pad(t, (0, -t.shape[-1] % P), value=-1) for t in (window_idxs, topk_idxs))
    chosen = picked.shape[2]
    first = (dense(window, -1, d), dense(listed, b * s, -1))
    second = (dense(compressed, -1, d), dense(picked, b * s, -1)) if chosen else first
    flat = (dense(q, -1, d), first[0], second[0], first[1], second[1], dense(attn_sink, 1, -1))
    return run(attended, 2 if s % 2 == 0 else 1, *flat, heads, b, chosen, scale).view(q.shape)
