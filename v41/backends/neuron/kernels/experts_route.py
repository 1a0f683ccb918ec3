# SPDX-License-Identifier: Apache-2.0
"""Routing on the device: what every row gives every local expert, and the list of items of the experts that have rows."""

from v41.backends.neuron.kernels.tiles import converted, loaded
from v41.backends.neuron.nki import nisa, nl


def routed(ids, weights, scales, row, rows):
    """(rows, 4, held + 1) float32 for rows row..: routing weight, and the scales of w1, w3, w2. Column 0 stands for no expert, e + 1 for expert e.

    An expert named twice by a row gets the sum; ids outside [0, held) are in no column.
    """
    k, columns = ids.shape[1], scales.shape[1]
    table = nl.ndarray((rows, 4, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=table[:, 1:4, :], src=scales.ap([[0, rows], [columns, 3], [1, columns]]))
    chosen = converted(loaded(ids[row : row + rows, :], (rows, k), nl.int32), nl.float32)
    w = loaded(weights[row : row + rows, :], (rows, k), nl.float32)
    expert = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=expert, pattern=[[1, columns]], offset=-1)
    for j in range(k):
        part = table[:, 0, :] if j == 0 else nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=part, data=expert, op0=nl.equal, operand0=chosen[:, j : j + 1], op1=nl.multiply, operand1=w[:, j : j + 1])
        if j > 0:
            nisa.tensor_tensor(dst=table[:, 0, :], data1=table[:, 0, :], data2=part, op=nl.add)
    nisa.memset(dst=table[:, 0, 0:1], value=0.0)
    return table


def listed(table, rows, groups, step):
    """(item numbers, table columns, steps): lists (1, n / step, step) uint32 of the items of all experts that have rows, and a register: how many steps.

    The items of the hit experts, in increasing order, `step` at a time; the last step is filled with items of the first of them and column 0.
    """
    held = table.shape[2] - 1
    wide = held + -(-step // groups)
    flags = nl.ndarray((rows, wide), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=flags, value=0.0)
    nisa.tensor_scalar(dst=flags[:, 0:held], data=table[:, 0, 1 : held + 1], op0=nl.not_equal, operand0=0.0)
    ones = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    counted = nl.ndarray((1, wide), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=counted, stationary=ones, moving=flags, accumulate=False)
    found = nl.ndarray((1, wide + 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.nonzero_with_count(dst=found, src=converted(counted, nl.float32), index_offset=1, padding_val=0)
    hits = converted(found, nl.float32)
    return items_of(hits, wide, groups, step), columns_of(hits, wide, groups, step), steps_of(hits, wide, groups, step)


def in_steps(t, n, step):
    """The first n / step * step entries of a list as (1, n / step, step)."""
    return t.reshape((1, n))[:, 0 : n // step * step].reshape((1, n // step, step))


def items_of(hits, wide, groups, step):
    """Item numbers: expert * groups + group, of the first hit expert where the list of experts (each plus 1) has ended."""
    first = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=first, data=hits[:, 0:1], op0=nl.maximum, operand0=1.0)
    base = nl.ndarray((1, wide), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=base, data=hits[:, 0:wide], op0=nl.maximum, operand0=first, op1=nl.multiply, operand1=float(groups))
    group = nl.ndarray((1, wide, groups), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=group, pattern=[[0, wide], [1, groups]], offset=-groups)
    items = nl.ndarray((1, wide, groups), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=items, data1=base.ap([[wide, 1], [1, wide], [0, groups]]), data2=group, op=nl.add)
    return in_steps(items, wide * groups, step)


def columns_of(hits, wide, groups, step):
    """The table's column of every item: expert + 1, or 0 beyond the last."""
    columns = nl.ndarray((1, wide, groups), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=columns, src=hits.ap([[wide + 1, 1], [1, wide], [0, groups]]))
    return in_steps(columns, wide * groups, step)


def steps_of(hits, wide, groups, step):
    """A register with ceil(hit experts * groups / step), step 4 or 8."""
    total = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=total, data=hits[:, wide : wide + 1], op0=nl.multiply, operand0=float(groups), op1=nl.add, operand1=float(step - 1))
    nisa.tensor_scalar(dst=total, data=total, op0=nl.right_shift, operand0=3 if step == 8 else 2)
    steps = nisa.register_alloc()
    nisa.register_load(steps, total)
    return steps
