# SPDX-License-Identifier: Apache-2.0
"""Ranks as points of a grid with named axes. The last axis changes fastest: consecutive ranks form an attention group."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Mesh:
    """(name, size) of every axis, slowest first."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [n for n, _ in self.axes]
        if len(set(names)) < len(names):
            raise ValueError(f"mesh axes {names}: a name stands twice")
        for name, size in self.axes:
            if size < 1:
                raise ValueError(f"mesh axis {name}: {size} ranks")

    @property
    def size(self) -> int:
        """Ranks."""
        return prod(s for _, s in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, slowest first."""
        return tuple(n for n, _ in self.axes)

    def length(self, axis: str) -> int:
        """Ranks along one axis."""
        if axis not in self.names:
            raise ValueError(f"mesh axis {axis}: the mesh has {', '.join(self.names)}")
        return dict(self.axes)[axis]

    def ways(self, axes: tuple[str, ...]) -> int:
        """Shares of a dimension that is cut over these axes."""
        return prod(self.length(a) for a in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The rank's place on every axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank}: the mesh has {self.size} ranks")
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return {n: place[n] for n in self.names}

    def rank(self, coordinate: dict[str, int]) -> int:
        """The rank at a place, which names every axis."""
        if set(coordinate) != set(self.names):
            raise ValueError(f"coordinate of {sorted(coordinate)}: the mesh has {', '.join(self.names)}")
        found = 0
        for name, size in self.axes:
            if not 0 <= coordinate[name] < size:
                raise ValueError(f"mesh axis {name}: {coordinate[name]} of {size}")
            found = found * size + coordinate[name]
        return found

    def share(self, rank: int, axes: tuple[str, ...]) -> int:
        """Which share of a dimension that is cut over these axes the rank holds: its place in `group`."""
        place, found = self.coordinate(rank), 0
        for axis in axes:
            found = found * self.length(axis) + place[axis]
        return found

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that share all other coordinates with this one, in the order of their shares (first of `axes` slowest)."""
        place = self.coordinate(rank)
        found = [place]
        for axis in axes:
            found = [p | {axis: i} for p in found for i in range(self.length(axis))]
        return tuple(self.rank(p) for p in found)

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Every group of these axes, each once."""
        return tuple(dict.fromkeys(self.group(r, axes) for r in range(self.size)))


def grid(replica: int, attn: int) -> Mesh:
    """`replica` copies of an attention group of `attn` consecutive ranks."""
    return Mesh((("replica", replica), ("attn", attn)))


MESHES = {ranks: grid(max(ranks // 8, 1), min(ranks, 8)) for ranks in (1, 2, 4, 8, 16, 32, 64)}
mesh64 = MESHES[64]
