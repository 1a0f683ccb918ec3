# SPDX-License-Identifier: Apache-2.0
"""Weights of a product on their way to TensorE: the four forms of gemm.py as tiles of inner columns on lanes."""

from v41.backends.neuron.kernels.tiles import BLOCK, P, converted
from v41.backends.neuron.nki import nisa, nl

CHUNK = 8192  # bytes a partition of the weights of one DMA
RUN = 4096  # contiguous bytes that a DMA needs for its full rate


def pair(kind):
    """Tiles that lie interleaved on a lane."""
    return 2 if kind == "codes" or kind == "folded" else 1


def steps(w, kind, tiles, size):
    """Tiles of one DMA: CHUNK bytes a partition, or runs of at least RUN bytes in the rows that it turns, evenly shared."""
    if kind == "tiled":
        return max(1, CHUNK // (size * 2))
    least = RUN // P // (4 if w.dtype == nl.float32 else 2)
    turns = tiles // pair(kind)
    return -(-turns // max(1, turns // least)) * pair(kind)


def inner_tiles(w, kind):
    """Tiles of at most 128 inner columns."""
    if kind == "tiled":
        return w.shape[2]
    return -(-w.shape[1] // P) * pair(kind)


def weights(w, scales, kind, dtype, t0, count, c, size, columns):
    """Tiles t0 .. t0 + count - 1 of columns c .. c + size - 1: a list of (lanes <= 128, size) views that TensorE takes with the operand's dtype."""
    if kind == "tiled":
        return tiled(w, dtype, t0, count, c, size, columns)
    if kind == "natural":
        return natural(w, dtype, t0, count, c, size)
    found, n = [], 2 if kind == "codes" else 1
    raw = natural(w, w.dtype, t0 // 2, count // 2, c, size)
    for i in range(len(raw)):
        lanes = raw[i].shape[0]
        power = powers(scales, lanes, t0 // 2 + i, c, size, dtype) if n == 2 else raw[i]
        for half in range(2):  # inner columns 256 p + 2q, then 256 p + 2q + 1
            codes = raw[i].view(nl.uint8 if n == 2 else nl.float8_e4m3)[:, half : 2 * size : 2]
            if n == 2:
                codes = decode(codes, power, lanes, size, dtype)
            elif dtype == nl.float32:
                codes = converted(codes, dtype)
            found.append(codes)
    return found


def tiled(w, dtype, t0, count, c, size, columns):
    """Prepared weights: one DMA, contiguous in every lane; it widens them for a float32 operand."""
    tiles = w.shape[2]
    held = nl.ndarray((P, count, size), dtype=dtype, buffer=nl.sbuf)
    start = (c // columns * P * tiles + t0) * columns + c % columns
    nisa.dma_copy(dst=held, src=w.ap([[tiles * columns, P], [columns, count], [1, size]], offset=start))
    found = []
    for t in range(count):
        found.append(held[:, t, :])
    return found


def natural(w, dtype, t0, count, c, size):
    """Weights as (out, inner): whole tiles turned by one DMA, a last tile of fewer lanes by its own."""
    inner = w.shape[1]
    whole = min(count, inner // P - t0)
    found = []
    if whole > 0:
        held = turned_by_dma(w, dtype, t0 * P, P, whole, c, size)
        for t in range(whole):
            found.append(held[:, t, :])
    if whole < count:
        last = turned_by_dma(w, dtype, inner // P * P, inner % P, 1, c, size)
        found.append(last[:, 0, :])
    return found


def turned_by_dma(w, dtype, k, lanes, count, c, size):
    """(lanes, count, size) of rows c.. and columns k.. of an (out, inner) tensor in HBM."""
    inner = w.shape[1]
    held = nl.ndarray((lanes, count, size), dtype=w.dtype, buffer=nl.sbuf)
    nisa.dma_transpose(dst=held, src=w.ap([[inner, size], [lanes, count], [1, lanes]], offset=c * inner + k))
    if w.dtype == dtype:
        return held
    wider = nl.ndarray((lanes, count, size), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wider, src=held)
    return wider


def powers(scales, lanes, p, c, size, dtype):
    """(lanes, size / 32) powers of two of e8m0 bytes above 0."""
    pairs, blocks, n = scales.shape[1], scales.shape[2], -(-size // BLOCK)
    codes = nl.ndarray((lanes, n), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=codes, src=scales.ap([[pairs * blocks, lanes], [1, n]], offset=p * blocks + c // BLOCK))
    bits = nl.ndarray((lanes, n), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=bits, src=codes)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.left_shift, operand0=23)
    result = nl.ndarray((lanes, n), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=bits.view(nl.float32))
    return result


def decode(codes, power, lanes, size, dtype):
    """e4m3fn codes times powers of two, exact: a code c of 256 .. 448 (magnitude 0x78 .. 0x7e) is twice the code c - 8, which trn2 knows."""
    top = nl.ndarray((lanes, size), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=top, data=codes, op0=nl.left_shift, operand0=1)
    high = nl.ndarray((lanes, size), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=high, data=top, op0=nl.greater_equal, operand0=0xF0)
    low = nl.ndarray((lanes, size), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=low, data=high, op0=nl.multiply, operand0=-8.0, op1=nl.add, operand1=codes)
    value = nl.ndarray((lanes, size), dtype=dtype, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=value, data=high, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=low.view(nl.float8_e4m3))
    result = nl.ndarray((lanes, size), dtype=dtype, buffer=nl.sbuf)
    n, whole = -(-size // BLOCK), size // BLOCK * BLOCK
    if whole > 0:
        blocks = (lanes, whole // BLOCK, BLOCK)
        spread = power.ap([[n, lanes], [1, whole // BLOCK], [0, BLOCK]])
        nisa.tensor_tensor(dst=result[:, 0:whole].reshape(blocks), data1=value[:, 0:whole].reshape(blocks), data2=spread, op=nl.multiply)
    if whole < size:
        spread = power.ap([[n, lanes], [0, size - whole]], offset=n - 1)
        nisa.tensor_tensor(dst=result[:, whole:size], data1=value[:, whole:size], data2=spread, op=nl.multiply)
    return result
