# SPDX-License-Identifier: Apache-2.0
"""The rows that the indexer selects: an exact top-k in ascending order (docs/model.md 7.4)."""

import torch
from torch import Tensor
from torch.nn import functional

from v41.backends.neuron.kernels.best import best
from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, loaded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import Numerics

NARROW = 2048  # columns of a lane up to which four rows share the lanes
WIDEST = 9216  # columns of a lane
MOST = 4096  # to choose: four rows of as many lie on 128 lanes at the end


@nki.jit
def selected(scores, visible, lanes, k, real):
    """out (rows, ceil(k / 128) * 128) int32: the k best of each row of scores (rows, lanes * n) below visible (rows, 1), ascending, -1 last.

    `real` columns are not padding.

    for a group of 128 / lanes rows, shared among the cores: the k best whatever is visible (best.py), then -1 for those not below it
    """
    rows, n = scores.shape[0], scores.shape[1] // lanes
    tiles = -(-k // P)
    out = nl.ndarray((rows, tiles * P), dtype=nl.int32, buffer=nl.shared_hbm)
    mine = rows // nl.num_programs(0)
    start = nl.program_id(0) * mine
    for first in range(start, start + mine, P // lanes):
        count = min(P // lanes, start + mine - first)
        x = loaded(scores.ap([[n, count * lanes], [1, n]], offset=first * lanes * n), (count * lanes, n), scores.dtype)
        limit = loaded(visible.ap([[1, count], [0, tiles]], offset=first), (count * tiles, 1), nl.float32)
        found = best(x, count, lanes, n, k, real, False)
        shown = nl.ndarray((count * tiles, P), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=shown, data=found, op0=nl.less_equal, operand0=limit)
        nisa.tensor_tensor(dst=shown, data1=shown, data2=found, op=nl.multiply)
        result = nl.ndarray((count * tiles, P), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=result, data=shown, op0=nl.add, operand0=-1.0)
        nisa.dma_copy(dst=out[first : first + count, :], src=result)
    return out


def spread_over(rows: int, columns: int) -> int:
    """Lanes of a row: 32, or more where there are fewer than three rows for the lanes or their columns would be too many."""
    if rows == 1 or columns > 64 * NARROW:
        return P
    return 64 if rows == 2 or columns > 32 * NARROW else 32


def checked(name: str, scores: Tensor, k: int, numerics: Numerics) -> None:
    """ValueError for what the search does not do."""
    t = scores.shape[-1]
    if numerics.compact or scores.dtype not in (torch.bfloat16, torch.float32) or t > P * WIDEST or k > MOST:
        limits = f"bfloat16 or float32, up to {P * WIDEST} rows and {MOST} to choose, not released"
        raise ValueError(f"{name}: regime {numerics.regime!r}, {scores.dtype}, {t} rows, {k} to choose; the kernel takes {limits}")


def select(run: Run, scores: Tensor, visible: Tensor, k: int, numerics: Numerics) -> Tensor:
    """As `v41.spec.ops.index.select` outside `released`: scores (b, s, t) in bfloat16 or float32, visible (b, s); out (b, s, min(k, t)) int32.

    Exact, ids and ties, for scores that are not NaN (-infinity is). t <= 1,179,648, k <= 4096. The row is padded with -infinity to whole lanes.
    """
    b, s, t = scores.shape
    k = min(k, t)
    checked("select", scores, k, numerics)
    if b * s * k == 0:
        return visible.new_zeros((b, s, k))
    cores = 2 if b * s % 2 == 0 else 1
    lanes = spread_over(b * s // cores, t)
    padded = dense(functional.pad(scores, (0, -t % lanes), value=-torch.inf), b * s, -1)
    return run(selected, cores, padded, dense(visible, -1, 1), lanes, k, t).view(b, s, -1)[..., :k].contiguous()
