# SPDX-License-Identifier: Apache-2.0
"""Which kernels a step has: layers by the layer plan, lookups, head, drafts."""

from collections.abc import Iterator
from dataclasses import replace

from v41.sharding.bucket import Bucket
from v41.sharding.plan_work import NORM, ROPE, ROUND, Step, Work, attention, experts, hyper, router
from v41.sharding.rules import round_up
from v41.spec.plan import LayerPlan

SEARCH = 32  # steps of a threshold search over 32-bit keys
PER_STEP, COMPACT = 3, 8  # instructions of one of them; of writing out what was found


def compressor(s: Step, plan: LayerPlan, rows: int) -> Iterator[Work]:
    """Latents of finished groups and their index keys, at a kv source."""
    c = s.config
    matrices = 2 if plan.ratio > 1 else 1
    yield replace(
        s.matrix("index", "compressor", rows, c.hidden_size, matrices * c.head_dim, False),
        chain=((2 * NORM + 2 * ROPE + 2 * ROUND, rows * c.head_dim),),
        dmas=3,
    )
    yield s.matrix("index", "index keys", rows, c.head_dim, c.index_head_dim, False)


def indexer(s: Step, plan: LayerPlan, rows: int) -> Iterator[Work]:
    """Scores of every compressed row, threshold search for the best `index_topk`, at an index source."""
    c, heads, n = s.config, s.config.index_n_heads // s.placement.ways("index_heads"), s.capacity // plan.ratio
    wide = heads * c.index_head_dim
    yield replace(s.matrix("index", "index queries", rows, c.q_lora_rank, wide), chain=((ROPE + ROUND, rows * wide),))
    times = -(-rows * heads // s.costs.lanes)
    yield Work(
        "index",
        "index scores",
        bytes=n * c.index_head_dim * 2 + c.hidden_size * heads * 2,
        flops=2 * rows * heads * n * c.index_head_dim,
        tiles=s.tiled(c.hidden_size, heads),
        columns=rows,
        moving=2 * n * times,
        chain=((1, n * s.costs.lanes * times),),
    )
    blocks = ((2 * SEARCH, rows * n / c.candidate_block_size),) if plan.makes_candidates else ()
    searched = ((SEARCH, rows * n), ((PER_STEP - 1) * SEARCH, rows), (COMPACT, rows * n))
    yield Work("index", "selection", flops=SEARCH * rows * n, chain=(*searched, *blocks))


def engram(s: Step, rows: int) -> Iterator[Work]:
    """Hash and rows of one layer, projection, gate."""
    c, parts = s.config, s.placement.ways("engram.engram_parts*dim")
    inside, out = c.engram_columns * c.engram_head_dim, (c.hc_mult + 1) * c.hidden_size // parts
    yield Work(
        "engram",
        "hash, rows",
        row_bytes=rows * inside * 2 / s.placement.ways("engram_rows"),
        chain=((30, rows * c.engram_columns),),
        dmas=2,
    )
    yield replace(s.matrix("engram", "projection", rows, inside, out), chain=((ROUND, rows * inside),))
    yield Work("engram", "gate", bytes=2 * rows * c.hc_mult * c.hidden_size * 2, chain=((20, rows * c.hc_mult * c.hidden_size),))


def layer(s: Step, plan: LayerPlan, rows: int) -> Iterator[Work]:
    """One backbone layer."""
    if plan.engram is not None:
        yield from engram(s, rows)
    yield hyper(s, "mhc", rows)
    if plan.owns_kv:
        yield from compressor(s, plan, rows)
    if plan.owns_index:
        yield from indexer(s, plan, rows)
    cached = s.capacity // plan.ratio if plan.ratio else 0
    yield from attention(s, "attention", rows, min(s.config.index_topk, cached), cached)
    yield hyper(s, "mhc", rows)
    yield router(s, "router", rows, s.config.n_routed_experts)
    yield from experts(s, "experts", rows, s.config.n_routed_experts, s.config.num_experts_per_tok)


def embedding(s: Step, part: str, rows: int) -> Work:
    return Work(part, "embedding", row_bytes=rows * s.config.hidden_size * 2, dmas=2)


def head(s: Step, part: str, rows: int) -> Iterator[Work]:
    """Collapse, norm, this rank's logits, its best of them."""
    c = s.config
    vocab = round_up(c.vocab_size, s.placement.ways("head.vocab")) // s.placement.ways("head.vocab")
    yield replace(
        s.matrix(part, "head", rows, c.hidden_size, vocab, False),
        chain=((NORM, rows * c.hidden_size), (4, rows * vocab)),
        fixed=s.costs.combine,
    )


def drafts(s: Step, bucket: Bucket) -> Iterator[Work]:
    """The draft rings, and in a decode bucket the stages, the shared head and the Markov chain."""
    c, rows, block = s.config, bucket.tokens, s.config.dspark_block_size * bucket.batch
    taps = len(c.dspark_target_layer_ids) * c.hidden_size
    yield replace(
        s.matrix("draft", "main_proj", rows, taps, c.hidden_size // s.placement.ways("main_proj.dim")),
        chain=((ROUND, rows * taps), (NORM, rows * c.hidden_size)),
    )
    ring = replace(s.matrix("draft", "ring rows", rows, c.hidden_size, c.head_dim), chain=((NORM + ROPE + ROUND, rows * c.head_dim),), dmas=2)
    yield replace(ring, calls=c.num_nextn_predict_layers)
    if not bucket.drafts:
        return
    yield embedding(s, "draft", block)
    for _ in range(c.num_nextn_predict_layers):
        yield from (hyper(s, "draft", block), hyper(s, "draft", block))
        yield from attention(s, "draft", block, 0, 0)
        yield router(s, "draft", block, c.dspark_n_routed_experts)
        yield from experts(s, "draft", block, c.dspark_n_routed_experts, c.draft_experts_per_tok)
    yield from head(s, "draft", block)
    ways = s.placement.ways("markov_head.vocab")
    vocab = round_up(c.vocab_size, ways) // ways
    markov = s.matrix("draft", "Markov head, choice", bucket.batch, c.dspark_markov_rank, vocab, False)
    yield replace(markov, calls=c.dspark_block_size, chain=((6, bucket.batch * vocab),), dmas=2)


def step_work(s: Step, bucket: Bucket) -> list[Work]:
    """Every kernel of a step."""
    c = s.config
    found = [embedding(s, "head", bucket.tokens)]
    for plan in c.layer_plan:
        found += layer(s, plan, bucket.tokens)
    found += head(s, "head", bucket.logits)
    if c.num_nextn_predict_layers and bucket.fills:
        found += drafts(s, bucket)
    return found
