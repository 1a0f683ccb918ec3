# SPDX-License-Identifier: Apache-2.0
"""hc_pre and hc_post: copies of the stream, collapsed into one row or mixed with a sublayer's output (docs/kernels.md, Hyper-connections).

Both are out[t, k] = sum_j coef[t, j, k] rows[t, j] over 4 or 5 rows of `dim` elements. VectorE would take 2 cycles an element and row; TensorE
does it as a product whose stationary operand W holds the coefficients and zeros:

    lanes of rows: (token, copy, chunk), then (token, chunk) of x;   lanes of out: (token, k, chunk)
    C = sel.T @ coef         the coefficients of each lane            sel, mask: 0 and 1, made on chip while rows are on their way
    C = C1 + C2 + C3         three bfloat16 terms hold a float32 of 24 bits
    W_i[p, t, k, c] = mask[p, t, c] * C_i[p, k]
    out = W_1.T @ rows + W_2.T @ rows + W_3.T @ rows, rounded once

Products of bfloat16 are exact and the sum is in fp32. A row that is not real may hold NaN, which meets the zeros: it is made a number before.
Coefficients are numbers: those of `hc_mixes` always are. float32 rows take one float32 W. Columns are shared between both cores.

Limits: bfloat16 or float32 rows, at most 8 copies, dim even. Coefficients below 2^-110 lose bits of C3.
"""

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, bounded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl

BANK = 512
MOST = 8  # copies
MOST_BITS, MOST_VALUE = 0x7F7F, 3.3895313892515355e38  # the largest bfloat16


