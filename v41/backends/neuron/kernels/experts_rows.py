# SPDX-License-Identifier: Apache-2.0
"""Rows of many: which rows choose which expert, as places in lists that are never written, and rows gathered and scattered by them.

The rows of an expert have places 0, 1, .. in increasing order. A block of an expert is `rows` places; its row numbers come out of one product with
a matrix that has a one where a row's place is the lane's.
"""

from v41.backends.neuron.kernels.experts_core import GROUP, PARTS
from v41.backends.neuron.kernels.experts_route import routed
from v41.backends.neuron.kernels.tiles import P, converted
from v41.backends.neuron.nki import nisa, nl

OUTSIDE = 4194304  # beyond every row number: such a lane gathers and scatters nothing


def counted(n, value):
    """(128, n) float32: value * lane + column."""
    t = nl.ndarray((P, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=t, pattern=[[1, n]], offset=0, channel_multiplier=value)
    return t


def placed(ids, weights, scales, tiles):
    """(given, places, counts): given (128, 4, tiles, held + 1) as `routed` of each 128 rows; places (128, tiles, held + 1), -1 where the row
    does not choose the expert; counts (128, held + 1), the same on all lanes."""
    columns = scales.shape[1]
    given = nl.ndarray((P, 4, tiles, columns), dtype=nl.float32, buffer=nl.sbuf)
    places = nl.ndarray((P, tiles, columns), dtype=nl.float32, buffer=nl.sbuf)
    counts = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=counts, value=0.0)
    ones = nl.ndarray((P, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    before = nl.ndarray((P, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=before, data=counted(P, -1), op0=nl.greater, operand0=0.0)
    for t in range(tiles):
        table = routed(ids, weights, scales, t * P, P)
        nisa.tensor_copy(dst=given[:, :, t, :], src=table, engine=nisa.engine.gpsimd)
        flags = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=flags, data=table[:, 0, :], op0=nl.not_equal, operand0=0.0)
        earlier = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=earlier, stationary=before, moving=flags, accumulate=False)
        place = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(dst=place, data=earlier, op0=nl.add, operand0=1.0, op1=nl.add, operand1=counts)
        nisa.tensor_tensor(dst=place, data1=place, data2=flags, op=nl.multiply)
        nisa.tensor_scalar(dst=places[:, t, :], data=place, op0=nl.add, operand0=-1.0)
        here = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=here, stationary=ones, moving=flags, accumulate=False)
        nisa.tensor_tensor(dst=counts, data1=here, data2=counts, op=nl.add)
    return given, places, counts


