# SPDX-License-Identifier: Apache-2.0
"""One step of the experts kernels: some items of 32 inner columns through w1 and w3, SwiGLU, and w2 (docs/kernels.md).

Rows of x are the stationary operand and weights the moving one, so that every weight passes TensorE once. The results of w2 fill the lanes:
lane (s, b, r) of a sum is row r, output columns b * dim / 4 + s * width ..; the stationary operand of w2 has zeros elsewhere.

A step is `projected`, `hidden_parts` and `added`. TensorE works in order and `added` waits for VectorE, so kernels put the `projected` of the next
step before it.
"""

from v41.backends.neuron.kernels.tiles import P, loaded, round_trip
from v41.backends.neuron.nki import nisa, nl

GROUP, PARTS, ITEMS = 32, 4, 4
BANK = 512  # float32 columns of a PSUM bank
PIECE = 1280  # columns of many rows that are rounded at a time


def emptied(shape, dtype):
    """A tile of zeros."""
    t = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=t, value=0.0)
    return t


def splits_of(dim, rows):
    """How many parts of dim / 4 columns lie on lanes of their own: as many as leave at least 256 columns and fit 128 lanes."""
    best = 1
    for s in range(2, P // (PARTS * rows) + 1):
        if dim // PARTS % s == 0 and dim // PARTS // s >= 256:
            best = s
    return best


def turned(x, row, rows, fold, limit):
    """Rows row.. of x as (128, fold, dim / 128 / fold * rows): tile (q, s) of the layout at [s] and q * rows.., through the fp8 round trip if limit > 0.

    Few rows would leave most lanes idle: chunks q of a row lie on lanes of their own while they are rounded.
    """
    dim = x.shape[1]
    chunks, width = dim // (P * fold), P * fold
    result = nl.ndarray((P, fold, chunks * rows), dtype=x.dtype, buffer=nl.sbuf)
    some = max(1, min(chunks, P // rows))
    wide = max(1, PIECE // width) if some == 1 else 1
    for q in range(0, chunks, some * wide):
        n = min(some * wide, chunks - q)
        lanes, columns = (n * rows, width) if wide == 1 else (rows, n * width)
        start = row * dim + q * width
        pattern = [[width, n], [dim, rows], [1, width]] if wide == 1 else [[dim, rows], [1, columns]]
        t = loaded(x.ap(pattern, offset=start), (lanes, columns), x.dtype)
        if limit > 0:
            t = round_trip(t, lanes, columns, limit)
        turn(result, t, q * rows, lanes, fold)
    return result


def turn(result, t, first, lanes, fold):
    """Columns first.. of result (128, fold, n) = the transposed tiles of t (lanes, some * 128 * fold)."""
    width = P * fold
    chunks = t.shape[1] // width
    some = max(1, min(chunks, BANK * (1 if t.dtype == nl.float32 else 2) // lanes))
    for s in range(fold):
        for q in range(0, chunks, some):
            n = min(some, chunks - q)
            ps = nl.ndarray((P, n, lanes), dtype=t.dtype, buffer=nl.psum)
            for c in range(n):
                nisa.nc_transpose(dst=ps[:, c, :], data=t[:, (q + c) * width + s : (q + c + 1) * width : fold])
            start = first + q * lanes
            nisa.tensor_copy(dst=result[:, s, start : start + n * lanes], src=ps, engine=nisa.engine.scalar)


def projected(x_t, first, rows, items, tiles, fold):
    """(rows, items, 64) in PSUM: x @ w1.T and x @ w3.T for the items of a weight tile (128, items, tiles * 64)."""
    ps = nl.ndarray((rows, items, 2 * GROUP), dtype=nl.float32, buffer=nl.psum)
    for t in range(tiles):
        q, s = t // fold, t % fold
        moving = first[:, :, t * 2 * GROUP : (t + 1) * 2 * GROUP]
        nisa.nc_matmul(dst=ps, stationary=x_t[:, s, q * rows : (q + 1) * rows], moving=moving, accumulate=t > 0)
    return ps


def per_item(meta, kind, rows, items, kinds):
    """Columns kind .. of a (rows, 4, items) tile, each for 32 elements of every item: (rows, items, kinds * 32)."""
    return meta.ap([[4 * items, rows], [1, items], [items, kinds], [0, GROUP]], offset=kind * items)


def hidden_parts(parts, ps, meta, rows, items, clamp, limit):
    """parts (rows, items, 128) = what w2 multiplies: each item's 32 columns four times.

    weight * (silu(gate) * up), clamped, of products rounded to dtype; itself rounded to dtype, through the fp8 round trip if limit > 0, and times
    the item's scale of w2. meta (rows, 4, items): routing weight, scales of w1, w3, w2. Weight 0 gives 0 whatever the row holds.
    """
    both = nl.ndarray((rows, items, 2, GROUP), dtype=parts.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=both, data1=ps, data2=per_item(meta, 1, rows, items, 2), op=nl.multiply)
    if clamp > 0:
        nisa.tensor_scalar(dst=both, data=both, op0=nl.minimum, operand0=clamp)
    gated = nl.ndarray((rows, items, GROUP), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gated, op=nl.silu, data=both[:, :, 0, :])
    if clamp > 0:
        nisa.scalar_tensor_tensor(dst=gated, data=both[:, :, 1, :], op0=nl.maximum, operand0=-clamp, op1=nl.multiply, operand1=gated)
    else:
        nisa.tensor_tensor(dst=gated, data1=gated, data2=both[:, :, 1, :], op=nl.multiply)
    hidden = nl.ndarray((rows, items * GROUP), dtype=parts.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=hidden, data1=gated, data2=per_item(meta, 0, rows, items, 1), op=nl.multiply)
    absent = nl.ndarray((rows, items), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=absent, data=meta[:, 0, :], op0=nl.equal, operand0=0.0)
    nisa.tensor_copy_predicated(dst=hidden, src=0.0, predicate=absent.ap([[items, rows], [1, items], [0, GROUP]]))
    if limit > 0:
        hidden = round_trip(hidden, rows, items * GROUP, limit)
    scale = nl.ndarray((rows, items), dtype=parts.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=scale, src=meta[:, 3, :], engine=nisa.engine.gpsimd)
    source = hidden.ap([[items * GROUP, rows], [GROUP, items], [0, PARTS], [1, GROUP]])
    spread = scale.ap([[items, rows], [1, items], [0, PARTS], [0, GROUP]])
    nisa.tensor_tensor(dst=parts.reshape((rows, items, PARTS, GROUP)), data1=source, data2=spread, op=nl.multiply, engine=nisa.engine.gpsimd)


def parts_turned(parts, rows, items):
    """(128, items, rows) in PSUM from (rows, items, 128)."""
    ps = nl.ndarray((P, items, rows), dtype=parts.dtype, buffer=nl.psum)
    for j in range(items):
        nisa.nc_transpose(dst=ps[:, j, :], data=parts[:, j, :])
    return ps


def spread_rows(z, ps, rows, items, first, some, splits):
    """Fills the blocks of z (128, items, splits, splits * 4 * some) that are not zero: lane 32 b + k, column (s, b, r) is inner column k of row first + r."""
    lanes = PARTS * some
    row, room = splits * lanes, z.shape[1] * splits * splits * lanes
    for b in range(PARTS):
        lane = GROUP * b
        block = z.ap([[room, GROUP], [splits * row, items], [row + lanes, splits], [1, some]], offset=lane * room + b * some)
        source = ps.ap([[items * rows, GROUP], [rows, items], [0, splits], [1, some]], offset=lane * items * rows + first)
        nisa.tensor_copy(dst=block, src=source, engine=nisa.engine.scalar if b % 2 else nisa.engine.vector)


def product(z, second, first, items, lanes, splits, width):
    """(lanes, width) in PSUM: the hidden rows of items first .. first + items - 1 times their w2, a tile (128, items, dim / 4)."""
    ps = nl.ndarray((lanes, width), dtype=nl.float32, buffer=nl.psum)
    for low in range(0, width, BANK):
        high = min(low + BANK, width)
        for j in range(first, first + items):
            for s in range(splits):
                moving = second[:, j, s * width + low : s * width + high]
                nisa.nc_matmul(dst=ps[:, low:high], stationary=z[:, j, s, :], moving=moving, accumulate=j - first + s > 0)
    return ps


def summed(total, part, ps, fresh):
    """total[:, part] (lanes, width) += a product in PSUM; it is set where fresh."""
    if fresh:
        nisa.tensor_copy(dst=total[:, part, :], src=ps, engine=nisa.engine.scalar)
    else:
        nisa.tensor_tensor(dst=total[:, part, :], data1=total[:, part, :], data2=ps, op=nl.add)


def summed_scaled(total, part, z, second, outer, items, splits, fresh):
    """The products added where output column d of item j has a scale of its own: outer (lanes, items, width)."""
    lanes, width = total.shape[0], total.shape[2]
    for j in range(items):
        ps = product(z, second, j, 1, lanes, splits, width)
        first = fresh and j == 0
        scaled = total[:, part, :] if first else nl.ndarray((lanes, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=scaled, data1=ps, data2=outer[:, j, :], op=nl.multiply)
        if not first:
            nisa.tensor_tensor(dst=total[:, part, :], data1=total[:, part, :], data2=scaled, op=nl.add, engine=nisa.engine.gpsimd)


def added(total, part, count, z, parts, weight, rows, items, splits, fresh):
    """total[:, part + i] += what `items` items give rows i * some .. of a block of rows, some = rows / count <= 32.

    weight: (w1 and w3, w2), or (w1 and w3, w2, scales of w2's output columns); parts as `hidden_parts` makes them.
    """
    some = rows // count
    ps = parts_turned(parts, rows, items)
    for i in range(count):
        spread_rows(z, ps, rows, items, i * some, some, splits)
        if len(weight) == 2:
            summed(total, part + i, product(z, weight[1], 0, items, total.shape[0], splits, total.shape[2]), fresh)
        else:
            summed_scaled(total, part + i, z, weight[1], weight[2], items, splits, fresh)


def steps(total, count, z, x_ts, weight, metas, rows, items, fold, splits, clamp, limit, fresh):
    """A step for every block of rows; each block's product of w2 after the next block's of w1 and w3."""
    tiles, waiting = x_ts[0].shape[1] * x_ts[0].shape[2] // rows, []
    for b in range(len(x_ts)):
        ps = projected(x_ts[b], weight[0], rows, items, tiles, fold)
        if b > 0:
            added(total, (b - 1) * count, count, z, waiting[b - 1], weight, rows, items, splits, fresh)
        waiting.append(nl.ndarray((rows, items, P), dtype=x_ts[b].dtype, buffer=nl.sbuf))
        hidden_parts(waiting[b], ps, metas[b], rows, items, clamp, limit)
    last = len(x_ts) - 1
    added(total, last * count, count, z, waiting[last], weight, rows, items, splits, fresh)
