# SPDX-License-Identifier: Apache-2.0
"""Routed and shared experts: whole ones of a rank, or its share of their inner dimension (docs/kernels.md).

    experts(x, weights, ids) = sum over e in [0, held) of  w2_e (weight_e * silu(min(w1_e x, limit)) * clamp(w3_e x, limit))

n rows, any dim that is a multiple of 32, inner dimension a multiple of 32 (others are filled with zeros), at most 500 experts and 8,192 items.
Rounding is that of the definition: x and the hidden rows through their fp8 round trip, products of w1 and w3 and hidden rows to bfloat16, sums
and the result in float32. Whole and split experts are the same call. Weights come as the spec's (`Fp4`, `Folded`, values) and are rearranged on
every call, which tests do, or once at load as `ExpertTiles` (`experts_layout.prepared`), which a model does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from v41.backends.neuron.kernels.dense import dense
from v41.backends.neuron.kernels.experts_kernel import LANE_ROWS, all_experts, hit_experts
from v41.backends.neuron.kernels.experts_layout import ExpertTiles, P, SharedTiles, prepared, prepared_shared
from v41.backends.neuron.kernels.experts_prefill import prefill_experts
from v41.backends.neuron.launch import Run
from v41.spec.numerics import Numerics
from v41.spec.table import Fp4Like, Fp8Like
from v41.spec.types import F32, I32, Act

CORES = 2
HELD, LISTED = 500, 8192  # experts whose counts one PSUM bank holds; entries of a list on one lane
BLOCK_ROWS = ((1024, 32), (2048, 64))  # rows of a block of an expert, up to so many rows of the call; 128 above


def settings(limit: float, numerics: Numerics) -> tuple[float, float]:
    """(clamp of the SwiGLU, largest fp8 code of activations or 0). ValueError for what the kernels do not compute."""
    if numerics.regime not in ("trn2", "exact") or numerics.dtype == "float64":
        raise ValueError(f"experts: regime {numerics.regime!r} with {numerics.dtype}; the kernels know 'trn2' and 'exact' with float32")
    if limit < 0 or float(torch.tensor(limit, dtype=numerics.act)) != limit:
        raise ValueError(f"experts: limit {limit} is negative or no {numerics.dtype}")
    return float(limit), numerics.e4m3_max if numerics.rounds else 0.0


def rows_of(n: int) -> int:
    """Rows of a block without gathering: all up to 32, else a multiple of 32 up to 128."""
    return n if n <= LANE_ROWS else min(P, -(-n // LANE_ROWS) * LANE_ROWS)


def filled(x: Tensor, rows: int, columns: int, value: float = 0) -> Tensor:
    """x (n, m) up to multiples of rows and columns, contiguous."""
    return functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows), value=value).contiguous()


def routing(x: Tensor, weights: Tensor, ids: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, ids, weights) with rows up to a multiple; a row that is added chooses no expert."""
    return filled(x, rows, P), filled(ids, rows, 1, -1), filled(weights, rows, 1)


def held_tiles(x: Tensor, weights: Tensor, ids: Tensor, w1: Any, w2: Any, w3: Any, numerics: Numerics) -> ExpertTiles:
    """The weights as the kernels read them; ValueError where shapes do not belong together."""
    tiles = w1 if isinstance(w1, ExpertTiles) else prepared(w1, w2, w3, numerics)
    if x.shape[1] != tiles.dim or ids.shape != weights.shape or len(ids) != len(x):
        raise ValueError(f"experts: x {tuple(x.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)} with experts of dim {tiles.dim}")
    held, groups = tiles.weight.shape[:2]
    if held > HELD or held * groups > LISTED:
        raise ValueError(f"experts: {held} experts of {groups} items on a rank; the lists on the device take {HELD} experts and {LISTED} items")
    return tiles


def given(tiles: ExpertTiles, flat: bool) -> tuple[Any, ...]:
    """(tiles, outer, scales, shared, packed, shared items) for a kernel; items of all experts in one dimension if flat."""
    weight, outer, scale, shared = (None if t is None else dense(t, *t.shape) for t in (tiles.weight, tiles.outer, tiles.scale, tiles.shared))
    if flat:
        weight, outer = (None if t is None else t.flatten(0, 1) for t in (weight, outer))
    return weight, 0 if outer is None else outer, scale, 0 if shared is None else shared, tiles.packed, 0 if shared is None else len(shared)


