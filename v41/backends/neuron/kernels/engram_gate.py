# SPDX-License-Identifier: Apache-2.0
"""engram_gate: the stream plus a gated value, one gate per token and copy (docs/kernels.md, Engram).

    lanes (token, copy, chunk), a chunk of a row of dim:
        h2, k2 = sums of squares of stream and key, dot = sum of (h * w) * k, w = q_weight * k_weight        products by VectorE, sums by ScalarE
        (h2, k2, dot) added up over the chunks of a row and put on each of its lanes: one product with zeros and ones
        dot = dot * rsqrt(h2 / dim + eps) * rsqrt(k2 / dim + eps) * dim^-1/2
        gate = sigmoid(sqrt(max(|dot|, 1e-6)) with dot's sign bit) * mask
        out = value * gate + h, rounded once

fp32 throughout. Tokens are shared between both cores. w is to be made once at load.
Limits: bfloat16 or float32, at most 128 copies, eps >= 2^-87 (where rsqrt begins).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, finite
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics

FLOOR = 1e-6
LARGEST = 2.0**120  # of a lane's sum: 128 of them are finite
SMALLEST_EPS = 2.0**-87
SIGN = 1 << 31


@nki.jit
def gate_kernel(stream, kv, weight, mask, copies, tokens, chunks, eps):
    """out like stream (n * copies, dim); kv (n, (copies + 1) * dim), weight (copies, dim), mask (n, 1) float32; n a multiple of cores * tokens."""
    dim = weight.shape[1]
    n, size = kv.shape[0], dim // chunks
    out = nl.ndarray((n * copies * chunks, size), dtype=stream.dtype, buffer=nl.shared_hbm)
    mine = n // nl.num_programs(0)
    first = nl.program_id(0) * mine
    lanes, per = tokens * copies * chunks, copies * chunks
    w = nl.ndarray((lanes, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=w, src=weight.ap([[0, tokens], [size, per], [1, size]]))
    same = group_mask(lanes, chunks)
    width = kv.shape[1]
    for t in range(first, first + mine, tokens):
        h = nl.ndarray((lanes, size), dtype=stream.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=h, src=stream.reshape((n * per, size))[t * per : t * per + lanes, :])
        key = nl.ndarray((lanes, size), dtype=stream.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=key, src=kv.ap([[width, tokens], [size, per], [1, size]], offset=t * width))
        value = nl.ndarray((lanes, size), dtype=stream.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=value, src=kv.ap([[width, tokens], [0, copies], [size, chunks], [1, size]], offset=t * width + copies * dim))
        sees = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=sees, src=mask.ap([[1, tokens], [0, per], [1, 1]], offset=t))
        gate = gates(sums(h, key, w, same, lanes, size), sees, lanes, dim, eps)
        result = nl.ndarray((lanes, size), dtype=stream.dtype, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(dst=result, data=value, op0=nl.multiply, operand0=gate, op1=nl.add, operand1=h)
        nisa.dma_copy(dst=out[t * per : t * per + lanes, :], src=result)
    return out


def group_mask(lanes, chunks):
    """(lanes, lanes): 1 where two lanes hold chunks of one row."""
    rows = lanes // chunks
    same = nl.ndarray((lanes, rows, chunks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=same, value=1.0)
    steps = [[-chunks, rows], [0, chunks]]
    nisa.affine_select(dst=same, pattern=steps, channel_multiplier=1, on_true_tile=same, on_false_value=0.0, cmp_op=nl.greater_equal, offset=0)
    nisa.affine_select(dst=same, pattern=steps, channel_multiplier=1, on_true_tile=same, on_false_value=0.0, cmp_op=nl.less_equal, offset=1 - chunks)
    return same.reshape((lanes, lanes))


def sums(h, key, w, same, lanes, size):
    """(lanes, 3) in PSUM: sums of h^2, key^2 and h * w * key over the row of each lane."""
    part = nl.ndarray((lanes, 3), dtype=nl.float32, buffer=nl.sbuf)
    command = nisa.reduce_cmd.reset_reduce
    scratch = nl.ndarray((lanes, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scratch, op=nl.square, data=h, reduce_op=nl.add, reduce_res=part[:, 0:1], reduce_cmd=command)
    nisa.activation(dst=scratch, op=nl.square, data=key, reduce_op=nl.add, reduce_res=part[:, 1:2], reduce_cmd=command)
    product = nl.ndarray((lanes, size), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product, data1=h, data2=w, op=nl.multiply)
    nisa.tensor_tensor(dst=product, data1=product, data2=key, op=nl.multiply)
    nisa.activation(dst=scratch, op=nl.copy, data=product, reduce_op=nl.add, reduce_res=part[:, 2:3], reduce_cmd=command)
    total = nl.ndarray((lanes, 3), dtype=nl.float32, buffer=nl.psum)
    # The zeros of `same` meet the sums of rows that are not real and may hold NaN.
    nisa.nc_matmul(dst=total, stationary=same, moving=finite(part, lanes, 3, nl.float32, LARGEST), accumulate=False)
    return total


def gates(total, sees, lanes, dim, eps):
    """(lanes, 1): the gate of each lane's row."""
    norm = nl.ndarray((lanes, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=norm, data=total[:, 0:2], op0=nl.multiply, operand0=1.0 / dim, op1=nl.add, operand1=eps)
    nisa.tensor_scalar(dst=norm, data=norm, op0=nl.rsqrt, operand0=0.0)
    nisa.tensor_tensor(dst=norm[:, 0:1], data1=norm[:, 0:1], data2=norm[:, 1:2], op=nl.multiply)
    dot = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=dot, data=total[:, 2:3], op0=nl.multiply, operand0=norm[:, 0:1], op1=nl.multiply, operand1=dim**-0.5)
    size = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=size, data=dot, op0=nl.abs, operand0=None, op1=nl.maximum, operand1=FLOOR)
    nisa.activation(dst=size, op=nl.sqrt, data=size)
    nisa.tensor_scalar(dst=dot.view(nl.int32), data=dot.view(nl.int32), op0=nl.bitwise_and, operand0=SIGN)
    nisa.tensor_tensor(dst=size.view(nl.int32), data1=size.view(nl.int32), data2=dot.view(nl.int32), op=nl.bitwise_or)
    nisa.activation(dst=size, op=nl.sigmoid, data=size)
    nisa.tensor_scalar(dst=size, data=size, op0=nl.multiply, operand0=sees)
    return size


