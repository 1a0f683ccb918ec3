# SPDX-License-Identifier: Apache-2.0
"""Which mesh axes cut which logical axis: one table, total on purpose, so that nothing is replicated by being forgotten."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from v41.sharding.mesh import Mesh
from v41.spec.table import Dim, ParamSpec

Axes = str | tuple[str, ...] | None
CHOICES = ("logits", "candidates")
LOOKUPS = ("embed", "engram")


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below n."""
    return -(-n // multiple) * multiple


def listed(axes: Axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass(frozen=True)
class Rules:
    """A placement of parameters and caches.

    axes: logical axis -> mesh axis, mesh axes (slowest first) or None. A key may name a part of the checkpoint name in front,
    `gate.experts`: then it holds for the tensors of that part only. A key `taps*dim` stands for a dimension of two logical axes as a
    whole; without one such a dimension is cut on its outer axis only.
    padding: logical axis -> multiple to which a share is rounded up, with zeros at the end; without one the size must divide.
    merged: the lookups (`embed`: tokens and their Markov embedding; `engram`) that share one reduction where they are known at the same
    time; one that is cut over fewer mesh axes than the others counts where the coordinates on the rest are 0.
    choice: whether a choice gathers whole `logits` or the best `candidates` of each rank where only the token is wanted.
    """

    name: str
    axes: Mapping[str, Axes]
    padding: Mapping[str, int] = field(default_factory=dict)
    merged: tuple[str, ...] = ()
    choice: str = "logits"

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", MappingProxyType(dict(self.axes)))
        object.__setattr__(self, "padding", MappingProxyType(dict(self.padding)))
        for axis, multiple in self.padding.items():
            if multiple < 1:
                raise ValueError(f"rules {self.name}: {axis} is padded to multiples of {multiple}")
        if self.choice not in CHOICES or not set(self.merged) <= set(LOOKUPS):
            raise ValueError(f"rules {self.name}: choice {self.choice!r} of {CHOICES}, merged {self.merged} of {LOOKUPS}")

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.axes.items(), key=str)), self.merged, self.choice))

    def key(self, axis: str, name: str = "") -> str | None:
        """The key of the table that holds for an axis of the tensor `name`; None for an axis that is not listed."""
        parts = [p for p in name.split(".") if p]
        return next((k for k in (*(f"{p}.{axis}" for p in reversed(parts)), axis) if k in self.axes), None)

    def of(self, axis: str, name: str = "") -> tuple[str, ...]:
        """The mesh axes that cut a logical axis (in the tensor `name`).

        `axis` may itself name a part in front, `gate.experts`, and may be `a*b`: without a rule of its own that is cut like a.
        """
        part, _, plain = axis.rpartition(".")
        found = self.key(plain, part or name) or self.key(plain.split("*")[0], part or name)
        if found is None:
            raise ValueError(f"rules {self.name}: axis {plain}{f' of {name}' if name else ''} is not listed")
        return listed(self.axes[found])

    def over(self, *axes: str) -> tuple[str, ...]:
        """The mesh axes over which partial results of these logical axes must be summed: each once, in the order of the first."""
        return tuple(dict.fromkeys(m for a in axes for m in self.of(a)))

    def cut(self, dim: Dim, name: str) -> tuple[str, ...]:
        """The mesh axes that cut one stored dimension."""
        whole = "*".join(dim.axes)
        if len(dim.axes) > 1 and self.key(whole, name) is not None:
            return self.of(whole, name)
        for inner in dim.axes[1:]:
            if self.of(inner, name):
                raise ValueError(f"rules {self.name}: {name}: axis {inner} is cut over {self.of(inner, name)}, but stands inside {whole}")
        return self.of(dim.axes[0], name)

    def share(self, dim: Dim, stored: int, name: str, mesh: Mesh) -> int:
        """Stored elements of one dimension on each rank, padding included."""
        axes, whole = self.cut(dim, name), "*".join(dim.axes)
        ways = mesh.ways(axes)
        if ways == 1:
            return stored
        logical = prod(dim.sizes)
        as_whole = len(dim.axes) > 1 and self.key(whole, name) is not None
        axis, outer = (whole, logical) if as_whole else (dim.axes[0], dim.sizes[0])
        multiple = self.padding.get(axis)
        if multiple is None and outer % ways:
            over = " x ".join(axes)
            raise ValueError(f"rules {self.name}: {name}: {axis} of {outer} does not divide by {ways} ({over}) and has no padding")
        each = round_up(round_up(outer, ways) // ways, multiple or 1) * (logical // outer)
        if each % dim.per:
            raise ValueError(f"rules {self.name}: {name}: {each} of {logical} {whole} on each of {ways} ranks cut a block of {dim.per}")
        return each // dim.per

    def partition(self, spec: ParamSpec, mesh: Mesh) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(dimension, mesh axes) of every dimension of a tensor that is cut; ValueError for a mesh axis that cuts two of them."""
        cuts = [(i, self.cut(d, spec.name)) for i, d in enumerate(spec.dims)]
        used = [m for _, axes in cuts for m in axes]
        twice = sorted({m for m in used if used.count(m) > 1})
        if twice:
            axes = " ".join("*".join(d.axes) for d in spec.dims)
            raise ValueError(f"rules {self.name}: {spec.name}: {axes} use the mesh axis {', '.join(twice)} twice")
        for m in used:
            mesh.length(m)
        return tuple((i, axes) for i, axes in cuts if axes)

    def local_shape(self, spec: ParamSpec, mesh: Mesh) -> tuple[int, ...]:
        """The shape that every rank holds, padding included."""
        self.partition(spec, mesh)
        return tuple(self.share(d, n, spec.name, mesh) for d, n in zip(spec.dims, spec.shape, strict=True))
