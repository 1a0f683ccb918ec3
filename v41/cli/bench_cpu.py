# SPDX-License-Identifier: Apache-2.0
"""`v41 bench cpu`: the CPU backend against the spec evaluated as the released kernels do, and against what this machine can read and multiply."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from v41.cli.checkpoint import named_config
from v41.cli.cpu_figures import Bench, run_bench
from v41.params_io import init_params
from v41.resident import RESIDENT, as_values

SAME = ("config", "seed", "resident")  # what two runs must share to be compared


@click.command()
@click.option("--config", "config_name", default="medium", show_default=True, help="tiny, medium, released, or a config.json; weights by the recipe.")
@click.option("--seed", default=41, show_default=True)
@click.option("--resident", type=click.Choice(RESIDENT), default="bf16", show_default=True, help="How the CPU backend's weights are kept.")
@click.option("--rows", type=click.IntRange(min=1), multiple=True, default=(128, 512), show_default=True, help="Tokens of a prefill (may be given again).")
@click.option("--threads", type=click.IntRange(min=1), multiple=True, default=(1, 2), show_default=True, help="Thread counts to choose the best of.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each, in turns; the median counts.")
@click.option("--compare", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="JSON of an earlier run to compare with.")
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def cpu(config_name: str, seed: int, resident: str, rows: tuple[int, ...], threads: tuple[int, ...], rounds: int, compare: Path | None, machine: bool) -> None:
    """Decode, prefill and draft in one process, both sides in turns, each at its best thread count.

    Logits and tokens must equal the spec's bit for bit: exit 1 where they do not. docs/performance.md says what the figures mean.
    """
    config = named_config(config_name)
    if max(rows) + 2 > config.max_position_embeddings:
        raise click.UsageError(f"--rows {max(rows)}: with two tokens behind it more than the {config.max_position_embeddings} positions of {config_name}")
    setting: dict[str, Any] = {"config": config_name, "seed": seed, "resident": resident}
    before = earlier(compare, setting) if compare else None
    stored = init_params(config, seed)
    params = as_values(stored)[0] if resident == "bf16" else stored
    told: dict[str, Any] = setting | run_bench(Bench(params, stored, tuple(sorted(set(rows))), tuple(sorted(set(threads))), rounds))
    if before is not None:
        told["compared"] = {
            n: {"seconds_before": before[n]["seconds"], "change": before[n]["seconds"] / told[n]["seconds"]} for n in works(told) if n in before
        }
    click.echo(json.dumps(told, indent=1)) if machine else show(told)
    wrong = [n for n in works(told) if not told[n]["equal"]]
    if wrong:
        click.echo(f"{', '.join(wrong)}: other bits than the spec's", err=True)
        raise SystemExit(1)


def works(told: dict[str, Any]) -> list[str]:
    """The names of what was timed."""
    return [n for n, v in told.items() if isinstance(v, dict) and "baseline_seconds" in v]


def earlier(path: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """An earlier run's JSON; a usage error where it is none, or of another model."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise click.UsageError(f"--compare {path}: no JSON ({e})") from e
    if not isinstance(before, dict) or not works(before):
        raise click.UsageError(f"--compare {path}: no figures of `v41 bench cpu`")
    other = [f"{n} {before.get(n)!r}, now {setting[n]!r}" for n in SAME if before.get(n) != setting[n]]
    if other:
        raise click.UsageError(f"--compare {path}: made with {'; '.join(other)}")
    return before


def show(told: dict[str, Any]) -> None:
    """A table, one line for each work."""
    table = Table("", "ms", "threads", "baseline ms", "threads", "ratio", "limit ms", "of limit", "GB/s", "GFLOP/s", "bits", "before ms")
    for n in works(told):
        w, old = told[n], told.get("compared", {}).get(n)
        table.add_row(
            *(n, f"{1e3 * w['seconds']:.1f}", str(w["threads"]), f"{1e3 * w['baseline_seconds']:.1f}", str(w["baseline_threads"]), f"{w['ratio']:.1f}"),
            *(f"{1e3 * w['limit_seconds']:.1f}", f"{w['seconds'] / w['limit_seconds']:.1f}x", f"{w['weight_bytes'] / w['seconds'] / 1e9:.1f}"),
            *(f"{w['flops'] / w['seconds'] / 1e9:.1f}", "equal" if w["equal"] else "DIFFER", f"{1e3 * old['seconds_before']:.1f}" if old else ""),
        )
    console, m = Console(width=160), told["machine"]
    console.print(table)
    console.print(f"memory {m['bytes_per_second'] / 1e9:.1f} GB/s, GEMM {m['flops_per_second'] / 1e9:.1f} GFLOP/s, peak {told['peak_rss'] / 1e9:.2f} GB")
