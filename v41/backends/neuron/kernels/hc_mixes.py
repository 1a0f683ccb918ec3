# SPDX-License-Identifier: Apache-2.0
"""hc_mixes: the stream's copies projected to mixes in fp32, then sigmoids, a softmax and Sinkhorn steps (docs/kernels.md, Hyper-connections).

    for a block of at most 128 tokens:
        rows are cut into chunks, one per lane, and transposed: u (128 inner, tile, token), float32
        sums of squares by ScalarE over the lanes, added up over chunks by a product with zeros and ones
        PSUM += fn.T tile . u tile                                            float32, exact products of bfloat16 and float32 values
        few tokens: `pack` tiles a product, which also makes pack^2 - pack blocks that nobody wants; the pack diagonal ones are added by
        products with columns of the identity, which turn them to (token, mix) on the way
        mixes = PSUM * rsqrt(mean of squares + norm_eps) * scale + base
    all blocks at once, a token per lane:
        pre = sigmoid + eps, post = 2 sigmoid, comb = softmax rows + eps, columns, (iters - 1) x (rows, columns)      sinkhorn.py

Rows that are not real may hold NaN: products with zeros reach all rows of a block, so elements are bounded to +-2^56 and NaN is made a number.

Limits: elements of at most 2^56; copies * dim is padded to a multiple of 128; at most 128 mixes; rows in bfloat16 or float32. To be done once at
load: fn as `Tiled` in one block.
"""

from torch import Tensor, cat, stack
from torch.nn.functional import pad

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.folded import batch_of, folded, in_tiles, load, turn, turned
from v41.backends.neuron.kernels.sinkhorn import few, many
from v41.backends.neuron.kernels.tiles import P, bounded, replicated
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics
from v41.spec.table import Tiled

MOST_BITS, MOST = 0x5B80, 2.0**56  # of the stream: 2^15 squares of it have a finite sum
FEW = 32  # tokens up to which tiles are packed
COLUMNS = 512  # float32 of a PSUM bank
SQUARES = 2048  # elements of a lane that are squared by one instruction


@nki.jit
def mixes_kernel(stream, fn, affine, rows, copies, true_size, iters, eps, norm_eps):
    """pre (n, copies), post (n, copies), comb (n * copies, copies) of stream (n, size), n a multiple of cores * rows.

    fn (1, 128, size / 128, mixes): lane p, tile j is inner column 128 j + p. affine (2, mixes): scale and base of each mix.
    """
    n, count = stream.shape[0], fn.shape[3]
    pre = nl.ndarray((n, copies), dtype=nl.float32, buffer=nl.shared_hbm)
    post = nl.ndarray((n, copies), dtype=nl.float32, buffer=nl.shared_hbm)
    comb = nl.ndarray((n * copies, copies), dtype=nl.float32, buffer=nl.shared_hbm)
    blocks = n // nl.num_programs(0) // rows
    first = nl.program_id(0) * blocks * rows
    mixes = nl.ndarray((rows, blocks, count), dtype=nl.float32, buffer=nl.sbuf)
    weights = nl.ndarray((P, 1, fn.shape[2], count), dtype=nl.float32, buffer=nl.sbuf)
    both = replicated(affine, rows, 2 * count)
    for block in range(blocks):
        x = bounded(folded(stream, first + block * rows, rows), MOST_BITS, MOST)
        if block == 0:
            load(weights, fn, 4)
        projected(mixes[:, block, :], weights[:, 0], x, both, rows, true_size, norm_eps)
    gates = nl.ndarray((rows, 2, blocks, copies), dtype=nl.float32, buffer=nl.sbuf)
    split = mixes[:, :, 0 : 2 * copies].reshape((rows, blocks, 2, copies)).permute((0, 2, 1, 3))
    nisa.activation(dst=gates, op=nl.sigmoid, data=split)
    nisa.tensor_scalar(dst=gates[:, 0, :, :], data=gates[:, 0, :, :], op0=nl.add, operand0=eps)
    nisa.tensor_scalar(dst=gates[:, 1, :, :], data=gates[:, 1, :, :], op0=nl.multiply, operand0=2.0)
    logits = mixes[:, :, 2 * copies : count].reshape((rows, blocks, copies, copies))
    for block in range(blocks):
        r = first + block * rows
        nisa.dma_copy(dst=pre[r : r + rows, :], src=gates[:, 0, block, :])
        nisa.dma_copy(dst=post[r : r + rows, :], src=gates[:, 1, block, :])
    if blocks == 1 and rows <= FEW and rows * copies <= P:
        nisa.dma_copy(dst=comb[first * copies : (first + rows) * copies, :], src=few(logits[:, 0, :, :], rows, copies, iters, eps))
        return pre, post, comb
    square = many(logits, rows, blocks, copies, iters, eps)
    for block in range(blocks):
        r = first + block * rows
        nisa.dma_copy(dst=comb.reshape((n, copies, copies))[r : r + rows], src=square[:, block, :, :])
    return pre, post, comb


