# SPDX-License-Identifier: Apache-2.0
"""Kernels in the form that this project writes: names from v41.backends.neuron.nki, nisa instructions only."""

from v41.backends.neuron.nki import nisa, nki, nl

P = 128
BLOCK = 32


@nki.jit
def gemm(x_t, w):
    """out = x_t.T @ w for x_t (K, M <= 128) and w (K, N <= 512)."""
    k, m = x_t.shape
    n = w.shape[1]
    out = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.shared_hbm)
    ps = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.psum)
    for i in range(k // P):
        a = nl.ndarray((P, m), dtype=x_t.dtype, buffer=nl.sbuf)
        b = nl.ndarray((P, n), dtype=w.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=a, src=x_t[i * P : (i + 1) * P, :])
        nisa.dma_copy(dst=b, src=w[i * P : (i + 1) * P, :])
        nisa.nc_matmul(dst=ps, stationary=a, moving=b, accumulate=i > 0)
    result = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=ps)
    nisa.dma_copy(dst=out, src=result)
    return out


@nki.jit
def block_gemm(x_t, codes, scales):
    """out = x_t.T @ (fp8 codes * 2**(scales - 127)): weights (K, N) as bytes, one ue8m0 byte per 32 x 32 block."""
    k, m = x_t.shape
    n = codes.shape[1]
    blocks = n // BLOCK
    out = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.shared_hbm)
    ps = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.psum)
    for i in range(k // P):
        a = nl.ndarray((P, m), dtype=x_t.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=a, src=x_t[i * P : (i + 1) * P, :])
        b = decoded(codes, scales, i, n, blocks)
        nisa.nc_matmul(dst=ps, stationary=a, moving=b, accumulate=i > 0)
    result = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=ps)
    nisa.dma_copy(dst=out, src=result)
    return out


def decoded(codes, scales, i, n, blocks):
    """128 rows of the weights in bfloat16, exact: fp8 times a power of two."""
    raw = nl.ndarray((P, n), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw, src=codes[i * P : (i + 1) * P, :])
    bytes_ = nl.ndarray((P, blocks), dtype=nl.uint8, buffer=nl.sbuf)
    for j in range(P // BLOCK):
        row = scales.ap([[0, BLOCK], [1, blocks]], offset=(i * (P // BLOCK) + j) * blocks)
        nisa.dma_copy(dst=bytes_[j * BLOCK : (j + 1) * BLOCK, :], src=row)
    wide = nl.ndarray((P, blocks), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide, src=bytes_)
    nisa.tensor_scalar(dst=wide, data=wide, op0=nl.left_shift, operand0=23)
    power = wide.view(nl.float32)
    b = nl.ndarray((P, blocks, BLOCK), dtype=nl.bfloat16, buffer=nl.sbuf)
    spread = power.ap([[blocks, P], [1, blocks], [0, BLOCK]])
    values = raw.view(nl.float8_e4m3).reshape((P, blocks, BLOCK))
    nisa.tensor_tensor(dst=b, data1=values, data2=spread, op=nl.multiply)
    return b.reshape((P, n))


@nki.jit
def gathered_attention(q_t, cache, index, scale):
    """softmax(q @ rows.T * scale) @ rows over the cache rows that index names; q_t (128, heads), index (128, 1)."""
    d, heads = q_t.shape
    out = nl.ndarray((heads, d), dtype=nl.float32, buffer=nl.shared_hbm)
    q = nl.ndarray((d, heads), dtype=q_t.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=q, src=q_t)
    idx = nl.ndarray((P, 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.dma_copy(dst=idx, src=index)
    rows = nl.ndarray((P, d), dtype=cache.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=cache.ap([[d, P], [1, d]], vector_offset=idx, indirect_dim=0))
    turned = transposed(rows, d, P)
    scores = nl.ndarray((heads, P), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=scores, stationary=q, moving=turned, accumulate=False)
    top = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=scores, axis=1, negate=True)
    nisa.tensor_scalar(dst=top, data=top, op0=nl.multiply, operand0=scale)
    weight = nl.ndarray((heads, P), dtype=cache.dtype, buffer=nl.sbuf)
    total = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=weight,
        op=nl.exp,
        data=scores,
        bias=top,
        scale=scale,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    nisa.reciprocal(dst=total, data=total)
    probabilities = transposed(weight, P, heads)
    mixed = nl.ndarray((heads, d), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=mixed, stationary=probabilities, moving=rows, accumulate=False)
    result = nl.ndarray((heads, d), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=mixed, op0=nl.multiply, operand0=total)
    nisa.dma_copy(dst=out, src=result)
    return out


def transposed(t, rows, columns):
    """A (rows, columns) SBUF tile from a (columns, rows) one, by TensorE."""
    ps = nl.ndarray((rows, columns), dtype=t.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=ps, data=t)
    result = nl.ndarray((rows, columns), dtype=t.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=ps)
    return result


@nki.jit
def experts(x_t, weights, ids, count, gates):
    """out = sum over experts of gate * (x_t.T @ their weights); how many and which are data.

    ids (experts * k, 1): weight rows; gates (m, experts * k): one column per id row, the first of each expert is read;
    count (1, 1): id rows in use. The loop steps by k.
    """
    k, m = x_t.shape
    n = weights.shape[1]
    out = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.shared_hbm)
    x = nl.ndarray((k, m), dtype=x_t.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=x_t)
    acc = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=acc, value=0.0)
    limit = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=limit, src=count)
    upper = nisa.register_alloc()
    nisa.register_load(upper, limit)
    steps = ids.shape[0]

    def body(i):
        row_ids = nl.ndarray((k, 1), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(dst=row_ids, src=ids.ap([[1, k], [1, 1]], scalar_offset=i, indirect_dim=0))
        w = nl.ndarray((k, n), dtype=weights.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=w, src=weights.ap([[n, k], [1, n]], vector_offset=row_ids, indirect_dim=0))
        gate = nl.ndarray((m, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=gate, src=gates.ap([[steps, m], [1, 1]], scalar_offset=i, indirect_dim=1))
        ps = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=ps, stationary=x, moving=w, accumulate=False)
        nisa.scalar_tensor_tensor(dst=acc, data=ps, op0=nl.multiply, operand0=gate, op1=nl.add, operand1=acc)

    nl.fori_loop(0, upper, body, k)
    nisa.dma_copy(dst=out, src=acc)
    return out
