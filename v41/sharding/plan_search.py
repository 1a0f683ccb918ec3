# SPDX-License-Identifier: Apache-2.0
"""Placements ranked under an HBM limit, and what would make one of them faster."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from v41.sharding.bucket import Bucket
from v41.sharding.costs import Costs
from v41.sharding.mesh import Mesh, grid
from v41.sharding.placement import Placement, Resident
from v41.sharding.planner import Plan, plan
from v41.sharding.rules import LOOKUPS, Axes, Rules
from v41.sharding.tables import GROUP, HEADS, ROUTER, WHOLE
from v41.spec.config import Config

PAIRS = ("fp4", "e4m3"), ("bf16", "fp8-naive"), ("cut", "whole")
US = 1e-6


def split_mesh(ranks: int, inner: int) -> Mesh:
    """The mesh of 8-rank attention groups with the group as 8 / inner x inner."""
    group = min(ranks, 8)
    if inner in (1, group):
        return grid(ranks // group, group)
    return Mesh((("replica", ranks // group), ("half", group // inner), ("part", inner)))


def candidate(ranks: int, inner: int, small: str) -> tuple[Rules, Mesh]:
    """Rules with each expert cut over `inner` ranks; small: `cut` or `whole` shared experts, Engram projection, main_proj, Markov head."""
    mesh = split_mesh(ranks, inner)
    attn = tuple(n for n in mesh.names if n != "replica")
    by_id, within = (mesh.names, ()) if inner == 1 else (mesh.names[: -1 if len(attn) > 1 else 1], mesh.names[-1:])
    cut: dict[str, Axes] = {"experts": by_id, "moe_inter": within, "vocab": mesh.names, "engram_rows": mesh.names}
    cut |= dict.fromkeys(HEADS, attn) | {"shared_inter": mesh.names if small == "cut" else None}
    if small == "cut":
        cut |= {k: attn if v else None for k, v in GROUP.items()}
    padding = {"vocab": 1, "engram_rows": 1, "shared_inter": 32}
    name = f"experts {mesh.ways(by_id)} x {inner}, small parts {small}"
    return Rules(name, WHOLE | ROUTER | cut, padding, LOOKUPS, "candidates"), mesh


def candidates(ranks: int) -> Iterator[Placement]:
    """Every way to cut an expert within an attention group, every format, small parts cut or whole. bf16 Engram tables only cost memory."""
    inners = [n for n in (1, 2, 4, 8) if n <= min(ranks, 8)]
    for inner, (experts, dense, small) in product(inners, product(*PAIRS)):
        yield Placement(*candidate(ranks, inner, small), Resident(experts, dense, "fp8"))


def search(config: Config, ranks: int, bucket: Bucket, capacity: int, limit: float, costs: Costs | None = None) -> tuple[list[Plan], list[str]]:
    """(plans that fit in `limit` bytes a rank, fastest estimate first; why others were left out)."""
    fit, out = [], []
    for placement in candidates(ranks):
        r = placement.resident
        what = f"{placement.rules.name}, experts {r.experts}, dense {r.dense}"
        try:
            found = plan(config, placement, bucket, capacity, costs=costs)
        except ValueError as e:
            out.append(f"{what}: {e}")
            continue
        if found.bytes_per_rank["total"] > limit:
            out.append(f"{what}: {found.bytes_per_rank['total'] / 2**30:.2f} GiB")
        else:
            fit.append(found)
    return sorted(fit, key=lambda p: p.seconds("estimate")), out


@dataclass(frozen=True)
class Lever:
    """Something that is not built yet, as the constants that it would change."""

    name: str
    why: str
    changes: Mapping[str, float]


def lever(name: str, why: str, **changes: float) -> Lever:
    return Lever(name, why, MappingProxyType(changes))


LEVERS = (
    lever(
        "waits for late ranks only",
        "2.07 ms of the near-twin's waits, at 90 all-reduces; the rest is inside a rank",
        waits=0.0,
        late=23 * US,
    ),
    lever("weights as the moving operand", "512 columns in 213 ns, not four loads of 105 ns; seen at half that rate", tile=0.213 / 4 * US),
    lever("a collective at its measured minimum", "17.5 us of 64 ranks, fastest of 630", collective=17.5 / 12 * US),
    lever("collapse and combine inside the mixes' kernel", "the stream stays in SBUF between the sublayers", combine=0.0),
    lever("no isolated kernel calls", "collectives issued from inside the chain", isolated=0.0),
    lever("fixed part of the expert kernel", "ids prefetched, one loop (7 us) instead of one a phase", experts_fixed=10 * US),
    lever("router hidden behind the shared expert", "its products only", router=0.0),
)


def with_lever(costs: Costs, x: Lever) -> Costs:
    changes: dict[str, Any] = dict(x.changes)
    return replace(costs, **changes)


def levers(config: Config, placement: Placement, bucket: Bucket, capacity: int, costs: Costs | None = None) -> list[tuple[Lever, float]]:
    """(lever, estimate with it and all before it), each time the one that gains most."""
    held, left, found = costs or Costs(), list(LEVERS), []
    while left:
        plans = [plan(config, placement, bucket, capacity, costs=with_lever(held, x)) for x in left]
        tried = [(p.seconds("estimate"), i) for i, p in enumerate(plans)]
        best, i = min(tried)
        held = with_lever(held, left[i])
        found.append((left.pop(i), best))
    return found