def squares(x, rows):
    """(rows, 1) in PSUM: the sum of squares of each row, whose chunks lie on neighboring lanes of x."""
    lanes, size = x.shape
    chunks = lanes // rows
    part = nl.ndarray((lanes, 1), dtype=nl.float32, buffer=nl.sbuf)
    scratch = nl.ndarray((lanes, min(size, SQUARES)), dtype=nl.float32, buffer=nl.sbuf)
    for c in range(0, size, SQUARES):
        stop = min(c + SQUARES, size)
        command = nisa.reduce_cmd.reduce if c else nisa.reduce_cmd.reset_reduce
        nisa.activation(dst=scratch[:, 0 : stop - c], op=nl.square, data=x[:, c:stop], reduce_op=nl.add, reduce_res=part, reduce_cmd=command)
    own = nl.ndarray((lanes, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=own, value=1.0)
    steps = [[-chunks, rows]]
    nisa.affine_select(dst=own, pattern=steps, channel_multiplier=1, on_true_tile=own, on_false_value=0.0, cmp_op=nl.greater_equal, offset=0)
    nisa.affine_select(dst=own, pattern=steps, channel_multiplier=1, on_true_tile=own, on_false_value=0.0, cmp_op=nl.less_equal, offset=1 - chunks)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=own, moving=part, accumulate=False)
    return total


def projected(mixes, weights, x, both, rows, true_size, norm_eps):
    """mixes (rows, count) = fn u / rms * scale + base of the rows of x; scale and base lie side by side in `both`."""
    count = weights.shape[2]
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=inverse, data=squares(x, rows), op0=nl.multiply, operand0=1.0 / true_size, op1=nl.add, operand1=norm_eps)
    nisa.tensor_scalar(dst=inverse, data=inverse, op0=nl.rsqrt, operand0=0.0)
    total = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.psum)
    if rows > FEW:
        one_by_one(total, weights, x, rows)
    else:
        packed_tiles(total, weights, turned(x, rows, nl.float32), rows)
    nisa.scalar_tensor_tensor(dst=mixes, data=total, op0=nl.multiply, operand0=inverse, op1=nl.multiply, operand1=both[:, 0:count])
    nisa.tensor_tensor(dst=mixes, data1=mixes, data2=both[:, count : 2 * count], op=nl.add)


def one_by_one(total, weights, x, rows):
    """total (rows, count) += u tile.T @ fn tile, a bank of turned tiles at a time."""
    chunks, parts = x.shape[0] // rows, x.shape[1] // P
    batch = batch_of(x)
    for s in range(0, parts, batch):
        some = min(batch, parts - s)
        u = nl.ndarray((P, chunks, some, rows), dtype=nl.float32, buffer=nl.sbuf)
        turn(u, x, rows, s)
        for c in range(chunks):
            for i in range(some):
                nisa.nc_matmul(dst=total, stationary=u[:, c, i, :], moving=weights[:, c * parts + s + i, :], accumulate=s + c + i > 0)


def packed_tiles(total, weights, u, rows):
    """total (rows, count) = fn @ u, turned: `pack` tiles side by side in both operands, whose diagonal blocks count."""
    tiles, count = u.shape[1], weights.shape[2]
    pack = min(P // count, tiles, COLUMNS // rows)
    packed = nl.ndarray((pack * count, pack, rows), dtype=nl.float32, buffer=nl.psum)
    for t in range(0, tiles // pack * pack, pack):
        nisa.nc_matmul(dst=packed, stationary=weights[:, t : t + pack, :].reshape((P, pack * count)), moving=u[:, t : t + pack, :], accumulate=t > 0)
    diagonal(total, packed, pack, count, rows)
    for t in range(tiles // pack * pack, tiles):
        nisa.nc_matmul(dst=total, stationary=u[:, t, :], moving=weights[:, t, :], accumulate=True)


def diagonal(result, packed, pack, count, rows):
    """result (rows, count) = the sum over i of block (i, i) of packed, turned."""
    blocks = nl.ndarray((pack * count, pack, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=blocks, src=packed)
    unit = nl.ndarray((pack * count, pack * count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=unit, value=0.0)
    nisa.affine_select(dst=unit, pattern=[[-1, pack * count]], channel_multiplier=1, on_true_tile=unit, on_false_value=1.0, cmp_op=nl.not_equal, offset=0)
    for i in range(pack):
        nisa.nc_matmul(dst=result, stationary=blocks[:, i, :], moving=unit[:, i * count : (i + 1) * count], accumulate=i > 0)


def hc_mixes(
    run: Run, stream: Tensor, fn: Tensor | Tiled, scale: Tensor, base: Tensor, iters: int, eps: float, norm_eps: float, numerics: Numerics
) -> tuple[Tensor, Tensor, Tensor]:
    """`hc_mixes` of the spec: stream [b, s, copies, dim], fn [mixes, copies * dim]; same values in every regime but float64."""
    if numerics.dtype == "float64":
        raise ValueError("hc_mixes: numerics dtype float64; the kernels take bfloat16 and float32")
    b, s, copies, dim = stream.shape
    n = b * s
    if n == 0:
        return base.new_empty((b, s, copies)), base.new_empty((b, s, copies)), base.new_empty((b, s, copies, copies))
    flat = stream.reshape(n, -1)
    cores = 1 if n <= FEW else 2
    most = P if stream.element_size() == 2 else P // 2
    rows = -(-n // (cores * -(-n // (cores * most))))
    flat = dense(pad(flat, (0, -flat.shape[1] % P, 0, -n % (cores * rows))), -1, flat.shape[1] + -flat.shape[1] % P)
    affine = stack((cat([scale[i].expand(size) for i, size in enumerate((copies, copies, copies**2))]), base))
    pre, post, comb = run(mixes_kernel, cores, flat, in_tiles(fn), affine, rows, copies, copies * dim, iters, eps, norm_eps)
    return pre[:n].view(b, s, copies), post[:n].view(b, s, copies), comb.view(-1, copies, copies)[:n].view(b, s, copies, copies)
