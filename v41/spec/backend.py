# SPDX-License-Identifier: Apache-2.0
"""A backend is the spec with some of its bodies replaced."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from v41.spec import collectives
from v41.spec.ops import accept, attend, draws, index, mix, ngram, norm, place, pool, quant
from v41.spec.ops import choose as choosing
from v41.spec.ops import experts as moe
from v41.spec.ops import linear as products
from v41.spec.ops import rope as rotation


def tap(name: str, tensor: Tensor) -> Tensor:
    """The identity. Recording, bisecting and poisoning are backends that replace it; a name tapped again in a call holds further rows."""
    return tensor


@dataclass(frozen=True)
class Backend:
    """Every primitive that the model calls; the defaults are their definitions. Replace one with `dataclasses.replace`."""

    name: str
    linear: Callable = products.linear
    partial_linear: Callable = products.partial_linear
    plain_linear: Callable = products.plain_linear
    wide_linear: Callable = products.wide_linear
    grouped_linear: Callable = products.grouped_linear
    rms_norm: Callable = norm.rms_norm
    rope: Callable = rotation.rope
    rope_inverse: Callable = rotation.rope_inverse
    act_round: Callable = quant.act_round
    index_round: Callable = quant.index_round
    kv_round: Callable = quant.kv_round
    sparse_attn: Callable = attend.sparse_attn
    index_scores: Callable = index.index_scores
    seen_rows: Callable = index.seen_rows
    select: Callable = index.select
    candidate_blocks: Callable = index.candidate_blocks
    softmax_pool: Callable = pool.softmax_pool
    hc_mixes: Callable = mix.hc_mixes
    hc_pre: Callable = mix.hc_pre
    hc_post: Callable = mix.hc_post
    gate: Callable = moe.gate
    experts: Callable = moe.experts
    shared_expert: Callable = moe.shared_expert
    engram_hash: Callable = ngram.engram_hash
    engram_rows: Callable = ngram.engram_rows
    engram_gate: Callable = ngram.engram_gate
    embedding: Callable = place.embedding
    write_rows: Callable = place.write_rows
    choose: Callable = choosing.choose
    chosen_from: Callable = choosing.chosen_from
    uniforms: Callable = draws.uniforms
    accept_greedy: Callable = accept.accept_greedy
    accept_token: Callable = accept.accept_token
    accept_block: Callable = accept.accept_block
    tap: Callable = tap
    all_reduce: Callable = collectives.all_reduce
    all_gather: Callable = collectives.all_gather
    sum_terms: Callable = collectives.sum_terms
    lookups: Callable = collectives.lookups
    first: Callable = collectives.first
    recut: Callable = collectives.recut
    choice_cut: Callable = collectives.choice_cut
    elect: Callable = collectives.elect

    def __post_init__(self) -> None:
        for f in fields(self)[1:]:
            want, got = signature(definition(f)), signature(getattr(self, f.name))
            by_name = {n for n, p in want.parameters.items() if p.kind == Parameter.KEYWORD_ONLY}
            try:
                got.bind(*[None] * (len(want.parameters) - len(by_name)), **dict.fromkeys(by_name))
            except TypeError as e:
                raise TypeError(f"{self.name}.{f.name}{got} cannot be called like the spec's {f.name}{want}: {e}") from e


def definition(field: Any) -> Callable:
    """The spec's body of one primitive."""
    return field.default
