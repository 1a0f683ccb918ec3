# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn steps of hc_mixes on chip, in two layouts (docs/kernels.md, Hyper-connections).

`few`, 4 copies of up to 32 tokens, on lanes (token, source): comb = r_j K_jk c_k is kept as K and two vectors. A column step
c' = c / (c (K^T r) + eps) is c' = 1 / (K^T r + eps d) with d = 1 / c, the denominator of the step before, and a row step is the same with K^T: a
product on TensorE, which also adds eps d, and a reciprocal on VectorE. All 4 x 4 matrices stand on the diagonal of one (128, 128) operand.

`many`, a token per lane and blocks side by side: each step is a reduction, a reciprocal and a product on (block, 5, 5), whose fifth row and
column hold eps, so that a reduction gives sum + eps.
"""

from v41.backends.neuron.kernels.tiles import transposed
from v41.backends.neuron.nki import nisa, nl


def many(logits, rows, blocks, copies, iters, eps):
    """(rows, blocks, copies, copies): softmax over the last axis + eps, columns, then rows and columns iters - 1 times."""
    side = copies + 1
    square = nl.ndarray((rows, blocks, side, side), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=square, value=eps)
    inner = square[:, :, 0:copies, 0:copies]
    sums = nl.ndarray((rows, blocks, copies), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sums, op=nl.maximum, data=logits, axis=3)
    nisa.tensor_tensor(dst=inner, data1=logits, data2=sums.expand_dim(3).broadcast(3, copies), op=nl.subtract)
    nisa.activation(dst=inner, op=nl.exp, data=inner)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=inner, axis=3)
    divided(inner, sums.expand_dim(3).broadcast(3, copies), sums)
    nisa.tensor_scalar(dst=inner, data=inner, op0=nl.add, operand0=eps)
    by_column = square[:, :, :, 0:copies].permute((0, 1, 3, 2))
    for i in range(iters):
        if i > 0:
            nisa.tensor_reduce(dst=sums, op=nl.add, data=square[:, :, 0:copies, :], axis=3)
            divided(inner, sums.expand_dim(3).broadcast(3, copies), sums)
        nisa.tensor_reduce(dst=sums, op=nl.add, data=by_column, axis=3)
        divided(inner, sums.expand_dim(2).broadcast(2, copies), sums)
    return inner


def divided(inner, spread, sums):
    """inner / spread, where spread is a view of sums."""
    nisa.reciprocal(dst=sums, data=sums)
    nisa.tensor_tensor(dst=inner, data1=inner, data2=spread, op=nl.multiply)


def few(logits, rows, copies, iters, eps):
    """(rows * copies, copies) of logits (rows, copies, copies): what `many` gives, rows * copies <= 128."""
    lanes = rows * copies
    unit, same, which = masks(rows, copies)
    square = softmax(by_source(logits, rows, copies), lanes, copies, eps)
    forward = nl.ndarray((lanes, rows, copies), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=forward, data1=same, data2=square.expand_dim(1).broadcast(1, rows), op=nl.multiply)
    forward = forward.reshape((lanes, lanes))
    backward = transposed(forward)
    small = nl.ndarray((lanes, lanes), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=small, data=unit, op0=nl.multiply, operand0=eps)
    row, row_below = ones(lanes), ones(lanes)
    column_below = ones(lanes)
    for i in range(iters):
        if i > 0:
            row, row_below = step(backward, small, column, row_below, lanes)
        column, column_below = step(forward, small, row, column_below, lanes)
    spread = nl.ndarray((lanes, copies), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=spread, data=which, op0=nl.multiply, operand0=column)
    columns = nl.ndarray((lanes, copies), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=columns, stationary=same.reshape((lanes, lanes)), moving=spread, accumulate=False)
    comb = nl.ndarray((lanes, copies), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=comb, data=square, op0=nl.multiply, operand0=row, op1=nl.multiply, operand1=columns)
    return comb


def ones(lanes):
    """A column of ones."""
    t = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=t, value=1.0)
    return t


def step(matrix, small, vector, below, lanes):
    """(1 / d, d) with d = matrix.T @ vector + eps * below; small is eps times the identity."""
    ps = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=small, moving=below, accumulate=False)
    nisa.nc_matmul(dst=ps, stationary=matrix, moving=vector, accumulate=True)
    inverse = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=ps)
    kept = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=kept, src=ps)
    return inverse, kept


def masks(rows, copies):
    """Zeros and ones over lanes p = (token, source): the identity, whether token t is p's (lanes, rows, copies), whether p % copies is k (lanes, copies)."""
    lanes = rows * copies
    unit = nl.ndarray((lanes, rows, copies), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=unit, value=0.0)
    steps = [[-copies, rows], [-1, copies]]
    nisa.affine_select(dst=unit, pattern=steps, channel_multiplier=1, on_true_tile=unit, on_false_value=1.0, cmp_op=nl.not_equal, offset=0)
    same = nl.ndarray((lanes, rows, copies), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=same[:, :, 0], op=nl.add, data=unit, axis=2)
    for k in range(1, copies):
        nisa.tensor_copy(dst=same[:, :, k], src=same[:, :, 0], engine=nisa.engine.gpsimd)
    which = nl.ndarray((lanes, copies), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=which, op=nl.add, data=unit.permute((0, 2, 1)), axis=2)
    return unit.reshape((lanes, lanes)), same, which


def by_source(logits, rows, copies):
    """(rows * copies, copies) in PSUM from (rows, copies, copies): lane (t, j) gets row j of token t."""
    sel = nl.ndarray((rows, copies, rows, copies), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=sel, value=0.0)
    ps = nl.ndarray((rows * copies, copies), dtype=nl.float32, buffer=nl.psum)
    for j in range(copies):
        own = sel[:, j, :, j]
        nisa.affine_select(dst=own, pattern=[[-1, rows]], channel_multiplier=1, on_true_tile=own, on_false_value=1.0, cmp_op=nl.not_equal, offset=0)
        nisa.nc_matmul(dst=ps, stationary=sel[:, j, :, :].reshape((rows, rows * copies)), moving=logits[:, j, :], accumulate=j > 0)
    return ps


def softmax(logits, lanes, copies, eps):
    """softmax + eps of each lane's row."""
    top = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=logits, axis=1, negate=True)
    result = nl.ndarray((lanes, copies), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=logits, bias=top, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=result, data=result, op0=nl.multiply, operand0=total, op1=nl.add, operand1=eps)
    return result
