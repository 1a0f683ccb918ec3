# SPDX-License-Identifier: Apache-2.0
"""A model of a few layers whose rings wrap after 16 positions, and plain decoding to compare with."""

from dataclasses import replace
from pathlib import Path

import torch

import v41
from v41 import tree

GOLDEN = Path(__file__).parent / "golden" / "tiny" / "checkpoint"


def micro_config(vocab=64):
    """Ratio 2, ratio 1 with candidates, an Engram, a draft stage: every kind of state, in rings of 8 + slack positions."""
    base = v41.Config.from_json(GOLDEN / "config.json")
    return replace(
        base,
        vocab_size=vocab,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        n_routed_experts=4,
        sliding_window=8,
        compress_ratios=(2, 1, 1, 0),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1, 2),
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        candidate_source_layer_id=1,
        candidate_topk_blocks=5,
        candidate_block_size=2,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        engram_layer_ids=(1,),
        engram_num_embeddings=base.engram_num_embeddings[:1],
        engram_compressed_vocab_size=50,
        max_position_embeddings=4096,
        num_nextn_predict_layers=1,
        dspark_noise_token_id=vocab - 3,
        dspark_target_layer_ids=(1, 2),
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
    )


def prefill(params, prompts, capacity, rings=True):
    """(cache, logits of each newest position) after prompts of different lengths, in one call."""
    rows, counts = max(map(len, prompts)), torch.tensor([len(p) for p in prompts])
    tokens = torch.tensor([[*p, *[0] * (rows - len(p))] for p in prompts])
    cache = v41.init_cache(params, len(prompts), capacity)
    out, cache = v41.step(params, cache, tokens, valid=counts, logits="last")
    if rings:
        _, cache = v41.draft(params, cache, out.hidden, None, valid=counts)
    return cache, out.logits[:, 0]


def decode(params, cache, logits, count):
    """Plain greedy decoding with draft rings: (tokens [batch, count + 1], the cache after each of 0 .. count steps)."""
    token, caches = logits.argmax(-1), [cache]
    tokens = [token]
    for _ in range(count):
        out, cache = v41.step(params, cache, token[:, None])
        if params.draft is not None:
            _, cache = v41.draft(params, cache, out.hidden, None)
        token = out.logits[:, 0].argmax(-1)
        tokens.append(token)
        caches.append(cache)
    return torch.stack(tokens, 1).to(torch.int32), caches


def one(cache, b):
    """The cache of one sequence."""
    return tree.map(lambda t: t[b : b + 1], cache)


def difference(params, got, want):
    """Name of the first live tensor that differs between two caches of one sequence, or None."""
    if got.length.tolist() != want.length.tolist():
        return f"length {got.length.tolist()} {want.length.tolist()}"
    a, b = v41.export_cache(params, got), v41.export_cache(params, want)
    return next((n for n in b if not torch.equal(a[n], b[n])), None)
