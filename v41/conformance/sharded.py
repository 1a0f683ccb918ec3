# SPDX-License-Identifier: Apache-2.0
"""Cases of sharding: a stored call on four ranks in this process, each with its share of the weights (docs/sharding.md 6)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from v41.backends.cpu.ranks import run_ranks
from v41.conformance.blocks import forced_by, judge_call, run_call
from v41.conformance.judge import Finding
from v41.conformance.target import Target
from v41.conformance.walk import Opened, Stop
from v41.golden.metrics import same_bits
from v41.golden.pack_ranks import RANKS, RULES, divides
from v41.sharding.mesh import MESHES
from v41.sharding.shard import shard_params
from v41.sharding.tables import rules_named
from v41.spec.backend import Backend


def rank_cases(opened: Opened, every: Sequence[Stop]) -> list[Stop]:
    """One decode step and one draft with taps: every collective is in them."""
    if not divides(opened.params):
        return []
    steps = [s for s in every if s.taps and s.op == "step" and s.inputs["tokens"].shape[1] == 1]
    return steps[-1:] + [s for s in every if s.taps and s.op == "draft"][:1]


def sharded_call(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """The ranks agree in every byte; rank 0 is judged like the whole, but never bit for bit: sums run in the order of the ranks."""
    rules, mesh = rules_named(RULES), MESHES[RANKS]

    def one(rank: int, ops: Backend) -> dict:
        local = replace(opened, params=shard_params(opened.params, rules, mesh, rank))
        return run_call(replace(target, ops=ops), local, stop, forced_by(stop)).tensors

    results = run_ranks(one, mesh, rules, ops=target.ops).values
    for rank, other in enumerate(results[1:], 1):
        unlike = next((n for n, t in results[0].items() if not same_bits(other[n], t)), None)
        if unlike is not None:
            yield Finding("alike", "differs", f"{unlike}: ranks 0 and {rank} differ")
            return
    yield Finding("alike", "equal", f"{len(results[0])} tensors on {RANKS} ranks")
    loose = replace(target, claims=replace(target.claims, bits=frozenset()))
    yield from judge_call(loose, opened, stop, results[0])
