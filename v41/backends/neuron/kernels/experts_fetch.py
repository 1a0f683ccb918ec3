# SPDX-License-Identifier: Apache-2.0
"""Items of experts from HBM into operands: values and e4m3 codes as they are, fp4 codes decoded."""

from v41.backends.neuron.kernels.experts_core import BANK, GROUP, PARTS, emptied, steps
from v41.backends.neuron.kernels.tiles import P, loaded, round_trip
from v41.backends.neuron.nki import nisa, nl


def rounded_rows(x, limit):
    """x (n, dim), n a multiple of 64, through its fp8 round trip, in HBM; a core takes half, a quarter of a row on each lane. x itself if limit is 0."""
    if limit == 0:
        return x
    n, dim = x.shape
    rounded = nl.ndarray((n, dim), dtype=x.dtype, buffer=nl.shared_hbm)
    width, mine = dim // PARTS, n * PARTS // nl.num_programs(0)
    for first in range(nl.program_id(0) * mine, (nl.program_id(0) + 1) * mine, P):
        t = loaded(x.ap([[width, P], [1, width]], offset=first * width), (P, width), x.dtype)
        nisa.dma_copy(dst=rounded.ap([[width, P], [1, width]], offset=first * width), src=round_trip(t, P, width, limit))
    if nl.num_programs(0) == 2:
        nisa.core_barrier(data=rounded)
    return rounded