@nki.jit
def collapse(stream, pre, copies, chunks):
    """out (n, dim), as (n * chunks, dim / chunks), = sum_j pre[:, j] stream[:, j]: stream (n * copies, dim), pre (n * copies, 1)."""
    n, dim = stream.shape[0] // copies, stream.shape[1]
    out = nl.ndarray((n * chunks, dim // chunks), dtype=stream.dtype, buffer=nl.shared_hbm)
    most = P // (copies * chunks)
    for start in range(0, n, most):
        count = min(most, n - start)
        lanes = count * copies
        coef = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=coef, src=pre[start * copies : start * copies + lanes, :])
        rows = nl.ndarray((lanes * chunks, width(dim, chunks)), dtype=stream.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=piece(stream, start * copies, lanes, chunks))
        parts = stationaries(coef, count, copies, chunks, 1, False, stream.dtype)
        combined(out, start * chunks, parts, bounded(rows, MOST_BITS, MOST_VALUE))
    return out


@nki.jit
def expand(x, stream, post, comb, copies, chunks):
    """out (n * copies, dim), as `collapse` has it: out[t, k] = post[t, k] x[t] + sum_j comb[t, j, k] stream[t, j].

    post (n, copies), comb (n * copies, copies).
    """
    n, dim = x.shape
    out = nl.ndarray((n * copies * chunks, dim // chunks), dtype=stream.dtype, buffer=nl.shared_hbm)
    most = P // ((copies + 1) * chunks)
    for start in range(0, n, most):
        count = min(most, n - start)
        lanes = count * copies
        coef = nl.ndarray((lanes + count, copies), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=coef[0:lanes, :], src=comb[start * copies : start * copies + lanes, :])
        nisa.dma_copy(dst=coef[lanes : lanes + count, :], src=post[start : start + count, :])
        rows = nl.ndarray(((lanes + count) * chunks, width(dim, chunks)), dtype=stream.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows[0 : lanes * chunks, :], src=piece(stream, start * copies, lanes, chunks))
        nisa.dma_copy(dst=rows[lanes * chunks : (lanes + count) * chunks, :], src=piece(x, start, count, chunks))
        parts = stationaries(coef, count, copies, chunks, copies, True, stream.dtype)
        combined(out, start * copies * chunks, parts, bounded(rows, MOST_BITS, MOST_VALUE))
    return out


def width(dim, chunks):
    """Columns of a lane on one core."""
    return dim // chunks // nl.num_programs(0)


def piece(t, row, count, chunks):
    """This core's columns of `count` rows of an HBM tensor (rows, dim), as (count * chunks, width)."""
    w = width(t.shape[1], chunks)
    first = nl.program_id(0) * w
    return t.reshape((t.shape[0] * chunks, t.shape[1] // chunks))[row * chunks : (row + count) * chunks, first : first + w]


def stationaries(coef, count, copies, chunks, outs, extra, dtype):
    """The coefficients as stationary operands (lanes of rows, count * outs * chunks) whose sum they are."""
    q = coef.shape[0]
    lanes = q * chunks
    sel = nl.ndarray((q, lanes), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sel, value=1.0, engine=nisa.engine.gpsimd)
    nisa.affine_select(dst=sel, pattern=[[1, lanes]], channel_multiplier=-chunks, on_true_tile=sel, on_false_value=0.0, cmp_op=nl.greater_equal, offset=0)
    nisa.affine_select(dst=sel, pattern=[[1, lanes]], channel_multiplier=-chunks, on_true_tile=sel, on_false_value=0.0, cmp_op=nl.less_equal, offset=1 - chunks)
    spread = nl.ndarray((lanes, outs), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=spread, stationary=sel, moving=coef, accumulate=False)
    own = mask_of(lanes, count, copies, chunks, extra, dtype)
    rest, parts = spread, []
    for i in range(1 if dtype == nl.float32 else 3):
        term = nl.ndarray((lanes, outs), dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=term, src=rest)
        if i < 2:
            less = nl.ndarray((lanes, outs), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=less, data1=rest, data2=term, op=nl.subtract)
            rest = less
        w = nl.ndarray((lanes, count, outs, chunks), dtype=dtype, buffer=nl.sbuf)
        wide = term.expand_dim(1).broadcast(1, count).expand_dim(3).broadcast(3, chunks)
        nisa.tensor_tensor(dst=w, data1=own.expand_dim(2).broadcast(2, outs), data2=wide, op=nl.multiply)
        parts.append(w.reshape((lanes, count * outs * chunks)))
    return parts


def mask_of(lanes, count, copies, chunks, extra, dtype):
    """mask[p, t, c]: 1 where lane p holds chunk c of a row of token t."""
    mask = nl.ndarray((lanes, count, chunks), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=mask, value=0.0, engine=nisa.engine.gpsimd)
    steps = [[-copies * chunks, count], [-1, chunks]]
    for j in range(copies):
        nisa.affine_select(dst=mask, pattern=steps, channel_multiplier=1, on_true_tile=mask, on_false_value=1.0, cmp_op=nl.not_equal, offset=-j * chunks)
    if extra:
        steps = [[-chunks, count], [-1, chunks]]
        first = count * copies * chunks
        nisa.affine_select(dst=mask, pattern=steps, channel_multiplier=1, on_true_tile=mask, on_false_value=1.0, cmp_op=nl.not_equal, offset=-first)
    return mask


def combined(out, row, parts, rows):
    """Stores sum of parts.T @ rows to this core's columns, a PSUM bank at a time; ScalarE rounds three of four, as VectorE has more to do."""
    lanes, columns = parts[0].shape[1], rows.shape[1]
    first = nl.program_id(0) * columns
    # Few columns are stored in halves, to be early; many four banks at a time, to be fast.
    few = columns <= 2 * BANK
    size = -(-columns // 4) if few else BANK
    stored = 2 * size if few else 4 * size
    for start in range(0, columns, stored):
        end = min(start + stored, columns)
        result = nl.ndarray((lanes, end - start), dtype=out.dtype, buffer=nl.sbuf)
        for c in range(start, end, size):
            stop = min(c + size, end)
            ps = nl.ndarray((lanes, stop - c), dtype=nl.float32, buffer=nl.psum)
            for i in range(len(parts)):
                nisa.nc_matmul(dst=ps, stationary=parts[i], moving=rows[:, c:stop], accumulate=i > 0)
            engine = nisa.engine.scalar if c // size % 4 else nisa.engine.vector
            nisa.tensor_copy(dst=result[:, c - start : stop - start], src=ps, engine=engine)
        nisa.dma_copy(dst=out[row : row + lanes, first + start : first + end], src=result)


def chunks_of(rows: int, tokens: int, dim: int) -> int:
    """How many lanes a row takes: as many as fill the 128 lanes and divide the columns of each core into equal parts of 64 or more."""
    fits = [c for c in range(1, P + 1) if c * rows * tokens <= P and dim % (2 * c) == 0 and (c == 1 or dim // (2 * c) >= 64)]
    return max(fits, default=1)


def checked(stream: Tensor) -> torch.Size:
    """The stream's shape. Raises ValueError for what the kernels do not take."""
    copies, dim = stream.shape[2:]
    if stream.dtype not in (torch.bfloat16, torch.float32) or copies > MOST or dim % 2:
        raise ValueError(f"{copies} copies of {dim} {stream.dtype}; the kernels take at most {MOST} of even size in bfloat16 or float32")
    return stream.shape


def hc_pre(run: Run, stream: Tensor, pre: Tensor) -> Tensor:
    """`hc_pre` of the spec: stream [b, s, copies, dim], pre [b, s, copies] fp32."""
    b, s, copies, dim = checked(stream)
    if stream.numel() == 0:
        return stream.new_empty((b, s, dim))
    chunks = chunks_of(copies, min(b * s, P // copies), dim)
    return run(collapse, 2, dense(stream, -1, dim), dense(pre, -1, 1), copies, chunks).view(b, s, dim)


def hc_post(run: Run, x: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`hc_post` of the spec: x [b, s, dim], stream [b, s, copies, dim], post [b, s, copies], comb [b, s, copies, copies] fp32."""
    _, _, copies, dim = checked(stream)
    if stream.numel() == 0:
        return stream.clone()
    tokens = x.numel() // dim
    chunks = chunks_of(copies + 1, min(tokens, P // (copies + 1)), dim)
    args = (dense(x, -1, dim), dense(stream, -1, dim), dense(post, -1, copies), dense(comb, -1, copies))
    return run(expand, 2, *args, copies, chunks).view(stream.shape)
