# SPDX-License-Identifier: Apache-2.0
"""The experts kernel for many rows: a dynamic loop over the blocks of rows of the experts that have rows (docs/kernels.md)."""

from v41.backends.neuron.kernels.experts_core import PARTS, emptied, steps, turn, turned
from v41.backends.neuron.kernels.experts_fetch import begun, decoders, operands, passed, read_as, rounded_rows
from v41.backends.neuron.kernels.experts_kernel import LANE_ROWS
from v41.backends.neuron.kernels.experts_rows import blocks_of, chosen, copied, fixed, gathered, of_block, placed, scattered
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
            gather its rows, transpose
            for at most 8 items of the expert, a core half of them:   as `hit_experts`
            add to the core's sums, row by row
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
    parts, most, tables = rows // LANE_ROWS, items_a_step(tiles.shape[1]), fixed(n, rows, blocks)
    z = emptied((P, most, 1, P), x.dtype)

    def body(i):
        expert, number = nisa.register_alloc(), nisa.register_alloc()
        nisa.register_load(expert, experts.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1))
        nisa.register_load(number, numbers.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1))
        first, place, own = of_block(tables, places, given, expert, number)
        found = chosen(place, tables[0], tables[2], first, rows)
        x_t = nl.ndarray((P, fold, dim // (P * fold) * rows), dtype=x.dtype, buffer=nl.sbuf)
        turn(x_t, gathered(rounded, found, rows, dim), 0, rows, fold)
        total = nl.ndarray((P, parts, dim // PARTS), dtype=nl.float32, buffer=nl.sbuf)
        half(total, parts, z, x_t, tiles, outer, packed, expert, found, own, rows, most, fold, clamp, limit)
        for p in range(parts):
            scattered(sums[me], total[:, p, :], copied(found, tables[3], p), tables[4])

    nl.fori_loop(0, count, body)
    finish(out, sums)
    return out


def items_a_step(groups):
    """Items a step: a core's half of an expert's in equal steps."""
    mine = -(-groups // nl.num_programs(0))
    return -(-mine // -(-mine // MOST))


def half(total, parts, z, x_t, tiles, outer, packed, expert, found, given, rows, most, fold, clamp, limit):
    """total += what this core's items of an expert (a register) give. An odd number of items: both cores take the middle one, the second with weight 0."""
    source, programs, me = read_as(tiles, packed), nl.num_programs(0), nl.program_id(0)
    groups, elements, dim = source.shape[1], source.shape[3], PARTS * total.shape[2]
    mine = -(-groups // programs)
    helpers = decoders(packed, LANE_ROWS, 1)
    for first in range(0, mine, most):
        items, item = min(most, mine - first), me * (groups - mine) + first
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
        tiles_of = given.shape[2]
        nisa.tensor_copy(dst=meta[:, 1:4, :], src=given.ap([[4 * tiles_of, rows], [tiles_of, 3], [0, items]], offset=tiles_of))
        weight = operands(raw, raw_outer, helpers, items, dim, fold)
        steps(total, parts, z, [x_t], weight, [meta], rows, items, fold, 1, clamp, limit, first == 0)


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
