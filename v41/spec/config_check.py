# SPDX-License-Identifier: Apache-2.0
"""What must agree with what in a config (docs/model.md 1). Each check raises ValueError with the keys and their values."""

from collections.abc import Callable
from typing import Any

SCORES = ("sqrtsoftplus", "sigmoid", "softmax")
BLOCK = 32  # columns that share a power-of-two scale
KV_BLOCK = 16  # columns of a compressed row that share an e4m3 scale


def check(config: Any) -> None:
    """Raises ValueError for the first inconsistency."""
    for part in (_sizes, _layers, _sources, _candidates, _engram, _draft):
        part(config, _refuse)


def _refuse(ok: bool, text: str) -> None:
    if not ok:
        raise ValueError(f"config: {text}")


def _sizes(c: Any, need: Callable[[bool, str], None]) -> None:
    positive = (
        "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups "
        "max_position_embeddings n_routed_experts num_experts_per_tok sliding_window hc_mult hc_sinkhorn_iters rope_theta"
    )
    for key in positive.split():
        need(getattr(c, key) > 0, f"{key} is {getattr(c, key)}, not positive")
    need(c.num_attention_heads % c.o_groups == 0, f"num_attention_heads {c.num_attention_heads} does not divide by o_groups {c.o_groups}")
    need(c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= c.head_dim, f"qk_rope_head_dim {c.qk_rope_head_dim} is odd or above head_dim {c.head_dim}")
    for key in ("hidden_size", "q_lora_rank", "head_dim", "moe_intermediate_size"):
        need(getattr(c, key) % BLOCK == 0, f"{key} {getattr(c, key)} does not divide by {BLOCK}, the width of a scale block")
    need(c.o_groups * c.o_lora_rank % BLOCK == 0, f"o_groups x o_lora_rank {c.o_groups * c.o_lora_rank} does not divide by {BLOCK}")
    need(c.num_experts_per_tok <= c.n_routed_experts, f"num_experts_per_tok {c.num_experts_per_tok} is above n_routed_experts {c.n_routed_experts}")
    need(c.scoring_func in SCORES, f"scoring_func {c.scoring_func!r} is not one of {SCORES}")
    need(type(c.norm_topk_prob) is bool, f"norm_topk_prob is {c.norm_topk_prob!r}, not true or false")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        need(getattr(c, key) < c.vocab_size, f"{key} {getattr(c, key)} is not below vocab_size {c.vocab_size}")
    y = c.rope_scaling
    need(y is None or (y.factor > 0 and y.original_max_position_embeddings > 0), f"rope_scaling {y} has a factor or an original length of 0")


def _layers(c: Any, need: Callable[[bool, str], None]) -> None:
    entries, given = c.num_hidden_layers + c.num_nextn_predict_layers, len(c.compress_ratios)
    # A model whose draft stages were taken away may keep their entries, which are 0.
    need(
        given == entries or (given > entries and not c.num_nextn_predict_layers),
        f"compress_ratios has {given} entries, not {entries} (num_hidden_layers {c.num_hidden_layers} + num_nextn_predict_layers {c.num_nextn_predict_layers})",
    )
    need(not any(c.compress_ratios[c.num_hidden_layers :]), f"compress_ratios behind the backbone are {c.compress_ratios[c.num_hidden_layers :]}, not 0")
    lists = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids")
    for key in (*lists, "dspark_target_layer_ids") if c.num_nextn_predict_layers else lists:
        ids = getattr(c, key)
        need(list(ids) == sorted(set(ids)), f"{key} {ids} is not ascending without repeats")
        need(all(i < c.num_hidden_layers for i in ids), f"{key} {ids} names a layer that does not exist (num_hidden_layers {c.num_hidden_layers})")


