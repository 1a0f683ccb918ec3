# SPDX-License-Identifier: Apache-2.0
"""`v41 bench kernels`: modeled time, bounds and memory of the NKI kernels."""

import json

import click
from rich.console import Console
from rich.table import Table

from v41.backends.neuron.bench import PHASES, Measured, cases, measure


@click.command()
@click.option("--kernel", "names", multiple=True, metavar="NAME", help="Only this kernel (may be given again).")
@click.option("--phase", type=click.Choice(PHASES), help="Only decode or prefill shapes.")
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def kernels(names: tuple[str, ...], phase: str | None, machine: bool) -> None:
    """Time by the simulator's model, what bounds it, memory and instructions of every kernel and shape. Nothing is run on a device.

    Exit 2 where no case has these names and this phase.
    """
    every = cases()
    known = sorted({c.kernel for c in every})
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise click.UsageError(f"--kernel {', '.join(unknown)}: there are {', '.join(known)}")
    chosen = [c for c in every if (not names or c.kernel in names) and phase in (None, c.phase)]
    if not chosen:
        raise click.UsageError(f"no case of --kernel {', '.join(names) or 'any'} in --phase {phase}")
    told = [measure(c) for c in chosen]
    if machine:
        click.echo(json.dumps([m.as_dict() for m in told], indent=1))
    else:
        Console(width=200).print(table(told))


def table(told: list[Measured]) -> Table:
    """One line a case, with the time of every part."""
    made = Table(
        "kernel", "shape", "kind", "phase", "us", "floor us", "ratio", "bound by", "SBUF", "PSUM", "instr", "parts, us", title="model, not run on a device"
    )
    for m in told:
        d = m.as_dict()
        parts = " ".join(f"{n} {us:.1f}" for n, us in m.parts.items() if us >= 0.05)
        made.add_row(
            *(m.case.kernel, m.case.shape, m.case.kind, m.case.phase, f"{m.time_us:.1f}", f"{m.case.floor_us:.1f}", f"{m.ratio:.2f}"),
            *(m.bound_by, f"{d['sbuf_peak']:,}", f"{d['psum_peak']:,}", f"{d['instructions']:,}", parts),
        )
    return made
