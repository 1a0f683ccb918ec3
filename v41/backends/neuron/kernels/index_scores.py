# SPDX-License-Identifier: Apache-2.0
"""Index scores: every key against every query, relu per head, heads summed with their weights (docs/model.md 7.4).

Pairs (query, head) are rows of a product with keys; up to 32 pairs leave room for four blocks of keys side by side, up to 64 for two:

    for a step of up to 512 keys of each block:
        keys turned by TensorE, 128 at a time
        dots     (block * pairs, keys) = pairs . keys; for more than 128 pairs in parts of 128
        relu, rounded to the keys' dtype
        scores   (block * queries, keys) = weights . relu: a product whose operand holds a weight where a pair belongs to a query, else 0

The last product multiplies the dots of every pair, and of every block's keys, by zeros too: a query or a key that is not real must not bring NaN there.
So elements of queries and weights are clamped to +-2^60 and NaN in them is 0, and with several blocks a dot that is NaN counts as 0.

A block is a contiguous run of keys, read in parts of up to 64 for each lane: lane p holds `size` neighbors, so that its DMA reads long runs, and a step
takes key number j of each lane.
"""

import torch
from torch import Tensor

from v41.backends.neuron.kernels.bands import band
from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, finite, loaded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics

STEP = 4  # keys of a lane in one step: 512 columns of a PSUM bank
AWAY = float(1 << 22)
LARGEST = 2.0**60  # of a query or a weight; sums of 128 products with keys up to 2^60 are finite
HELD = 64  # keys of a lane that are loaded at once


@nki.jit
def scored(iq, keys, weights, queries, heads, sequences, wide):
    """out (sequences * queries, room): scores of keys (sequences * t, d) with iq (sequences * queries * heads, d) and weights (1, sequences * queries * heads).

    room is t, or above it what fills whole steps; columns from t on are those of keys of zeros. d <= 128. wide: out is float32 and not rounded.
    """
    d, t = keys.shape[1], keys.shape[0] // sequences
    pairs = queries * heads
    stride = 32 if pairs <= 32 else 64 if pairs <= 64 else P
    blocks = P // stride
    cores = nl.num_programs(0)
    run = t // (P * blocks * cores)
    body = run * P * blocks * cores
    rest = 0 if body == t else 1
    out = nl.ndarray((sequences * queries, body + rest * P * blocks * cores), dtype=nl.float32 if wide else keys.dtype, buffer=nl.shared_hbm)
    for b in range(sequences):
        turned, spread = operands(iq, weights, b, queries, heads, stride, blocks)
        first = nl.program_id(0) * blocks * run * P
        for at in range(0, run, HELD):
            size = min(HELD, run - at)
            held = []
            for k in range(blocks):
                source = keys.ap([[size * d, P], [d, size], [1, d]], offset=(b * t + first + (k * run + at) * P) * d)
                held.append(loaded(source, (P, size, d), keys.dtype))
            part(out, held, turned, spread, b, queries, stride, run * P, first + at * P)
        if rest == 1:
            held = []
            for k in range(blocks):
                held.append(tail(keys, b, t, body + (nl.program_id(0) * blocks + k) * P))
            part(out, held, turned, spread, b, queries, stride, P, body + nl.program_id(0) * blocks * P)
    return out


