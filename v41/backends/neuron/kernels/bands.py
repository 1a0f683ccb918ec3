# SPDX-License-Identifier: Apache-2.0
"""Matrices of ones and zeros that sum over groups of partitions: operands of exact float32 products of counts, and of sums."""

from v41.backends.neuron.nki import nisa, nl


def band(rows, columns, pattern, low, high, value, dtype):
    """(rows, columns) with `value` where low <= p + sum(step * index) <= high over the free pattern [[step, count], ...], else 0."""
    t = nl.ndarray((rows, columns), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=t, value=value, engine=nisa.engine.gpsimd)
    nisa.affine_select(dst=t, pattern=pattern, offset=-low, channel_multiplier=1, on_true_tile=t, on_false_value=0.0, cmp_op=nl.greater_equal)
    nisa.affine_select(dst=t, pattern=pattern, offset=-high, channel_multiplier=1, on_true_tile=t, on_false_value=0.0, cmp_op=nl.less_equal)
    return t


def same_group(rows, size, value):
    """(rows, rows) float32 with `value` where both lie in one group of `size` partitions: a product with it sums each group onto all its partitions."""
    return band(rows, rows, [[-size, rows // size], [0, size]], 0, size - 1, value, nl.float32)


def summed(groups, column):
    """PSUM (rows, 1): groups.T @ column of float32, as from `same_group`."""
    rows = groups.shape[1]
    ps = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=groups, moving=column, accumulate=False)
    return ps
