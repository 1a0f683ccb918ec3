# SPDX-License-Identifier: Apache-2.0
"""What accept.py decides on few numbers: chances of drafts, one a lane, and the rules, on one lane."""

from v41.backends.neuron.kernels.vocab import ones, row_tile
from v41.backends.neuron.nki import nisa, nl

TINY = 2.0**-126


def loaded_float(row, partitions, n):
    """Small whole numbers of an int32 HBM tensor (partitions, n) as float32."""
    whole = nl.ndarray((partitions, n), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=whole, src=row)
    t = nl.ndarray((partitions, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=t, src=whole)
    return t


def column(t, first, n, dtype):
    """Rows first .. first + n - 1 of an HBM tensor (rows, 1)."""
    result = nl.ndarray((n, 1), dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=result, src=t[first : first + n, :])
    return result


def chances(rows, drafts, first, n):
    """(n, 1): element drafts[i] of row first + i of an HBM tensor (rows, vocab). Element numbers are added in int32."""
    count, vocab = rows.shape
    at = nl.ndarray((n, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=at, pattern=[[0, 1]], offset=first * vocab, channel_multiplier=vocab)
    nisa.tensor_tensor(dst=at, data1=at, data2=drafts, op=nl.add, engine=nisa.engine.gpsimd)
    found = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    base = rows.reshape((count * vocab, 1))
    nisa.dma_copy(dst=found, src=base.ap([[1, n], [1, 1]], vector_offset=at.view(nl.uint32), indirect_dim=0))
    return found


def in_a_row(values, n):
    """A column (n, 1) as a row (1, n)."""
    ps = nl.ndarray((1, n), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=ps, data=values)
    t = nl.ndarray((1, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=t, src=ps)
    return t


def wide_value(row, every, lanes):
    """A row (1, n) on every lane: (lanes, n), by a product with ones."""
    n = row.shape[1]
    ps = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=every[0:1, :], moving=row, accumulate=False)
    t = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=t, src=ps)
    return t


def leading(accepted, passed, offered):
    """accepted (1, b) = how many of passed (1, b, n) stand in front of the first 0, at most offered (1, b)."""
    b, n = passed.shape[1], passed.shape[2]
    inside = nl.ndarray((1, b, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=inside, pattern=[[0, b], [1, n]], offset=0)
    nisa.tensor_tensor(dst=inside, data1=inside, data2=offered.expand_dim(2).broadcast(2, n), op=nl.less)
    nisa.tensor_tensor(dst=passed, data1=passed, data2=inside, op=nl.multiply)
    for i in range(1, n):
        nisa.tensor_tensor(dst=passed[:, :, i], data1=passed[:, :, i], data2=passed[:, :, i - 1], op=nl.multiply)
    nisa.tensor_reduce(dst=accepted, op=nl.add, data=passed, axis=2)


def token_verdict(of_p, of_q, uniform, offer, n):
    """Accepted drafts (1, 1) token by token: p > u q up to the first that is not."""
    passed = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=passed, data1=uniform, data2=of_q, op=nl.multiply)
    nisa.tensor_tensor(dst=passed, data1=of_p, data2=passed, op=nl.greater)
    accepted = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    leading(accepted, in_a_row(passed, n).reshape((1, 1, n)), offer)
    return accepted


def block_verdict(p, q, i, of_p, of_q, uniform, offer, n, every, lanes, w):
    """(accepted drafts, P of the last of them), each (1, 1), by block verification of sequence i."""
    ratio = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=ratio, data=of_q, op0=nl.maximum, operand0=TINY)
    nisa.reciprocal(dst=ratio, data=ratio)
    nisa.tensor_tensor(dst=ratio, data1=ratio, data2=of_p, op=nl.multiply)
    weights = nl.ndarray((1, n + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=weights[:, 0:1], value=1.0)
    own = weights[:, 1 : n + 1]
    nisa.tensor_tensor_scan(dst=own, data0=in_a_row(ratio, n), data1=ones(1, n), initial=1.0, op0=nl.multiply, op1=nl.minimum)
    number = nl.ndarray((1, n + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=number, pattern=[[1, n + 1]], offset=0)
    share = shares(own, rests(p, q, i, wide_value(own, every, lanes), n, every, lanes, w), number[:, 1 : n + 1], offer, n)
    passed = nl.ndarray((1, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=passed, data1=in_a_row(uniform, n), data2=share, op=nl.less)
    nisa.tensor_tensor(dst=passed, data1=passed, data2=number[:, 1 : n + 1], op=nl.multiply)
    # Those behind the offer do not count: number * (number <= offer).
    nisa.scalar_tensor_tensor(dst=passed, data=passed, op0=nl.less_equal, operand0=offer, op1=nl.multiply, operand1=passed)
    accepted = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=accepted, op=nl.maximum, data=passed, axis=1)
    last = nl.ndarray((1, n + 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=last, data=number, op0=nl.equal, operand0=accepted)
    nisa.memset(dst=number, value=0.0)
    nisa.tensor_copy_predicated(dst=number, src=weights, predicate=last)
    weight = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=weight, op=nl.add, data=number, axis=1)
    return accepted, weight


def rests(p, q, i, weights, n, every, lanes, w):
    """(1, n): R_k = sum of relu(P_k p - q) over row k of sequence i, k = 1 .. n - 1; the last is 0."""
    parts = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=parts, value=0.0)
    command = nisa.reduce_cmd.reset_reduce
    for k in range(1, n):
        target, rest = row_tile(p, i * (n + 1) + k, lanes, w), row_tile(q, i * n + k, lanes, w)
        nisa.scalar_tensor_tensor(dst=rest, data=target, op0=nl.multiply, operand0=weights[:, k - 1 : k], op1=nl.subtract, operand1=rest)
        nisa.activation(dst=target, op=nl.relu, data=rest, reduce_op=nl.add, reduce_res=parts[:, k - 1 : k], reduce_cmd=command)
    ps = nl.ndarray((1, n), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=every[:, 0:1], moving=parts, accumulate=False)
    t = nl.ndarray((1, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=t, src=ps)
    return t


def shares(weights, rest, number, offer, n):
    """h (1, n): R / (R + 1 - P), 1 where that is 0 / 0, and P for the last draft that is offered."""
    total = nl.ndarray((1, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=total, data=rest, op0=nl.add, operand0=1.0)
    nisa.tensor_tensor(dst=total, data1=total, data2=weights, op=nl.subtract)
    share = nl.ndarray((1, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=share, data=total, op0=nl.maximum, operand0=TINY)
    nisa.reciprocal(dst=share, data=share)
    nisa.tensor_tensor(dst=share, data1=share, data2=rest, op=nl.multiply)
    nisa.scalar_tensor_tensor(dst=share, data=total, op0=nl.less_equal, operand0=0.0, op1=nl.maximum, operand1=share)
    last = nl.ndarray((1, n), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=last, data=number, op0=nl.equal, operand0=offer)
    nisa.tensor_copy_predicated(dst=share, src=weights, predicate=last)
    return share
