# SPDX-License-Identifier: Apache-2.0
"""The architecture: the published `config.json`, checked strictly. Field names are the file's own."""

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from v41.spec import config_check, config_file
from v41.spec.plan import LayerPlan, layer_plan


@dataclass(frozen=True)
class Yarn:
    """`rope_scaling`: YaRN for layers that compress (docs/model.md 4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Config:
    """One model. `from_json` reads and checks a published file; `to_dict` gives the file's contents back."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Yarn | None
    n_routed_experts: int
    num_experts_per_tok: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    vision: bool
    source: str  # the file's own contents, as canonical JSON: what `to_dict` and the digest give back

    @staticmethod
    def from_json(path: str | Path) -> "Config":
        """Reads a published config.json. Raises ValueError with the key and the values for anything unknown or inconsistent."""
        return Config.from_dict(config_file.read(Path(path)))

    @staticmethod
    def from_dict(published: dict[str, Any]) -> "Config":
        """The same from the parsed file."""
        values = config_file.parse(published)
        scaling = values["rope_scaling"]
        values["rope_scaling"] = None if scaling is None else Yarn(**scaling)
        values["source"] = json.dumps(published, sort_keys=True, separators=(",", ":"))
        config = Config(**values)
        config_check.check(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The published form, as parsed JSON."""
        return json.loads(self.source)

    @cached_property
    def layer_plan(self) -> tuple[LayerPlan, ...]:
        """Who compresses, who indexes, who reuses whose keys and selection, who has an Engram: pure data, one entry a layer."""
        return layer_plan(self)

    @property
    def draft_experts_per_tok(self) -> int:
        """Experts per token in the draft stages; 0 in the file means the backbone's number."""
        return self.dspark_num_experts_per_tok or self.num_experts_per_tok

    @property
    def engram_columns(self) -> int:
        """Engram rows per token and layer: heads times n-gram sizes."""
        return self.engram_n_heads * (self.engram_max_ngram_size - 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every logical axis that all layers share (docs/model.md 1); layers add their own."""
        return {
            "vocab": self.vocab_size,
            "dim": self.hidden_size,
            "heads": self.num_attention_heads,
            "group_heads": self.num_attention_heads // self.o_groups,
            "head_dim": self.head_dim,
            "q_lora": self.q_lora_rank,
            "o_groups": self.o_groups,
            "o_lora": self.o_lora_rank,
            "experts": self.n_routed_experts,
            "moe_inter": self.moe_intermediate_size,
            "shared_inter": self.moe_intermediate_size,
            "index_heads": self.index_n_heads,
            "index_dim": self.index_head_dim,
            "copies": self.hc_mult,
            "mixes": (2 + self.hc_mult) * self.hc_mult,
            "mix_scales": 3,
            "engram_columns": self.engram_columns,
            "engram_dim": self.engram_head_dim,
            "engram_parts": self.hc_mult + 1,
            "taps": len(self.dspark_target_layer_ids),
            "markov": self.dspark_markov_rank,
            "one": 1,
            "confidence_in": self.hidden_size + self.dspark_markov_rank,
        }


def field_names() -> tuple[str, ...]:
    """Names of the fields that come from the file."""
    return tuple(f.name for f in fields(Config) if f.name not in ("source", "vision"))
