# SPDX-License-Identifier: Apache-2.0
"""The experts kernels for decode: with a dynamic loop over what has rows, and without dynamic loops (docs/kernels.md)."""

from v41.backends.neuron.kernels.experts_core import (
    ITEMS,
    PARTS,
    added,
    emptied,
    hidden_parts,
    parts_turned,
    product,
    projected,
    splits_of,
    spread_rows,
    steps,
    summed,
    summed_scaled,
    turned,
)
from v41.backends.neuron.kernels.experts_fetch import begun, decoders, operands, passed, read_as, rounded_rows, stored
from v41.backends.neuron.kernels.experts_route import listed, routed
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.nki import nisa, nki, nl

LANE_ROWS = 32  # rows whose results of w2 fill 128 lanes


def of_list(entries, i, j):
    """Entry j of this core in step i (a register) of a list, as a register."""
    found = nisa.register_alloc()
    nisa.register_load(found, entries.ap([[1, 1], [1, 1]], offset=nl.program_id(0) * ITEMS + j, scalar_offset=i, indirect_dim=1))
    return found


def fetched(raw, raw_outer, meta, j, source, outer, table, item, column, splits, packed):
    """Item j of a step: its elements by one DMA, scales of w2 if packed, and from the table what each row gives it. item and column are registers."""
    n, elements, held, width = meta.shape[0], source.shape[2], table.shape[2], raw_outer.shape[2]
    nisa.dma_copy(dst=raw[:, j, :], src=source.ap([[elements, P], [1, elements]], scalar_offset=item, indirect_dim=0))
    if packed:
        pattern = [[width, splits], [splits * width, PARTS], [1, width]]
        nisa.dma_copy(dst=raw_outer[:, j, :], src=outer.ap(pattern, scalar_offset=item, indirect_dim=0))
    given = table.ap([[4 * held, n], [held, 4], [1, 1]], scalar_offset=column, indirect_dim=2)
    nisa.tensor_copy(dst=meta[:, :, j : j + 1], src=given, engine=nisa.engine.gpsimd)


def nothing(dtype, packed, lanes, splits, width):
    """The weight of a step of zeros, whose room keeps w2 of the step before."""
    second = emptied((P, ITEMS, splits * width), nl.float8_e4m3 if packed else dtype)
    return (0, second, emptied((lanes, ITEMS, width), nl.bfloat16)) if packed else (0, second)