def experts(
    run: Run,
    x: Act[Tensor, "n dim"],
    weights: F32[Tensor, "n k"],
    ids: I32[Tensor, "n k"],
    w1: Fp4Like | ExpertTiles,
    w2: Fp4Like | None,
    w3: Fp4Like | None,
    limit: float,
    numerics: Numerics,
) -> F32[Tensor, "n dim"]:
    """The sum over the experts that have rows: one call, no host. Up to 32 rows as they lie, more are gathered expert by expert.

    Tiles that hold a shared expert as well give the sum of both.
    """
    clamp, largest = settings(limit, numerics)
    tiles = held_tiles(x, weights, ids, w1, w2, w3, numerics)
    n, dim = x.shape
    if n == 0:
        return x.new_zeros((0, dim), dtype=torch.float32)
    if n <= LANE_ROWS:
        some = given(tiles, True)
        out = run(hit_experts, CORES, *routing(x, weights, ids, 1), *some, tiles.weight.shape[1], tiles.fold, clamp, largest)
        return out[:, :dim]
    return many(run, x, weights, ids, tiles, clamp, largest)[:n, :dim]


def many(run: Run, x: Tensor, weights: Tensor, ids: Tensor, tiles: ExpertTiles, clamp: float, largest: float) -> Tensor:
    """The form for prefill."""
    block = next((rows for most, rows in BLOCK_ROWS if len(x) <= most), P)
    operands = routing(x, weights, ids, P)
    log_blocks = (len(operands[0]) // block - 1).bit_length()
    if len(tiles.weight) << log_blocks > LISTED:
        raise ValueError(f"experts: {len(tiles.weight)} experts and {len(x)} rows in blocks of {block}; the list on the device takes {LISTED} blocks")
    return run(prefill_experts, CORES, *operands, *given(tiles, False), block, 1 << log_blocks, log_blocks, tiles.fold, clamp, largest)


def experts_unrolled(run: Run, x: Tensor, weights: Tensor, ids: Tensor, w1: Any, w2: Any, w3: Any, limit: float, numerics: Numerics) -> F32[Tensor, "n dim"]:
    """The same sum without dynamic loops, for a compiler that refuses them: every local expert over all rows, with weight 0."""
    clamp, largest = settings(limit, numerics)
    tiles = held_tiles(x, weights, ids, w1, w2, w3, numerics)
    n, dim = x.shape
    if n == 0:
        return x.new_zeros((0, dim), dtype=torch.float32)
    rows = rows_of(n)
    operands = routing(x, weights, ids, rows)
    return run(all_experts, CORES, *operands, *given(tiles, True), tiles.weight.shape[1], rows, tiles.fold, clamp, largest)[:n, :dim]


def shared_expert(
    run: Run,
    x: Act[Tensor, "n dim"],
    w1: Fp8Like | SharedTiles,
    w2: Fp8Like | None,
    w3: Fp8Like | None,
    limit: float,
    numerics: Numerics,
) -> F32[Tensor, "n dim"]:
    """The expert that every row passes, whole or this rank's share of its inner dimension, in a call of its own; not rounded.

    Zeros, without a call, where the routed experts' call sums it (`SharedTiles` without items).
    """
    clamp, largest = settings(limit, numerics)
    n, dim = x.shape
    tiles = w1 if isinstance(w1, SharedTiles) else prepared_shared(w1, w2, w3, numerics)
    if dim != tiles.dim:
        raise ValueError(f"shared_expert: x {tuple(x.shape)} with an expert of dim {tiles.dim}")
    if n == 0 or tiles.weight is None:
        return x.new_zeros((n, dim), dtype=torch.float32)
    rows = rows_of(n)
    x, items, count = filled(x, rows, P), dense(tiles.weight, *tiles.weight.shape), len(tiles.weight)
    return run(all_experts, CORES, x, 0, 0, 0, 0, 0, items, False, count, 0, rows, tiles.fold, clamp, largest)[:n, :dim]