def engram_gate(run: Run, stream: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, mask: Tensor | None, eps: float, numerics: Numerics) -> Tensor:
    """`engram_gate` of the spec: stream [b, s, copies, dim], kv [b, s, (copies + 1) * dim], weights [copies, dim], mask [b, s] or None."""
    if numerics.dtype == "float64" or eps < SMALLEST_EPS:
        raise ValueError(f"engram_gate: numerics dtype {numerics.dtype}, eps {eps}; the kernel takes bfloat16 and float32, eps >= 2^-87")
    b, s, copies, dim = stream.shape
    n = b * s
    if n == 0:
        return stream.clone()
    cores = 1 if n == 1 else 2
    tokens = min(-(-n // cores), P // copies)
    more = -n % (cores * tokens)
    chunks = max(c for c in range(1, P // (tokens * copies) + 1) if dim % c == 0)
    sees = stream.new_ones(n, dtype=torch.float32) if mask is None else mask.reshape(n).float()
    flat = dense(pad(stream.reshape(n, -1), (0, 0, 0, more)), -1, dim)
    parts = dense(pad(kv.reshape(n, -1), (0, 0, 0, more)), n + more, -1)
    weight = dense(q_weight.float() * k_weight.float(), copies, dim)
    out = run(gate_kernel, cores, flat, parts, weight, dense(pad(sees, (0, more)), -1, 1), copies, tokens, chunks, float(eps))
    return out.view(n + more, copies, dim)[:n].view(stream.shape)
