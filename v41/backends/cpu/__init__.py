# SPDX-License-Identifier: Apache-2.0
"""The CPU backend."""

from v41.backends.cpu.attend import sparse_attn
from v41.backends.cpu.index import seen_rows
from v41.backends.cpu.linears import grouped_linear, linear, partial_linear, plain_linear, shared_expert, wide_linear
from v41.backends.cpu.mix import hc_mixes, hc_post
from v41.backends.cpu.moe import experts
from v41.backends.cpu.norm import rms_norm
from v41.backends.cpu.rotate import rope, rope_inverse
from v41.backends.cpu.round import act_round, index_round
from v41.spec.backend import Backend

backend = Backend(
    "cpu",
    linear=linear,
    partial_linear=partial_linear,
    plain_linear=plain_linear,
    wide_linear=wide_linear,
    grouped_linear=grouped_linear,
    rms_norm=rms_norm,
    rope=rope,
    rope_inverse=rope_inverse,
    act_round=act_round,
    index_round=index_round,
    sparse_attn=sparse_attn,
    hc_mixes=hc_mixes,
    hc_post=hc_post,
    experts=experts,
    shared_expert=shared_expert,
    seen_rows=seen_rows,
)
