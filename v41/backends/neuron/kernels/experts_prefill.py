# SPDX-License-Identifier: Apache-2.0
"""The experts kernel for many rows: a dynamic loop over the blocks of rows of the experts that have rows (docs/kernels.md)."""

from v41.backends.neuron.kernels.experts_core import PARTS, added, emptied, hidden_parts, projected, turn, turned
from v41.backends.neuron.kernels.experts_fetch import begun, decoders, operands, passed, read_as, rounded_rows
from v41.backends.neuron.kernels.experts_kernel import LANE_ROWS, keep, nothing
from v41.backends.neuron.kernels.experts_rows import OUTSIDE, blocks_of, entry, fixed, gathered, indices_of, looked, placed, scattered
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.nki import nisa, nki, nl

MOST = 8  # items of a step: 512 columns, one PSUM bank


@nki.jit
def prefill_experts(x, ids, weights, tiles, outer, scales, shared, packed, shared_items, rows, blocks, log_blocks, fold, clamp, limit):
    """out (n, dim) float32 as `hit_experts`, n a multiple of 128. tiles (held, groups, 128, elements), outer (held, groups, dim).

    rows of a block: 32, 64, 96 or 128; blocks = 2^log_blocks >= n / rows.

        x through its fp8 round trip, to HBM;  sums of each core in HBM = the shared expert, or 0
        places of the rows in the lists of their experts; list the blocks that have rows
        for a block:                                         a dynamic loop
            transpose its rows; gather those of the next block
            for at most 8 items of the expert, a core half of them:
                ps = x . w1, x . w3;  total = or += hidden . w2 of the step before;  hidden = activated(ps)
            add the total of the block before to the core's sums, row by row
        out = the sums of both cores
    """
    n, dim = x.shape
    me = nl.program_id(0)
    out = nl.ndarray((n, dim), dtype=nl.float32, buffer=nl.shared_hbm)
    sums = nl.ndarray((nl.num_programs(0), n * PARTS, dim // PARTS), dtype=nl.float32, buffer=nl.shared_hbm)
    rounded = rounded_rows(x, limit)
    begin(sums[me], rounded, shared, shared_items, fold, clamp, limit)
    given, places, counts = placed(ids, weights, scales, n // P)
    experts, numbers, count = blocks_of(counts, blocks, log_blocks, rows)
    if nl.num_programs(0) == 2:
        nisa.core_barrier(data=sums)
    parts, tables, widths = rows // LANE_ROWS, fixed(n, rows, blocks), step_items(tiles.shape[1])
    total = nl.ndarray((P, parts, dim // PARTS), dtype=nl.float32, buffer=nl.sbuf)
    index = nl.ndarray((P, parts), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.memset(dst=index, value=OUTSIDE)
    z, kept = emptied((P, widths[0], 1, P), x.dtype), emptied((rows, widths[0], P), x.dtype)
    before = nothing(read_as(tiles, packed).dtype, packed, P, widths[0], dim // PARTS, dim // PARTS)
    x_rows = nl.ndarray((rows, dim), dtype=x.dtype, buffer=nl.sbuf)
    found, own = looked(tables, places, given, experts, numbers, nisa.register_alloc(0), 0, rows)
    gathered(x_rows, rounded, found)

    def body(i):
        expert = entry(experts, i, 0)
        next_found, next_own = looked(tables, places, given, experts, numbers, i, 1, rows)
        x_t = nl.ndarray((P, fold, dim // (P * fold) * rows), dtype=x.dtype, buffer=nl.sbuf)
        turn(x_t, x_rows, 0, rows, fold)
        gathered(x_rows, rounded, next_found)
        for c in range(len(widths)):
            weight, meta = fetched(tiles, outer, packed, expert, found, own, c * widths[0], widths[c], rows, dim, fold)
            ps = projected(x_t, weight[0], rows, widths[c], dim // P, fold)
            added(total, 0, parts, z, kept, before, rows, widths[c - 1], 1, (c - 1) % len(widths) == 0)
            if c == 0:
                scattered(sums[me], total, index)
            keep(before, weight, widths[c])
            hidden_parts(kept[:, 0 : widths[c], :], ps, meta, rows, widths[c], clamp, limit)
        indices_of(index, found, tables[3], tables[4])
        nisa.tensor_copy(dst=found, src=next_found)
        nisa.tensor_copy(dst=own, src=next_own)

    nl.fori_loop(0, count, body)
    added(total, 0, parts, z, kept, before, rows, widths[len(widths) - 1], 1, len(widths) == 1)
    scattered(sums[me], total, index)
    finish(out, sums)
    return out


def step_items(groups):
    """Items of the steps of a block: a core's half of an expert's, in steps of at most 8, the first ones alike."""
    mine = -(-groups // nl.num_programs(0))
    most = -(-mine // -(-mine // MOST))
    widths = []
    for first in range(0, mine, most):
        widths.append(min(most, mine - first))
    return widths


def fetched(tiles, outer, packed, expert, found, own, first, items, rows, dim, fold):
    """(weight, meta) of items first .. of this core's half of an expert (a register). An odd number of items: both cores take the middle one, the second
    with weight 0."""
    source, programs, me = read_as(tiles, packed), nl.num_programs(0), nl.program_id(0)
    groups, elements = source.shape[1], source.shape[3]
    mine = -(-groups // programs)
    item = me * (groups - mine) + first
    raw = nl.ndarray((P, items, elements), dtype=source.dtype, buffer=nl.sbuf)
    pattern = [[elements, P], [P * elements, items], [1, elements]]
    nisa.dma_copy(dst=raw, src=source.ap(pattern, offset=item * P * elements, scalar_offset=expert, indirect_dim=0))
    raw_outer = nl.ndarray((PARTS, items, dim // PARTS), dtype=nl.uint8, buffer=nl.sbuf)
    if packed:
        pattern = [[dim // PARTS, PARTS], [dim, items], [1, dim // PARTS]]
        nisa.dma_copy(dst=raw_outer, src=outer.ap(pattern, offset=item * dim, scalar_offset=expert, indirect_dim=0))
    meta = nl.ndarray((rows, 4, items), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=meta[:, 0, :], src=found.ap([[3, rows], [0, items]], offset=2))
    if mine * programs > groups and first == 0:
        nisa.tensor_scalar(dst=meta[:, 0, 0:1], data=meta[:, 0, 0:1], op0=nl.multiply, operand0=1.0 - float(me))
    row_tiles = own.shape[2]
    nisa.tensor_copy(dst=meta[:, 1:4, :], src=own.ap([[4 * row_tiles, rows], [row_tiles, 3], [0, items]], offset=row_tiles))
    return operands(raw, raw_outer, decoders(packed, LANE_ROWS, 1), items, dim, fold), meta


def begin(sums, x, shared, shared_items, fold, clamp, limit):
    """x: rounded rows; sums (n * 4, dim / 4) of this core = its part of the shared expert, or zeros; row 4 r + b holds columns b * dim / 4 .. of row r."""
    n, dim = x.shape
    width = dim // PARTS
    for row in range(0, n, 4 * P):
        blocks = min(4, (n - row) // P)
        total = begun((P, blocks * PARTS, width), shared_items)
        if shared_items > 0:
            x_ts = []
            for b in range(blocks):
                x_ts.append(turned(x, row + b * P, P, fold, 0.0))
            z = emptied((P, PARTS, 1, P), x.dtype)
            passed(total, PARTS, z, x_ts, shared, P, fold, 1, clamp, limit)
        for part in range(blocks * PARTS):
            place = sums.ap([[width, PARTS], [PARTS * width, LANE_ROWS], [1, width]], offset=(row + part * LANE_ROWS) * dim)
            nisa.dma_copy(dst=place, src=total[:, part, :])


def finish(out, sums):
    """out = the sum of the cores' sums; each adds half of the rows."""
    n, dim = out.shape
    programs, me = nl.num_programs(0), nl.program_id(0)
    if programs == 1:
        nisa.dma_copy(dst=out, src=sums[0].reshape((n, dim)))
        return
    nisa.core_barrier(data=sums)
    mine = n // programs
    terms = []
    for p in range(programs):
        terms.append(sums.ap([[dim, mine], [1, dim]], offset=(p * n + me * mine) * dim))
    nisa.dma_compute(dst=out[me * mine : (me + 1) * mine, :], srcs=terms, reduce_op=nl.add)
