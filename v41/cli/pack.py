# SPDX-License-Identifier: Apache-2.0
"""`v41 golden pack`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from v41.golden import folder
from v41.golden.pack import chosen_scenarios, make_pack
from v41.golden.pack_block_make import make_block_pack
from v41.golden.pack_scenarios import scenarios
from v41.params_io import load_params
from v41.spec.config import Config
from v41.spec.numerics import Numerics

# Folder names of the packs of one model.
REGIMES = {
    "faithful": Numerics(),
    "released": Numerics("released"),
    "exact-float32": Numerics("exact"),
    "exact-float64": Numerics("exact", dtype="float64"),
    "trn2": Numerics("trn2"),
}


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path), required=False)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A folder; each regime gets one in it.")
@click.option("--regime", "regimes", multiple=True, type=click.Choice(list(REGIMES)), help="Default: all. May be given again.")
@click.option("--scenario", "names", multiple=True, help="Default: all that the regime has. May be given again; what it starts from comes along.")
@click.option("--config", "shape", type=click.Choice(["released", "medium", "tiny"]), help="Instead of CHECKPOINT, with --block: weights by the recipe.")
@click.option("--block", type=int, help="With --config: this layer alone, at its full widths.")
@click.option("--rows", default=4, show_default=True, type=click.IntRange(1, 64), help="With --block: rows of the call.")
@click.option("--seed", default=0, show_default=True, help="With --block: of the weight recipe.")
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def pack(
    checkpoint: Path | None,
    out: Path,
    regimes: tuple[str, ...],
    names: tuple[str, ...],
    shape: str | None,
    block: int | None,
    rows: int,
    seed: int,
    machine: bool,
) -> None:
    """Golden packs of CHECKPOINT, one folder a regime; or of one layer of a shape, with --config and --block (docs/golden-pack.md)."""
    if (checkpoint is None) == (shape is None) or (shape is None) != (block is None):
        raise click.UsageError("give CHECKPOINT, or --config with --block")
    wanted = regimes or tuple(REGIMES)
    if shape is not None:
        config = Config.from_json(Path(__file__).parent.parent / "data" / f"{shape}_config.json")
        made = {r: make_block_pack(config, REGIMES[r], int(block or 0), rows, seed, out / r) for r in wanted}
    else:
        assert checkpoint is not None
        made = from_checkpoint(checkpoint, wanted, names, out)
    report(made, out, machine)


def from_checkpoint(checkpoint: Path, wanted: tuple[str, ...], names: tuple[str, ...], out: Path) -> dict[str, dict[str, Any]]:
    """The packs of a checkpoint; a scenario that a regime has not is left out of its pack."""
    from v41.cli.golden import recipe_of

    recipe, made = recipe_of(checkpoint), {}
    for regime in wanted:
        params = load_params(checkpoint, numerics=REGIMES[regime])
        known = [s.name for s in chosen_scenarios(params, None)]
        stray = [n for n in names if n not in {s.name for s in scenarios(params.config, Numerics())}]
        if stray:
            raise ValueError(f"--scenario: {stray[0]!r} is not one of {', '.join(known)}")
        asked = [n for n in names if n in known]
        if names and not asked:
            click.echo(f"{regime}: has none of {', '.join(names)}", err=True)
            continue
        made[regime] = make_pack(params, recipe, out / regime, asked if names else None, partial(progress, regime))
    return made


def progress(regime: str, scenario: str) -> None:
    click.echo(f"{regime} {scenario}", err=True)


def report(made: dict[str, dict[str, Any]], out: Path, machine: bool) -> None:
    """What was written."""
    rows = {}
    for regime, manifest in made.items():
        size = sum(f.stat().st_size for f in (out / regime).iterdir())
        tensors = sum(len(t) for t in manifest["tensors"].values())
        digest = folder.text_digest((out / regime / folder.MANIFEST).read_text(encoding="utf-8"))
        rows[regime] = {"bytes": size, "tensors": tensors, "smallest_gap": manifest["smallest_gap"], "manifest_sha256": digest}
    if machine:
        click.echo(json.dumps({"out": str(out), "packs": rows}))
        return
    for regime, row in rows.items():
        gap = "none" if row["smallest_gap"] is None else f"{row['smallest_gap']:.3g}"
        click.echo(f"{out / regime}: {row['tensors']} tensors, {row['bytes']:,} bytes, smallest gap {gap}, manifest {row['manifest_sha256'][:16]}")
