# SPDX-License-Identifier: Apache-2.0
"""`v41 golden make|check|diff`."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from v41.checkpoint import open_folder
from v41.cli.pack import pack
from v41.cli.streaming import stream_make
from v41.golden import compare, folder
from v41.golden import make as making
from v41.golden import ranks as rank_golden
from v41.golden.metrics import Difference
from v41.params_io import load_params, passed_over
from v41.sharding.mesh import MESHES, Mesh
from v41.sharding.tables import rules_named
from v41.spec.config import Config
from v41.spec.numerics import INDEX_KEYS, REGIMES, Numerics
from v41.stream import check_streamed, prepare_run
from v41.tokenizer import open_tokenizer

as_json = click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
within = click.option(
    "--tolerance", type=click.FloatRange(min=0, max=1), default=0.0, show_default=True, help="Relative L2 up to which a float tensor passes; 0: bit for bit."
)


@click.group()
def golden() -> None:
    """Make, check and compare golden outputs."""


def read_prompts(directory: Path, texts: tuple[str, ...], ids: tuple[str, ...], bos: int) -> list[list[int]]:
    """Token lists: every --text through the checkpoint's tokenizer with bos in front, every --ids as it is."""
    prompts = []
    if texts:
        tokenizer = open_tokenizer(directory / "tokenizer.json")
        prompts += [[bos, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
    for listed in ids:
        try:
            prompts.append([int(i) for i in listed.replace(",", " ").split()])
        except ValueError as e:
            raise ValueError(f"--ids: {listed!r} is no list of integers") from e
        if any(abs(i) >= 2**63 for i in prompts[-1]):
            raise ValueError(f"--ids: {listed!r} has an id beyond 64 bits")
    if not prompts:
        raise ValueError("give at least one --text or --ids")
    return prompts


@golden.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--text", "texts", multiple=True, help="A prompt; may be given again for a batch.")
@click.option("--ids", multiple=True, help="A prompt as token ids, comma-separated; may be given again.")
@click.option("--steps", default=8, show_default=True, help="Greedy decode steps after the prefill.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.option("--taps", is_flag=True, help="Also every tap and cache.")
@click.option("--regime", type=click.Choice(REGIMES), default="faithful", show_default=True)
@click.option("--index-keys", type=click.Choice(INDEX_KEYS), help="Default: the regime's own.")
@click.option("--dtype", type=click.Choice(["float32", "float64", "bfloat16"]), help="For exact: float32 (default) or float64.")
@click.option("--stream", is_flag=True, help="One layer in memory at a time; a run that was killed goes on.")
@click.option("--layers", help="With --stream: a:b, these layers of the prefill only, from the records of those below.")
@click.option("--ranks", type=int, help="Also what each of that many ranks brings to every collective; all of them in this process.")
@click.option("--rules", default="pr71", show_default=True, help="With --ranks: the placement.")
@as_json
def make(
    checkpoint: Path,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    steps: int,
    out: Path,
    taps: bool,
    regime: str,
    index_keys: str | None,
    dtype: str | None,
    stream: bool,
    layers: str | None,
    ranks: int | None,
    rules: str,
    machine: bool,
) -> None:
    """Golden outputs of CHECKPOINT, a folder in the released layout."""
    numerics = Numerics(regime, index_keys, dtype)
    if layers and not stream:
        raise ValueError("--layers: only with --stream")
    if ranks is not None and stream:
        raise ValueError("--ranks: not with --stream")
    prompts = read_prompts(checkpoint, texts, ids, Config.from_json(checkpoint / "config.json").bos_token_id)
    if ranks is not None:
        made = rank_golden.make(checkpoint, rules_named(rules), mesh_of(ranks), numerics, prompts, steps, out, taps, recipe_of(checkpoint))
        print_ranks(out, made, machine)
        return
    if stream:
        manifest = stream_make(prepare_run(checkpoint, numerics), prompts, steps, out, taps, recipe_of(checkpoint), layers)
    else:
        params = load_params(checkpoint, numerics=numerics)
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("prefill and decode", total=steps + 1)
            recipe = recipe_of(checkpoint)
            manifest = making.make(params, prompts, steps, out, taps, recipe, lambda done, total: bar.update(task, completed=done))
    for part in passed_over(open_folder(checkpoint), True):
        click.echo(f"passed over: {part.what}, {part.tensors:,} tensors, {part.bytes:,} bytes", err=True)
    print_made(out, manifest, machine)


def mesh_of(ranks: int) -> Mesh:
    """The shipped mesh of that many ranks."""
    if ranks not in MESHES:
        raise ValueError(f"--ranks: {ranks}; there are meshes of {', '.join(map(str, MESHES))}")
    return MESHES[ranks]


def print_ranks(out: Path, made: dict[str, Any], machine: bool) -> None:
    """What was written for a mesh of ranks."""
    sizes = [r["bytes_held"] for r in made["ranks"].values()]
    summary = {
        "out": str(out),
        "ranks": len(sizes),
        "rules": made["rules"]["name"],
        "alike": made["alike"],
        "collectives": len(made["order"]),
        "bytes_held": {"least": min(sizes), "most": max(sizes)},
        "bytes_read": {"most": max(r["bytes_read"] for r in made["ranks"].values())},
    }
    if machine:
        click.echo(json.dumps(summary))
        return
    click.echo(f"{out}: {len(sizes)} ranks by rules {summary['rules']}, {summary['collectives']} collectives each")
    click.echo(f"{summary['alike']} tensors in {rank_golden.WHOLE} are the same on every rank; weights per rank {min(sizes):,} to {max(sizes):,} bytes")


def print_made(out: Path, manifest: dict[str, Any], machine: bool) -> None:
    """What was written, in two lines or as JSON."""
    summary = {
        "out": str(out),
        "tensors": sum(len(t) for t in manifest["tensors"].values()),
        "bytes": sum(f.stat().st_size for f in out.iterdir()),
        "numerics": manifest["numerics"],
        "smallest_margin": manifest["smallest_margin"],
        "coverage": manifest["coverage"],
    }
    if machine:
        click.echo(json.dumps(summary))
        return
    click.echo(f"{out}: {summary['tensors']} tensors, {summary['bytes']:,} bytes, {' '.join(manifest['numerics'].values())}")
    margin = manifest["smallest_margin"]
    click.echo(f"smallest greedy margin {'none' if margin is None else f'{margin:.3g}'}; exercised: {exercised(manifest['coverage'])}")


def exercised(flags: dict[str, Any]) -> str:
    return ", ".join(n.replace("_", " ") for n, on in flags.items() if on is True) or "nothing"


def recipe_of(checkpoint: Path) -> dict[str, Any] | None:
    """The recipe of a checkpoint that was made by it: what its manifest.json says, else None."""
    file = checkpoint / folder.MANIFEST
    if not file.is_file():
        return None
    try:
        recipe = json.loads(file.read_text(encoding="utf-8")).get("recipe")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as e:
        raise ValueError(f"{file}: not a checkpoint's manifest: {e}") from e
    if recipe is not None:
        folder.check_fields(file, recipe, {"seed": (int,)})
    return recipe


golden.add_command(pack)


@golden.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("checkpoint", type=click.Path(path_type=Path), required=False)
@within
@as_json
def check(directory: Path, checkpoint: Path | None, tolerance: float, machine: bool) -> None:
    """Recompute DIRECTORY and compare every tensor. CHECKPOINT is needed unless the weights come from the recipe."""
    found = folder.open_golden(directory)
    checked = check_streamed if found.manifest["weights"].get("streamed") else compare.check
    report(checked(found, checkpoint, tolerance), machine, versions_note(found.manifest))


@golden.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@within
@as_json
def diff(a: Path, b: Path, tolerance: float, machine: bool) -> None:
    """Compare two golden folders tensor by tensor, B as the expected one."""
    left, right = folder.open_golden(a), folder.open_golden(b)
    note = [f"{k}: {left.manifest[k]} and {right.manifest[k]}" for k in ("numerics", "config_sha256") if left.manifest[k] != right.manifest[k]]
    lone = compare.one_sided(left.manifest["tensors"], right.manifest["tensors"])
    note += [f"{len(lone)} tensors stand on one side only, {lone[0]} first"] if lone else []
    report(compare.diff(left, right, tolerance), machine, note)


def versions_note(manifest: dict[str, Any]) -> list[str]:
    """What differs between the run that made a folder and this one, where it may move last bits."""
    here = folder.versions()
    return [f"made with {k} {v}, this is {here[k]}" for k, v in manifest["versions"].items() if here.get(k) != v]


def report(rows: list[Difference], machine: bool, notes: list[str]) -> None:
    """Prints the first difference and the worst ones; exit 1 where anything differs."""
    bad = [r for r in rows if r.status not in ("equal", "close")]
    bad.sort(key=lambda r: r.status != "non-finite")
    counts = {s: sum(r.status == s for r in rows) for s in ("equal", "close", "differs", "non-finite", "shape")}
    if machine:
        click.echo(json.dumps({"counts": counts, "notes": notes, "first": bad[0].as_dict() if bad else None, "differences": [r.as_dict() for r in bad]}))
    else:
        for note in notes:
            click.echo(f"note: {note}")
        if bad:
            _print_first(bad[0])
            _print_table(bad)
        click.echo(", ".join(f"{n} {s}" for s, n in counts.items() if n) + f" of {len(rows)} tensors")
    sys.exit(1 if bad else 0)


def _print_first(first: Difference) -> None:
    click.echo(f"first that differs: {first.name} ({first.status}) at {first.worst}")
    for key, value in first.numbers.items():
        click.echo(f"  {key}: {value}")


def _print_table(bad: list[Difference]) -> None:
    """The first twenty, in order of computation."""
    table = Table("tensor", "status", "at", "max abs", "relative L2", "cosine")
    for r in bad[:20]:
        n = r.numbers
        table.add_row(r.name, r.status, str(r.worst), *(f"{n[k]:.3g}" if k in n else "" for k in ("max_abs", "relative_l2", "cosine")))
    Console(width=160).print(table)
