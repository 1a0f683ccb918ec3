# SPDX-License-Identifier: Apache-2.0
"""What a planner plans: rules on a mesh, and the format in which every part stays in HBM."""

from dataclasses import dataclass, field

from v41.sharding.mesh import Mesh, grid
from v41.sharding.rules import Rules
from v41.sharding.tables import TABLES, rules_named

FORMATS = {
    "experts": ("fp4", "fp4-naive", "e4m3"),
    "dense": ("fp8-naive", "bf16"),
    "tables": ("fp8", "bf16"),
    "caches": ("rings", "paged"),
}


@dataclass(frozen=True)
class Resident:
    """Formats in HBM.

    experts: `fp4` as in the checkpoint, decoded in the kernel word by word; `fp4-naive` byte by byte; `e4m3` refolded at load, exactly.
    dense (every other quantized matrix): `fp8-naive` as in the checkpoint, decoded in the kernel; `bf16`, exact.
    tables (Engram): `fp8` with their scales, or `bf16`.
    caches: `rings` as in v41/spec/cache.py, or `paged`: every window and every pooled group as long as the context.
    """

    experts: str = "e4m3"
    dense: str = "bf16"
    tables: str = "fp8"
    caches: str = "rings"

    def __post_init__(self) -> None:
        for part, formats in FORMATS.items():
            if getattr(self, part) not in formats:
                raise ValueError(f"resident {part}: {getattr(self, part)!r} is none of {', '.join(formats)}")


@dataclass(frozen=True)
class Placement:
    """Rules on a mesh with the formats in HBM."""

    rules: Rules
    mesh: Mesh
    resident: Resident = field(default_factory=Resident)

    def ways(self, *axes: str) -> int:
        """Ranks among which these logical axes are divided together."""
        return self.mesh.ways(self.rules.over(*axes))


CHECKPOINT = Resident("fp4-naive", "fp8-naive", "fp8")
RESIDENT = {
    "pr71": Resident("fp4-naive", "fp8-naive", "bf16", "paged"),
    "lean": Resident("fp4", "bf16", "fp8"),
    "fast": Resident("e4m3", "bf16", "fp8"),
}


def placed(name: str, ranks: int) -> Placement:
    """A shipped table with the formats that belong to it, on a mesh of so many ranks in attention groups of up to 8."""
    group = 1 if name == "single" else min(ranks, 8)
    if ranks < 1:
        raise ValueError(f"ranks {ranks}: at least 1")
    if ranks % group:
        raise ValueError(f"ranks {ranks}: not a multiple of the attention group of {group}")
    return Placement(rules_named(name), grid(ranks // group, group), RESIDENT.get(name, CHECKPOINT))


assert set(RESIDENT) <= set(TABLES)
