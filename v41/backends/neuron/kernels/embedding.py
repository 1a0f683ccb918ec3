# SPDX-License-Identifier: Apache-2.0
"""Embedding rows of a table, or of this rank's part of one."""

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.tiles import P, loaded
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl


@nki.jit
def gathered(ids, table, wide):
    """out (n, dim): rows of table (vocab, dim) by ids (n, 1) int32; zeros for an id that is negative or beyond the table. wide: out is float32.

    for a tile of up to 128 ids, shared among the cores: zeros; one DMA gathers the rows and skips those out of range,
    where as uint32 a negative id lies, too
    """
    n, dim = ids.shape[0], table.shape[1]
    dtype = nl.float32 if wide else table.dtype
    out = nl.ndarray((n, dim), dtype=dtype, buffer=nl.shared_hbm)
    mine = n // nl.num_programs(0)
    start = nl.program_id(0) * mine
    for first in range(start, start + mine, P):
        rows = min(P, start + mine - first)
        index = loaded(ids[first : first + rows, :], (rows, 1), ids.dtype).view(nl.uint32)
        t = nl.ndarray((rows, dim), dtype=dtype, buffer=nl.sbuf)
        nisa.memset(dst=t, value=0.0)
        nisa.dma_copy(dst=t, src=table.ap([[dim, rows], [1, dim]], vector_offset=index, indirect_dim=0), oob_mode=nisa.oob_mode.skip)
        nisa.dma_copy(dst=out[first : first + rows, :], src=t)
    return out


def embedding(run: Run, ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """As `v41.spec.ops.place.embedding`: table[ids] (*n, dim) in `dtype` (bfloat16 or float32), exact; zeros for ids not held."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"embedding: dtype {dtype}; the kernel takes torch.bfloat16 (trn2) and torch.float32 (exact)")
    if ids.numel() == 0:
        return table.new_zeros((*ids.shape, table.shape[1]), dtype=dtype)
    cores = 2 if ids.numel() % 2 == 0 else 1
    return run(gathered, cores, dense(ids.to(torch.int32), -1, 1), dense(table, *table.shape), dtype != table.dtype).view(*ids.shape, -1)
