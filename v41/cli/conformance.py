# SPDX-License-Identifier: Apache-2.0
"""`v41 conformance`."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from v41.conformance import report
from v41.conformance.cases import all_cases
from v41.conformance.patterns import Patterns, read_patterns
from v41.conformance.run import Result, Verdict, run
from v41.conformance.target import target_named, target_names
from v41.conformance.walk import Opened, open_with_params
from v41.golden.folder import versions
from v41.spec.numerics import Numerics

PRIMITIVES = (Numerics(), Numerics("exact"), Numerics("exact", dtype="float64"), Numerics("trn2"), Numerics("released"))


@click.command()
@click.option("--backend", help="cpu, cpu-compiled, neuron-sim, or the name of an installed one.")
@click.option("--pack", "packs", multiple=True, type=click.Path(path_type=Path), help="A golden pack; may be given again. Without one: primitives only.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Weights of packs that no recipe gives.")
@click.option("--include", multiple=True, help="Shell pattern of cases to run; may be given again.")
@click.option("--exclude", multiple=True, help="Shell pattern of cases to leave out; may be given again.")
@click.option("--config", type=click.Path(path_type=Path, exists=True), help="TOML: include, exclude, xfail and lacks (docs/conformance.md 7).")
@click.option("--max-seconds", type=click.FloatRange(min=0), help="Begin no case after so long.")
@click.option("--results", type=click.Path(path_type=Path), help="Judge a folder of tensors that any program wrote, against one --pack.")
@click.option("--self-test", is_flag=True, help="Known wrong backends, edited packs and swapped layouts: each must be caught.")
@click.option("--list", "listed", is_flag=True, help="Print the cases and what they need; run nothing.")
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def conformance(
    backend: str | None,
    packs: tuple[Path, ...],
    checkpoint: Path | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    config: Path | None,
    max_seconds: float | None,
    results: Path | None,
    self_test: bool,
    listed: bool,
    machine: bool,
) -> None:
    """Whether a backend computes the model, where it leaves it first, and what that usually means. Exit 0 pass, 1 fail, 2 nothing compared."""
    given = read_patterns(config) if config else Patterns()
    patterns = replace(given, include=given.include + include, exclude=given.exclude + exclude)
    if self_test:
        sys.exit(run_self_test(packs, checkpoint, machine))
    opened = [open_with_params(p, checkpoint) for p in packs]
    if results is not None:
        finish(judge_results(results, opened), machine, [])
    if backend is None:
        raise click.UsageError(f"--backend NAME, one of {', '.join(target_names())}; or --results, or --self-test")
    target, cases = target_named(backend), all_cases(opened, PRIMITIVES)
    if listed:
        for case in cases:
            click.echo(f"{case.name}  needs {', '.join(case.needs)}")
        return
    verdict = run(cases, target, patterns, max_seconds, told=lambda r: progress(r, machine))
    finish(verdict, machine, notes(opened))


def progress(result: Result, machine: bool) -> None:
    """One line on stderr for what is not quiet."""
    if result.status in ("fail", "error", "xpass", "flip") and not machine:
        click.echo(f"{result.status} {result.case}", err=True)


def notes(opened: list[Opened]) -> list[str]:
    """What may move last bits between the maker of a pack and this machine; the gaps that choices were made by."""
    found, here = [], versions()
    for one in opened:
        manifest = one.pack.manifest
        found += [f"{one.pack.path}: made with {k} {v}, this is {here[k]}" for k, v in manifest["versions"].items() if here.get(k) != v]
        found.append(f"{one.pack.path}: smallest gap {manifest['smallest_gap']}, ties {sum(g['ties'] for g in manifest['gaps'].values())}")
    return found


def finish(verdict: Verdict, machine: bool, told: list[str]) -> None:
    """Prints a verdict and leaves with its exit code."""
    verdict = replace(verdict, notes=tuple(told))
    if machine:
        body = {"backend": verdict.backend, "exit": verdict.exit_code, "counts": verdict.counts, "idle": verdict.idle, "notes": verdict.notes}
        first = verdict.first
        click.echo(json.dumps(body | {"first": first.as_dict() if first else None, "results": [r.as_dict() for r in verdict.results]}))
    else:
        shown = list(verdict.results)
        if any(f.numbers and f.status != "equal" for r in shown for f in r.findings):
            Console(width=220).print(report.figures_table(shown, 12))
        for line in (*report.logit_lines(shown), *report.summary(verdict)):
            click.echo(line)
        if verdict.exit_code == 2:
            click.echo("nothing was compared", err=True)
    sys.exit(verdict.exit_code)


def judge_results(results: Path, opened: list[Opened]) -> Verdict:
    """A folder of tensors against one pack."""
    from v41.conformance.results import judge_folder

    if len(opened) != 1:
        raise click.UsageError(f"--results needs one --pack; {len(opened)} given")
    return judge_folder(results, opened[0])


def run_self_test(packs: tuple[Path, ...], checkpoint: Path | None, machine: bool) -> int:
    """Prints the table of wrong backends; the exit code."""
    from v41.conformance.selftest import self_test

    rows = []
    for row in self_test(packs, checkpoint):
        rows.append(row)
        if not machine:
            click.echo(row.line())
    missed = [r for r in rows if not r.caught]
    if machine:
        click.echo(json.dumps({"rows": [r.as_dict() for r in rows], "caught": len(rows) - len(missed)}))
    else:
        click.echo(f"{len(rows) - len(missed)} of {len(rows)} caught")
    return 2 if not rows else int(bool(missed))