def halves(raw, dim):
    """(w1 and w3, w2) of a tile (128, items, elements)."""
    inner = dim // P * 2 * GROUP
    return raw[:, :, 0:inner], raw[:, :, inner : inner + dim // PARTS]


def read_as(tiles, packed):
    """The items' elements as they are read: bytes are legacy e4m3 codes, unless they are packed fp4."""
    return tiles.view(nl.float8_e4m3) if tiles.dtype == nl.uint8 and not packed else tiles


def masks():
    """(128, 4) uint16: magnitude and sign bits of the low, then of the high nibbles of two bytes."""
    t = nl.ndarray((P, 4), dtype=nl.uint16, buffer=nl.sbuf)
    nisa.memset(dst=t[:, 0:1], value=0x0707)
    nisa.memset(dst=t[:, 1:2], value=0x0808)
    nisa.memset(dst=t[:, 2:3], value=0x7070)
    nisa.memset(dst=t[:, 3:4], value=0x8080)
    return t


def decoded(pairs, words, mask, low, engine):
    """pairs (128, n) = legacy e4m3 bytes of value * 2^-6, two in a word, of the low or the high nibbles of words (128, n): s e e m to s 0 0 e e m 0 0."""
    magnitude = nl.ndarray(words.shape, dtype=nl.uint16, buffer=nl.sbuf)
    sign = nl.ndarray(words.shape, dtype=nl.uint16, buffer=nl.sbuf)
    if low:
        nisa.tensor_scalar(dst=magnitude, data=words, op0=nl.bitwise_and, operand0=mask[:, 0:1], op1=nl.left_shift, operand1=2)
        nisa.tensor_scalar(dst=sign, data=words, op0=nl.bitwise_and, operand0=mask[:, 1:2], op1=nl.left_shift, operand1=4)
    else:
        nisa.tensor_scalar(dst=magnitude, data=words, op0=nl.bitwise_and, operand0=mask[:, 2:3], op1=nl.right_shift, operand1=2)
        nisa.tensor_scalar(dst=sign, data=words, op0=nl.bitwise_and, operand0=mask[:, 3:4])
    nisa.tensor_tensor(dst=pairs, data1=magnitude, data2=sign, op=nl.bitwise_or, engine=engine)


def unpacked(raw, mask, items, dim, fold):
    """(w1 and w3 in bfloat16, w2 as e4m3 codes), both times 2^-6, of packed items (128, items, bytes); only w1 and w3 have their scales in them.

    Item by item: VectorE is four times as fast where 16-bit elements lie in one run. It takes the bits apart, ScalarE widens, GpSimd scales.
    """
    inner, chunks = dim // P * 2 * GROUP, dim // (P * fold)
    n, row = inner + dim // PARTS, chunks * 2 * GROUP
    codes = nl.ndarray((P, items, n), dtype=nl.uint8, buffer=nl.sbuf)
    values = nl.ndarray((P, items, inner), dtype=nl.bfloat16, buffer=nl.sbuf)
    for j in range(items):
        words, pairs = raw.view(nl.uint16)[:, j, 0 : n // 4], codes.view(nl.uint16)[:, j, :]
        decoded(pairs[:, 0 : n // 4], words, mask, True, nisa.engine.vector)
        decoded(pairs[:, n // 4 : n // 2], words, mask, False, nisa.engine.gpsimd)
        power = nl.ndarray((P, row), dtype=nl.uint16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=power, src=raw[:, j, n // 2 : n // 2 + row], engine=nisa.engine.scalar)
        nisa.tensor_scalar(dst=power, data=power, op0=nl.left_shift, operand0=7)
        wide = nl.ndarray((P, inner), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=wide, src=codes.view(nl.float8_e4m3)[:, j, 0:inner], engine=nisa.engine.scalar)
        spread = power.view(nl.bfloat16).ap([[row, P], [2 * GROUP, chunks], [0, fold], [1, 2 * GROUP]])
        shape = (P, chunks, fold, 2 * GROUP)
        nisa.tensor_tensor(dst=values[:, j, :].reshape(shape), data1=wide.reshape(shape), data2=spread, op=nl.multiply, engine=nisa.engine.gpsimd)
    return values, codes.view(nl.float8_e4m3)[:, :, inner:n]


def lanes_of(rows, splits):
    """(4 * splits, 4 * splits * rows) bfloat16: one where lane (s, b) meets column (s, b, r)."""
    n = PARTS * splits
    lane = nl.ndarray((n, n, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=lane, pattern=[[1, n], [0, rows]], offset=0, channel_multiplier=-1)
    result = nl.ndarray((n, n, rows), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=lane, op0=nl.equal, operand0=0.0)
    return result.reshape((n, n * rows))


def decoders(packed, rows, splits):
    """What decoding packed items needs: (bit masks, `lanes_of`), or nothing."""
    return (masks(), lanes_of(rows, splits)) if packed else ()


def outer_scales(raw, lanes, items, width):
    """(lanes, items, width) bfloat16 powers of two of e8m0 bytes (4 * splits, items, width), every lane (s, b) for all its rows; by TensorE, exact."""
    n, count = raw.shape[0], lanes.shape[1]
    power = nl.ndarray((n, items, width), dtype=nl.uint16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=power, src=raw)
    nisa.tensor_scalar(dst=power, data=power, op0=nl.left_shift, operand0=7)
    flat = power.view(nl.bfloat16).reshape((n, items * width))
    result = nl.ndarray((count, items * width), dtype=nl.bfloat16, buffer=nl.sbuf)
    for low in range(0, items * width, BANK):
        high = min(low + BANK, items * width)
        ps = nl.ndarray((count, high - low), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=ps, stationary=lanes, moving=flat[:, low:high], accumulate=False)
        nisa.tensor_copy(dst=result[:, low:high], src=ps, engine=nisa.engine.scalar)
    return result.reshape((count, items, width))


def operands(raw, raw_outer, helpers, items, dim, fold):
    """What `step` takes as weight: of packed items decoded, with scales of w2 by raw_outer (4 * splits, items, width) and `decoders`; else as they are."""
    if raw.dtype != nl.uint8:
        return halves(raw, dim)
    first, second = unpacked(raw, helpers[0], items, dim, fold)
    return first, second, outer_scales(raw_outer, helpers[1], items, raw_outer.shape[2])


def begun(shape, shared_items):
    """A tile of sums: zeros, or left to `passed`."""
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf) if shared_items > 0 else emptied(shape, nl.float32)


def passed(total, parts, z, x_ts, tiles, rows, fold, splits, clamp, limit):
    """total = what the items of an expert give that every row passes with weight 1; the cores share the items, of which there is an even number."""
    programs, me, most = nl.num_programs(0), nl.program_id(0), z.shape[1]
    mine, elements = tiles.shape[0] // programs, tiles.shape[2]
    dim = x_ts[0].shape[1] * x_ts[0].shape[2] // rows * P
    for first in range(0, mine, most):
        items = min(most, mine - first)
        weight = nl.ndarray((P, items, elements), dtype=tiles.dtype, buffer=nl.sbuf)
        start = (me * mine + first) * P * elements
        nisa.dma_copy(dst=weight, src=tiles.ap([[elements, P], [P * elements, items], [1, elements]], offset=start))
        meta = nl.ndarray((rows, 4, items), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=meta, value=1.0)
        metas = []
        for _ in range(len(x_ts)):
            metas.append(meta)
        steps(total, parts, z, x_ts, halves(weight, dim), metas, rows, items, fold, splits, clamp, limit, first == 0)


def stored(out, total, row, some, splits):
    """Rows row.. of out, `some` a part, from the sums of both cores: each adds and stores half of every lane's columns."""
    dim, parts, width = out.shape[1], total.shape[1], total.shape[2]
    me, half = nl.program_id(0), width // nl.num_programs(0)
    for first in range(0, parts, PARTS):
        count = min(PARTS, parts - first)
        mine = total[:, first : first + count, me * half : (me + 1) * half]
        if nl.num_programs(0) == 2:
            theirs = nl.ndarray((total.shape[0], count, half), dtype=nl.float32, buffer=nl.sbuf)
            sent = total[:, first : first + count, (1 - me) * half : (2 - me) * half]
            nisa.sendrecv(src=sent, dst=theirs, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
            nisa.tensor_tensor(dst=theirs, data1=theirs, data2=mine, op=nl.add)
            mine = theirs
        for i in range(count):
            place = out.ap([[width, splits], [dim // PARTS, PARTS], [dim, some], [1, half]], offset=(row + (first + i) * some) * dim + me * half)
            nisa.dma_copy(dst=place, src=mine[:, i, :])
