# SPDX-License-Identifier: Apache-2.0
"""What a sequence remembers, as values (docs/model.md 7.8). Every buffer has one more row than it holds: the sink of `write_rows`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.table import static
from v41.spec.types import I32, Act, Wide

SLACK = 8


@dataclass(frozen=True)
class LayerCache:
    """One backbone layer: the window ring; at kv sources the compressed rows, the index keys and the tokens of the unfinished group."""

    window: Act[Tensor, "b ring head_dim"]
    compressed: Act[Tensor, "b t head_dim"] | None
    index_keys: Act[Tensor, "b t index_dim"] | None
    group_kv: Wide[Tensor, "b carry head_dim"] | None
    group_score: Wide[Tensor, "b carry head_dim"] | None


@dataclass(frozen=True)
class Cache:
    """All state of a batch. `high` is the most positions a sequence ever held; rewinding is exact down to high - slack."""

    length: I32[Tensor, "b"]
    high: I32[Tensor, "b"]
    draft_length: I32[Tensor, "b"]
    layers: tuple[LayerCache, ...]
    draft: tuple[Act[Tensor, "b ring head_dim"], ...]
    history: I32[Tensor, "b lookback"] | None
    index_slot: Act[Tensor, "b t index_dim"] | None
    capacity: int = static()
    slack: int = static()
    config: Config = static()
    numerics: Numerics = static()

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.length.shape[0]

    @property
    def window_ring(self) -> int:
        """Positions in a window ring."""
        return self.config.sliding_window + self.slack

    @property
    def history_ring(self) -> int:
        """Positions in the ring of compressed token ids."""
        return self.config.engram_max_ngram_size - 1 + self.slack

    def group_ring(self, ratio: int) -> int:
        """Positions in the ring of an unfinished group."""
        return ratio - 1 + self.slack


def init_layer(config: Config, layer: int, batch: int, capacity: int, slack: int, numerics: Numerics, device: torch.device) -> LayerCache:
    """The empty cache of one layer."""

    def zeros(rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((batch, rows + 1, width), dtype=dtype, device=device)

    plan = config.layer_plan[layer]
    window = zeros(config.sliding_window + slack, config.head_dim, numerics.act)
    if not plan.owns_kv:
        return LayerCache(window, None, None, None, None)
    rows, carry = capacity // plan.ratio, plan.ratio - 1 + slack
    grouped = plan.ratio > 1
    return LayerCache(
        window,
        zeros(rows, config.head_dim, numerics.act),
        zeros(rows, config.index_head_dim, numerics.act),
        zeros(carry, config.head_dim, numerics.wide) if grouped else None,
        zeros(carry, config.head_dim, numerics.wide) if grouped else None,
    )


def init_cache(config: Config, numerics: Numerics, batch: int, capacity: int, slack: int, draft: bool, device: torch.device) -> Cache:
    """An empty cache: shapes depend on these arguments only."""
    count = torch.zeros(batch, dtype=torch.int32, device=device)
    layers = tuple(init_layer(config, i, batch, capacity, slack, numerics, device) for i in range(config.num_hidden_layers))
    stages = config.num_nextn_predict_layers if draft else 0
    history = torch.zeros((batch, config.engram_max_ngram_size + slack), dtype=torch.int32, device=device)
    slot = torch.zeros((batch, 0, config.index_head_dim), dtype=numerics.act, device=device)
    return Cache(
        length=count,
        high=count.clone(),
        draft_length=count.clone(),
        layers=layers,
        draft=tuple(torch.zeros_like(layers[0].window) for _ in range(stages)),
        history=history if config.engram_layer_ids else None,
        index_slot=slot if numerics.index_keys == "reference" and config.index_source_layer_ids else None,
        capacity=capacity,
        slack=slack,
        config=config,
        numerics=numerics,
    )


def advance(cache: Cache, valid: I32[Tensor, "b"]) -> Cache:
    """The cache with `valid` more positions in each sequence."""
    length = cache.length + valid
    return replace(cache, length=length, high=torch.maximum(cache.high, length))


def rewind(cache: Cache, length: I32[Tensor, "b"]) -> Cache:
    """The cache as it was at `length` positions; nothing is copied. Exact while high - length <= slack."""
    return replace(cache, length=length, draft_length=torch.minimum(cache.draft_length, length))
