# SPDX-License-Identifier: Apache-2.0
"""The fp8 round trip of activations as a kernel of its own; products have it inside (docs/kernels.md 3)."""

from torch import Tensor
from torch.nn import functional

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import BLOCK, P, loaded, round_trip
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.numerics import E4M3_MAX_TRN2, Numerics
from v41.spec.types import Act

LANE = 64  # groups of 32 on a lane at most


@nki.jit
def rounded(x, limit):
    """`round_trip` of x (lanes, n), bfloat16, in tiles of 128 lanes, which the cores share evenly."""
    lanes, n = x.shape
    out = nl.ndarray((lanes, n), dtype=x.dtype, buffer=nl.shared_hbm)
    mine = lanes // nl.num_programs(0)
    first = nl.program_id(0) * mine
    for row in range(first, first + mine, P):
        size = min(P, first + mine - row)
        y = round_trip(loaded(x[row : row + size, :], (size, n), x.dtype), size, n, limit)
        nisa.dma_copy(dst=out[row : row + size, :], src=y)
    return out


def act_round(run: Run, x: Act[Tensor, "*rows n"], numerics: Numerics) -> Act[Tensor, "*rows n"]:
    """The round trip of x in groups of 32 columns, n a multiple of 32; `trn2` only.

    Groups do not depend on each other: they are spread over all lanes, at most 64 to a lane.
    """
    if numerics.regime != "trn2":
        raise ValueError(f"act_round: a kernel computes trn2, not {numerics.regime}")
    if x.shape[-1] % BLOCK:
        raise ValueError(f"act_round: {x.shape[-1]} columns, not a multiple of {BLOCK}")
    groups = x.numel() // BLOCK
    if groups == 0:
        return x
    each = min(LANE, -(-groups // P))
    lanes = -(-groups // each)
    cores = 1 if lanes <= P else 2
    lanes += lanes % cores
    flat = functional.pad(x.flatten(), (0, lanes * each * BLOCK - x.numel())).unflatten(0, (lanes, -1))
    return run(rounded, cores, dense(flat, lanes, -1), E4M3_MAX_TRN2).flatten()[: x.numel()].unflatten(0, x.shape)
