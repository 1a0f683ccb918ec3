# SPDX-License-Identifier: Apache-2.0
"""Temperature, top-p and a draw for rows that lie over the lanes, without a sort (docs/kernels.md, Token choice).

    e = exp((logit - max) / temperature), 1 for the best token                                    a temperature of 0: 2^100 for 1 / temperature
    goal = top_p * sum of e; at least 1e-30, so that the first best token stays; 1e30 for a top_p of 1 or more
    A(v) = sum of e above v falls as v grows; theta = the smallest float32 with A(theta) < goal, by its bits, the highest first, 30 steps:
        A(v) = sum of relu(e - v) + v * count(e > v)                                   ScalarE and VectorE, then one product with ones
    kept: e > theta, and of e = theta those with A(theta) + rank * theta < goal, rank counted from the lower id
    draw: the first kept token whose cumulative sum exceeds uniform * total

The set and the token are exact up to the rounding of these sums (each a few 2^-24 of the total); the definition rounds its own sums so.
"""

from v41.backends.neuron.kernels.vocab import summed
from v41.backends.neuron.nki import nisa, nl

BITS = 30  # of the pattern of 1.0 and all below
COLDEST = 1e-5
COLD = 2.0**100
SMALLEST, LARGEST = 1e-30, 1e30


def settings(heat, top_p, lanes, n):
    """(1 / temperature, top_p) as used, (lanes, n): a temperature of 0 becomes 2^100 and a top_p of 0, which leaves the best token."""
    hot = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=hot, data=heat, op0=nl.greater, operand0=0.0)
    share = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=share, data1=top_p, data2=hot, op=nl.multiply)
    inverse = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=inverse, data=heat, op0=nl.maximum, operand0=COLDEST)
    nisa.reciprocal(dst=inverse, data=inverse)
    nisa.tensor_tensor(dst=inverse, data1=inverse, data2=hot, op=nl.multiply)
    nisa.tensor_scalar(dst=hot, data=hot, op0=nl.multiply, operand0=-COLD, op1=nl.add, operand1=COLD)
    nisa.tensor_tensor(dst=inverse, data1=inverse, data2=hot, op=nl.add)
    return inverse, share


def softened(t, inverse, every, total):
    """exp((t - max) * inverse) of a row (lanes, w), in place; its sum in each lane goes to total (lanes, 1)."""
    lanes = t.shape[0]
    top = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=t, axis=1)
    row = nl.ndarray((1, lanes), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=row, data=top)
    most = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=most, op=nl.maximum, data=row, axis=1)
    top = summed(every[0:1, :], most)
    nisa.tensor_scalar(dst=t, data=t, op0=nl.subtract, operand0=top, op1=nl.multiply, operand1=inverse)
    nisa.activation(dst=t, op=nl.exp, data=t, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce)


def goals(total, share, lanes, n):
    """share * total, between SMALLEST and, where share is 1 or more, LARGEST."""
    goal = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=goal, data1=total, data2=share, op=nl.multiply)
    nisa.tensor_scalar(dst=goal, data=goal, op0=nl.maximum, operand0=SMALLEST)
    whole = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=whole, data=share, op0=nl.greater_equal, operand0=1.0, op1=nl.multiply, operand1=LARGEST)
    nisa.tensor_tensor(dst=goal, data1=goal, data2=whole, op=nl.add)
    return goal


def above(rows, theta, every, lanes, n):
    """(lanes, n): the sum of each row's elements above theta (lanes, n), on every lane."""
    w = rows[0].shape[1]
    minus = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=minus, data=theta, op0=nl.multiply, operand0=-1.0)
    parts = nl.ndarray((lanes, 2, n), dtype=nl.float32, buffer=nl.sbuf)
    command = nisa.reduce_cmd.reset_reduce
    for g in range(n):
        over = nl.ndarray((lanes, w), dtype=nl.bfloat16, buffer=nl.sbuf)
        at = minus[:, g : g + 1]
        nisa.activation(dst=over, op=nl.relu, data=rows[g], bias=at, reduce_op=nl.add, reduce_res=parts[:, 0, g : g + 1], reduce_cmd=command)
        flags = nl.ndarray((lanes, w), dtype=nl.bfloat16, buffer=nl.sbuf)
        found = parts[:, 1, g : g + 1]
        nisa.tensor_scalar_reduce(dst=flags, data=rows[g], op0=nl.greater, operand0=theta[:, g : g + 1], reduce_op=nl.add, reduce_res=found)
    sums = nl.ndarray((lanes, 2, n), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=every, moving=parts, accumulate=False)
    result = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=sums[:, 1, :], data2=theta, op=nl.multiply)
    nisa.tensor_tensor(dst=result, data1=sums[:, 0, :], data2=result, op=nl.add)
    return result


