# SPDX-License-Identifier: Apache-2.0
"""Boundaries and layer states as tensors by name: a record holds what its unit changed, the rest comes from the boundary before it."""

from dataclasses import replace

from torch import Tensor

from v41 import tree
from v41.spec.cache import Cache, LayerCache
from v41.spec.handed import Boundary, Handed

Named = dict[str, Tensor]
TAP = "tap."


def changed(before: Boundary, after: Boundary, state: LayerCache) -> Named:
    """The tensors of the boundary that are not those of the one before it, and the state of the layer."""
    held = {id(t) for t in tree.leaves(before)}
    new = [(n, t) for n, t in tree.paths(after) if id(t) not in held]
    return {n: t.contiguous() for n, t in [*new, *tree.paths(state, "state")]}


def boundary_of(before: Boundary, values: Named) -> Boundary:
    """The boundary after the layer: `changed` undone."""
    new = {f: values.get(f"handed.{f}", getattr(before.handed, f)) for f in Handed.__dataclass_fields__}
    tap = values.get(f"taps.{len(before.taps)}")
    taps = before.taps if tap is None else (*before.taps, tap)
    return replace(before, stream=values["stream"], pre=values["pre"], handed=Handed(**new), taps=taps, layer=before.layer + 1)


def cache_of(cache: Cache, after: Boundary, values: Named) -> Cache:
    """The cache with the state of the layer before `after`."""
    states = list(cache.layers)
    states[after.layer - 1] = LayerCache(**{f: values.get(f"state.{f}") for f in LayerCache.__dataclass_fields__})
    slot = after.handed.index_keys if cache.index_slot is not None else None
    return replace(cache, layers=tuple(states), index_slot=slot)


def with_taps(values: Named, taps: Named) -> Named:
    return values | {TAP + n: t.contiguous() for n, t in taps.items()}


def taps_of(values: Named) -> Named:
    return {n.removeprefix(TAP): t for n, t in values.items() if n.startswith(TAP)}
