# SPDX-License-Identifier: Apache-2.0
"""uniforms: Threefry-2x32-20 on VectorE, bit for bit (docs/kernels.md, Token choice).

A 32-bit word is two int32 halves of 16 bits, high first. VectorE adds integers in fp32, exact below 2^24: halves and their sums stay below
2^18. Masks and shifts work on the patterns. A sequence lies on one lane, its counters in the free dimension; the two words of a counter, and
their halves, are neighbors, so that one instruction serves all four:

    add: s = a + b;  high += (low >= 2^16);  s &= 0xFFFF                                   three instructions
    rotate by r, xor x: ((y << r) & 0xFFFF) | (other half of y >> (16 - r)), ^ x             four, one where r is 16; GpSimd keeps the halves
                                                                                             high, low, high, so that the other ones are a view

Limits: at most 128 sequences a launch (the wrapper cuts them).
"""

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.ops.draws import PARITY, ROTATIONS, ROUNDS

MASK = 0xFFFF
CARRY = 65536.0


@nki.jit
def threefry_kernel(key, position, first, lanes):
    """(b, lanes) float32 of key (b, 2) and position (b, 1) int32."""
    b = key.shape[0]
    out = nl.ndarray((b, lanes), dtype=nl.float32, buffer=nl.shared_hbm)
    words = nl.ndarray((b, 3), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=words[:, 0:2], src=key)
    nisa.dma_copy(dst=words[:, 2:3], src=position)
    ones = nl.ndarray((b, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=MASK)
    halves = nl.ndarray((b, 3, 2), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=halves[:, :, 0], data=words, op0=nl.right_shift, operand0=16, op1=nl.bitwise_and, operand1=ones)
    nisa.tensor_scalar(dst=halves[:, :, 1], data=words, op0=nl.bitwise_and, operand0=ones)
    keys = schedule(halves, b)
    state = nl.ndarray((b, 2, 2, lanes), dtype=nl.int32, buffer=nl.sbuf)
    counter(state, halves, first, lanes, ones)
    add(state, keys, 0, ones)
    again = nl.ndarray((b, 3, lanes), dtype=nl.int32, buffer=nl.sbuf)
    for r in range(ROUNDS):
        repeated(again, state)
        plus(state[:, 0], state[:, 0], state[:, 1], ones)
        turned(state, again, ROTATIONS[r % 8], ones)
        if r % 4 == 3:
            add(state, keys, r // 4 + 1, ones)
    number = nl.ndarray((b, lanes), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=number, data=state[:, 0, 1, :], op0=nl.right_shift, operand0=8)
    result = nl.ndarray((b, lanes), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=result, data=state[:, 0, 0, :], op0=nl.multiply, operand0=256.0, op1=nl.add, operand1=number)
    nisa.tensor_scalar(dst=result, data=result, op0=nl.multiply, operand0=2.0**-24)
    nisa.dma_copy(dst=out, src=result)
    return out


def schedule(halves, b):
    """(b, 6, 2, 2): what is added to the two words before round 4 n, n = 0 .. 5: keys n and n + 1 of three, the second plus n."""
    three = nl.ndarray((b, 3, 2), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=three[:, 0:2, :], src=halves[:, 0:2, :])
    nisa.tensor_tensor(dst=three[:, 2, :], data1=halves[:, 0, :], data2=halves[:, 1, :], op=nl.bitwise_xor)
    parity = nl.ndarray((b, 2), dtype=nl.int32, buffer=nl.sbuf)
    for i in range(2):
        nisa.memset(dst=parity[:, i : i + 1], value=PARITY[i])
    nisa.tensor_tensor(dst=three[:, 2, :], data1=three[:, 2, :], data2=parity, op=nl.bitwise_xor)
    keys = nl.ndarray((b, 6, 2, 2), dtype=nl.int32, buffer=nl.sbuf)
    for n in range(6):
        nisa.tensor_copy(dst=keys[:, n, 0, :], src=three[:, n % 3, :])
        nisa.tensor_copy(dst=keys[:, n, 1, 0:1], src=three[:, (n + 1) % 3, 0:1])
        nisa.tensor_scalar(dst=keys[:, n, 1, 1:2], data=three[:, (n + 1) % 3, 1:2], op0=nl.add, operand0=float(n))
    return keys


def counter(state, halves, first, lanes, ones):
    """The counter words: position, and the lane numbers first, first + 1, ..."""
    b = state.shape[0]
    nisa.tensor_copy(dst=state[:, 0], src=halves[:, 2, :].expand_dim(2).broadcast(2, lanes))
    lane = nl.ndarray((b, lanes), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=lane, pattern=[[1, lanes]], offset=first)
    nisa.tensor_scalar(dst=state[:, 1, 0, :], data=lane, op0=nl.right_shift, operand0=16)
    nisa.tensor_scalar(dst=state[:, 1, 1, :], data=lane, op0=nl.bitwise_and, operand0=ones)


def add(state, keys, n, ones):
    """Both words plus their keys."""
    plus(state, state, keys[:, n].expand_dim(3).broadcast(3, state.shape[3]), ones)


def plus(dst, a, b, ones):
    """dst = a + b modulo 2^32: (..., 2, lanes), the halves in the last dimension but one."""
    nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=nl.add, engine=nisa.engine.vector)
    high, low = dst[..., 0, :], dst[..., 1, :]
    nisa.scalar_tensor_tensor(dst=high, data=low, op0=nl.greater_equal, operand0=CARRY, op1=nl.add, operand1=high)
    nisa.tensor_scalar(dst=dst, data=dst, op0=nl.bitwise_and, operand0=ones)


def turned(state, again, bits, ones):
    """The second word rotated left by `bits`, xor the first; `again` (b, 3, lanes) holds it high, low, high, before and after."""
    x, y = state[:, 0], state[:, 1]
    b, lanes = state.shape[0], state.shape[3]
    # A rotation by 16 or more starts from the halves exchanged.
    straight, crossed = (again[:, 0:2], again[:, 1:3]) if bits < 16 else (again[:, 1:3], again[:, 0:2])
    if bits % 16 == 0:
        nisa.tensor_tensor(dst=y, data1=straight, data2=x, op=nl.bitwise_xor)
    else:
        new = nl.ndarray((b, 2, lanes), dtype=nl.int32, buffer=nl.sbuf)
        over = nl.ndarray((b, 2, lanes), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=new, data=straight, op0=nl.left_shift, operand0=bits % 16, op1=nl.bitwise_and, operand1=ones)
        nisa.tensor_scalar(dst=over, data=crossed, op0=nl.right_shift, operand0=16 - bits % 16)
        nisa.tensor_tensor(dst=new, data1=new, data2=over, op=nl.bitwise_or)
        nisa.tensor_tensor(dst=y, data1=new, data2=x, op=nl.bitwise_xor)


def repeated(again, state):
    """The halves of the second word and the high one again; GpSimd does it while VectorE adds."""
    nisa.tensor_copy(dst=again[:, 0:2], src=state[:, 1], engine=nisa.engine.gpsimd)
    nisa.tensor_copy(dst=again[:, 2], src=state[:, 1, 0, :], engine=nisa.engine.gpsimd)


def uniforms(run: Run, key: Tensor, position: Tensor, first: int, lanes: int) -> Tensor:
    """`uniforms` of the spec: key [b, 2], position [b] int32; [b, lanes]."""
    b = key.shape[0]
    if b == 0 or lanes == 0:
        return key.new_empty((b, lanes), dtype=torch.float32)
    if not 0 <= first <= 2**31 - lanes:
        raise ValueError(f"uniforms: lanes {first} to {first + lanes - 1}; the kernel takes 0 to 2^31 - 1")
    parts = [run(threefry_kernel, 1, dense(key[i : i + P], -1, 2), dense(position[i : i + P], -1, 1), first, lanes) for i in range(0, b, P)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