def tail(keys, b, t, first):
    """(128, 1, d): keys first .. first + 127 of a sequence, zeros from key t on."""
    d = keys.shape[1]
    at = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=at, pattern=[[0, 1]], offset=first, channel_multiplier=1)
    beyond = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=beyond, data=at, op0=nl.greater_equal, operand0=float(t), op1=nl.multiply, operand1=AWAY)
    index = nl.ndarray((P, 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=index, data1=beyond, data2=at, op=nl.add)
    rows = nl.ndarray((P, 1, d), dtype=keys.dtype, buffer=nl.sbuf)
    nisa.memset(dst=rows, value=0.0)
    source = keys.ap([[d, P], [1, d]], offset=b * t * d, vector_offset=index, indirect_dim=0)
    nisa.dma_copy(dst=rows, src=source, oob_mode=nisa.oob_mode.skip)
    return rows


def operands(iq, weights, b, queries, heads, stride, blocks):
    """Pairs turned, (d, parts * stride), zeros behind them; and a list of (blocks * stride, blocks * queries) operands that sum pairs to queries."""
    d, pairs = iq.shape[1], queries * heads
    parts = -(-pairs // stride)
    turned = nl.ndarray((d, parts * stride), dtype=iq.dtype, buffer=nl.sbuf)
    nisa.memset(dst=turned, value=0.0)
    spread = []
    for part_ in range(parts):
        first, count = part_ * stride, min(stride, pairs - part_ * stride)
        rows = loaded(iq[b * pairs + first : b * pairs + first + count, :], (count, d), iq.dtype)
        ps = nl.ndarray((d, count), dtype=iq.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=ps, data=rows)
        nisa.tensor_copy(dst=turned[:, first : first + count], src=finite(ps, d, count, iq.dtype, LARGEST))
        column = nl.ndarray((blocks * stride, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=column, value=0.0)
        for k in range(blocks):
            source = weights.ap([[1, count], [1, 1]], offset=b * pairs + first)
            nisa.dma_copy(dst=column[k * stride : k * stride + count, :], src=source)
        # one[p, (k, query)] where p - k * stride + first is a pair of the query
        pattern = [[-stride, blocks], [-heads, queries]]
        one = band(blocks * stride, blocks * queries, pattern, -first, heads - 1 - first, 1.0, iq.dtype)
        nisa.tensor_scalar(dst=one, data=one, op0=nl.multiply, operand0=finite(column, blocks * stride, 1, nl.float32, LARGEST))
        spread.append(one)
    return turned, spread


def part(out, held, turned, spread, b, queries, stride, apart, base):
    """Scores of the held keys, (128, size, d) of each block; those of block k go to columns base + k * apart and on."""
    blocks, size = len(held), held[0].shape[1]
    result = nl.ndarray((blocks * queries, P, size), dtype=out.dtype, buffer=nl.sbuf)
    for j in range(0, size, STEP):
        some = min(STEP, size - j)
        ps = step(held, turned, spread, queries, stride, j, some)
        # VectorE has more to do beside; ScalarE takes the larger part of these.
        engine = nisa.engine.vector if j // STEP % 4 == 3 else nisa.engine.scalar
        nisa.tensor_copy(dst=result[:, :, j : j + some], src=ps.reshape((blocks * queries, some, P)).permute((0, 2, 1)), engine=engine)
    for k in range(blocks):
        first = base + k * apart
        nisa.dma_copy(dst=out[b * queries : (b + 1) * queries, first : first + P * size], src=result[k * queries : (k + 1) * queries, :, :])


def step(held, turned, spread, queries, stride, j, some):
    """PSUM (blocks * queries, some * 128) float32: scores of keys j .. j + some - 1 of each lane of the held blocks."""
    blocks, d, columns = len(held), turned.shape[0], some * P
    dtype = turned.dtype
    keys = []
    for k in range(blocks):
        ps = nl.ndarray((d, some, P), dtype=dtype, buffer=nl.psum)
        for i in range(some):
            nisa.nc_transpose(dst=ps[:, i, :], data=held[k][:, j + i, :])
        across = nl.ndarray((d, columns), dtype=dtype, buffer=nl.sbuf)
        # With several blocks VectorE is busy with the dots.
        nisa.tensor_copy(dst=across, src=ps, engine=nisa.engine.vector if blocks == 1 and j // STEP % 2 == 0 else nisa.engine.scalar)
        keys.append(across)
    scores = nl.ndarray((blocks * queries, columns), dtype=nl.float32, buffer=nl.psum)
    for n in range(len(spread)):
        dots = nl.ndarray((blocks * stride, columns), dtype=nl.float32, buffer=nl.psum)
        for k in range(blocks):
            place = dots[k * stride : (k + 1) * stride, :]
            nisa.nc_matmul(dst=place, stationary=turned[:, n * stride : (n + 1) * stride], moving=keys[k], accumulate=False)
        positive = nl.ndarray((blocks * stride, columns), dtype=dtype, buffer=nl.sbuf)
        if blocks > 1:
            above = nl.ndarray((blocks * stride, columns), dtype=nl.uint8, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=above, data=dots, op0=nl.greater, operand0=0.0)
            nisa.select_reduce(dst=positive, predicate=above, on_true=dots, on_false=0.0)
        elif (n + j // STEP) % 2 == 0:
            nisa.activation(dst=positive, op=nl.relu, data=dots)
        else:
            nisa.tensor_scalar(dst=positive, data=dots, op0=nl.maximum, operand0=0.0)
        nisa.nc_matmul(dst=scores, stationary=spread[n], moving=positive, accumulate=n > 0)
    return scores


def index_scores(run: Run, iq: Tensor, ik: Tensor, iw: Tensor, numerics: Numerics) -> Tensor:
    """As `v41.spec.ops.index.index_scores` in `trn2` and `exact` float32: iq (b, s, heads, d <= 128), ik (b, t, d), iw (b, s, heads); out (b, s, t).

    Rounding: dots (sums of exact products in float32) to iq's dtype, scores once. b * t < 2^22; s * b <= 128.
    """
    return _scores("index_scores", run, iq, ik, iw, numerics, False)


def partial_index_scores(run: Run, iq: Tensor, ik: Tensor, iw: Tensor, numerics: Numerics) -> Tensor:
    """As `v41.spec.ops.partial.index_scores`: the same from this rank's heads, in float32 and not rounded."""
    return _scores("partial index_scores", run, iq, ik, iw, numerics, True)


def _scores(name: str, run: Run, iq: Tensor, ik: Tensor, iw: Tensor, numerics: Numerics, wide: bool) -> Tensor:
    b, s, heads, d = iq.shape
    t = ik.shape[1]
    if not (numerics.device or iq.dtype == torch.float32):
        raise ValueError(f"{name}: regime {numerics.regime!r} in {iq.dtype}; the kernel computes trn2, and exact in float32")
    if d > P or s > 64 or b * t >= AWAY:
        raise ValueError(f"{name}: {s} queries (<= 64) of {d} columns (<= {P}), {b} x {t} keys (< {int(AWAY)})")
    if b * s * t == 0:
        return iq.new_zeros((b, s, t), dtype=torch.float32 if wide else iq.dtype)
    flat = (dense(iq, -1, d), dense(ik, -1, d), dense(iw, 1, -1))
    return run(scored, 2, *flat, s, heads, b, wide).view(b, s, -1)[..., :t].contiguous()
