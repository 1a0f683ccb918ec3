# SPDX-License-Identifier: Apache-2.0
"""Weights as float32, a piece at a time: exact values of fp8, fp4 and bfloat16 tensors, by vector instructions (docs/performance.md 3).

fp8 and fp4 codes become float16 by moving their bits: the fields of float16 are wide enough for both, and its subnormals are theirs. The
value is then short of a power of two, which joins the block's scale.
"""

import threading

import torch
from torch import Tensor

from v41.spec.ops.quant import BLOCK, dequantize
from v41.spec.table import Fp4, Fp4Like, Fp8, Fp8Like

PAD = 16  # floats behind each row: rows a multiple of 4096 bytes apart fall into the same cache sets
PIECE = 1 << 18  # codes whose steps stay in the second-level cache
FP8_SHORT, FP4_SHORT = 2.0**8, 2.0**14  # what a code moved into float16 lacks: the difference of the exponent biases
FP8_MOST, FP4_MOST = 127 + 127 - 8, 127 + 127 - 14  # scale bytes up to which scale times that is finite
SCRATCH = 1 << 20  # floats of a thread's scratch

Matrix = Fp8 | Fp4 | Tensor


class Scratch(threading.local):
    """One thread's space for widened weights: memory that stays in the cache, and that the system need not clear for every product."""

    floats: Tensor | None = None


scratch = Scratch()


def room(rows: int, width: int, device: torch.device) -> Tensor:
    """Space for a float32 matrix whose rows do not collide in the cache. A small one is the thread's scratch: until the next call."""
    if rows * (width + PAD) > SCRATCH or device.type != "cpu":
        return torch.empty((rows, width + PAD), dtype=torch.float32, device=device)[:, :width]
    if scratch.floats is None:
        with torch.inference_mode(False):
            scratch.floats = torch.empty(SCRATCH, dtype=torch.float32)
    return scratch.floats.as_strided((rows, width), (width + PAD, 1))


def plain(w: Fp8Like | Fp4Like | Matrix) -> Matrix:
    """The matrix in a form that `widen` knows: whatever else there is becomes float32 here."""
    return w if isinstance(w, Tensor | Fp8 | Fp4) else dequantize(w, torch.float32)


def sizes(w: Matrix) -> tuple[int, int]:
    """(rows, columns) of one matrix."""
    if isinstance(w, Tensor):
        rows, columns = w.shape
        return rows, columns
    return w.weight.shape[0], w.weight.shape[1] * (2 if isinstance(w, Fp4) else 1)


def some_rows(w: Matrix, a: int, b: int) -> Matrix:
    """Rows a .. b - 1; a is a multiple of 32 for an fp8 matrix."""
    if isinstance(w, Tensor):
        return w[a:b]
    if isinstance(w, Fp8):
        return Fp8(w.weight[a:b], w.scale[a // BLOCK : -(-b // BLOCK)])
    return Fp4(w.weight[a:b], w.scale[a:b])


def widen(w: Matrix, out: Tensor) -> None:
    """Writes the values of a matrix to `out` [rows, columns], float32. Codes are numbers: no tensor that was read holds a NaN."""
    if isinstance(w, Tensor):
        out.copy_(w)
        return
    rows, columns = sizes(w)
    step = max(PIECE // columns // BLOCK, 1) * BLOCK
    for a in range(0, rows, step):
        b = min(a + step, rows)
        part, into = some_rows(w, a, b), out[a:b]
        if isinstance(part, Fp8):
            widen_fp8(part, into)
        if isinstance(part, Fp4):
            widen_fp4(part, into)


def widen_fp8(w: Fp8, out: Tensor) -> None:
    """e4m3 s eeee mmm is float16 s 0eeee mmm0000000, 2^8 too small."""
    if int(w.scale.view(torch.uint8).max()) > FP8_MOST:
        out.copy_(dequantize(w, torch.float32))
        return
    bits = w.weight.view(torch.int8).to(torch.int16)  # the sign is where float16 has it
    out.copy_(((bits << 7) & 0x3F80).bitwise_or_(bits & -0x8000).view(torch.float16))
    rows, columns = out.shape
    scale = (w.scale.float() * FP8_SHORT).repeat_interleave(BLOCK, -1)[:, :columns]
    whole = rows - rows % BLOCK
    out[:whole].unflatten(0, (-1, BLOCK)).mul_(scale[: whole // BLOCK, None])
    if whole < rows:
        out[whole:].mul_(scale[-1])


def widen_fp4(w: Fp4, out: Tensor) -> None:
    """e2m1 s ee m is float16 s 000ee m000000000, 2^14 too small. One product puts both codes of a byte at the top of their halves."""
    if int(w.scale.view(torch.uint8).max()) > FP4_MOST:
        out.copy_(dequantize(w, torch.float32))
        return
    bits = w.weight.view(torch.uint8).to(torch.int32).mul_((1 << 24) + (1 << 12)).view(torch.int16)
    out.copy_(bits.bitwise_right_shift_(3).bitwise_and_(-0x7200).view(torch.float16))  # -0x7200 is 1000111000000000
    columns, scale = out.shape[1], w.scale.float() * FP4_SHORT
    if columns % BLOCK:
        out.mul_(scale.repeat_interleave(BLOCK, -1)[:, :columns])
    else:
        out.unflatten(1, (-1, BLOCK)).mul_(scale[..., None])
