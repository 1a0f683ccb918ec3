# SPDX-License-Identifier: Apache-2.0
"""Parameters as they cross the edge of a graph: 8-bit floats as bytes, and no 64-bit integer (docs/neuron-graph.md 2)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from v41 import tree
from v41.backends.neuron.kernels.engram_hash import BYTES, DIGITS, Tables, tables
from v41.spec.params import EngramMap, Params

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


def carried(tensor: Tensor) -> Tensor:
    """The bytes of an 8-bit float; anything else as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in EIGHT_BITS else tensor


def constants(multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tables:
    """The kernel's constants of one table of the hash; of tensors without memory their shapes."""
    if not multipliers.is_meta:
        return tables(multipliers, primes, offsets)
    made = tables(*(torch.full(t.shape, 2, dtype=torch.int64) for t in (multipliers, primes, offsets)))
    return Tables(*(t.to("meta") for t in made))


def packed_map(m: EngramMap) -> EngramMap:
    """The same with the kernel's constants in place of 64-bit integers."""
    each = [constants(*one) for one in zip(m.multipliers, m.primes, m.offsets, strict=True)]
    return EngramMap(m.token_map, *(torch.stack(parts) for parts in zip(*each, strict=True)))


def packed(params: Params) -> Params:
    """Parameters as a graph takes them; nothing but the constants of the Engram hash is made anew. Packed ones stay as they are."""
    made: Params = tree.map(carried, params)
    m = params.engram_map
    return made if m is None or m.multipliers.dtype != torch.int64 else replace(made, engram_map=packed_map(m))


def integers(multipliers: Tensor, primes: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 64-bit integers of one table again, for the definition."""
    places = torch.arange(BYTES, device=multipliers.device) * 8
    factors = (multipliers.view(-1, BYTES).long() << places).sum(-1)
    return factors, primes[2 * DIGITS].long().view(factors.shape[0] - 1, -1), offsets[0].long()


def hashing(body: Callable[..., Any]) -> Callable[..., Any]:
    """The definition of engram_hash for packed tables."""

    def run(ids: Tensor, mask: Tensor, pad: Tensor, *given: Tensor) -> Any:
        return body(ids, mask, pad, *(given if given[0].dtype == torch.int64 else integers(*given)))

    return run
