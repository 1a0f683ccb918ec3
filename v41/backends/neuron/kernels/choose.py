# SPDX-License-Identifier: Apache-2.0
"""choose, chosen_from: the best token of each row, a draw from its distribution, that distribution (docs/kernels.md, Token choice).

A row lies over all lanes (vocab.py); rows are shared between both cores.

    best        max8 and nc_find_index8 in each lane (or the maximum alone), then over the lanes of all rows at once: the lower id wins a tie
    choose      with a sample: what is kept of e (nucleus.py), then the draw; a temperature of 0 keeps the best token alone
    chosen_from what is kept of e, times 1 / its sum

Discrete results are exact for best tokens. A drawn token, or the last one kept, differs from the definition's only where uniform * total, or
top_p, lies within the rounding of the sums, about 2^-22 of the total, of a token's edge; the definition's own edges are rounded so.

Limits: float32 rows; vocabularies up to 128 * 8192, padded with -inf; no NaN; at least one finite logit a row.
"""

import torch
from torch import Tensor

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.nucleus import drawn, kept, lane_sums
from v41.backends.neuron.kernels.tiles import P
from v41.backends.neuron.kernels.vocab import best_tokens, earlier, first_best, laid, lane_best, ones, row_tile, summed
from v41.backends.neuron.launch import Run
from v41.backends.neuron.nki import nisa, nki, nl
from v41.spec.ops.choose import Sample

ROWS, HELD = 4, 4096  # rows that are searched together, and how many of their elements a lane holds


@nki.jit
def best_kernel(logits, lanes, w):
    """Best token of each row of logits (n, lanes * w): (cores * ceil(n / cores), 1) int32."""
    mine = -(-logits.shape[0] // nl.num_programs(0))
    first = nl.program_id(0) * mine
    out = nl.ndarray((mine * nl.num_programs(0), 1), dtype=nl.int32, buffer=nl.shared_hbm)
    for start in range(0, mine, P):
        count = min(P, mine - start)
        stored(out, first + start, best_tokens(logits, first + start, count, lanes, w))
    return out


@nki.jit
def draw_kernel(logits, heat, top_p, uniform, lanes, w):
    """A drawn token of each row, shaped like `best_kernel`'s; heat, top_p and uniform (n, 1)."""
    n = logits.shape[0]
    mine = -(-n // nl.num_programs(0))
    first = nl.program_id(0) * mine
    out = nl.ndarray((mine * nl.num_programs(0), 1), dtype=nl.int32, buffer=nl.shared_hbm)
    every, before = ones(lanes, lanes), earlier(lanes)
    together = max(1, min(ROWS, HELD // w))
    for start in range(0, mine, together):
        count = min(together, mine - start)
        rows, chances = kept_rows(logits, heat, top_p, uniform, first + start, count, every, before, lanes, w)
        best = nl.ndarray((lanes, 2, count), dtype=nl.float32, buffer=nl.sbuf)
        for g in range(count):
            lane_best(best, g, drawn(rows[g], chances[:, g : g + 1], every, before))
        stored(out, first + start, first_best(best, count, lanes, w))
    return out


@nki.jit
def share_kernel(logits, heat, top_p, lanes, w):
    """The distribution of each row: (cores * ceil(n / cores), lanes * w) float32."""
    n = logits.shape[0]
    mine = -(-n // nl.num_programs(0))
    first = nl.program_id(0) * mine
    total = mine * nl.num_programs(0)
    out = nl.ndarray((total, lanes * w), dtype=nl.float32, buffer=nl.shared_hbm)
    every, before = ones(lanes, lanes), earlier(lanes)
    together = max(1, min(ROWS, HELD // w))
    for start in range(0, mine, together):
        count = min(together, mine - start)
        rows = kept_rows(logits, heat, top_p, top_p, first + start, count, every, before, lanes, w)[0]
        for g in range(count):
            scaled = nl.ndarray((lanes, w), dtype=nl.float32, buffer=nl.sbuf)
            inverse = summed(every, lane_sums(rows[g], scaled))
            nisa.reciprocal(dst=inverse, data=inverse)
            nisa.activation(dst=scaled, op=nl.copy, data=rows[g], scale=inverse)
            r = first + start + g
            nisa.dma_copy(dst=out.reshape((total * lanes, w))[r * lanes : (r + 1) * lanes, :], src=scaled)
    return out


def kept_rows(logits, heat, top_p, uniform, r, count, every, before, lanes, w):
    """(rows, uniforms) of rows r .. r + count - 1, what is kept of e; beyond the last row it again."""
    n = logits.shape[0]
    rows = []
    scalars = nl.ndarray((lanes, 3, count), dtype=nl.float32, buffer=nl.sbuf)
    for g in range(count):
        at = min(r + g, n - 1)
        rows.append(row_tile(logits, at, lanes, w))
        nisa.dma_copy(dst=scalars[:, 0, g : g + 1], src=heat.ap([[0, lanes], [1, 1]], offset=at))
        nisa.dma_copy(dst=scalars[:, 1, g : g + 1], src=top_p.ap([[0, lanes], [1, 1]], offset=at))
        nisa.dma_copy(dst=scalars[:, 2, g : g + 1], src=uniform.ap([[0, lanes], [1, 1]], offset=at))
    kept(rows, scalars[:, 0, :], scalars[:, 1, :], every, before, lanes, count)
    return rows, scalars[:, 2, :]


def stored(out, r, token):
    """Writes tokens (n, 1) from row r on."""
    n = token.shape[0]
    whole = nl.ndarray((n, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=whole, src=token)
    nisa.dma_copy(dst=out[r : r + n, :], src=whole)


def choose(run: Run, logits: Tensor, sample: Sample | None, column: int) -> Tensor:
    """`choose` of the spec: logits [b, vocab] fp32."""
    b = logits.shape[0]
    if b == 0:
        return torch.empty(0, dtype=torch.int32, device=logits.device)
    rows, lanes, w = laid(logits, -torch.inf)
    cores = min(2, b)
    if sample is None:
        return run(best_kernel, cores, rows, lanes, w).flatten()[:b]
    heat, most, uniform = (dense(t, -1, 1) for t in (sample.temperature, sample.top_p, sample.uniforms[:, column]))
    return run(draw_kernel, cores, rows, heat, most, uniform, lanes, w).flatten()[:b]


def chosen_from(run: Run, logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """`chosen_from` of the spec: logits [b, n, vocab] fp32."""
    b, n, vocab = logits.shape
    if b * n == 0:
        return torch.empty_like(logits)
    rows, lanes, w = laid(logits, -torch.inf)
    heat, most = (dense(t[:, None].expand(-1, n), -1, 1) for t in (temperature, top_p))
    return run(share_kernel, min(2, b * n), rows, heat, most, lanes, w)[: b * n, :vocab].reshape(b, n, vocab)