def threshold(rows, goal, every, lanes, n):
    """theta (lanes, n) of every row: one above the largest pattern whose `above` reaches the goal."""
    low = nl.ndarray((lanes, n), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=low, value=0)
    for bit in range(BITS - 1, -1, -1):
        tried = nl.ndarray((lanes, n), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=tried, data=low, op0=nl.bitwise_or, operand0=1 << bit)
        reached = nl.ndarray((lanes, n), dtype=nl.uint32, buffer=nl.sbuf)
        sums = above(rows, tried.view(nl.float32), every, lanes, n)
        nisa.tensor_tensor(dst=reached, data1=sums, data2=goal, op=nl.greater_equal)
        nisa.tensor_copy_predicated(dst=low, src=tried, predicate=reached)
    one = nl.ndarray((lanes, n), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=one, value=1)
    nisa.tensor_tensor(dst=low, data1=low, data2=one, op=nl.add, engine=nisa.engine.gpsimd)
    return low.view(nl.float32)


def keep(t, theta, over, goal, before):
    """Sets what is not kept of a row (lanes, w) to 0; theta, over (its A) and goal (lanes, 1)."""
    lanes, w = t.shape
    rank = nl.ndarray((lanes, w), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar_cumulative(dst=rank, src=t, op0=nl.equal, op1=nl.add, imm0=theta)
    first = summed(before, rank[:, w - 1 : w])
    nisa.tensor_scalar(dst=first, data=first, op0=nl.subtract, operand0=1.0)
    nisa.tensor_scalar(dst=rank, data=rank, op0=nl.add, operand0=first, op1=nl.multiply, operand1=theta)
    nisa.tensor_scalar(dst=rank, data=rank, op0=nl.add, operand0=over, op1=nl.less, operand1=goal)
    nisa.scalar_tensor_tensor(dst=rank, data=t, op0=nl.equal, operand0=theta, op1=nl.multiply, operand1=rank)
    nisa.scalar_tensor_tensor(dst=rank, data=t, op0=nl.greater, operand0=theta, op1=nl.add, operand1=rank)
    nisa.tensor_tensor(dst=t, data1=t, data2=rank, op=nl.multiply)


def kept(rows, heat, top_p, every, before, lanes, n):
    """Turns rows of logits into what is kept of e, in place."""
    inverse, share = settings(heat, top_p, lanes, n)
    parts = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    for g in range(n):
        softened(rows[g], inverse[:, g : g + 1], every, parts[:, g : g + 1])
    goal = goals(summed(every, parts), share, lanes, n)
    theta = threshold(rows, goal, every, lanes, n)
    over = above(rows, theta, every, lanes, n)
    for g in range(n):
        keep(rows[g], theta[:, g : g + 1], over[:, g : g + 1], goal[:, g : g + 1], before)


def lane_sums(t, scale):
    """(lanes, 1): the sum of each lane of t; `scale` is a scratch tile of t's shape."""
    sums = nl.ndarray((t.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scale, op=nl.copy, data=t, reduce_op=nl.add, reduce_res=sums, reduce_cmd=nisa.reduce_cmd.reset_reduce)
    return sums


def drawn(t, uniform, every, before):
    """1 at elements that are not 0 and whose cumulative sum exceeds uniform (lanes, 1) * total, else 0: the first of them is the draw."""
    lanes, w = t.shape
    flags = nl.ndarray((lanes, w), dtype=nl.float32, buffer=nl.sbuf)
    sums = lane_sums(t, flags)
    goal = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=goal, data1=summed(every, sums), data2=uniform, op=nl.multiply)
    nisa.tensor_tensor(dst=goal, data1=goal, data2=summed(before, sums), op=nl.subtract)
    nisa.tensor_scalar_cumulative(dst=flags, src=t, op0=nl.multiply, op1=nl.add, imm0=1.0)
    nisa.scalar_tensor_tensor(dst=flags, data=flags, op0=nl.greater, operand0=goal, op1=nl.logical_and, operand1=t)
    return flags
