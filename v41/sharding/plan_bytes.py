# SPDX-License-Identifier: Apache-2.0
"""Bytes in HBM of one rank, by component: weights and caches from their tables, scratch from the live intermediates."""

from collections.abc import Iterator
from math import prod

import torch

from v41.sharding.bucket import Bucket
from v41.sharding.caches import empty_specs
from v41.sharding.costs import Costs
from v41.sharding.distinct import distinct
from v41.sharding.placement import Placement
from v41.sharding.rules import round_up
from v41.spec.cache import SLACK
from v41.spec.config import Config
from v41.spec.table import ParamSpec

# Component of a tensor: the first pair whose text stands in its name.
WEIGHTS = (
    ("ffn.experts.", "routed experts"),
    ("engram.embed.", "Engram tables"),
    ("engram.", "Engram projection"),
    ("ffn.shared_experts.", "shared experts"),
    ("markov_head.", "draft heads"),
    ("main_", "draft heads"),
    ("confidence_head.", "draft heads"),
    ("attn.indexer.", "indexers, compressors"),
    ("attn.compressor.", "indexers, compressors"),
    (".attn.", "attention"),
    ("hc_", "hyper-connections"),
    ("ffn.gate.", "routers"),
    ("embed.", "embedding, head"),
    ("head.", "embedding, head"),
    ("norm.", "norms"),
)
CACHES = (
    ("window", "windows"),
    ("draft.", "windows"),
    ("compressed", "compressed rows"),
    ("index_", "index keys"),
    ("group_", "pooled groups"),
    ("", "counters"),
)


def component(name: str, table: tuple[tuple[str, str], ...]) -> str:
    return next(part for text, part in table if text in name)


def width(spec: ParamSpec, placement: Placement) -> float:
    """Bytes in HBM of one stored element of a tensor."""
    resident, part = placement.resident, component(spec.name, WEIGHTS)
    scale, code = spec.dtype == torch.float8_e8m0fnu, spec.dtype in (torch.float8_e4m3fn, torch.int8)
    if part == "routed experts" and resident.experts == "e4m3":
        return 4 * 32 / 128**2 if scale else 2.0  # two codes become two bytes; one fp32 scale for 128 x 128 weights
    wide = resident.tables == "bf16" if part == "Engram tables" else resident.dense == "bf16"
    if part != "routed experts" and wide and (scale or code):
        return 0.0 if scale else 2.0
    return float(spec.dtype.itemsize)


def weight_bytes(config: Config, placement: Placement, draft: bool) -> Iterator[tuple[str, float]]:
    """(component, bytes) of every parameter of one rank, padding included."""
    for spec, count in distinct(config, draft):
        held = prod(placement.rules.local_shape(spec, placement.mesh))
        yield component(spec.name, WEIGHTS), count * held * width(spec, placement)


def paged_rows(name: str, stored: int, capacity: int) -> int:
    """Rows of a buffer in a cache that keeps windows and pooled groups as long as the context."""
    long = name.startswith("draft.") or name.endswith(("window", "group_kv", "group_score", "compressed", "index_keys"))
    return capacity if long else stored


def cache_bytes(config: Config, placement: Placement, batch: int, capacity: int, draft: bool) -> Iterator[tuple[str, float]]:
    """(component, bytes) of every cache tensor of one rank; in `paged` all of them are bf16."""
    for spec in empty_specs(config, batch, capacity, SLACK, draft):
        shape = placement.rules.local_shape(spec, placement.mesh)
        size = spec.dtype.itemsize
        if placement.resident.caches == "paged" and len(shape) == 3:
            shape, size = (shape[0], paged_rows(spec.name, shape[1], capacity), shape[2]), 2
        yield component(spec.name, CACHES), float(prod(shape) * size)


def live_bytes(config: Config, placement: Placement, bucket: Bucket, capacity: int) -> float:
    """Intermediates that are alive together at the worst place: two streams, one reduction, queries, index scores, logits."""
    rows = bucket.tokens
    stream = rows * config.hc_mult * config.hidden_size * 2
    reduction = rows * config.hidden_size * 4
    queries = 2 * rows * config.num_attention_heads // placement.ways("heads") * config.head_dim * 2
    keys = max((capacity // p.ratio for p in config.layer_plan if p.owns_index), default=0)
    logits = bucket.logits * config.vocab_size * 4
    return float(2 * stream + reduction + queries + max(rows * keys * 4, logits))


def scratch_bytes(config: Config, placement: Placement, bucket: Bucket, capacity: int, costs: Costs) -> float:
    """The same in whole scratchpad pages."""
    return float(round_up(int(live_bytes(config, placement, bucket, capacity)), int(costs.page)))


def summed(pairs: Iterator[tuple[str, float]]) -> dict[str, int]:
    """Sums by name, in the order of first appearance."""
    found: dict[str, float] = {}
    for name, amount in pairs:
        found[name] = found.get(name, 0.0) + amount
    return {n: round(v) for n, v in found.items()}


def bytes_by_part(config: Config, placement: Placement, bucket: Bucket, capacity: int, costs: Costs) -> dict[str, dict[str, int]]:
    """`weights`, `caches`, `scratch` -> component -> bytes of the fullest rank."""
    draft = config.num_nextn_predict_layers > 0
    weights = summed(weight_bytes(config, placement, draft))
    caches = summed(cache_bytes(config, placement, bucket.batch, capacity, draft))
    scratch = round(scratch_bytes(config, placement, bucket, capacity, costs))
    return {"weights": weights, "caches": caches, "scratch": {"scratch": scratch}}
