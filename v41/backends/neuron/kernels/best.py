# SPDX-License-Identifier: Apache-2.0
"""The k best of each row, exactly, in ascending order: what `select` and `candidate_blocks` share (docs/kernels.md).

A row lies on `lanes` lanes (32, 64 or 128), n columns each, lane by lane. Nothing is sorted:

    threshold  the k-th largest score, one bit at a time: a score counts where it is at least the candidate; counts of a row are summed by a product
    ranks      c = (scores above the threshold so far) + min(scores equal to it so far, how many of them are needed): the lower index wins a tie
    columns    rank r lies in the one lane with c before it <= r < c at its end; a product with these ones fetches that lane's c,
               and the column in the lane is the number of c <= r there

The threshold is sought in the bits of a float32, whose order is that of the floats: from 0 upwards, or from -infinity towards 0. A candidate beyond
infinity, or beyond 0 from below, has the bits of a NaN: no score is at least that, so that it is refused. NaN scores are never chosen.
"""

from v41.backends.neuron.kernels.bands import same_group, summed
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.nki import nisa, nl

INFINITY_BITS, HALF_INFINITY_BITS = 0x7F800000, 0x7F80  # infinity in float32 and in bfloat16
COLUMNS = 512  # float32 of a PSUM bank
FLOOR = -3.4028234663852886e38  # the lowest finite float32


