# SPDX-License-Identifier: Apache-2.0
"""The layer plan: which layer owns what, as pure data (docs/model.md 1)."""

from dataclasses import dataclass
from typing import Any

QUERIES = 64  # queries whose index scores are held at once: memory stays linear in the number of rows


@dataclass(frozen=True)
class LayerPlan:
    """What one layer is. Ids are layer numbers; None where the layer has no such thing."""

    ratio: int  # tokens per compressed row; 0: window only
    kv_source: int | None  # whose compressed rows and index keys it reads
    index_source: int | None  # whose selection it reads
    owns_kv: bool  # has a compressor and index keys
    owns_index: bool  # has an indexer
    makes_candidates: bool
    reads_candidates: bool
    engram: int | None  # number of its Engram table, in file order
    tap: int | None  # its place in `hidden`


def nearest(ids: tuple[int, ...], layer: int) -> int | None:
    """The last of `ids` that is not above `layer`."""
    return max((i for i in ids if i <= layer), default=None)


def position_in(ids: tuple[int, ...], layer: int) -> int | None:
    return ids.index(layer) if layer in ids else None


def layer_plan(config: Any) -> tuple[LayerPlan, ...]:
    """One entry a backbone layer."""
    plans = []
    for layer in range(config.num_hidden_layers):
        compresses = config.compress_ratios[layer] > 0
        owns_index = layer in config.index_source_layer_ids
        source = config.candidate_source_layer_id
        plans.append(
            LayerPlan(
                ratio=config.compress_ratios[layer],
                kv_source=nearest(config.kv_source_layer_ids, layer) if compresses else None,
                index_source=nearest(config.index_source_layer_ids, layer) if compresses else None,
                owns_kv=layer in config.kv_source_layer_ids,
                owns_index=owns_index,
                makes_candidates=layer == source,
                reads_candidates=owns_index and 0 <= source < layer,
                engram=position_in(config.engram_layer_ids, layer),
                tap=position_in(config.dspark_target_layer_ids, layer) if config.num_nextn_predict_layers else None,
            )
        )
    return tuple(plans)
