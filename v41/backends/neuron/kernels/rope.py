# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of the last dims of rows, and its inverse (docs/model.md 4).

The angle is the float32 product of position and frequency, up to 2^20. ScalarE knows sin on [-pi, pi] only, so 2 pi k is taken off in parts:

    k = round(angle / 2 pi), k < 2^18, perhaps one off
    r = angle - k * c1 - k * c2 - k * c3 - k * c4 - k * c5,  2 pi = c1 + .. + c5

c1 .. c4 have 5 or 6 significant bits, so that k * ci has at most 24 and is exact; each difference is a multiple of the smaller of the angle's
last place and ci's, 2^-22 at least, and below 4 + 2^18 |2 pi - c1 - .. - ci| in size, so that it is exact as well. c5 is what is left, 2^-24
in size: its product and the last difference are rounded, 2^-25 + 2^-23. Where k was one off r lies outside [-pi, pi] and is brought back by 2 pi in two
parts. sin r and cos r = sin(pi/2 - |r|) are then within 2^-21.9 of the angle's sine and cosine, plus what the table of the device adds.
"""

import math

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, loaded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl

TURN = 2.0 * math.pi
# 2 pi in parts whose last places are 2^-2, 2^-10, 2^-16, 2^-22, and the rest.
C1 = math.floor(TURN * 2.0**2) / 2.0**2
C2 = math.floor((TURN - C1) * 2.0**10) / 2.0**10
C3 = math.floor((TURN - C1 - C2) * 2.0**16) / 2.0**16
C4 = math.floor((TURN - C1 - C2 - C3) * 2.0**22) / 2.0**22
C5 = TURN - C1 - C2 - C3 - C4
HALF_TURN = 3.1415927410125732  # float32(pi): the upper end of sin's range
WHOLE_TURN = 6.2831854820251465  # float32(2 pi), and what it is too much
WHOLE_REST = TURN - WHOLE_TURN
POSITIONS = 1 << 20
HELD = 32768  # bytes of x that a lane holds


@nki.jit
def turned(x, positions, f, heads, together, sign):
    """out of x (tokens * heads, n), positions (tokens, 1) int32 and f (1, half): the last 2 * half columns rotated by sign * position * f.

    A lane holds `together` heads of a token; together divides heads. For a tile of whole tokens, shared among the cores:
        angle = position * f, rounded as the definition does; its sine and cosine by `waves`
        (x, y) of each pair: x cos - y sin, x sin + y cos, products and sums rounded in float32, then once to x's dtype
    """
    n, half, each = x.shape[1], f.shape[1], heads // together
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    step = P // each
    mine = positions.shape[0] // nl.num_programs(0)
    start = nl.program_id(0) * mine
    for first in range(start, start + mine, step):
        tokens = min(step, start + mine - first)
        lanes = tokens * each
        at = loaded(positions.ap([[1, tokens], [0, each]], offset=first), (lanes, 1), nl.float32)
        angle = loaded(f.ap([[0, lanes], [1, half]]), (lanes, half), nl.float32)
        nisa.tensor_scalar(dst=angle, data=angle, op0=nl.multiply, operand0=at)
        rows = [[together * n, lanes], [1, together * n]]
        t = loaded(x.ap(rows, offset=first * heads * n), (lanes, together, n), x.dtype)
        sine, cosine = waves(angle, lanes, half)
        rotate(t[:, :, n - 2 * half : n].reshape_dim(2, (half, 2)), sine, cosine, lanes, together, half, sign)
        nisa.dma_copy(dst=out.ap(rows, offset=first * heads * n), src=t)
    return out


def rotate(pairs, sine, cosine, lanes, together, half, sign):
    """The pairs (lanes, together, half, 2), rotated in place."""
    a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
    a_cos, b_sin = times(a, cosine, lanes, together, half), times(b, sine, lanes, together, half)
    a_sin, b_cos = times(a, sine, lanes, together, half), times(b, cosine, lanes, together, half)
    nisa.tensor_tensor(dst=a, data1=a_cos, data2=b_sin, op=nl.subtract if sign > 0 else nl.add)
    nisa.tensor_tensor(dst=b, data1=b_cos, data2=a_sin, op=nl.add if sign > 0 else nl.subtract)


def times(a, wave, lanes, together, half):
    """a * wave in float32, the same wave for each of the heads of a lane."""
    t = nl.ndarray((lanes, together, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=t, data1=a, data2=wave.ap([[half, lanes], [0, together], [1, half]]), op=nl.multiply)
    return t


def waves(angle, lanes, half):
    """(sine, cosine) of a float32 tile of angles from 0 to 2^20."""
    whole = nl.ndarray((lanes, half), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=whole, data=angle, op0=nl.multiply, operand0=1.0 / TURN)
    turns = nl.ndarray((lanes, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=turns, src=whole)
    r = angle
    for c in (C1, C2, C3, C4, C5):
        r = taken_off(r, turns, c, lanes, half)
    low = nl.ndarray((lanes, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=low, data=r, op0=nl.less, operand0=-HALF_TURN)
    outside = nl.ndarray((lanes, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=outside, data=r, op0=nl.greater, operand0=HALF_TURN, op1=nl.subtract, operand1=low)
    r = taken_off(r, outside, WHOLE_TURN, lanes, half)
    r = taken_off(r, outside, WHOLE_REST, lanes, half)
    sine = nl.ndarray((lanes, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=sine, op=nl.sin, data=r)
    cosine = nl.ndarray((lanes, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=cosine, data=r, op0=nl.abs, operand0=None)
    nisa.tensor_scalar(dst=cosine, data=cosine, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=0.5 * math.pi)
    nisa.activation(dst=cosine, op=nl.sin, data=cosine)
    return sine, cosine


def taken_off(r, turns, c, lanes, half):
    """r - turns * c."""
    t = nl.ndarray((lanes, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=t, data=turns, op0=nl.multiply, operand0=-c, op1=nl.add, operand1=r)
    return t


def rope(run: Run, x: Tensor, positions: Tensor, f: Tensor) -> Tensor:
    """As `v41.spec.ops.rope.rope`: x (*lead, *heads, n) in bfloat16 or float32, positions (*lead) int32 from 0 to 2^20 - 1, f (half) float32 <= 1.

    Rounding: sine and cosine within 2^-21.5 of those of the float32 angle; out rounded once.
    """
    return _rotated("rope", run, x, positions, f, 1)


def rope_inverse(run: Run, x: Tensor, positions: Tensor, f: Tensor) -> Tensor:
    """As `v41.spec.ops.rope.rope_inverse`: the conjugate rotation, as `rope` otherwise."""
    return _rotated("rope_inverse", run, x, positions, f, -1)


def _rotated(name: str, run: Run, x: Tensor, positions: Tensor, f: Tensor, sign: int) -> Tensor:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name}: x is {x.dtype}; the kernel takes torch.bfloat16 (trn2) and torch.float32 (exact)")
    tokens = positions.numel()
    if x.numel() == 0:
        return x
    heads, n = x.numel() // (tokens * x.shape[-1]), x.shape[-1]
    cores = 2 if tokens % 2 == 0 and tokens * heads > P else 1
    room = max(1, HELD // (n * x.element_size()))
    together = [h for h in range(1, heads + 1) if heads % h == 0 and h <= room and heads // h <= P]
    if not together:
        raise ValueError(f"{name}: {heads} heads of {n}; the kernel has no room for them on {P} lanes")
    wanted = next((h for h in together if tokens // cores * heads // h <= P), together[-1])
    return run(turned, cores, dense(x, -1, n), dense(positions, -1, 1), dense(f, 1, -1), heads, wanted, sign).view(x.shape)
