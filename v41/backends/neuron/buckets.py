# SPDX-License-Identifier: Apache-2.0
"""What a bucket computes, as a function of trees, and its arguments without memory (docs/neuron-graph.md 5)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron import ops as neuron
from v41.backends.neuron.wires import functional
from v41.backends.sharded import sharded
from v41.sharding.bucket import Bucket
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.sharding.shard import rank_slices
from v41.spec import verify
from v41.spec.backend import Backend
from v41.spec.cache import SLACK, init_cache
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import EngramMap, Params, build_params
from v41.spec.table import ParamSpec
from v41.spec.verify import SpecState

Trees = dict[str, Any]
META = torch.device("meta")
STOPS = 4  # stop tokens that a sequence may have


def local_params(config: Config, numerics: Numerics, rules: Rules, mesh: Mesh, rank: int = 0, draft: bool = True) -> Params:
    """A rank's parameters in their stored formats, without memory."""

    def leaf(spec: ParamSpec) -> Tensor:
        held = [r.size for r in rank_slices(spec, rules, mesh, rank)]
        return torch.empty(held, dtype=spec.dtype, device=META)

    return build_params(config, numerics, leaf, engram_map(config), draft)


def engram_map(config: Config) -> EngramMap | None:
    """The tensors of the Engram hash, without memory."""
    tables = len(config.engram_layer_ids)
    if not tables:
        return None
    sizes = config.engram_max_ngram_size
    heads = config.engram_columns // (sizes - 1)

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=META)

    return EngramMap(
        torch.empty(config.vocab_size, dtype=torch.int32, device=META),
        wide(tables, sizes),
        wide(tables, sizes - 1, heads),
        wide(tables, config.engram_columns),
    )


def empty_state(config: Config, numerics: Numerics, batch: int, depth: int, device: torch.device, rule: str = "greedy", stops: int = STOPS) -> SpecState:
    """An idle state: nothing chosen, nothing offered."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros((batch, *shape), dtype=dtype, device=device)

    return SpecState(
        token=zeros(),
        drafts=zeros(depth),
        offered=zeros(),
        q=None if rule == "greedy" else zeros(depth, config.vocab_size, dtype=numerics.wide),
        since=zeros(),
        alive=zeros(dtype=torch.bool),
        budget=zeros(),
        stops=zeros(stops) - 1,
        key=zeros(2),
        temperature=zeros(dtype=torch.float32),
        top_p=zeros(dtype=torch.float32) + 1,
        floor=zeros(dtype=torch.float32),
        rule=rule,
    )


def arguments(params: Params, bucket: Bucket, capacity: int, rule: str = "greedy", slack: int = SLACK) -> Trees:
    """params, cache, rank, and what else the bucket's function takes; all but params without memory."""
    config, numerics = params.config, params.numerics
    cache = init_cache(config, numerics, bucket.batch, capacity, slack, params.draft is not None, META)
    rank = torch.empty((), dtype=torch.int32, device=META)
    given: Trees = {"params": params, "cache": cache, "rank": rank}
    if bucket.kind == "decode":
        return given | {"state": empty_state(config, numerics, bucket.batch, bucket.rows - 1, META, rule)}
    tokens = torch.empty((bucket.batch, bucket.rows), dtype=torch.int32, device=META)
    return given | {"tokens": tokens, "valid": torch.empty(bucket.batch, dtype=torch.int32, device=META)}


def rank_backend(rules: Rules, mesh: Mesh, rank: Tensor, ops: Backend = neuron.backend, bodies: dict[str, Callable] | None = None) -> Backend:
    """The record of one rank, with the collectives as nodes."""
    return sharded(ops, rules, mesh, rank, functional(mesh), neuron.bodies if bodies is None else bodies)


def function_of(bucket: Bucket, rules: Rules, mesh: Mesh, ops: Backend = neuron.backend, bodies: dict[str, Callable] | None = None) -> Callable[..., Trees]:
    """decode: one speculative step, (emitted, state, cache). prefill: rows of a prompt, (token after the last of them, cache)."""

    def decode(params: Params, cache: Any, rank: Tensor, state: SpecState) -> Trees:
        emitted, state, cache = verify.spec_step(params, cache, state, rank_backend(rules, mesh, rank, ops, bodies))
        return {"emitted": emitted, "state": state, "cache": cache}

    def prefill(params: Params, cache: Any, rank: Tensor, tokens: Tensor, valid: Tensor) -> Trees:
        token, cache = verify.prefill_step(params, cache, tokens, valid, rank_backend(rules, mesh, rank, ops, bodies))
        return {"token": token, "cache": cache}

    return decode if bucket.kind == "decode" else prefill
