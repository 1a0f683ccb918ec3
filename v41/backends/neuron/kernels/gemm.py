# SPDX-License-Identifier: Apache-2.0
"""The product kernel behind every linear layer: out = x @ w.T (docs/kernels.md 3).

Rows of x are the stationary operand, transposed once; weights are the moving one and pass TensorE once, 512 columns at a time:

    for a block of at most 4 x 128 rows:                  x.T, through its fp8 round trip where limit > 0
        for a group of columns that fits 6 PSUM banks:
            for a chunk of tiles of 128 inner columns:    one DMA of weights
                PSUM += x.T tile . weight tile            products exact, sums in fp32
            out = PSUM, rounded once to its dtype

Weights come in one of four forms (`kind`):

    tiled     (blocks, 128, tiles, columns): prepared, lane p and tile t hold inner column 128 t + p; long contiguous reads
    natural   (out, inner) in bfloat16 or float32: turned by the DMA
    folded    (out, inner / 2): e4m3 codes of at most 240 in pairs, turned by the DMA, with a power of two (out,) that scales the sums
    codes     (out, inner / 2): checkpoint e4m3 codes in pairs, turned by the DMA, decoded by VectorE with scales (128, pairs of tiles, out / 32)
"""

from v41.backends.neuron.kernels.operand import stationary, turned
from v41.backends.neuron.kernels.tiles import BLOCK, P, replicated
from v41.backends.neuron.kernels.weights import RUN, inner_tiles, pair, steps, weights
from v41.backends.neuron.nki import nisa, nki, nl

COLUMNS = 512  # of one PSUM bank
BANKS = 6  # for sums; transposes take the others
RESIDENT = 65536  # bytes a partition of weights that are kept for several passes
HELD = 98304  # bytes a partition of transposed rows
SPAN = 2048  # columns whose results are written at once


@nki.jit
def product(x, w, scales, kind, out_columns, blocks, groups, fold, rows, by_rows, limit, wide):
    """out (n, out_columns) of x (n, groups * inner) and w in one of its forms; n a multiple of `rows` <= 128.

    blocks: parts of the columns, which are shared among the cores unless `by_rows`, when the rows are. groups: group g of the columns
    takes columns g * inner.. of x. fold: tiles of x per lane (operand.py). limit: largest fp8 code, 0 for no round trip. wide: out is float32.
    """
    n, width = x.shape
    columns, inner, share = out_columns // blocks, width // groups, out_columns // groups
    out = nl.ndarray((n, out_columns), dtype=nl.float32 if wide else x.dtype, buffer=nl.shared_hbm)
    programs, me = nl.num_programs(0), nl.program_id(0)
    mine = n // programs if by_rows else n
    first_row = me * mine if by_rows else 0
    some = blocks if by_rows else blocks // programs
    first_block = 0 if by_rows else me * some
    count = max(1, min(4, HELD // (inner // P * rows * (4 if x.dtype == nl.float32 else 2))))
    for row in range(first_row, first_row + mine, rows * count):
        parts = min(count, (first_row + mine - row) // rows)
        held, operands = -1, []
        for block in range(first_block, first_block + some):
            start, stop = block * columns, (block + 1) * columns
            for g in range(start // share, (stop - 1) // share + 1):
                if g != held:
                    operands = []
                    for i in range(parts):
                        operands.append(turned(x, row + i * rows, g * inner, rows, inner // P, fold, pair(kind), limit))
                    held = g
                last = min(stop, (g + 1) * share)
                for low in range(max(start, g * share), last, SPAN):
                    span(out, w, scales, kind, operands, row, rows, fold, low, min(low + SPAN, last), columns)
    return out


def span(out, w, scales, kind, operands, row, rows, fold, low, high, columns):
    """Columns low .. high - 1 of out for the rows of the operands, in even groups that fit the sums into PSUM.

    With many rows the weights of all groups are loaded first where they fit: the DMA then reads longer runs.
    """
    tiles = inner_tiles(w, kind)
    most = group_size(w, kind, len(operands), tiles)
    pieces = -(-(high - low) // most)
    size = -(-(high - low) // pieces)
    if kind == "codes":
        size = -(-size // BLOCK) * BLOCK  # scales cover 32 columns
    dtype = operands[0].dtype
    held = []
    if kind == "tiled" and pieces > 1 and tiles * (high - low) * (4 if dtype == nl.float32 else 2) <= RESIDENT:
        chunk = steps(w, kind, tiles, high - low)
        for t0 in range(0, tiles, chunk):
            held = held + weights(w, scales, kind, dtype, t0, min(chunk, tiles - t0), low, high - low, columns)
    results = []
    for _ in range(len(operands)):
        results.append(nl.ndarray((rows, high - low), dtype=out.dtype, buffer=nl.sbuf))
    for c in range(low, high, size):
        group(results, w, scales, kind, held, operands, rows, fold, low, c, min(size, high - c), columns)
    for i in range(len(operands)):
        nisa.dma_copy(dst=out[row + i * rows : row + (i + 1) * rows, low:high], src=results[i])


def group_size(w, kind, count, tiles):
    """Columns that one pass over the inner columns sums: what PSUM has for `count` blocks of rows, no more than a DMA's full rate needs."""
    most = max(1, min(4, BANKS // count))
    if kind != "tiled":
        line = steps(w, kind, tiles, COLUMNS) * COLUMNS * (4 if w.dtype == nl.float32 else 2)
        most = min(most, -(-RUN // line))
    return COLUMNS * most


def group(results, w, scales, kind, held, operands, rows, fold, low, c, size, columns):
    """Columns c .. c + size - 1 of the results, which begin at column low; `held` has the weights or is empty."""
    sums = []
    for _ in range(len(operands)):
        sums.append(nl.ndarray((rows, size), dtype=nl.float32, buffer=nl.psum))
    tiles = inner_tiles(w, kind)
    chunk = steps(w, kind, tiles, size)
    for t0 in range(0, tiles, chunk):
        if len(held) > 0:
            parts, at = held[t0 : t0 + chunk], c - low
        else:
            parts, at = weights(w, scales, kind, operands[0].dtype, t0, min(chunk, tiles - t0), c, size, columns), 0
        for t in range(t0, min(t0 + chunk, tiles)):
            for i in range(len(operands)):
                x_t = stationary(operands[i], t, fold, rows, parts[t - t0].shape[0])
                add(sums[i], x_t, parts[t - t0][:, at : at + size], t > 0)
    for i in range(len(operands)):
        place = results[i][:, c - low : c - low + size]
        if kind == "folded":
            factor = replicated(scales[c : c + size], rows, size)
            nisa.tensor_tensor(dst=place, data1=sums[i], data2=factor, op=nl.multiply)
        else:
            nisa.tensor_copy(dst=place, src=sums[i], engine=nisa.engine.scalar)


def add(total, x_t, moving, more):
    """total (+)= x_t.T @ moving, one bank of PSUM at a time."""
    size = moving.shape[1]
    for low in range(0, size, COLUMNS):
        high = min(low + COLUMNS, size)
        nisa.nc_matmul(dst=total[:, low:high], stationary=x_t, moving=moving[:, low:high], accumulate=more)
