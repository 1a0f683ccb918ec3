# SPDX-License-Identifier: Apache-2.0
"""x @ w.T for a few rows and a few columns over a long inner axis (docs/kernels.md 3): the sum over inner tiles must not be one long chain."""

from v41.backends.neuron.kernels.operand import turned
from v41.backends.neuron.kernels.tiles import P, converted, loaded
from v41.backends.neuron.nki import nisa, nki, nl


@nki.jit
def narrow_product(x, w, mask, fold, wide):
    """out (rows, columns) of x (rows, inner) and w (columns, inner), inner = 128 * fold * chunks, chunks * max(rows, columns) <= 128.

    All chunks of x meet all chunks of w in `fold` products; mask (chunks * rows, chunks * columns) keeps those of equal chunks. They are summed over
    w's chunks, turned, and summed over x's. All sums in fp32. A row that holds NaN stays alone: nothing is multiplied across rows.
    """
    rows, inner = x.shape
    columns = w.shape[0]
    chunks = inner // P // fold
    lanes = chunks * rows
    out = nl.ndarray((rows, columns), dtype=nl.float32 if wide else x.dtype, buffer=nl.shared_hbm)
    kept = loaded(mask, (lanes, chunks * columns), nl.float32)
    x_t = turned(x, 0, 0, rows, inner // P, fold, 1, 0)
    w_t = turned(w, 0, 0, columns, inner // P, fold, 1, 0)
    if w.dtype != x.dtype:
        w_t = converted(w_t, x.dtype)
    met = nl.ndarray((lanes, chunks * columns), dtype=nl.float32, buffer=nl.psum)
    for h in range(fold):
        nisa.nc_matmul(dst=met, stationary=x_t[:, h, :], moving=w_t[:, h, :], accumulate=h > 0)
    diagonal = nl.ndarray((lanes, chunks, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=diagonal.reshape((lanes, chunks * columns)), data1=met, data2=kept, op=nl.multiply)
    part = nl.ndarray((lanes, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=part, op=nl.add, data=diagonal.permute((0, 2, 1)), axis=2)
    ps = nl.ndarray((columns, chunks, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=ps.reshape((columns, lanes)), data=part)
    total = nl.ndarray((columns, rows), dtype=out.dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=ps.permute((0, 2, 1)), axis=2)
    nisa.dma_copy(dst=out.ap([[1, columns], [columns, rows]]), src=total)
    return out
