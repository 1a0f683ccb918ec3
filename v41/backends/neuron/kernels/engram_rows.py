# SPDX-License-Identifier: Apache-2.0
"""engram_rows: fp8 rows of a table gathered by id, times a scale per 32 columns; zeros for ids that it does not hold (docs/kernels.md, Engram).

    for 128 ids:  codes, scale bytes = 0; DMA gather of both by row id, ids out of range skipped: their row stays 0
        magnitude = min(code & 0x7F, 0x77) read as e4m3 + max(32 (code & 0x7F) - 3824, 0)
        value = magnitude * (1 or -1) * scale                                            ScalarE makes the second term and the sign

The engines read codes 0x78 .. 0x7E as infinity and NaN; they are 256, 288 .. 448, which the second term adds to 240, exactly. The scale byte is
the exponent field of a float32. Everything is exact, in bfloat16 too. Ids are only moved, so tables may have up to 2^31 rows.

Limits: scale bytes 0 .. 254; NaN codes 0x7F and 0xFF read as 480; the width a multiple of 32.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import BLOCK, P, spread
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics
from v41.spec.table import Fp8Rows

FROM_240 = 3824.0  # 32 * 0x77 + 16


@nki.jit
def rows_kernel(codes, scales, ids, wide):
    """(n, width) of codes (rows, width) and scales (rows, width / 32) as bytes, ids (n, 1) uint32; n a multiple of cores * (ids of a block)."""
    n, columns, blocks = ids.shape[0], codes.shape[1], scales.shape[1]
    dtype = nl.float32 if wide else nl.bfloat16
    out = nl.ndarray((n, columns), dtype=dtype, buffer=nl.shared_hbm)
    mine = n // nl.num_programs(0)
    first = nl.program_id(0) * mine
    lanes = min(P, mine)
    for row in range(first, first + mine, lanes):
        at = nl.ndarray((lanes, 1), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(dst=at, src=ids[row : row + lanes, :])
        code = gathered(codes, at, lanes, columns)
        bits = nl.ndarray((lanes, blocks), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=bits, src=gathered(scales, at, lanes, blocks))
        nisa.tensor_scalar(dst=bits, data=bits, op0=nl.left_shift, operand0=23)
        power = bits.view(nl.float32)
        # Byte 0 is 2^-127, which has no exponent field.
        nisa.tensor_scalar(dst=power, data=power, op0=nl.maximum, operand0=2.0**-127)
        values = nl.ndarray((lanes, blocks, BLOCK), dtype=dtype, buffer=nl.sbuf)
        scale = spread(power, lanes, blocks, BLOCK)
        nisa.tensor_tensor(dst=values, data1=decoded(code, lanes, columns).reshape((lanes, blocks, BLOCK)), data2=scale, op=nl.multiply)
        nisa.dma_copy(dst=out[row : row + lanes, :], src=values.reshape((lanes, columns)))
    return out


def gathered(table, at, lanes, columns):
    """(lanes, columns) bytes of the rows that `at` names; zeros where there is no such row."""
    t = nl.ndarray((lanes, columns), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.memset(dst=t, value=0, engine=nisa.engine.gpsimd)
    rows = table.ap([[columns, lanes], [1, columns]], vector_offset=at, indirect_dim=0)
    nisa.dma_copy(dst=t, src=rows, oob_mode=nisa.oob_mode.skip)
    return t


def decoded(code, lanes, columns):
    """bfloat16 values of e4m3fn codes, all exact."""
    low7 = nl.ndarray((lanes, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.memset(dst=low7, value=0x7F)
    magnitude = nl.ndarray((lanes, columns), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=magnitude, data=code, op0=nl.bitwise_and, operand0=low7)
    above = nl.ndarray((lanes, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=above, op=nl.relu, data=magnitude, scale=32.0, bias=-FROM_240)
    sign = nl.ndarray((lanes, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=sign, op=nl.sign, data=code, scale=-1.0, bias=127.5)
    most = nl.ndarray((lanes, columns), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=most, data=magnitude, op0=nl.minimum, operand0=float(0x77))
    value = nl.ndarray((lanes, columns), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=value, data1=above, data2=most.view(nl.float8_e4m3), op=nl.add)
    nisa.tensor_tensor(dst=value, data1=value, data2=sign, op=nl.multiply)
    return value


def engram_rows(run: Run, table: Fp8Rows, hash_ids: Tensor, numerics: Numerics) -> Tensor:
    """`engram_rows` of the spec: table of [rows, width] codes, hash_ids [b, s, columns] int32; [b, s, columns * width]."""
    if numerics.dtype == "float64":
        raise ValueError("engram_rows: numerics dtype float64; the kernel makes bfloat16 and float32")
    (b, s, columns), width = hash_ids.shape, table.weight.shape[1]
    n = b * s * columns
    if width % BLOCK:
        raise ValueError(f"engram_rows: rows of {width} codes; the kernel takes multiples of {BLOCK}")
    if n == 0:
        return torch.empty((b, s, columns * width), dtype=numerics.act, device=hash_ids.device)
    cores = 1 if n <= BLOCK else 2
    more = -n % (cores * min(P, -(-n // cores)))
    ids = dense(pad(hash_ids.reshape(-1), (0, more), value=-1), -1, 1).view(torch.uint32)
    codes, scales = (dense(t.view(torch.uint8), *t.shape) for t in (table.weight, table.scale))
    return run(rows_kernel, cores, codes, scales, ids, numerics.act == torch.float32)[:n].view(b, s, columns * width)
