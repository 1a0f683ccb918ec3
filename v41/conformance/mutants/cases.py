# SPDX-License-Identifier: Apache-2.0
"""The mutants: one mistake each, all of kinds that ports of this model have made."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from v41.conformance.mutants import attend as a
from v41.conformance.mutants import layer as b
from v41.conformance.mutants.kit import Change, Mutant, configured, loaded, patch, swap
from v41.spec import attention, compress, draft, indexer, model
from v41.spec.backend import Backend
from v41.spec.ops import attend, experts, linear, ngram, quant, rope
from v41.spec.params import Params


def rebuilt(make) -> Change:
    """A backend made for one check: make(params, ops), for mistakes that remember something."""

    @contextmanager
    def change(params: Params, ops: Backend) -> Iterator[tuple[Params, Backend]]:
        yield params, make(params, ops)

    return change


def frequencies(body, *modules) -> Change:
    return patch(*((m, "layer_frequencies", body) for m in modules or (attention, compress, indexer, draft)))


def exchanged(params: Params, i: int, j: int) -> Params:
    layers = list(params.layers)
    layers[i], layers[j] = layers[j], layers[i]
    return replace(params, layers=tuple(layers))


def flipped_tables(params: Params) -> Params:
    m = params.engram_map
    return replace(params, engram_map=replace(m, multipliers=m.multipliers.flip(0), primes=m.primes.flip(0), offsets=m.offsets.flip(0)))


def without_wide_sinks(params: Params) -> Params:
    """Sinks of all layers as zeros."""
    layers = tuple(replace(p, attn=replace(p.attn, attn_sink=torch.zeros_like(p.attn.attn_sink))) for p in params.layers)
    return replace(params, layers=layers)


MUTANTS = [
    # 2 formats
    Mutant("scale codes one too large", "2", "prefill", "layers.0.attn_out", patch((linear, "act_round", b.doubled))),
    Mutant("scale is the power of two below", "2", "prefill", "layers.0.attn_out", patch((quant, "pow2_scale", b.floor_scale))),
    Mutant("an exact power of two is rounded up", "2", "vectors act_quant", "act_quant: qdq[9]", patch((quant, "pow2_scale", b.always_above))),
    Mutant("activations scaled for a largest code of 240", "2", "prefill", "layers.1.ffn_out", patch((quant, "pow2_scale", b.scale_for(240.0)))),
    Mutant("activations not rounded before products", "2", "prefill", "layers.0.attn_out", patch((linear, "act_round", b.same))),
    Mutant("even column in the high nibble", "2", "prefill", "layers.0.ffn_out", patch((quant, "e2m1_unpack", b.high_first))),
    Mutant(
        "fp4 ties away from zero",
        "2",
        "vectors fp4_act_quant",
        "fp4_act_quant: e8m0_block32.qdq[3]",
        patch((quant, "e2m1_round", b.ties_away)),
    ),
    Mutant("index keys in the format of compressed rows and the reverse", "2", "layer 2", "layers.2.index_score", swap(**b.swapped_formats)),
    Mutant("window rows in the format of index keys", "2", "prefill", "layers.0.attn_out", swap(act_round=b.index_round)),
    Mutant("window rows in the format of compressed rows", "2", "prefill", "layers.0.attn_out", swap(act_round=b.kv_round)),
    Mutant("rotary part of window rows not rounded", "2", "prefill", "layers.0.attn_out", swap(act_round=a.head_only_rounding)),
    Mutant("compressed rows not rounded", "2", "layer 2", "layers.2.attn_out", swap(kv_round=b.same)),
    Mutant("index queries and keys not rounded", "2", "layer 2", "layers.2.index_score", swap(index_round=b.same)),
    # 3 norms
    Mutant("norms with eps 1e-6", "3", "vectors rms_norm", "rms_norm: out[4]", configured(rms_norm_eps=1e-6)),
    # 4 rotation
    Mutant("attention output not rotated back", "4", "prefill", "layers.0.attn_out", swap(rope_inverse=a.as_is)),
    Mutant("output rotated on instead of back", "4", "prefill", "layers.0.attn_out", swap(rope_inverse=rope.rope)),
    Mutant(
        "pairs split by halves",
        "4",
        "prefill",
        "layers.0.attn_out",
        swap(rope=a.half_split(rope.rope), rope_inverse=a.half_split(rope.rope_inverse)),
    ),
    Mutant(
        "first dims rotated",
        "4",
        "prefill",
        "layers.0.attn_out",
        swap(rope=a.rotated_front(rope.rope), rope_inverse=a.rotated_front(rope.rope_inverse)),
    ),
    Mutant(
        "tables of window-only and compressing layers exchanged",
        "4",
        "prefill",
        "layers.0.attn_out",
        frequencies(a.frequencies_of(lambda r: int(r == 0))),
    ),
    Mutant("window-only layers with YaRN", "4", "prefill", "layers.0.attn_out", frequencies(a.frequencies_of(lambda r: 1))),
    Mutant("compressing layers without YaRN", "4", "layer 2", "layers.2.index_score", frequencies(a.frequencies_of(lambda r: 0))),
    Mutant("indexer without YaRN", "4", "layer 2", "layers.2.index_score", frequencies(a.frequencies_of(lambda r: 0), indexer)),
    Mutant("frequencies in bfloat16", "4", "prefill", "layers.0.attn_out", frequencies(a.bf16_frequencies)),
    # 5, 6 streams
    Mutant("two layers exchanged", "5", "layer 3", "layers.3.attn_out", loaded(lambda p: exchanged(p, 3, 4))),
    Mutant("each sublayer collapses with its own pre mix", "6", "prefill", "layers.0.attn_out", rebuilt(lambda params, ops: b.own_pre(ops))),
    Mutant(
        "comb transposed",
        "6",
        "prefill",
        "layers.0.h_out",
        swap(hc_post=lambda x, stream, post, comb: b.RIGHT_POST(x, stream, post, comb.mT)),
    ),
    Mutant(
        "post mix without its factor 2",
        "6",
        "prefill",
        "layers.0.route_weights",
        swap(hc_mixes=b.mixes_with(lambda pre, post, comb: (pre, post / 2, comb))),
    ),
    Mutant("19 Sinkhorn iterations", "6", "vectors hyper_connections", "hyper_connections: comb[1]", configured(hc_sinkhorn_iters=19)),
    Mutant("stream normalized before its projection", "6", "prefill", "layers.0.ffn_out", swap(hc_mixes=b.normed_late)),
    Mutant("head collapses to the mean", "5", "prefill", "logits", patch((model, "head", b.flat_head(model.head)))),
    # 7 attention
    Mutant("V4's norm of each query head", "7.1", "prefill", "layers.0.attn_out", patch((attention, "queries", a.head_normed_queries))),
    Mutant("sinks zeroed", "7.6", "prefill", "layers.0.attn_out", loaded(without_wide_sinks)),
    Mutant(
        "sink scaled like a logit",
        "7.6",
        "prefill",
        "layers.0.attn_out",
        swap(sparse_attn=a.attention_with(attn_sink=lambda a: a["attn_sink"] * a["scale"])),
    ),
    Mutant("probabilities not rounded", "7.6", "prefill", "layers.0.attn_out", swap(sparse_attn=a.unrounded_attention)),
    Mutant("one maximum for the whole list", "7.6", "layer 2", "layers.2.attn_out", patch((attend, "RUN", 1 << 20))),
    Mutant("scale by the rotary dims", "7.6", "prefill", "layers.0.attn_out", swap(sparse_attn=a.attention_with(scale=lambda a: 32**-0.5))),
    Mutant(
        "no slot read as row 0",
        "7.6",
        "prefill",
        "layers.0.attn_out",
        swap(sparse_attn=a.attention_with(window_idxs=lambda a: a["window_idxs"].clamp_min(0))),
    ),
    Mutant("window one position short", "7.2", "prefill", "layers.0.attn_out", patch((attention, "window_list", a.shorter_list))),
    Mutant(
        "window rows one slot too far",
        "7.2",
        "prefill",
        "cache layers.0.window_kv_cache",
        patch((attention, "ring_targets", a.late_targets)),
    ),
    # 7.3 compressor
    Mutant("group j at position j", "7.3", "layer 2", "layers.2.index_score", patch((attention, "publish", a.publish_with(lambda n, r: n)))),
    Mutant(
        "group at its last token",
        "7.3",
        "layer 2",
        "layers.2.index_score",
        patch((attention, "publish", a.publish_with(lambda n, r: n * r + r - 1))),
    ),
    Mutant(
        "compressed rows not rotated",
        "7.3",
        "layer 2",
        "layers.2.attn_out",
        patch((attention, "publish", a.publish_with(a.first_token, rotate_rows=False))),
    ),
    Mutant(
        "index keys after rotation",
        "7.3",
        "layer 2",
        "layers.2.index_score",
        patch((attention, "publish", a.publish_with(a.first_token, "rotated"))),
    ),
    Mutant(
        "index keys after rounding",
        "7.3",
        "layer 2",
        "layers.2.index_score",
        patch((attention, "publish", a.publish_with(a.first_token, "rounded"))),
    ),
    Mutant("group pooled by its mean", "7.3", "layer 2", "layers.2.index_score", swap(softmax_pool=a.mean_pool)),
    Mutant("softmax over channels", "7.3", "layer 2", "layers.2.index_score", swap(softmax_pool=a.channel_pool)),
    Mutant("unfinished group forgotten", "7.3", "layer 2", "cache layers.2.kv_state", patch((compress, "_carry", a.kept_carry))),
    # 7.4, 7.5 indexer
    Mutant("no ReLU in index scores", "7.4", "layer 2", "layers.2.index_score", swap(index_scores=a.scores_without_relu)),
    Mutant("ReLU after the head weights", "7.4", "layer 2", "layers.2.index_score", swap(index_scores=a.scores_with_late_relu)),
    Mutant("selection in order of score", "7.4", "layer 2", "layers.2.topk_idxs", swap(select=a.best_first)),
    Mutant("group seen before its last token", "7.4", "layer 2", "layers.2.index_score", patch((indexer, "visible_rows", a.early_rows))),
    Mutant("an index source reuses the selection below", "7.4", "layer 7", "layers.7.attn_out", configured(index_source_layer_ids=(2, 5))),
    Mutant(
        "newest block not pinned",
        "7.5",
        "vectors candidate_blocks",
        "candidate_blocks: prefill.blocks2x4",
        swap(candidate_blocks=a.unpinned_blocks),
    ),
    Mutant("candidates applied to their own source", "7.5", "layer 5", "layers.5.topk_idxs", rebuilt(a.self_masked)),
    Mutant("candidates not applied", "7.5", "layer 7", "layers.7.index_score", configured(candidate_source_layer_id=-1)),
    Mutant(
        "every source publishes its keys in every step",
        "7.9",
        "decode",
        "step 1: layers.2.index_score",
        patch((attention, "hand_down", a.always_handed_down)),
    ),
    # 8 Engram
    Mutant("tables of the two Engram layers exchanged", "8", "prefill", "engram_hash_ids", loaded(flipped_tables)),
    Mutant("columns by head, then n-gram size", "8", "prefill", "engram_hash_ids", swap(engram_hash=b.heads_outside)),
    Mutant("pad id 0 before the start", "8", "prefill", "engram_hash_ids", swap(engram_hash=b.hash_with(lambda a: {"pad": a["pad"] * 0}))),
    Mutant("a dead token hides only itself", "8", "vectors engram_hash", "engram_hash: prefill8_masked", swap(engram_hash=b.per_slot_mask)),
    Mutant(
        "gate without the sign of the dot product",
        "8",
        "layer 1",
        "layers.1.engram_out",
        patch((ngram, "engram_sigmoid", b.unsigned_sigmoid)),
    ),
    Mutant("gate without its floor", "8", "vectors engram_gate", "engram_gate: exact[4]", patch((ngram, "engram_sigmoid", b.floorless_sigmoid))),
    Mutant("images reach the gate", "8", "vectors engram_gate", "engram_gate: out_masked", swap(engram_gate=b.deaf_gate)),
    Mutant("empty tables", "8", "layer 1", "layers.1.engram_out", swap(engram_rows=b.no_rows)),
    # 9 mixture of experts
    Mutant("bias in the routing weights", "9", "prefill", "layers.0.route_weights", swap(gate=b.biased_weights)),
    Mutant("bias left out of the choice", "9", "prefill", "layers.0.route_weights", swap(gate=b.unbiased_choice)),
    Mutant("routing weights not normalized", "9", "prefill", "layers.0.route_weights", swap(gate=b.gate_with(normalize=False))),
    Mutant("routing weights not scaled", "9", "prefill", "layers.0.route_weights", swap(gate=b.gate_with(route_scale=1.0))),
    Mutant("router in bfloat16", "9", "prefill", "layers.0.ffn_out", swap(gate=b.bf16_gate)),
    Mutant("scores without their square root", "9", "prefill", "layers.0.route_weights", patch((experts, "score", b.plain_softplus))),
    Mutant("routing weight after w2", "9", "prefill", "layers.0.ffn_out", patch((experts, "expert", b.weight_last))),
    Mutant("gate and up exchanged", "9", "prefill", "layers.0.ffn_out", patch((experts, "expert", b.swapped_gate_and_up))),
    Mutant("no shared expert", "9", "prefill", "layers.0.ffn_out", swap(shared_expert=b.no_shared_expert)),
    Mutant("no clamp", "9", "vectors expert", "expert: fp4.out", patch((experts, "swiglu", b.swiglu_with(lambda up, gate, limit: (up, gate))))),
    Mutant(
        "gate clamped on both sides, up from above",
        "9",
        "vectors expert",
        "expert: fp4.out",
        patch((experts, "swiglu", b.swiglu_with(b.other_sides))),
    ),
    Mutant(
        "gate not clamped",
        "9",
        "vectors expert",
        "expert: fp4.out",
        patch((experts, "swiglu", b.swiglu_with(lambda u, g, n: (u.clamp(-n, n), g)))),
    ),
    # 11 draft head
    Mutant("taps of the layer below", "11", "prefill", "main_hidden", configured(dspark_target_layer_ids=(4, 5, 6))),
    Mutant("taps before the Engram", "11", "prefill", "main_hidden", patch((model, "layer", b.tap_before_engram(model.layer)))),
    Mutant("Markov bias of the given token at every place", "11", "draft", "spec.logits", rebuilt(b.markov_of_first)),
    Mutant("confidence after the norm", "11", "draft", "spec.confidence", rebuilt(b.normed_confidence)),
    Mutant("causal draft block", "11", "draft", "mtp.0.attn_out", swap(sparse_attn=a.causal_block)),
    Mutant("draft block one position too far", "11", "draft", "mtp.0.attn_out", patch((draft, "call_rows", b.late_block))),
    Mutant("draft stages with YaRN", "11", "draft", "mtp.0.attn_out", frequencies(a.frequencies_of(lambda r: 1), draft)),
    Mutant("another noise token", "11", "draft", "mtp.0.attn_in", configured(dspark_noise_token_id=0)),
    Mutant("draft stages with the backbone's number of experts", "11", "draft", "mtp.0.route_weights", configured(dspark_num_experts_per_tok=0)),
]
