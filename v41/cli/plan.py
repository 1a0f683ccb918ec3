# SPDX-License-Identifier: Apache-2.0
"""`v41 plan`: bytes, collectives and time of a placement. Nothing runs on a device."""

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from v41.cli.checkpoint import named_config
from v41.cli.plan_picture import draw
from v41.sharding import planner
from v41.sharding.bucket import Bucket, bucket_named
from v41.sharding.costs import Costs
from v41.sharding.placement import placed
from v41.sharding.plan_search import levers, search
from v41.sharding.plan_time import bounds_of, seconds_of
from v41.sharding.planner import WAYS, Plan
from v41.sharding.tables import TABLES
from v41.spec.config import Config

GIB = 2**30


@click.command()
@click.option("--config", "config_name", default="released", show_default=True, help="tiny, medium, released, or a config.json.")
@click.option("--rules", "names", multiple=True, default=["fast"], show_default=True, help=f"{', '.join(TABLES)}; may be given again.")
@click.option("--ranks", default=64, show_default=True, help="Logical cores.")
@click.option("--bucket", "bucket_name", default="decode6", show_default=True, help="decode<rows>, drafts included, or prefill<rows>.")
@click.option("--capacity", default=8192, show_default=True, help="Positions a sequence may have.")
@click.option("--way", type=click.Choice(WAYS), default="graph", show_default=True, help="One graph a step, or many as in PR71.")
@click.option("--search", "searched", is_flag=True, help="Rank placements under --limit instead.")
@click.option("--limit", default=14.0, show_default=True, help="GiB a rank, for --search.")
@click.option("--levers", "levered", is_flag=True, help="Also what would make the estimate smaller, in order of gain.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write stacked bars to this file (needs the extra `plots`).")
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def plan(
    config_name: str,
    names: tuple[str, ...],
    ranks: int,
    bucket_name: str,
    capacity: int,
    way: str,
    searched: bool,
    limit: float,
    levered: bool,
    picture: Path | None,
    machine: bool,
) -> None:
    """Bytes a rank, collectives, FLOPs and time of one step. Exit 1 where a placement does not fit in HBM."""
    config, bucket = named_config(config_name), bucket_named(bucket_name)
    if searched:
        print_search(config, ranks, bucket, capacity, limit, machine)
        return
    plans = [planner.plan(config, placed(n, ranks), bucket, capacity, way) for n in names]
    if picture:
        draw(plans, picture)
    gains = [levers(config, p.placement, bucket, capacity) for p in plans] if levered else [None] * len(plans)
    if machine:
        found = [p.as_dict() | ({} if g is None else {"levers": levers_json(g)}) for p, g in zip(plans, gains, strict=True)]
        click.echo(json.dumps(found[0] if len(found) == 1 else found))
    else:
        for p, g in zip(plans, gains, strict=True):
            print_plan(p, g)
    large = [p for p in plans if p.bytes_per_rank["total"] > Costs().usable]
    for p in large:
        size, room = p.bytes_per_rank["total"] / 1e9, Costs().usable / 1e9
        click.echo(f"{p.placement.rules.name}: {size:.1f} GB do not fit in {room:.0f} GB", err=True)
    sys.exit(1 if large else 0)


def levers_json(found: list) -> list[dict[str, object]]:
    return [{"name": x.name, "why": x.why, "estimate": seconds} for x, seconds in found]


def print_plan(p: Plan, gains: list | None) -> None:
    """One plan as tables."""
    out, r = Console(width=140), p.placement.resident
    out.print(
        f"{p.placement.rules.name}: {p.placement.mesh.size} ranks {dict(p.placement.mesh.axes)}; experts {r.experts}, dense {r.dense}, "
        f"Engram tables {r.tables}; {p.bucket.name}, capacity {p.capacity}, way {p.way}. Planned, not run on a device."
    )
    out.print(bytes_table(p))
    out.print(collectives_table(p))
    out.print(f"{p.flops / 1e9:.1f} GFLOP and {p.hbm_bytes / 1e9:.2f} GB from HBM a step on the fullest rank")
    out.print(time_table(p))
    if gains is not None:
        table = Table("in order of gain, each with all before it", "why", "estimate ms")
        for x, seconds in gains:
            table.add_row(x.name, x.why, f"{seconds * 1e3:.1f}")
        out.print(table)


def bytes_table(p: Plan) -> Table:
    table = Table("bytes a rank", "GiB")
    for kind, parts in p.bytes_by_part.items():
        for name, size in parts.items():
            table.add_row(name, f"{size / GIB:.3f}")
        if len(parts) > 1:
            table.add_row(f"all {kind}", f"{p.bytes_per_rank[kind] / GIB:.3f}")
        table.add_section()
    table.add_row("total", f"{p.bytes_per_rank['total'] / GIB:.3f}")
    return table


def collectives_table(p: Plan) -> Table:
    table = Table("collectives", "closes", "axis", "ranks", "count", "bytes each")
    for c in p.collectives:
        table.add_row(f"{c.phase}: {c.kind}", c.of, c.axis(p.placement.mesh.names), str(c.ranks), str(c.number), f"{c.bytes:,}")
    return table


def time_table(p: Plan) -> Table:
    """Floor and estimate side by side, each with what bounds it."""
    table = Table("part", "floor ms", "bound by", "estimate ms", "bound by ")
    floor, estimate = seconds_of(p.floor), seconds_of(p.estimate)
    low, high = bounds_of(p.floor), bounds_of(p.estimate)
    for part in dict.fromkeys([*[n for n in floor if n != "total"], *[n for n in estimate if n != "total"], "total"]):
        cells = [f"{s[part] * 1e3:.2f}" if part in s else "" for s in (floor, estimate)]
        table.add_row(part, cells[0], low.get(part, ""), cells[1], high.get(part, ""), end_section=part == "waits")
    return table


def print_search(config: Config, ranks: int, bucket: Bucket, capacity: int, limit: float, machine: bool) -> None:
    """Placements that fit, fastest first; exit 1 where none does."""
    fit, out = search(config, ranks, bucket, capacity, limit * GIB)
    if machine:
        click.echo(json.dumps({"limit_gib": limit, "plans": [p.as_dict() for p in fit], "left_out": out}))
    else:
        table = Table("rules", "experts", "dense", "GiB", "floor ms", "estimate ms")
        for p in fit:
            r, times = p.placement.resident, (p.seconds("floor"), p.seconds("estimate"))
            total = p.bytes_per_rank["total"] / GIB
            table.add_row(p.placement.rules.name, r.experts, r.dense, f"{total:.2f}", *(f"{s * 1e3:.2f}" for s in times))
        Console(width=140).print(table)
        click.echo(f"{len(out)} left out; {bucket.name}, capacity {capacity}, at most {limit} GiB a rank. Planned, not run on a device.")
    sys.exit(0 if fit else 1)
