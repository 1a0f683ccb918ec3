# SPDX-License-Identifier: Apache-2.0
"""Rows as long as a vocabulary, spread over the lanes: lane l holds elements l * w .. (l + 1) * w - 1 (docs/kernels.md, Token choice)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.nki import nisa, nl

EIGHT = 8  # what max8 needs
LOWEST = -3.4028234663852886e38
MOST = 8192  # elements of a lane: a row and what is made of it fit a lane's memory
LONG = 2000  # elements of lanes whose search costs more than another gather


def row_tile(rows, r, lanes, w):
    """Row r of an HBM tensor (n, lanes * w), as (lanes, w)."""
    t = nl.ndarray((lanes, w), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=t, src=rows.reshape((rows.shape[0] * lanes, w))[r * lanes : (r + 1) * lanes, :])
    return t


def best_tokens(logits, first, count, lanes, w):
    """(count, 1) float32: the best element of rows first .. first + count - 1 of an HBM tensor (n, lanes * w); beyond the last row it again.

    Many long rows are searched for their maximum only, and the lane that has it, once more from HBM, for its place.
    """
    last = logits.shape[0] - 1
    if (count - 1) * w < LONG:
        best = nl.ndarray((lanes, 2, count), dtype=nl.float32, buffer=nl.sbuf)
        for g in range(count):
            lane_best(best, g, row_tile(logits, min(first + g, last), lanes, w))
        return first_best(best, count, lanes, w)
    tops = nl.ndarray((lanes, count), dtype=nl.float32, buffer=nl.sbuf)
    for g in range(count):
        nisa.tensor_reduce(dst=tops[:, g : g + 1], op=nl.maximum, data=row_tile(logits, min(first + g, last), lanes, w), axis=1)
    top, lane = searched(turned_over(tops, count, lanes, LOWEST), count)
    row = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[0, 1]], offset=first * lanes, channel_multiplier=lanes)
    number = nl.ndarray((count, 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=number, data=row, op0=nl.minimum, operand0=float(last * lanes), op1=nl.add, operand1=lane[:, 0:1])
    found = nl.ndarray((count, w), dtype=nl.float32, buffer=nl.sbuf)
    base = logits.reshape((logits.shape[0] * lanes, w))
    nisa.dma_copy(dst=found, src=base.ap([[w, count], [1, w]], vector_offset=number, indirect_dim=0))
    place = nl.ndarray((count, EIGHT), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.nc_find_index8(dst=place, data=found, vals=top)
    token = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=token, data=lane[:, 0:1], op0=nl.multiply, operand0=float(w), op1=nl.add, operand1=place[:, 0:1])
    return token


def turned_over(values, n, lanes, rest):
    """(n, lanes), at least 8 columns, of a tile (lanes, n); `rest` fills what is added."""
    t = nl.ndarray((n, max(lanes, EIGHT)), dtype=nl.float32, buffer=nl.sbuf)
    if lanes < EIGHT:
        nisa.memset(dst=t, value=rest)
    ps = nl.ndarray((n, lanes), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=ps, data=values)
    nisa.tensor_copy(dst=t[:, 0:lanes], src=ps)
    return t


def searched(values, n):
    """(the 8 largest, their first places) of each row of values (n, 8 or more)."""
    top = nl.ndarray((n, EIGHT), dtype=nl.float32, buffer=nl.sbuf)
    at = nl.ndarray((n, EIGHT), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.max8(dst=top, src=values)
    nisa.nc_find_index8(dst=at, data=values, vals=top)
    return top, at


def lane_best(best, g, t):
    """Puts the largest value of each lane of t and its first position into best (lanes, 2, n), at [:, 0, g] and [:, 1, g]."""
    top, at = searched(t, t.shape[0])
    nisa.tensor_copy(dst=best[:, 0, g : g + 1], src=top[:, 0:1])
    nisa.tensor_copy(dst=best[:, 1, g : g + 1], src=at[:, 0:1])


def first_best(best, n, lanes, w):
    """(n, 1) float32: for each row of `lane_best` the number of its largest element, the first of equal ones."""
    lane = searched(turned_over(best[:, 0, :], n, lanes, LOWEST), n)[1]
    places = turned_over(best[:, 1, :], n, lanes, 0.0)
    place = nl.ndarray((n, EIGHT), dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=place, data=places, indices=lane)
    token = nl.ndarray((n, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=token, data=lane[:, 0:1], op0=nl.multiply, operand0=float(w), op1=nl.add, operand1=place[:, 0:1])
    return token


def ones(rows, columns):
    """A float32 tile of ones."""
    t = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=t, value=1.0)
    return t


def earlier(lanes):
    """(lanes, lanes): 1 where the partition comes before the column; as stationary operand it adds up what lies in earlier lanes."""
    t = ones(lanes, lanes)
    nisa.affine_select(dst=t, pattern=[[1, lanes]], channel_multiplier=-1, on_true_tile=t, on_false_value=0.0, cmp_op=nl.greater, offset=0)
    return t


def summed(weights, parts):
    """A copy in SBUF of weights.T @ parts: with `ones` the sum over the lanes, on every lane; with `earlier` the sum over lanes before."""
    lanes, n = weights.shape[1], parts.shape[1]
    ps = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=ps, stationary=weights, moving=parts, accumulate=False)
    t = nl.ndarray((lanes, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=t, src=ps)
    return t


def lanes_of(vocab: int) -> tuple[int, int]:
    """(lanes, elements of a lane) of a row, which is padded to their product."""
    w = max(EIGHT, -(-vocab // P))
    return -(-vocab // w), w


def laid(rows: Tensor, value: float) -> tuple[Tensor, int, int]:
    """(rows [n, lanes * w] fp32 padded with value, lanes, w). No copy where the vocabulary fills 128 lanes evenly.

    Raises ValueError for a vocabulary above 128 * 8192 and for other dtypes than float32.
    """
    vocab = rows.shape[-1]
    lanes, w = lanes_of(vocab)
    if rows.dtype != torch.float32 or w > MOST:
        raise ValueError(f"rows of {vocab} {rows.dtype}; the kernels take float32 rows of at most {P * MOST}")
    flat = rows.reshape(-1, vocab)
    return dense(pad(flat, (0, lanes * w - vocab), value=value) if lanes * w > vocab else flat, -1, lanes * w), lanes, w
