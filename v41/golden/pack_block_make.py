# SPDX-License-Identifier: Apache-2.0
"""Making and opening packs of one layer (docs/golden-pack.md 8)."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from v41.backends.cpu import backend as cpu
from v41.checkpoint import write_file
from v41.golden import folder
from v41.golden import pack_block as blocks
from v41.golden.make import one_thread
from v41.golden.pack import KIND, LICENCE, REFERENCE, SCHEMA, describe, facts, prepare, write_manifest
from v41.golden.pack_calls import Made, Tensors
from v41.golden.pack_run import scored, twins, with_scores
from v41.spec.backend import Backend
from v41.spec.cache import SLACK, Cache
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import Params


def call(number: int, inputs: Tensors, ops: Backend, params: Params, cache: Cache, given: Tensors) -> Made:
    """The layer in the numerics of the parameters, from inputs of any: for twins."""
    boundary = blocks.in_act(blocks.block_state(params, number, inputs)[1], params.numerics)
    return blocks.block_step(ops, params, cache, boundary, given)


def routed(params: Params, number: int, inputs: Tensors) -> list[int]:
    """The experts that the rows choose: the layer run once with experts of zeros, which come after the choice."""
    cache, boundary = blocks.block_state(params, number, inputs)
    made = blocks.block_step(cpu, params, cache, boundary, {})
    return sorted(made.tensors[f"layers.{number}.route_experts"].unique().tolist())


def rebuilt(config: Config, numerics: Numerics, number: int, seed: int, experts: list[int]) -> Params:
    """The parameters of a pack of one layer."""
    params = blocks.block_params(config, numerics, number, seed)
    blocks.fill_experts(params.layers[number], config, number, seed, experts)
    return params


@torch.no_grad()
def make_block_pack(config: Config, numerics: Numerics, number: int, rows: int, seed: int, out: Path) -> dict[str, Any]:
    """Writes a pack of one layer. ValueError for a layer that the config has not, and for numerics that take the released calls only."""
    if not 0 <= number < config.num_hidden_layers:
        raise ValueError(f"block: {number} is no layer of a model with {config.num_hidden_layers}")
    if numerics.needs_start:
        raise ValueError(f"block: regime {numerics.regime!r} takes one prefill from empty, then one row at a time; a block starts in between")
    prepare(out)
    params = blocks.block_params(config, numerics, number, seed)
    inputs = blocks.block_inputs(params, number, rows)
    with one_thread(params):
        experts = routed(params, number, inputs)
        blocks.fill_experts(params.layers[number], config, number, seed, experts)
        cache, boundary = blocks.block_state(params, number, inputs)
        ops, scores = scored(cpu)
        full = with_scores(blocks.block_step(ops, params, cache, boundary, {}), scores)
        far, scales = twins(params, cache, full, partial(call, number, inputs))
    tensors = {f"c0.{n}": t.contiguous() for n, t in (inputs | full | far).items()}
    write_file(out / "block.safetensors", tensors)
    listed = [{"name": "block", "start": None, "batch": 1, "calls": [{"name": "c0", "op": "block", "taps": True}]}]
    weights = {
        "sha256": None,
        "recipe": {"seed": seed},
        "streamed": True,
        "read": {"whole": blocks.weight_digests(params.layers[number], config, number, experts)},
    }
    manifest = {
        **{"kind": KIND, "schema": SCHEMA, "licence": LICENCE, "reference": REFERENCE, "numerics": numerics.describe(), "index_keys": numerics.index_keys},
        **{"ties": "lower index", "versions": folder.versions(), "weights": weights, "token_map": None, "slack": SLACK, "capacity": cache.capacity},
        "run": {"draft": False, "block": number, "rows": rows, "experts": experts, "engram_rows": blocks.ENGRAM_ROWS},
        "config_sha256": folder.text_digest(config.source),
        "config": config.to_dict(),
        **facts(params, listed, {"block": tensors}),
        "scenarios": listed,
        "tensors": {"block": describe(tensors, {f"c0.{n}": s for n, s in scales.items()})},
    }
    write_manifest(out, manifest)
    return manifest
