# SPDX-License-Identifier: Apache-2.0
"""Rows into a cache buffer. The kernel changes the buffer and returns it: only a returned input is aliased by the compiled graph."""

from torch import Tensor

from v41.backends.neuron.kernels.bands import band, summed
from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, loaded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl

AWAY = 1 << 22  # above any row of a buffer, and a float32 integer


@nki.jit
def scattered(buffer, index, rows, sequences):
    """buffer (sequences * t, d) with rows (sequences * n, d) at index (sequences * n, 1) int32 of their sequence, cast to its dtype.

    for a sequence, for a tile of 128 rows: one DMA writes the rows; of those for the sink (row t - 1) it writes the first:
    two rows of one DMA must not meet, so the others are sent out of range and skipped
    """
    d = buffer.shape[1]
    t, n = buffer.shape[0] // sequences, rows.shape[0] // sequences
    for b in range(sequences):
        for first in range(b * n, (b + 1) * n, P):
            count = min(P, (b + 1) * n - first)
            target = separated(loaded(index[first : first + count, :], (count, 1), nl.float32), count, t - 1)
            values = loaded(rows[first : first + count, :], (count, d), buffer.dtype)
            place = buffer.ap([[d, count], [1, d]], offset=b * t * d, vector_offset=target, indirect_dim=0)
            nisa.dma_copy(dst=place, src=values, oob_mode=nisa.oob_mode.skip)
    return buffer


def separated(index, count, sink):
    """(count, 1) uint32: the index, moved out of range where an earlier row of the tile goes to the sink as this one does."""
    gone = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=gone, data=index, op0=nl.equal, operand0=float(sink))
    # earlier[k, m] is 1 where k < m
    earlier = summed(band(count, count, [[-1, count]], -count, -1, 1.0, nl.float32), gone)
    again = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=again, data=earlier, op0=nl.minimum, operand0=1.0, op1=nl.multiply, operand1=gone)
    target = nl.ndarray((count, 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=target, data=again, op0=nl.multiply, operand0=float(AWAY), op1=nl.add, operand1=index)
    return target


def write_rows(run: Run, buffer: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """As `v41.spec.ops.place.write_rows`: buffer (b, t, d) with rows (b, s, d) at index (b, s); exact, the last row of a buffer is a sink.

    Where several rows go to the sink one of them is written, which one is not defined: callers send equal ones. b * t < 2^22.
    """
    b, t, d = buffer.shape
    if b * t >= AWAY:
        raise ValueError(f"write_rows: {b} x {t} rows; the kernel takes fewer than {AWAY}")
    if index.numel() == 0:
        return buffer
    return run(scattered, 1, dense(buffer, b * t, d), dense(index, -1, 1), dense(rows, -1, d), b).view(b, t, d)