def _sources(c: Any, need: Callable[[bool, str], None]) -> None:
    ratios, plan = c.compress_ratios, c.layer_plan
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        for i in getattr(c, key):
            need(ratios[i] > 0, f"{key} names layer {i}, whose compress_ratios entry is 0")
    missing = sorted(set(c.kv_source_layer_ids) - set(c.index_source_layer_ids))
    need(not missing, f"kv_source_layer_ids {missing} are not index_source_layer_ids: nobody would make their index keys")
    for layer, p in enumerate(plan):
        if p.ratio == 0:
            continue
        need(p.kv_source is not None, f"layer {layer} compresses (ratio {p.ratio}) but no kv source is at or below it")
        for name, source in (("kv", p.kv_source), ("index", p.index_source)):
            need(ratios[source] == p.ratio, f"layer {layer} has ratio {p.ratio}, its {name} source {source} has {ratios[source]}")
    if any(ratios):
        for key in ("index_n_heads", "index_head_dim", "index_topk", "compress_rope_theta"):
            need(getattr(c, key) > 0, f"{key} is {getattr(c, key)}, but layers compress")
        need(c.index_head_dim % BLOCK == 0, f"index_head_dim {c.index_head_dim} does not divide by {BLOCK}")
        need(c.qk_rope_head_dim <= c.index_head_dim, f"qk_rope_head_dim {c.qk_rope_head_dim} is above index_head_dim {c.index_head_dim}")
        need(c.head_dim % KV_BLOCK == 0, f"head_dim {c.head_dim} does not divide by {KV_BLOCK}")


def _candidates(c: Any, need: Callable[[bool, str], None]) -> None:
    source = c.candidate_source_layer_id
    if source < 0:
        return
    need(source in c.index_source_layer_ids, f"candidate_source_layer_id {source} is not one of index_source_layer_ids {c.index_source_layer_ids}")
    blocks, size = c.candidate_topk_blocks, c.candidate_block_size
    need(blocks > 0 and size > 0, f"candidate_topk_blocks {blocks} and candidate_block_size {size} must be positive with a candidate source")
    # The pinned newest block may hold one visible row only.
    rows = (blocks - 1) * size + 1
    need(
        rows >= c.index_topk,
        f"candidate_topk_blocks {blocks} x candidate_block_size {size} is sure of {rows} rows only, index_topk wants {c.index_topk}: "
        "rows that are no candidates would be taken",
    )
    for layer, p in enumerate(c.layer_plan):
        if p.reads_candidates:
            need(
                p.kv_source == c.layer_plan[source].kv_source,
                f"layer {layer} would apply the candidates of layer {source} to the rows of kv source {p.kv_source}, not {c.layer_plan[source].kv_source}",
            )


def _engram(c: Any, need: Callable[[bool, str], None]) -> None:
    need(
        len(c.engram_layer_ids) == len(c.engram_num_embeddings),
        f"engram_layer_ids {c.engram_layer_ids} and engram_num_embeddings {c.engram_num_embeddings} differ in length",
    )
    if not c.engram_layer_ids:
        return
    need(c.engram_max_ngram_size >= 2, f"engram_max_ngram_size is {c.engram_max_ngram_size}, below 2")
    for key in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
        need(getattr(c, key) > 0, f"{key} is {getattr(c, key)}, but engram_layer_ids is {c.engram_layer_ids}")
    need(c.engram_head_dim % BLOCK == 0, f"engram_head_dim {c.engram_head_dim} does not divide by {BLOCK}")
    need(c.engram_pad_token_id < c.vocab_size, f"engram_pad_token_id {c.engram_pad_token_id} is not below vocab_size {c.vocab_size}")
    need(max(c.engram_num_embeddings) < 2**31, f"engram_num_embeddings {c.engram_num_embeddings} do not fit int32 row ids")


def _draft(c: Any, need: Callable[[bool, str], None]) -> None:
    if not c.num_nextn_predict_layers:
        return
    for key in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts"):
        need(getattr(c, key) > 0, f"{key} is {getattr(c, key)}, but num_nextn_predict_layers is {c.num_nextn_predict_layers}")
    need(bool(c.dspark_target_layer_ids), "dspark_target_layer_ids is empty, but num_nextn_predict_layers is not 0")
    need(c.dspark_noise_token_id < c.vocab_size, f"dspark_noise_token_id {c.dspark_noise_token_id} is not below vocab_size {c.vocab_size}")
    need(
        c.draft_experts_per_tok <= c.dspark_n_routed_experts,
        f"dspark_num_experts_per_tok {c.draft_experts_per_tok} is above dspark_n_routed_experts {c.dspark_n_routed_experts}",
    )
