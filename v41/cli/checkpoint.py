# SPDX-License-Identifier: Apache-2.0
"""`v41 checkpoint make`: a checkpoint in the released layout by the weight recipe."""

import json
import shutil
from pathlib import Path

import click
import torch

from v41 import api
from v41.engram_map import default_token_map
from v41.golden import folder
from v41.golden.clamps import count_clamps
from v41.golden.coverage import coverage
from v41.params_io import init_params, save_params, weights_digest
from v41.spec.config import Config
from v41.spec.params import Params
from v41.stand_in import stand_in_tokenizer
from v41.tokenizer import checked_token_map

DATA = Path(__file__).parent.parent / "data"
NAMED = {name: DATA / f"{name}_config.json" for name in ("tiny", "medium", "released")}
PROMPT_SEED = 1


def named_config(value: str) -> Config:
    """A config by name (tiny, medium, released) or by path."""
    return Config.from_json(NAMED.get(value, Path(value)))


@click.group()
def checkpoint() -> None:
    """Make checkpoints by the weight recipe."""


@checkpoint.command()
@click.option("--config", "config_name", default="tiny", show_default=True, help="tiny, medium, released, or a config.json.")
@click.option("--seed", default=41, show_default=True)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.json to take along; without one a stand-in.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--shard-bytes", default=5_000_000, show_default=True, help="Payload bytes a shard.")
@click.option(
    "--prompt", type=click.IntRange(min=0), default=151, show_default=True, help="Random tokens of the run that the manifest's coverage speaks of; 0: none."
)
@click.option("--json", "machine", is_flag=True, help="Print JSON on stdout.")
def make(config_name: str, seed: int, tokenizer: Path | None, out: Path, shard_bytes: int, prompt: int, machine: bool) -> None:
    """Writes config, shards, index, tokenizer and a manifest with the recipe's seed and what a run exercises."""
    config = named_config(config_name)
    known = default_token_map(config) if config.engram_layer_ids else None
    if tokenizer is not None:
        known = torch.from_numpy(checked_token_map(tokenizer, config.vocab_size, config.engram_compressed_vocab_size))
    params = init_params(config, seed, known)
    save_params(params, out, shard_bytes=shard_bytes)
    if tokenizer is not None and tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, out / "tokenizer.json")
    if tokenizer is None and known is not None:  # a folder with Engram loads with a tokenizer only
        folder.write_json(out / "tokenizer.json", stand_in_tokenizer(config.vocab_size, config.engram_compressed_vocab_size))
    manifest = {"kind": "v41 checkpoint", "schema": folder.SCHEMA, "recipe": {"seed": seed}, "sha256": weights_digest(params)}
    if prompt:
        manifest["coverage"] = exercise(params, prompt)
    folder.write_json(out / folder.MANIFEST, manifest)
    if machine:
        click.echo(json.dumps({"out": str(out), **manifest}))
    else:
        click.echo(f"{out}: {json.dumps(manifest['coverage']) if prompt else 'no coverage run'}")


def exercise(params: Params, rows: int) -> dict[str, object]:
    """What a prefill of random tokens exercises, with the number of SwiGLU inputs beyond the clamp."""
    tokens = torch.randint(0, params.config.vocab_size, (1, rows), generator=torch.Generator().manual_seed(PROMPT_SEED))
    image = params.config.image_token_id
    tokens = tokens if image is None else torch.where(tokens == image, 0, tokens)
    tokens[:, 0] = params.config.bos_token_id
    ops, clamped = count_clamps(api.available_backends()["cpu"])
    cache = api.init_cache(params, 1, rows)
    _, _, taps = api.record(params, cache, tokens, ops=ops)
    return {"prompt_tokens": rows, "clamped_swiglu_inputs": sum(clamped), **coverage(params, tokens, {"prefill": taps})}