def best(x, rows, lanes, n, k, real, drop):
    """(rows * tiles, 128) float32 in SBUF, tiles = ceil(k / 128): one more than the column of each of the k best of every row, ascending, 0 behind them.

    x: (rows * lanes, n) tile of scores, -infinity behind the `real` columns of a row. drop: -infinity is never chosen.
    """
    total = rows * lanes
    same = same_group(total, lanes, 1.0)
    edge = threshold(x, total, n, k, same) if k < real else lowest(total)
    above, above_count = compared(x, edge, total, n, nl.greater)
    equal, equal_count = compared(x, edge, total, n, nl.equal)
    need = nl.ndarray((total, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=need, data=summed(same, above_count), op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=float(k))
    if drop:
        finite = nl.ndarray((total, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=finite, data=edge, op0=nl.greater_equal, operand0=FLOOR)
        nisa.tensor_tensor(dst=need, data1=need, data2=finite, op=nl.multiply)
    earlier = earlier_lanes(rows, lanes)
    first = nl.ndarray((total, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=first, data=summed(earlier, equal_count), op0=nl.minimum, operand0=need)
    start = nl.ndarray((total, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=start, src=summed(earlier, above_count))
    ranks = counted(above, equal, start, first, need, total, n)
    nisa.tensor_tensor(dst=start, data1=start, data2=first, op=nl.add)
    return columns(ranks, start, rows, lanes, n, k)


def compared(x, edge, total, n, op):
    """(x op edge as ones and zeros, how many ones in each lane)."""
    mask = nl.ndarray((total, n), dtype=nl.bfloat16, buffer=nl.sbuf)
    count = nl.ndarray((total, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar_reduce(dst=mask, data=x, op0=op, operand0=edge, reduce_op=nl.add, reduce_res=count)
    return mask, count


def earlier_lanes(rows, lanes):
    """(rows * lanes, rows * lanes): one where the first lane lies before the second in the same row."""
    total = rows * lanes
    t = nl.ndarray((total, total), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=t, value=1.0, engine=nisa.engine.gpsimd)
    row, lane = [[-lanes, rows], [0, lanes]], [[-lanes, rows], [-1, lanes]]
    nisa.affine_select(dst=t, pattern=row, channel_multiplier=1, on_true_tile=t, on_false_value=0.0, cmp_op=nl.greater_equal)
    nisa.affine_select(dst=t, pattern=lane, channel_multiplier=1, on_true_tile=t, on_false_value=0.0, cmp_op=nl.less)
    return t


def lowest(total):
    """(total, 1) float32: -infinity, the threshold where all columns are wanted."""
    t = nl.ndarray((total, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=t, value=INFINITY_BITS - (1 << 31))
    return t.view(nl.float32)


def infinite(total, dtype):
    """(total, 1): infinity in float32 or bfloat16, made from its bits."""
    t = nl.ndarray((total, 1), dtype=nl.int16 if dtype == nl.bfloat16 else nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=t, value=HALF_INFINITY_BITS if dtype == nl.bfloat16 else INFINITY_BITS)
    return t.view(dtype)


def threshold(x, total, n, k, same):
    """(total, 1) float32: the k-th largest score of each row, on all its lanes."""
    mask = nl.ndarray((total, n), dtype=nl.bfloat16, buffer=nl.sbuf)
    count = nl.ndarray((total, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar_reduce(dst=mask, data=x, op0=nl.greater_equal, operand0=0.0, reduce_op=nl.add, reduce_res=count)
    positive = nl.ndarray((total, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=positive, data=summed(same, count), op0=nl.greater_equal, operand0=float(k))
    # A bfloat16 has 16 bits of them: the lower half of its float32 is 0.
    lowest_bit, steps = (16, 15) if x.dtype == nl.bfloat16 else (0, 31)
    step = signed_steps(positive, total, lowest_bit, steps)
    edge = lowest(total)
    nisa.tensor_copy_predicated(dst=edge, src=0.0, predicate=positive)
    bits = edge.view(nl.int32)
    for i in range(steps - 1, -1, -1):
        candidate = nl.ndarray((total, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=candidate, data1=bits, data2=step[:, i : i + 1], op=nl.add)
        nisa.tensor_scalar_reduce(dst=mask, data=x, op0=nl.greater_equal, operand0=candidate.view(nl.float32), reduce_op=nl.add, reduce_res=count)
        enough = nl.ndarray((total, 1), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=enough, data=summed(same, count), op0=nl.greater_equal, operand0=float(k))
        nisa.tensor_copy_predicated(dst=bits, src=candidate, predicate=enough)
    return edge


def signed_steps(positive, total, lowest_bit, steps):
    """(total, steps) int32: 2^(lowest_bit + i) on lanes whose row's threshold is positive, minus that on the others."""
    shift = nl.ndarray((total, steps), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=shift, pattern=[[1, steps]], offset=lowest_bit, channel_multiplier=0)
    up = nl.ndarray((total, steps), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=up, value=1)
    nisa.tensor_tensor(dst=up, data1=up, data2=shift, op=nl.left_shift)
    step = nl.ndarray((total, steps), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=step, value=0)
    nisa.tensor_tensor(dst=step, data1=step, data2=up, op=nl.subtract)
    nisa.tensor_copy_predicated(dst=step, src=up, predicate=positive.ap([[1, total], [0, steps]]))
    return step


def counted(above, equal, start, first, need, total, n):
    """(total, n) float32: how many of a row are chosen up to and with each column."""
    ties = nl.ndarray((total, n), dtype=nl.float32, buffer=nl.sbuf)
    limit = need.ap([[1, total], [0, n]])
    nisa.tensor_tensor_scan(dst=ties, data0=equal, data1=limit, initial=first, op0=nl.add, op1=nl.minimum)
    ranks = nl.ndarray((total, n), dtype=nl.float32, buffer=nl.sbuf)
    floor = start.ap([[1, total], [0, n]])
    nisa.tensor_tensor_scan(dst=ranks, data0=above, data1=floor, initial=start, op0=nl.add, op1=nl.maximum)
    nisa.tensor_tensor(dst=ranks, data1=ranks, data2=ties, op=nl.add)
    return ranks


def columns(ranks, start, rows, lanes, n, k):
    """What `best` returns, from the ranks and those before each lane."""
    total, tiles = rows * lanes, -(-k // P)
    number = nl.ndarray((total, tiles * P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=number, pattern=[[1, tiles * P]], channel_multiplier=0)
    here = nl.ndarray((total, tiles * P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=here, data=number, op0=nl.greater_equal, operand0=start)
    nisa.scalar_tensor_tensor(dst=here, data=number, op0=nl.less, operand0=ranks[:, n - 1 : n], op1=nl.multiply, operand1=here)
    # Column 0: one more than the first column of each lane; column 1: one.
    facts = nl.ndarray((total, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=facts, value=1.0)
    for i in range(rows):
        nisa.iota(dst=facts[i * lanes : (i + 1) * lanes, 0:1], pattern=[[0, 1]], offset=1, channel_multiplier=n)
    own = nl.ndarray((P, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=own, pattern=[[P, tiles]], channel_multiplier=1)
    half = nl.ndarray((P, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=half, data=own, op0=nl.add, operand0=0.5)
    counts = nl.ndarray((P, rows * tiles), dtype=nl.float32, buffer=nl.sbuf)
    places = nl.ndarray((P, rows * tiles, 2), dtype=nl.float32, buffer=nl.psum)
    for i in range(rows):
        for j in range(tiles):
            at = i * tiles + j
            ones = here[i * lanes : (i + 1) * lanes, j * P : (j + 1) * P]
            mine = half if at % 2 == 1 else own
            counted_below(counts[:, at : at + 1], ones, ranks[i * lanes : (i + 1) * lanes, :], mine[:, j : j + 1], n, at % 2)
            nisa.nc_matmul(dst=places[:, at, :], stationary=ones, moving=facts[i * lanes : (i + 1) * lanes, :], accumulate=False)
    if rows * tiles > 1:
        signs = counts[:, 1 : rows * tiles : 2]
        nisa.tensor_scalar(dst=signs, data=signs, op0=nl.add, operand0=float(n), op1=nl.multiply, operand1=0.5)
    found = nl.ndarray((P, rows * tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=found, data1=counts, data2=places[:, :, 0], op=nl.add)
    nisa.tensor_tensor(dst=found, data1=found, data2=places[:, :, 1], op=nl.multiply)
    ps = nl.ndarray((rows * tiles, P), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=ps, data=found)
    return ps


def counted_below(count, ones, ranks, own, n, by_scalar):
    """count (128, 1) = how many columns of the lane that `ones` chooses have a rank of at most own; 2 * that - n on ScalarE, which has own + 1/2.

    VectorE compares; the sum of the signs of own + 1/2 - rank says the same, and keeps ScalarE busy meanwhile.
    """
    pieces = -(-n // COLUMNS)
    size = -(-n // pieces)
    for a in range(0, n, size):
        z = min(a + size, n)
        ps = nl.ndarray((P, z - a), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=ps, stationary=ones, moving=ranks[:, a:z], accumulate=False)
        mask = nl.ndarray((P, z - a), dtype=nl.bfloat16, buffer=nl.sbuf)
        command = nisa.reduce_cmd.reset_reduce if a == 0 else nisa.reduce_cmd.reduce
        if by_scalar:
            nisa.activation(dst=mask, op=nl.sign, data=ps, scale=-1.0, bias=own, reduce_op=nl.add, reduce_res=count, reduce_cmd=command)
        else:
            nisa.tensor_scalar_reduce(dst=mask, data=ps, op0=nl.less_equal, operand0=own, reduce_op=nl.add, reduce_res=count, reduce_cmd=command)
