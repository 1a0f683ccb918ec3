# SPDX-License-Identifier: Apache-2.0
"""Candidate blocks: the best blocks of rows by their best row (docs/model.md 7.5)."""

import torch
from torch import Tensor
from torch.nn import functional

from v41.backends.neuron.kernels.best import best, infinite
from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.select import checked, spread_over
from v41.backends.neuron.kernels.tiles import P, loaded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics


@nki.jit
def candidates(scores, visible, lanes, size, k, real):
    """out (rows, ceil(k / 128) * 128) int32: the k best blocks of each row of scores (rows, lanes * n * size), ascending, -1 last; visible (rows, 1).

    `real` blocks are not padding.

    for a group of 128 / lanes rows, shared among the cores:
        x = maximum of each block; infinity for the block that holds row visible - 1
        the k best above -infinity (best.py)
    """
    rows, n = scores.shape[0], scores.shape[1] // lanes // size
    tiles = -(-k // P)
    out = nl.ndarray((rows, tiles * P), dtype=nl.int32, buffer=nl.shared_hbm)
    mine = rows // nl.num_programs(0)
    start = nl.program_id(0) * mine
    for first in range(start, start + mine, P // lanes):
        count = min(P // lanes, start + mine - first)
        x = strongest(scores, visible, first, count, lanes, n, size)
        result = nl.ndarray((count * tiles, P), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=result, data=best(x, count, lanes, n, k, real, True), op0=nl.add, operand0=-1.0)
        nisa.dma_copy(dst=out[first : first + count, :], src=result)
    return out


def strongest(scores, visible, first, count, lanes, n, size):
    """(count * lanes, n): the maximum of each block, infinity for the newest one."""
    total, width = count * lanes, n * size
    raw = loaded(scores.ap([[width, total], [1, width]], offset=first * lanes * width), (total, n, size), scores.dtype)
    x = nl.ndarray((total, n), dtype=scores.dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=x, op=nl.maximum, data=raw, axis=2)
    seen = loaded(visible.ap([[1, count], [0, lanes]], offset=first), (total, 1), nl.float32)
    number = nl.ndarray((total, n), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(count):
        nisa.iota(dst=number[i * lanes : (i + 1) * lanes, :], pattern=[[size, n]], channel_multiplier=width)
    # The block that begins at row r holds row visible - 1 where r < visible <= r + size.
    begun = nl.ndarray((total, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=begun, data=number, op0=nl.less, operand0=seen)
    nisa.tensor_scalar(dst=seen, data=seen, op0=nl.add, operand0=-float(size))
    newest = nl.ndarray((total, n), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=newest, data=number, op0=nl.greater_equal, operand0=seen, op1=nl.multiply, operand1=begun)
    most = infinite(total, scores.dtype).ap([[1, total], [0, n]])
    nisa.tensor_copy_predicated(dst=x, src=most, predicate=newest)
    return x


def candidate_blocks(run: Run, scores: Tensor, visible: Tensor, blocks: int, size: int, numerics: Numerics) -> Tensor:
    """As `v41.spec.ops.index.candidate_blocks` outside `released`: scores (b, s, t) masked; out (b, s, min(blocks, ceil(t / size))) int32.

    Exact, ids and ties, for scores that are not NaN. t <= 1,179,648, at most 4096 blocks. The row is padded with -infinity to whole lanes of whole blocks.
    """
    b, s, t = scores.shape
    count = -(-t // size)
    k = min(blocks, count)
    checked("candidate_blocks", scores, k, numerics)
    if b * s * k == 0:
        return visible.new_zeros((b, s, k))
    cores = 2 if b * s % 2 == 0 else 1
    lanes = spread_over(b * s // cores, t)
    padded = dense(functional.pad(scores, (0, -t % (lanes * size)), value=-torch.inf), b * s, -1)
    return run(candidates, cores, padded, dense(visible, -1, 1), lanes, size, k, count).view(b, s, -1)[..., :k].contiguous()
