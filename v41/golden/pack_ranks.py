# SPDX-License-Identifier: Apache-2.0
"""A step on the ranks of a mesh: what each of them brings to every collective, by name (docs/golden-pack.md 3)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from v41 import api
from v41.backends.cpu.ranks import Meeting, run_ranks
from v41.golden.ranks import Recorder, combine_rule, rank_name
from v41.sharding.check import check
from v41.sharding.mesh import MESHES
from v41.sharding.shard import shard_params
from v41.sharding.tables import rules_named
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.params import Params

RANKS, RULES = 4, "pr71"


@dataclass(frozen=True)
class Offers:
    """What all ranks bring, as `rank00.NAME`; the names in their order, and how the parts of each make the whole."""

    tensors: dict[str, Tensor]
    order: list[str]
    combine: dict[str, dict[str, Any]]


def divides(params: Params) -> bool:
    """Whether the model can be cut for so many ranks and the numerics take such calls."""
    if params.numerics.needs_start:
        return False
    try:
        check(params.config, rules_named(RULES), MESHES[RANKS])
    except ValueError:
        return False
    return True


def offers(params: Params, cache: Cache, tokens: Tensor, valid: Tensor, ops: Backend) -> Offers:
    """One step on every rank, from a state that all ranks hold."""
    rules, mesh = rules_named(RULES), MESHES[RANKS]
    recorders: dict[int, Recorder] = {}

    def one(rank: int, local: Backend) -> None:
        recorders[rank] = Recorder(local)
        recorders[rank].call("step", api.step, shard_params(params, rules, mesh, rank), cache, tokens, valid=valid)

    def watch(rank: int, meeting: Meeting, offer: Tensor) -> None:
        recorders[rank].waiting.append((meeting, offer))

    run_ranks(one, mesh, rules, ops=ops, watch=watch)
    named = {rank_name(r): recorders[r].brought for r in range(mesh.size)}
    first = named[rank_name(0)]
    short = {n: n.removeprefix("prefill.") for n in first.offers}
    tensors = {f"{rank}.{short[n]}": t for rank, brought in named.items() for n, t in brought.offers.items()}
    return Offers(tensors, list(short.values()), {short[n]: combine_rule(m) for n, m in first.meetings.items()})
