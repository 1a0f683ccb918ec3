# SPDX-License-Identifier: Apache-2.0
"""The parameters of one rank from a checkpoint folder: it reads its own slices and nothing else (docs/sharding.md 7)."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from v41.checkpoint import Folder, check_values, open_folder
from v41.params_io import check_folder, folder_map
from v41.sharding.check import check
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.sharding.shard import Range, as_bytes, reads
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import Params, build_params
from v41.spec.table import ParamSpec


class Loaded(NamedTuple):
    """A rank's parameters, the checkpoint bytes that it holds of them, and those that it read: a slice of columns comes with its rows."""

    params: Params
    held: int
    read: int


def read_slice(folder: Folder, name: str, ranges: tuple[Range, ...]) -> tuple[Tensor, int]:
    """(the slice of a tensor, bytes read for it)."""
    shape, size = folder.entries[name].shape, folder.entries[name].torch_dtype.itemsize
    whole = [r.start == 0 and r.stop == n for r, n in zip(ranges, shape, strict=True)]
    if all(whole[1:]):
        part = folder.rows(name, ranges[0].start, ranges[0].stop)
        return part, part.numel() * size
    if len(shape) == 2 and whole[0]:
        part = folder.columns(name, ranges[1].start, ranges[1].stop)
        return part, shape[0] * shape[1] * size
    part = folder.rows(name, ranges[0].start, ranges[0].stop)
    return part[(slice(None), *(slice(r.start, r.stop) for r in ranges[1:]))].contiguous(), part.numel() * size


def rank_leaf(folder: Folder, rules: Rules, mesh: Mesh, rank: int, tally: Callable[[int, int], None]) -> Callable[[ParamSpec], Tensor]:
    """One entry of the table as the rank holds it, padding as zeros. tally(held, read) counts bytes."""

    def leaf(spec: ParamSpec) -> Tensor:
        target = torch.empty(rules.local_shape(spec, mesh), dtype=spec.dtype)
        bits = as_bytes(target).zero_()
        for place, (name, ranges) in enumerate(reads(spec, rules, mesh, rank)):
            part, count = read_slice(folder, name, ranges)
            check_values(f"{folder.path / folder.files[name]}: {name}", part)
            into = bits[place] if spec.stacked else bits
            into[tuple(slice(r.length) for r in ranges)] = as_bytes(part)
            tally(part.numel() * part.dtype.itemsize, count)
        return target

    return leaf


def load_rank(
    directory: str | Path,
    rules: Rules,
    mesh: Mesh,
    rank: int,
    *,
    numerics: Numerics | None = None,
    draft: bool = True,
    token_map: Tensor | None = None,
) -> Loaded:
    """`load_params` for one rank of a mesh: equal to `shard_params` of the whole.

    Raises ValueError where the rules do not fit the config or the mesh, and for what `load_params` refuses, as far as this rank reads.
    """
    directory = Path(directory)
    config = Config.from_json(directory / "config.json")
    check(config, rules, mesh)
    folder = open_folder(directory)
    check_folder(folder, config, draft)
    counts: list[tuple[int, int]] = []
    leaf = rank_leaf(folder, rules, mesh, rank, lambda held, read: counts.append((held, read)))
    params = build_params(config, numerics or Numerics(), leaf, folder_map(config, directory, token_map), draft)
    return Loaded(params, sum(h for h, _ in counts), sum(r for _, r in counts))
