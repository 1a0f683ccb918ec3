# SPDX-License-Identifier: Apache-2.0
"""`plan`: what a placement costs on one rank, before any machine is rented. Nothing runs (docs/sharding.md 5)."""

from dataclasses import dataclass, replace
from typing import Any

from v41.sharding.bucket import Bucket, check_fits
from v41.sharding.check import check
from v41.sharding.costs import Costs
from v41.sharding.placement import Placement
from v41.sharding.plan_bytes import bytes_by_part
from v41.sharding.plan_collectives import Collective, collectives
from v41.sharding.plan_step import step_work
from v41.sharding.plan_time import Parts, bounds_of, eager_parts, estimate_parts, floor_parts, seconds_of, total
from v41.sharding.plan_work import Step, Work
from v41.spec.config import Config

WAYS = ("graph", "pr71")


@dataclass(frozen=True)
class Plan:
    """Bytes in HBM, collectives, FLOPs and HBM traffic, and time of one step on the fullest rank."""

    placement: Placement
    bucket: Bucket
    capacity: int
    way: str
    bytes_by_part: dict[str, dict[str, int]]
    collectives: tuple[Collective, ...]
    flops: float
    hbm_bytes: float
    floor: Parts
    estimate: Parts

    @property
    def bytes_per_rank(self) -> dict[str, int]:
        """`weights`, `caches`, `scratch`, and their `total`."""
        sums = {kind: sum(parts.values()) for kind, parts in self.bytes_by_part.items()}
        return sums | {"total": sum(sums.values())}

    def seconds(self, kind: str) -> float:
        """Total of the `floor` or the `estimate`."""
        return total(self.floor if kind == "floor" else self.estimate)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        p, names = self.placement, self.placement.mesh.names
        listed = [
            {"phase": c.phase, "axis": c.axis(names), "of": c.of, "kind": c.kind, "ranks": c.ranks, "count": c.number, "bytes": c.bytes}
            for c in self.collectives
        ]
        return {
            "rules": p.rules.name,
            "ranks": p.mesh.size,
            "mesh": dict(p.mesh.axes),
            "resident": {n: getattr(p.resident, n) for n in ("experts", "dense", "tables", "caches")},
            "bucket": self.bucket.name,
            "capacity": self.capacity,
            "way": self.way,
            "bytes_per_rank": self.bytes_per_rank,
            "bytes_by_part": self.bytes_by_part,
            "collectives": listed,
            "flops": round(self.flops),
            "hbm_bytes": round(self.hbm_bytes),
            "step_seconds": {"floor": seconds_of(self.floor), "estimate": seconds_of(self.estimate)},
            "bound_by": {"floor": bounds_of(self.floor), "estimate": bounds_of(self.estimate)},
            "measured_on_a_device": False,
        }


def summed(work: list[Work], amount: str) -> float:
    return sum(w.calls * getattr(w, amount) for w in work)


def plan(config: Config, placement: Placement, bucket: Bucket, capacity: int, way: str = "graph", costs: Costs | None = None) -> Plan:
    """The plan of one step; ValueError where rules, mesh, bucket or capacity do not fit the model.

    way: `graph`, one graph a step; `pr71`, the execution that PR71 describes (many graphs, the host between them) on this placement.
    """
    if way not in WAYS:
        raise ValueError(f"way {way!r}: {' or '.join(WAYS)}")
    costs = costs or Costs()
    check_fits(config, bucket, capacity)
    check(config, placement.rules, placement.mesh)
    found = collectives(config, placement, bucket, capacity)
    if way == "pr71":
        costs = replace(costs, fp4_naive=costs.pr71_fp4, fp8_naive=costs.pr71_fp8)
    work = step_work(Step(config, placement, capacity, costs), bucket)
    layers, ranks = config.num_hidden_layers, placement.mesh.size
    eager = way == "pr71"
    return Plan(
        placement=placement,
        bucket=bucket,
        capacity=capacity,
        way=way,
        bytes_by_part=bytes_by_part(config, placement, bucket, capacity, costs),
        collectives=tuple(found),
        flops=summed(work, "flops"),
        hbm_bytes=summed(work, "bytes") + summed(work, "row_bytes"),
        floor=floor_parts(work, found, costs),
        estimate=eager_parts(work, found, layers, ranks, costs) if eager else estimate_parts(work, found, costs),
    )