def blocks_of(counts, blocks, log_blocks, rows):
    """(experts, block numbers, how many): lists (1, n) uint32 of the blocks of `rows` rows that have any; `blocks` = 2^log_blocks."""
    columns = counts.shape[1]
    held = columns - 1
    n = held * blocks
    first = nl.ndarray((1, held, blocks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=first, pattern=[[0, held], [rows, blocks]], offset=0)
    some = nl.ndarray((1, held, blocks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=some, data1=counts.ap([[columns, 1], [1, held], [0, blocks]], offset=1), data2=first, op=nl.greater)
    found = nl.ndarray((1, n + 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.nonzero_with_count(dst=found, src=some.reshape((1, n)), index_offset=0, padding_val=0)
    units = nl.ndarray((1, n), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=units, src=found[:, 0:n])
    experts = nl.ndarray((1, n), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=experts, data=units, op0=nl.right_shift, operand0=log_blocks)
    numbers = nl.ndarray((1, n), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=numbers, data=experts, op0=nl.left_shift, operand0=log_blocks)
    nisa.tensor_tensor(dst=numbers, data1=units, data2=numbers, op=nl.subtract)
    count = nisa.register_alloc()
    nisa.register_load(count, found[:, n : n + 1])
    return experts, numbers, count


def fixed(n, rows, blocks):
    """What every block needs: (info, firsts, lanes, copies, parts).

    info (128, n / 128, 3): row number, 1, and room for a weight; firsts (128, blocks): the first place of a block; lanes (128, rows): the lane;
    copies (rows, rows / 32, 128): ones where lane 32 i + r meets lane 32 b + r of part i; parts (128, 1): b of lane 32 b + r.
    """
    info = nl.ndarray((P, n // P, 3), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=info, value=1.0)
    nisa.iota(dst=info[:, :, 0], pattern=[[P, n // P]], offset=0, channel_multiplier=1)
    firsts = nl.ndarray((P, blocks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=firsts, pattern=[[rows, blocks]], offset=0)
    copies = nl.ndarray((rows, rows // GROUP, PARTS, GROUP), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=copies, pattern=[[GROUP, rows // GROUP], [0, PARTS], [1, GROUP]], offset=0, channel_multiplier=-1)
    nisa.tensor_scalar(dst=copies, data=copies, op0=nl.equal, operand0=0.0)
    parts = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    for b in range(PARTS):
        nisa.memset(dst=parts[b * GROUP : (b + 1) * GROUP, :], value=float(b))
    return info, firsts, counted(rows, 0), copies.reshape((rows, rows // GROUP, P)), parts


def of_block(tables, places, given, expert, number):
    """(first, place, own) of a block of an expert, both registers: its first place (128, 1), the rows' places in the expert's list (128, tiles), and
    what they give it and its scales (128, 4, tiles); the weights go into the room in `fixed`."""
    info, firsts = tables[0], tables[1]
    tiles, columns = places.shape[1], places.shape[2]
    first = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=first, src=firsts.ap([[firsts.shape[1], P], [1, 1]], scalar_offset=number, indirect_dim=1))
    place = nl.ndarray((P, tiles), dtype=nl.float32, buffer=nl.sbuf)
    pattern = [[tiles * columns, P], [columns, tiles], [1, 1]]
    nisa.tensor_copy(dst=place, src=places.ap(pattern, offset=1, scalar_offset=expert, indirect_dim=2))
    own = nl.ndarray((P, 4, tiles), dtype=nl.float32, buffer=nl.sbuf)
    pattern = [[4 * tiles * columns, P], [tiles * columns, 4], [columns, tiles], [1, 1]]
    nisa.tensor_copy(dst=own, src=given.ap(pattern, offset=1, scalar_offset=expert, indirect_dim=3), engine=nisa.engine.gpsimd)
    nisa.tensor_copy(dst=info[:, :, 2], src=own[:, 0, :])
    return first, place, own


def chosen(place, info, lanes_of, first, lanes):
    """(lanes, 3) float32: row number, 1 and weight of the row whose place is first + lanes_of(lane); zeros for a lane without a row.

    place (128, tiles); info (128, tiles, 3); lanes_of (128, lanes), the same on all lanes; first (128, 1).
    """
    ps = nl.ndarray((lanes, 3), dtype=nl.float32, buffer=nl.psum)
    for t in range(place.shape[1]):
        ones = nl.ndarray((P, lanes), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=ones, data=lanes_of, op0=nl.add, operand0=first, op1=nl.equal, operand1=place[:, t : t + 1])
        nisa.nc_matmul(dst=ps, stationary=ones, moving=info[:, t, :], accumulate=t > 0)
    return converted(ps, nl.float32)


def copied(found, copies, part):
    """(128, 3): what `chosen` found for the 32 rows of a part, on lane 32 b + r for every b."""
    ps = nl.ndarray((P, 3), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=copies[:, part, :], moving=found, accumulate=False)
    return converted(ps, nl.float32)


def indices(found, lanes, times, part):
    """(lanes, 1) uint32: row number * times + part (lanes, 1), or OUTSIDE where there is no row."""
    beyond = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=beyond, data=found[:, 1:2], op0=nl.multiply, operand0=-float(OUTSIDE), op1=nl.add, operand1=float(OUTSIDE))
    row = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=row, data=found[:, 0:1], op0=nl.multiply, operand0=times, op1=nl.add, operand1=part)
    index = nl.ndarray((lanes, 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=index, data1=row, data2=beyond, op=nl.add)
    return index


def gathered(source, found, rows, dim):
    """(rows, dim): rows of an HBM tensor by `chosen`, zeros where there is none."""
    t = nl.ndarray((rows, dim), dtype=source.dtype, buffer=nl.sbuf)
    nisa.memset(dst=t, value=0.0, engine=nisa.engine.gpsimd)
    index = indices(found, rows, 1.0, 0.0)
    nisa.dma_copy(dst=t, src=source.ap([[dim, rows], [1, dim]], vector_offset=index, indirect_dim=0), oob_mode=nisa.oob_mode.skip)
    return t


def scattered(sums, values, found, part):
    """Adds values (128, dim / 4), lane (b, r), to the rows of sums (n * 4, dim / 4) by `copied`; part (128, 1) is b."""
    width = sums.shape[1]
    index = indices(found, P, float(PARTS), part)
    place = sums.ap([[width, P], [1, width]], vector_offset=index, indirect_dim=0)
    nisa.dma_compute(dst=place, srcs=[place, values], reduce_op=nl.add, oob_mode=nisa.oob_mode.skip)
