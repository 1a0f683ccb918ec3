# SPDX-License-Identifier: Apache-2.0
"""Cases of single primitives, as data: each builds its arguments, and the spec's own body says what is right (docs/conformance.md 3)."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from v41.conformance.primitives_attention import ATTENTION
from v41.conformance.primitives_choose import CHOOSE
from v41.conformance.primitives_linear import LINEAR
from v41.conformance.primitives_mix import MIX
from v41.golden.pack_calls import Twin
from v41.golden.pack_noise import EXACT, FLOAT64, TRIPS, noise
from v41.golden.pack_numbers import Inputs
from v41.spec.backend import Backend
from v41.spec.numerics import Numerics

ROUND_TRIPS = {"act_round", "index_round", "kv_round"}  # not called in `exact`
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Edge:
    """One case of a primitive: what it is about, and its arguments from named inputs."""

    primitive: str
    edge: str
    build: Callable[[Inputs], Arguments]

    @property
    def name(self) -> str:
        return f"{self.primitive}.{self.edge}"


EDGES = tuple(Edge(op, edge, build) for table in (LINEAR, ATTENTION, MIX, CHOOSE) for op, cases in table.items() for edge, build in cases.items())


class Expected(NamedTuple):
    """What the definition gives, with its distance from the definition in float64."""

    want: dict[str, Tensor]
    far: dict[str, Tensor]


def edges(numerics: Numerics) -> list[Edge]:
    """Those that the regime calls."""
    return [e for e in EDGES if numerics.rounds or e.primitive not in ROUND_TRIPS]


def named(result: Any) -> dict[str, Tensor]:
    """The tensors of a result, by place."""
    if isinstance(result, Tensor):
        return {"out": result}
    if isinstance(result, tuple):
        return {f"out{i}": t for i, t in enumerate(result)}
    return {"out": torch.tensor([ord(c) for c in str(result)], dtype=torch.int32)}


def call(ops: Backend, edge: Edge, numerics: Numerics) -> dict[str, Tensor]:
    """What a backend gives for one case."""
    args, options = edge.build(Inputs(edge.name, numerics))
    return {edge.primitive + "." + n: t for n, t in named(getattr(ops, edge.primitive)(*args, **options)).items()}


def definitions() -> Backend:
    """The spec's own bodies."""
    return Backend("spec")


def expected(edge: Edge, numerics: Numerics) -> Expected:
    """By the definition, and how far that is from its float64 twins."""
    want = call(definitions(), edge, numerics)
    floats = [n for n, t in want.items() if t.is_floating_point()]
    if numerics.dtype == "float64":
        narrow = call(definitions(), edge, Numerics("exact", numerics.index_keys, "float32"))
        return Expected(want, {n + EXACT: noise(want[n], narrow[n].double()) * FLOAT64 for n in floats})
    far: dict[str, Tensor] = {}
    for suffix, trips in ((EXACT, False), (TRIPS, True)):
        if trips and not numerics.rounds:
            continue
        twin = call(definitions(), edge, Twin(numerics.regime, numerics.index_keys, numerics.dtype, trips))
        far |= {n + suffix: noise(want[n], twin[n]) for n in floats}
    return Expected(want, far)


def uncovered() -> set[str]:
    """Primitives of the record without a case."""
    return {f.name for f in fields(Backend)[1:]} - {e.primitive for e in EDGES}
