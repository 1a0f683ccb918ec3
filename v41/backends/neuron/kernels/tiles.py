# SPDX-License-Identifier: Apache-2.0
"""Helpers that kernels share: tiles, transposes, rows on every partition, the fp8 round trip (docs/kernels.md 2).

Helpers are traced with the kernel that calls them: every argument by position, no defaults.
"""

from v41.backends.neuron.nki import nisa, nl

P = 128
BLOCK = 32
LONG = 1024  # columns from which the last third of a round trip is worth two other engines


def loaded(src, shape, dtype):
    """A new SBUF tile of `shape` with the elements of an HBM view, by one DMA, which converts where dtypes differ."""
    t = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=src)
    return t


def replicated(row, partitions, n):
    """(partitions, n) in SBUF, each partition the n elements at which an HBM view starts, by one DMA."""
    return loaded(row.ap([[0, partitions], [1, n]]), (partitions, n), row.dtype)


def converted(t, dtype):
    """A copy of a tile in another dtype, or out of PSUM; float32 to bfloat16 is to nearest even."""
    result = nl.ndarray(t.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=t)
    return result


def transposed(t):
    """(columns, rows) in SBUF from a (rows, columns) tile of 2 or 4 bytes an element, by TensorE, bits kept."""
    rows, columns = t.shape
    ps = nl.ndarray((columns, rows), dtype=t.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=ps, data=t)
    return converted(ps, t.dtype)


def finite(t, lanes, n, dtype, most):
    """A copy (lanes, n) of t, clamped to +-most, 0 for NaN: what may meet zeros in a product."""
    number = nl.ndarray((lanes, n), dtype=nl.uint8, buffer=nl.sbuf)
    clamped = nl.ndarray((lanes, n), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=clamped, data=t, op0=nl.minimum, operand0=most, op1=nl.maximum, operand1=-most)
    nisa.tensor_tensor(dst=number, data1=clamped, data2=clamped, op=nl.equal)
    result = nl.ndarray((lanes, n), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=result, value=0.0, engine=nisa.engine.gpsimd)
    nisa.tensor_copy_predicated(dst=result, src=clamped, predicate=number)
    return result


def bounded(t, bits, most):
    """A copy of a tile (lanes, n) with magnitudes of at most `most`, whose bfloat16 pattern is `bits`; NaN becomes a number.

    As integers the patterns of infinity and NaN lie above those of numbers: the positive ones as int16, the negative ones as uint16.
    """
    lanes, n = t.shape
    if t.dtype == nl.float32:
        return finite(t, lanes, n, nl.float32, most)
    result = nl.ndarray((lanes, n), dtype=t.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result.view(nl.int16), data=t.view(nl.int16), op0=nl.minimum, operand0=float(bits))
    above = result.view(nl.uint16)
    nisa.tensor_scalar(dst=above, data=above, op0=nl.minimum, operand0=float(bits + 0x8000))
    return result


def magnitude(x, rows, n):
    """|x| of a bfloat16 tile (rows, n): the sign bit is shifted out."""
    bits = nl.ndarray((rows, n), dtype=nl.uint16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bits, data=x.view(nl.uint16), op0=nl.left_shift, operand0=1, op1=nl.right_shift, operand1=1)
    return bits.view(nl.bfloat16)


def power_above(y, rows, n):
    """2^ceil(log2 y) of a positive, normal float32 tile (rows, n): the exponent field, plus one where the mantissa is not zero."""
    floor = nl.ndarray((rows, n), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=floor, data=y.view(nl.int32), op0=nl.right_shift, operand0=23, op1=nl.left_shift, operand1=23)
    above = nl.ndarray((rows, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=above, data1=y, data2=floor.view(nl.float32), op=nl.greater)
    scale = nl.ndarray((rows, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=scale, data=above, op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=floor.view(nl.float32))
    return scale


def power_inverse(scale, rows, n, dtype):
    """1 / scale of a float32 tile of powers of two in 2^-126 .. 2^126, exact: the exponent field e becomes 254 - e."""
    bits = nl.ndarray((rows, n), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bits, data=scale.view(nl.int32), op0=nl.invert, operand0=None, op1=nl.right_shift, operand1=23)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.left_shift, operand0=24, op1=nl.right_shift, operand1=1)
    result = nl.ndarray((rows, n), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=bits.view(nl.float32), op0=nl.multiply, operand0=0.5)
    return result


def spread(scale, rows, blocks, size):
    """A view (rows, blocks, size) of a (rows, blocks) tile, each element `size` times."""
    return scale.ap([[blocks, rows], [1, blocks], [0, size]])


def round_trip(x, rows, n, limit):
    """`act_round` of a bfloat16 tile (rows <= 128, n a multiple of 32): codes of at most `limit` (240), one power of two a group of 32.

    s = P2(max(amax, 1e-4) * fp32(1 / limit)); y = e4m3(clamp(x / s, -limit, limit)) * s: x / s and y are exact in bfloat16, so the one
    rounding is that to e4m3, to nearest even.
    """
    blocks = n // BLOCK
    top = nl.ndarray((rows, blocks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=magnitude(x, rows, n).reshape((rows, blocks, BLOCK)), axis=2)
    nisa.tensor_scalar(dst=top, data=top, op0=nl.maximum, operand0=1e-4, op1=nl.multiply, operand1=1.0 / limit)
    scale = power_above(top, rows, blocks)
    inverse = power_inverse(scale, rows, blocks, nl.bfloat16)
    narrow = converted(scale, nl.bfloat16)
    scaled = nl.ndarray((rows, blocks, BLOCK), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=scaled, data1=x.reshape((rows, blocks, BLOCK)), data2=spread(inverse, rows, blocks, BLOCK), op=nl.multiply)
    codes = nl.ndarray((rows, blocks, BLOCK), dtype=nl.float8_e4m3, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=codes, data=scaled, op0=nl.minimum, operand0=limit, op1=nl.maximum, operand1=-limit)
    values = nl.ndarray((rows, blocks, BLOCK), dtype=nl.bfloat16, buffer=nl.sbuf)
    y = nl.ndarray((rows, blocks, BLOCK), dtype=nl.bfloat16, buffer=nl.sbuf)
    long = n >= LONG
    nisa.tensor_copy(dst=values, src=codes, engine=nisa.engine.scalar if long else nisa.engine.vector)
    back = nisa.engine.gpsimd if long else nisa.engine.vector
    nisa.tensor_tensor(dst=y, data1=values, data2=spread(narrow, rows, blocks, BLOCK), op=nl.multiply, engine=back)
    return y.reshape((rows, n))
