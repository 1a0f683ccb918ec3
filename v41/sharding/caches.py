# SPDX-License-Identifier: Apache-2.0
"""The caches as a table like that of the parameters, from the annotations of v41/spec/cache.py."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

from v41 import tree
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.sharding.shard import shard
from v41.spec.cache import Cache, init_cache
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.table import Dim, ParamSpec, parse_axes, without_none


def specs_of(node: Any, kind: Any, name: str) -> Iterator[ParamSpec]:
    """(a table entry for) every tensor of a cache, in the order of its leaves."""
    kind = without_none(kind)
    if isinstance(node, Tensor):
        dims = tuple(Dim(a, 1, (n,)) for a, n in zip(parse_axes(kind.dim_str), node.shape, strict=True))
        yield ParamSpec(name, node.dtype, dims, tuple(node.shape))
    elif isinstance(node, tuple):
        for i, item in enumerate(node):
            yield from specs_of(item, get_args(kind)[0] if get_origin(kind) is tuple else kind, f"{name}.{i}")
    elif is_dataclass(node):
        for f in fields(node):
            if not tree.is_static(f) and getattr(node, f.name) is not None:
                yield from specs_of(getattr(node, f.name), f.type, f"{name}.{f.name}" if name else f.name)


def cache_specs(cache: Cache) -> list[ParamSpec]:
    """One entry for every tensor of a cache."""
    return list(specs_of(cache, Cache, ""))


def empty_specs(config: Config, batch: int, capacity: int, slack: int, draft: bool = True) -> list[ParamSpec]:
    """The same for an empty cache of these sizes; nothing is allocated."""
    return cache_specs(init_cache(config, Numerics(), batch, capacity, slack, draft, torch.device("meta")))


def shard_cache(cache: Cache, rules: Rules, mesh: Mesh, rank: int) -> Cache:
    """A rank's caches."""
    specs = iter(cache_specs(cache))
    return tree.map(lambda t: shard(t, next(specs), rules, mesh, rank), cache)
