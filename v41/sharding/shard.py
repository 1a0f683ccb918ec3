# SPDX-License-Identifier: Apache-2.0
"""Cutting tensors by the rules, and putting them together again; no value changes on the way."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from v41 import tree
from v41.sharding.distinct import distinct
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.spec.config import Config
from v41.spec.params import Params, param_specs
from v41.spec.table import ParamSpec

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Range(NamedTuple):
    """Rows start..stop-1 of one stored dimension, and how many rows the rank holds: the rest is zeros at the end."""

    start: int
    stop: int
    size: int

    @property
    def length(self) -> int:
        """Rows that stand in the checkpoint."""
        return self.stop - self.start


def rank_slices(spec: ParamSpec, rules: Rules, mesh: Mesh, rank: int) -> tuple[Range, ...]:
    """What a rank holds of a tensor, dimension by dimension: all that its loader has to read."""
    held = rules.local_shape(spec, mesh)
    found = []
    for dim, stored, size in zip(spec.dims, spec.shape, held, strict=True):
        start = min(mesh.share(rank, rules.cut(dim, spec.name)) * size, stored)
        found.append(Range(start, min(start + size, stored), size))
    return tuple(found)


def reads(spec: ParamSpec, rules: Rules, mesh: Mesh, rank: int) -> Iterator[tuple[str, tuple[Range, ...]]]:
    """(checkpoint name, ranges) of every tensor that a rank reads for one entry of the table; of a stack, its own experts only."""
    ranges = rank_slices(spec, rules, mesh, rank)
    if any(r.length == 0 for r in ranges):
        return
    if not spec.stacked:
        yield spec.name, ranges
        return
    for e in range(ranges[0].start, ranges[0].stop):
        yield spec.name.replace("{experts}", str(e)), ranges[1:]


def read_bytes(config: Config, rules: Rules, mesh: Mesh, rank: int, draft: bool = True) -> int:
    """Checkpoint bytes that a rank reads."""
    slices = ((s.dtype.itemsize * n, rank_slices(s, rules, mesh, rank)) for s, n in distinct(config, draft))
    return sum(size * prod(r.length for r in ranges) for size, ranges in slices)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bits as integers of the same size: NaNs compare, and rows of every dtype can be copied."""
    return tensor.view(BITS[tensor.dtype.itemsize])


def check_shape(tensor: Tensor, want: tuple[int, ...], what: str) -> None:
    if tuple(tensor.shape) != want:
        raise ValueError(f"{what}: shape {tuple(tensor.shape)}, the rules say {want}")


def shard(tensor: Tensor, spec: ParamSpec, rules: Rules, mesh: Mesh, rank: int) -> Tensor:
    """A rank's part of a tensor, in memory of its own; padding is zeros."""
    check_shape(tensor, spec.shape, spec.name)
    ranges = rank_slices(spec, rules, mesh, rank)
    part = as_bytes(tensor)[tuple(slice(r.start, r.stop) for r in ranges)]
    if all(r.length == r.size for r in ranges):
        return part.clone().view(tensor.dtype)
    held = torch.zeros([r.size for r in ranges], dtype=part.dtype, device=part.device)
    held[tuple(slice(r.length) for r in ranges)] = part
    return held.view(tensor.dtype)


def join(parts: Sequence[Tensor], spec: ParamSpec, rules: Rules, mesh: Mesh) -> Tensor:
    """The whole tensor from the parts of all ranks, in rank order. ValueError where ranks that hold the same share differ in a byte."""
    if len(parts) != mesh.size:
        raise ValueError(f"{spec.name}: {len(parts)} parts for {mesh.size} ranks")
    whole = torch.zeros(spec.shape, dtype=as_bytes(parts[0]).dtype, device=parts[0].device)
    first: dict[tuple[Range, ...], int] = {}
    for rank, part in enumerate(parts):
        ranges = rank_slices(spec, rules, mesh, rank)
        check_shape(part, tuple(r.size for r in ranges), f"{spec.name} of rank {rank}")
        there = as_bytes(part)[tuple(slice(r.length) for r in ranges)]
        twin = first.setdefault(ranges, rank)
        if twin == rank:
            whole[tuple(slice(r.start, r.stop) for r in ranges)] = there
        elif not torch.equal(there, as_bytes(parts[twin])[tuple(slice(r.length) for r in ranges)]):
            raise ValueError(f"{spec.name}: ranks {twin} and {rank} hold the same share with different values")
    return whole.view(parts[0].dtype)


def shard_params(params: Params, rules: Rules, mesh: Mesh, rank: int) -> Params:
    """A rank's parameters. The Engram map is whole on every rank, and so is the config: shapes say what is local."""
    specs = param_specs(params.config, params.draft is not None)
    cut = tree.map(lambda t: shard(t, next(specs), rules, mesh, rank), replace(params, engram_map=None))
    return replace(cut, engram_map=params.engram_map)


def join_params(ranks: Sequence[Params], rules: Rules, mesh: Mesh) -> Params:
    """The whole parameters from those of all ranks."""
    specs = param_specs(ranks[0].config, ranks[0].draft is not None)
    bare = [replace(p, engram_map=None) for p in ranks]
    whole = tree.map(lambda *parts: join(parts, next(specs), rules, mesh), *bare)
    return replace(whole, engram_map=ranks[0].engram_map)
