# SPDX-License-Identifier: Apache-2.0
"""One rank of a sharded run as a process: `torchrun --nproc-per-node 4 -m v41.cli.gloo CHECKPOINT --rules pr71 --ids 0,5,6`."""

import json
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from v41 import api
from v41.backends.cpu.gloo import WAIT, run_rank
from v41.golden.folder import digest
from v41.golden.make import Run, compute, prompt_tensor
from v41.rank_params import load_rank
from v41.sharding.mesh import MESHES
from v41.sharding.tables import rules_named
from v41.spec.backend import Backend
from v41.spec.numerics import REGIMES, Numerics


def with_ops(ops: Backend) -> Run:
    """The calls of a golden run on this rank."""

    def record(*args: Any, **options: Any) -> Any:
        return api.record(*args, **options, ops=ops)

    def record_draft(*args: Any, **options: Any) -> Any:
        return api.record_draft(*args, **options, ops=ops)

    return Run(record, record_draft)


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--rules", default="pr71", show_default=True, help="The placement.")
@click.option("--ids", required=True, help="The prompt as token ids, comma-separated.")
@click.option("--steps", default=1, show_default=True, help="Greedy decode steps after the prefill.")
@click.option("--regime", type=click.Choice(REGIMES), default="faithful", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float64", "bfloat16"]), help="For exact: float32 (default) or float64.")
def main(checkpoint: Path, rules: str, ids: str, steps: int, regime: str, dtype: str | None) -> None:
    """Runs a prefill and greedy steps on all ranks; rank 0 prints tokens, digests and the collectives as JSON."""
    dist.init_process_group("gloo", timeout=WAIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    if size not in MESHES:
        raise ValueError(f"{size} processes; there are meshes of {', '.join(map(str, MESHES))}")
    table, mesh = rules_named(rules), MESHES[size]
    loaded = load_rank(checkpoint, table, mesh, rank, numerics=Numerics(regime, None, dtype))
    tokens, lengths = prompt_tensor([[int(i) for i in ids.split(",")]])

    def run(rank: int, ops: Backend) -> dict[str, Any]:
        return compute(loaded.params, tokens, lengths, steps, False, run=with_ops(ops))

    parts, meetings = run_rank(run, mesh, table)
    mine = {name: digest(t) for name, t in parts["outputs"].items()}
    told: list[Any] = [None] * size
    dist.all_gather_object(told, mine)
    if rank == 0:
        alike = all(t == mine for t in told)
        summary = {"ranks": size, "rules": table.name, "tokens": parts["outputs"]["tokens"].tolist(), "alike": alike, "sha256": mine}
        click.echo(json.dumps(summary | {"collectives": len(meetings), "bytes_held": loaded.held, "bytes_read": loaded.read}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
