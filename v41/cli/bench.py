# SPDX-License-Identifier: Apache-2.0
"""`v41 bench`: figures of one run on this machine."""

import json
from pathlib import Path
from typing import Any

import click
import torch

from v41.cli.bench_cpu import cpu
from v41.cli.bench_kernels import kernels
from v41.cli.generate import figures
from v41.generate import Generation
from v41.generate import generate as run
from v41.params_io import load_params


@click.group()
def bench() -> None:
    """Figures of one run on this machine."""


bench.add_command(cpu)
bench.add_command(kernels)


@bench.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--rows", type=int, default=32, show_default=True, help="Prompt tokens of each sequence, drawn evenly from the vocabulary.")
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def spec(checkpoint: Path, rows: int, batch: int, max_tokens: int, temperature: float, seed: int, machine: bool) -> None:
    """Accepted tokens a step, and time per token, with drafts and without, on random prompts and one run each.

    At temperature 0 the two runs must give the same tokens: exit 1 where they do not.
    """
    params = load_params(checkpoint)
    if params.draft is None:
        raise ValueError(f"{checkpoint}: no draft head")
    if rows < 1 or batch < 1:
        raise ValueError(f"--rows {rows} and --batch {batch}: both are at least 1")
    drawn = torch.randint(3, params.config.vocab_size, (batch, rows), generator=torch.Generator().manual_seed(seed))
    prompts = drawn.where(drawn != (params.config.image_token_id or -1), 3).tolist()
    options: dict[str, Any] = {"max_tokens": max_tokens, "stop_tokens": (), "temperature": temperature, "seed": seed}
    drafted, plain = run(params, prompts, draft=True, **options), run(params, prompts, draft=False, **options)
    same = drafted.sequences == plain.sequences
    told = {"drafts": measured(drafted), "plain": measured(plain)}
    if machine:
        click.echo(json.dumps(told | {"same_tokens": same}))
    else:
        for name, m in told.items():
            pace = f"{m['tokens_per_step']:.3f} tokens a step, {m['milliseconds_per_token']:.1f} ms a token"
            click.echo(f"{name}: {pace}, accepted by place {m['acceptance']}")
    if temperature == 0 and not same:
        click.echo("the runs with drafts and without gave other tokens", err=True)
        raise SystemExit(1)


def measured(made: Generation) -> dict[str, Any]:
    """The figures of a run, with milliseconds a token."""
    told = figures(made.statistics)
    return told | {"milliseconds_per_token": 1000 / made.statistics.tokens_per_second if made.statistics.tokens else 0.0}
