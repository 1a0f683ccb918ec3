# SPDX-License-Identifier: Apache-2.0
"""The NKI kernels, one file per primitive of the spec (docs/kernels.md). Nothing here has been run on a device.

KERNELS[name](run, *arguments of the spec's definition) computes the primitive with kernels that `run` starts (v41/backends/neuron/launch.py).
"""

from collections.abc import Callable

# Modules, not functions: a function of a module's name would hide the module.
from v41.backends.neuron.kernels import (
    accept,
    act_round,
    candidate_blocks,
    choose,
    combine,
    embedding,
    engram_gate,
    engram_hash,
    engram_rows,
    experts,
    gate,
    hc_mixes,
    index_scores,
    linear,
    rms_norm,
    rope,
    rounds,
    select,
    softmax_pool,
    sparse_attn,
    uniforms,
    write_rows,
)

KERNELS: dict[str, Callable] = {
    "accept_block": accept.accept_block,
    "accept_greedy": accept.accept_greedy,
    "accept_token": accept.accept_token,
    "act_round": act_round.act_round,
    "candidate_blocks": candidate_blocks.candidate_blocks,
    "choose": choose.choose,
    "chosen_from": choose.chosen_from,
    "embedding": embedding.embedding,
    "engram_gate": engram_gate.engram_gate,
    "engram_hash": engram_hash.engram_hash,
    "engram_rows": engram_rows.engram_rows,
    "experts": experts.experts,
    "gate": gate.gate,
    "grouped_linear": linear.grouped_linear,
    "hc_mixes": hc_mixes.hc_mixes,
    "hc_post": combine.hc_post,
    "hc_pre": combine.hc_pre,
    "index_round": rounds.index_round,
    "index_scores": index_scores.index_scores,
    "kv_round": rounds.kv_round,
    "linear": linear.linear,
    "partial_linear": linear.partial_linear,
    "plain_linear": linear.plain_linear,
    "rms_norm": rms_norm.rms_norm,
    "rope": rope.rope,
    "rope_inverse": rope.rope_inverse,
    "select": select.select,
    "shared_expert": experts.shared_expert,
    "softmax_pool": softmax_pool.softmax_pool,
    "sparse_attn": sparse_attn.sparse_attn,
    "uniforms": uniforms.uniforms,
    "wide_linear": linear.wide_linear,
    "write_rows": write_rows.write_rows,
}