@nki.jit
def hit_experts(x, ids, weights, tiles, outer, scales, shared, packed, shared_items, groups, fold, clamp, limit):
    """out (n <= 32, dim) float32: the sum over the experts that have rows.

    ids, weights (n, k); tiles (items, 128, elements), `groups` items an expert; outer (items, dim) if packed; scales (3, held + 1);
    shared (items, 128, elements), of an expert that every row passes, read if shared_items > 0. clamp: of the SwiGLU, 0 for none;
    limit: largest fp8 code of activations, 0 for no round trip.

        table = what each row gives each expert; list the items of the experts that get anything
        for 8 items at a time, 4 a core:                     a dynamic loop
            one DMA an item; ps = x . w1, x . w3
            total += hidden . w2 of the step before; hidden = activated(ps)
        total += hidden . w2 of the last step
        out = the totals of both cores
    """
    n, dim = x.shape
    splits = splits_of(dim, n)
    width = dim // PARTS // splits
    out = nl.ndarray((n, dim), dtype=nl.float32, buffer=nl.shared_hbm)
    table = routed(ids, weights, scales, 0, n)
    items, columns, count = listed(table, n, groups, nl.num_programs(0) * ITEMS)
    x_t = turned(x, 0, n, fold, limit)
    total = begun((splits * PARTS * n, 1, width), shared_items)
    z = emptied((P, ITEMS, splits, splits * PARTS * n), x.dtype)
    helpers = decoders(packed, n, splits)
    source = read_as(tiles, packed)
    parts = emptied((n, ITEMS, P), x.dtype)
    before = nothing(source.dtype, packed, splits * PARTS * n, splits, width)
    if shared_items > 0:
        passed(total, 1, z, [x_t], shared, n, fold, splits, clamp, limit)

    def body(i):
        raw = nl.ndarray((P, ITEMS, tiles.shape[2]), dtype=source.dtype, buffer=nl.sbuf)
        raw_outer = nl.ndarray((PARTS * splits, ITEMS, width), dtype=nl.uint8, buffer=nl.sbuf)
        meta = nl.ndarray((n, 4, ITEMS), dtype=nl.float32, buffer=nl.sbuf)
        for j in range(ITEMS):
            fetched(raw, raw_outer, meta, j, source, outer, table, of_list(items, i, j), of_list(columns, i, j), splits, packed)
        weight = operands(raw, raw_outer, helpers, ITEMS, dim, fold)
        ps = projected(x_t, weight[0], n, ITEMS, dim // P, fold)
        spread_rows(z, parts_turned(parts, n, ITEMS), n, ITEMS, 0, n, splits)
        if packed:
            summed_scaled(total, 0, z, before[1], before[2], ITEMS, splits, False)
        else:
            sums = product(z, before[1], 0, ITEMS, total.shape[0], splits, width)
        for w in range(1, len(weight)):
            for j in range(ITEMS):
                nisa.tensor_copy(dst=before[w][:, j, :], src=weight[w][:, j, :], engine=nisa.engine.gpsimd)
        hidden_parts(parts, ps, meta, n, ITEMS, clamp, limit)
        if not packed:
            summed(total, 0, sums, False)

    nl.fori_loop(0, count, body)
    added(total, 0, 1, z, parts, before, n, ITEMS, splits, False)
    stored(out, total, 0, n, splits)
    return out


@nki.jit
def all_experts(x, ids, weights, tiles, outer, scales, shared, packed, shared_items, groups, rows, fold, clamp, limit):
    """The same sum without dynamic loops: every item meets every row, with weight 0 where a row did not choose it.

    n is a multiple of `rows`, which are at most 32, or 64, 96 or 128; up to 512 rows read the weights once. groups 0: the shared expert only.
    """
    n, dim = x.shape
    out = nl.ndarray((n, dim), dtype=nl.float32, buffer=nl.shared_hbm)
    some = min(rows, LANE_ROWS)
    parts, splits, most = rows // some, splits_of(dim, some), max(1, 512 // rows)
    if n > P:
        x = rounded_rows(x, limit)
    for row in range(0, n, most * rows):
        blocks = min(most, (n - row) // rows)
        x_ts = []
        for b in range(blocks):
            x_ts.append(turned(x, row + b * rows, rows, fold, 0.0 if n > P else limit))
        total = begun((splits * PARTS * some, blocks * parts, dim // PARTS // splits), shared_items)
        z = emptied((P, ITEMS, splits, splits * PARTS * some), x.dtype)
        if shared_items > 0:
            passed(total, parts, z, x_ts, shared, rows, fold, splits, clamp, limit)
        if groups > 0:
            tables = []
            for b in range(blocks):
                tables.append(routed(ids, weights, scales, row + b * rows, rows))
            every(total, parts, z, x_ts, tables, tiles, outer, packed, groups, rows, fold, splits, clamp, limit)
        stored(out, total, row, some, splits)
    return out


def every(total, parts, z, x_ts, tables, tiles, outer, packed, groups, rows, fold, splits, clamp, limit):
    """total += what all local experts give."""
    programs, me = nl.num_programs(0), nl.program_id(0)
    source, width = read_as(tiles, packed), total.shape[2]
    count, elements, dim = source.shape[0], source.shape[2], PARTS * splits * width
    helpers = decoders(packed, rows // parts, splits)
    for first in range(0, count, programs * ITEMS):
        raw = nl.ndarray((P, ITEMS, elements), dtype=source.dtype, buffer=nl.sbuf)
        raw_outer = nl.ndarray((PARTS * splits, ITEMS, width), dtype=nl.uint8, buffer=nl.sbuf)
        metas = []
        for _ in range(len(x_ts)):
            metas.append(nl.ndarray((rows, 4, ITEMS), dtype=nl.float32, buffer=nl.sbuf))
        for j in range(ITEMS):
            item = first + me * ITEMS + j
            column = item // groups + 1 if item < count else 0
            nisa.dma_copy(dst=raw[:, j, :], src=source[min(item, count - 1)])
            if packed:
                pattern = [[width, splits], [dim // PARTS, PARTS], [1, width]]
                nisa.dma_copy(dst=raw_outer[:, j, :], src=outer.ap(pattern, offset=min(item, count - 1) * dim))
            for b in range(len(x_ts)):
                nisa.tensor_copy(dst=metas[b][:, :, j : j + 1], src=tables[b][:, :, column : column + 1], engine=nisa.engine.gpsimd)
        weight = operands(raw, raw_outer, helpers, ITEMS, dim, fold)
        steps(total, parts, z, x_ts, weight, metas, rows, ITEMS, fold, splits, clamp, limit, False)
