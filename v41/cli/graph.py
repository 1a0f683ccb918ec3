# SPDX-License-Identifier: Apache-2.0
"""`v41 graph`: one step of one rank as one captured graph, read at full size. Nothing runs on a device."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from v41.backends.neuron.capture import CaptureError
from v41.backends.neuron.graph_report import as_dict, differences, failed, graphed
from v41.cli.checkpoint import named_config
from v41.sharding.bucket import bucket_named
from v41.sharding.placement import placed
from v41.sharding.tables import TABLES
from v41.spec.numerics import REGIMES, Numerics

GIB = 2**30


@click.command()
@click.option("--config", "config_name", default="released", show_default=True, help="tiny, medium, released, or a config.json.")
@click.option("--rules", "rules_name", default="lean", show_default=True, help=f"{', '.join(TABLES)}.")
@click.option("--ranks", default=64, show_default=True, help="Logical cores.")
@click.option("--bucket", "bucket_name", default="decode6", show_default=True, help="decode<rows> or prefill<rows>, x<sequences> behind it.")
@click.option("--capacity", default=8192, show_default=True, help="Positions a sequence may have.")
@click.option("--regime", type=click.Choice(REGIMES), default="trn2", show_default=True, help="How it is computed (docs/numerics.md).")
@click.option("--weights", type=click.Choice(["prepared", "checkpoint"]), default="prepared", show_default=True, help="As kernels read them, or as stored.")
@click.option("--hash-rank", "hashed", multiple=True, type=int, help="Ranks whose graphs are captured and compared; the first and one in the middle.")
@click.option("--profile-mib", type=click.IntRange(min=0), help="Run kernels that read up to so many MiB in the simulator; decode 200, prefill 0.")
@click.option("--diff", nargs=2, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Compare two reports (JSON files) instead.")
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def graph(
    config_name: str,
    rules_name: str,
    ranks: int,
    bucket_name: str,
    capacity: int,
    regime: str,
    weights: str,
    hashed: tuple[int, ...],
    profile_mib: int | None,
    diff: tuple[Path, Path] | None,
    machine: bool,
) -> None:
    """Capture a step and read it: collectives, refused operations, caches, bytes. Exit 1 where something is wrong, or two reports differ."""
    if diff:
        compare(*diff, machine)
        return
    placement, bucket = placed(rules_name, ranks), bucket_named(bucket_name)
    chosen = hashed or tuple(dict.fromkeys((0, ranks // 2 + min(5, ranks // 2 - 1) if ranks > 1 else 0)))
    for rank in chosen:
        placement.mesh.coordinate(rank)
    profile = (200 if bucket.kind == "decode" else 0) if profile_mib is None else profile_mib
    try:
        report = as_dict(graphed(named_config(config_name), placement, bucket, capacity, Numerics(regime), chosen, weights, profile << 20))
    except CaptureError as e:
        report = failed(e)
    if machine:
        click.echo(json.dumps(report))
    else:
        show(report)
    sys.exit(1 if report["wrong"] else 0)


def show(r: dict[str, Any]) -> None:
    """A report as tables."""
    out = Console(width=140)
    if r["graphs"]:
        out.print(
            f"{r['rules']}, {r['ranks']} ranks, {r['bucket']}, capacity {r['capacity']}, regime {r['numerics']['regime']}: {r['graphs']} graph, "
            f"{sum(r['nodes'].values())} nodes, hash {r['graph_hash'][:16]} on ranks {', '.join(r['graph_hash_by_rank'])}. Not run on a device."
        )
        for table in (primitives_table(r), collectives_table(r), figures_table(r), findings_table(r)):
            out.print(table)
    for line in r["wrong"][:20]:
        click.echo(f"wrong: {line}", err=True)
    if len(r["wrong"]) > 20:
        click.echo(f"wrong: {len(r['wrong']) - 20} more", err=True)


def primitives_table(r: dict[str, Any]) -> Table:
    table = Table("primitive", "nodes", "kernel")
    for name, found in sorted(r["primitives"].items(), key=lambda kv: -kv[1]["nodes"]):
        table.add_row(name, str(found["nodes"]), "yes" if found["kernel"] else "none: the definition's shapes only")
    return table


def collectives_table(r: dict[str, Any]) -> Table:
    table = Table("collectives", "axis", "ranks", "count", "bytes each", caption="as planned" if r["collectives_match_plan"] else "NOT as planned")
    for c in r["collectives"]:
        table.add_row(c["kind"], c["axis"], str(c["ranks"]), str(c["count"]), f"{c['bytes']:,}")
    return table


def figures_table(r: dict[str, Any]) -> Table:
    """Single figures."""
    table = Table("figure", "value")
    counted, caches = r["instructions"], r["caches"]
    profiled, estimated = sum(counted["profiled"].values()), sum(counted["estimated"].values())
    for name, value in (
        ("host reads", r["host_reads"]),
        ("tensors of 64-bit integers", r["int64_tensors"]),
        ("kernel arguments that must be copied first", r["copies"]),
        ("caches: written by kernels, copied back, unchanged, not donated", ", ".join(str(n) for n in caches.values())),
        ("instructions (limit 5,000,000)", f"{counted['total']:,}: {profiled:,} profiled, {estimated:,} by a rule of thumb"),
        ("kernels one after the other, modeled", f"{counted['modeled_us']['total'] / 1e3:.1f} ms, with one expert hit a layer and without collectives"),
        ("intermediates alive at once, nothing fused", f"{r['alive_bytes'] / 2**20:.1f} MiB"),
        ("arguments", ", ".join(f"{n} {b / GIB:.3f} GiB" for n, b in r["argument_bytes"].items() if b > 2**20)),
        ("bytes a rank, planned", ", ".join(f"{n} {b / GIB:.3f} GiB" for n, b in r["bytes_per_rank"].items())),
        ("FLOPs and HBM bytes a step, planned", f"{r['flops'] / 1e9:.1f} G, {r['hbm_bytes'] / 1e9:.2f} GB"),
        ("step, planned", f"floor {r['step_seconds']['floor']['total'] * 1e3:.1f} ms, estimate {r['step_seconds']['estimate']['total'] * 1e3:.1f} ms"),
        ("capture", f"{r['capture']['seconds']} s, peak {r['capture']['peak_gib']} GiB"),
    ):
        table.add_row(name, str(value))
    return table


def findings_table(r: dict[str, Any]) -> Table:
    """Findings by severity, code and text, with one node of each."""
    table = Table("finding", "code", "count", "text", "for example")
    groups: dict[tuple[str, str, str], list[str]] = {}
    for f in [*r["refused_ops"], *r["doubtful_ops"]]:
        text = "a kernel's argument is not contiguous or begins inside its storage" if f["code"] == "copy" else f["text"]
        groups.setdefault((f["severity"], f["code"], text), []).append(f["node"])
    for (severity, code, text), nodes in groups.items():
        table.add_row(severity, code, str(len(nodes)), text, nodes[0])
    return table


def read_report(path: Path) -> dict[str, Any]:
    """A report of this command from its file; ValueError for any other."""
    try:
        found = json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"diff: {path} is not a JSON report: {e}") from e
    if not isinstance(found, dict) or "graph_hash" not in found:
        raise ValueError(f"diff: {path} is no report of `v41 graph --json`: it has no graph_hash")
    return found


def compare(left: Path, right: Path, machine: bool) -> None:
    """Two reports; exit 1 where they differ in anything but the time of their capture."""
    found = differences(read_report(left), read_report(right))
    if machine:
        click.echo(json.dumps([{"path": p, "left": x, "right": y} for p, x, y in found]))
    else:
        table = Table("differs", str(left), str(right))
        for path, x, y in found:
            table.add_row(path, str(x)[:60], str(y)[:60])
        Console(width=160).print(table if found else "no difference")
    sys.exit(1 if found else 0)
