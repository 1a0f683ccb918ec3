# SPDX-License-Identifier: Apache-2.0
"""Rows of activations as the stationary operand of a product: loaded over all lanes, through their fp8 round trip, transposed."""

from v41.backends.neuron.kernels.tiles import P, loaded, round_trip
from v41.backends.neuron.nki import nisa, nl

PIECE = 16  # tiles of 128 columns in work at once: bounds the room of the round trip
BANK = 2048  # bytes a partition of a PSUM bank


def turned(x, row, column, rows, tiles, fold, step, limit):
    """x[row : row + rows, column : column + 128 * tiles].T as (128, fold, tiles / fold * rows); tile t is at [t % fold] and rows t // fold * rows.

    Few rows would leave most lanes idle: a row is cut into tiles / fold parts, which lie on lanes of their own while they are rounded.
    `fold` divides tiles, tiles / fold * rows <= 128. step 2: a pair of tiles holds the even, then the odd of 256 columns. limit: 0 or `round_trip`'s.
    """
    width, chunks = x.shape[1], tiles // fold
    lanes = chunks * rows
    result = nl.ndarray((P, fold, lanes), dtype=x.dtype, buffer=nl.sbuf)
    size = 4 if x.dtype == nl.float32 else 2
    batch = min(BANK // (lanes * size), PIECE)
    for first in range(0, fold, PIECE):
        n = min(PIECE, fold - first)
        start = row * width + column + first * P
        t = loaded(x.ap([[fold * P, chunks], [width, rows], [1, n * P]], offset=start), (lanes, n * P), x.dtype)
        if limit > 0:
            t = round_trip(t, lanes, n * P, limit)
        for h in range(0, n, batch):
            some = min(batch, n - h)
            ps = nl.ndarray((P, some, lanes), dtype=x.dtype, buffer=nl.psum)
            for i in range(some):
                pair = (h + i) // step * step * P
                nisa.nc_transpose(dst=ps[:, i, :], data=t[:, pair + (h + i) % step : pair + step * P : step])
            nisa.tensor_copy(dst=result[:, first + h : first + h + some, :], src=ps, engine=nisa.engine.scalar)
    return result


def stationary(operand, t, fold, rows, lanes):
    """The first `lanes` lanes of tile t of what `turned` made."""
    chunk = t // fold
    return operand[0:lanes, t % fold, chunk * rows : (chunk + 1) * rows]
