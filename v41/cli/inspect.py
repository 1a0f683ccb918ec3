# SPDX-License-Identifier: Apache-2.0
"""`v41 inspect`: what a checkpoint folder holds, from its headers."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from v41.checkpoint import open_folder
from v41.cli.streaming import byte_bar
from v41.inspect_digest import digest_against
from v41.inspect_probe import Verdict, probe
from v41.inspect_report import Count, FolderReport, LayerLine, inspect_folder

FIRST = 20  # names that a list prints


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--no-draft", is_flag=True, help="The draft head may be absent.")
@click.option("--digest", type=click.Path(path_type=Path), help="Hash every tensor: compare with this list, or write it.")
@click.option("--probe", "probing", is_flag=True, help="Check published bytes, hashes, frequencies and tokens of the released checkpoint.")
@click.option("--no-run", is_flag=True, help="With --probe: leave the streamed run of 130 tokens out (it counts as not passed).")
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def inspect(directory: Path, no_draft: bool, digest: Path | None, probing: bool, no_run: bool, machine: bool) -> None:
    """Components, dtypes, bytes, parameters, layer roles, and what is missing, of a folder in the released layout.

    Exit 0: complete, and nothing differs. 1: something is missing, unknown, wrong or differs. 2: no such folder.
    """
    report = inspect_folder(directory, draft=not no_draft)
    if not machine:
        show(report)
    told: dict[str, Any] = {"report": report.as_dict()}
    failed = not report.complete
    if digest is not None:
        lines = hashed(directory, digest)
        told["digest"] = {"file": str(digest), "written": lines is None, "differ": lines or []}
        failed |= bool(lines)
        if not machine:
            click.echo(f"{digest}: written" if lines is None else "\n".join(lines[:FIRST] + [f"{len(lines)} tensors differ from {digest}"]))
    if probing:
        verdicts = probed(directory, not no_run)
        told["probe"] = [v.as_dict() for v in verdicts]
        failed |= any(v.status != "pass" for v in verdicts)
        if not machine:
            show_verdicts(verdicts)
    if machine:
        click.echo(json.dumps(told))
    sys.exit(1 if failed else 0)


def hashed(directory: Path, digest: Path) -> list[str] | None:
    """`digest_against` with a bar in bytes."""
    folder, done = open_folder(directory), 0
    with byte_bar() as bar:

        def on_read(count: int) -> None:
            nonlocal done
            done += count
            bar(done, folder.total_bytes, "hashing")

        return digest_against(folder, digest, on_read)


def probed(directory: Path, run: bool) -> list[Verdict]:
    with byte_bar() as bar:
        return probe(directory, run, bar)


def counts_table(title: str, counts: dict[str, Count], total: Count) -> Table:
    table = Table(title, "tensors", "bytes", "GiB", "parameters")
    for name, c in [*counts.items(), ("all", total)]:
        table.add_row(name, f"{c.tensors:,}", f"{c.bytes:,}", f"{c.bytes / 2**30:.4f}", f"{c.parameters:,}")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def layers_table(lines: tuple[LayerLine, ...]) -> Table:
    table = Table("layer", "role", "ratio", "keys of", "selection of", "candidates", "Engram", "draft tap", "tensors", "bytes")
    for line in lines:
        owners = ["" if i is None else str(i) for i in (line.kv_source, line.index_source)]
        marks = [line.candidates or "", "yes" if line.engram else "", "yes" if line.draft_tap else ""]
        table.add_row(str(line.layer), line.role, str(line.ratio), *owners, *marks, f"{line.count.tensors:,}", f"{line.count.bytes:,}")
    return table


def show(report: FolderReport) -> None:
    """Tables, then everything that is wrong."""
    console = Console(width=140)
    for table in (
        counts_table("component", report.components, report.total),
        counts_table("dtype", report.dtypes, report.total),
        layers_table(report.layers),
    ):
        console.print(table)
    for part in report.passed_over:
        click.echo(f"passed over by the text model: {part.what}, {part.tensors:,} tensors, {part.bytes:,} bytes")
    found = report.findings
    wrong = [": ".join(w) for w in found.wrong]
    lists = (("problem", report.problems), ("missing", found.missing), ("unknown", found.unknown), ("wrong", wrong))
    for what, names in lists:
        for name in names[:FIRST]:
            click.echo(f"{what}: {name}")
        if len(names) > FIRST:
            click.echo(f"{what}: and {len(names) - FIRST:,} more")
    click.echo("complete" if report.complete else "not complete")


def show_verdicts(verdicts: list[Verdict]) -> None:
    table = Table("check", "verdict", "expected", "found")
    for v in verdicts:
        table.add_row(v.check, v.status, v.expected, v.found)
    Console(width=160).print(table)
