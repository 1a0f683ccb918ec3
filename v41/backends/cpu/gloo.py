# SPDX-License-Identifier: Apache-2.0
"""One rank of a mesh as a process of its own: the collectives over torch.distributed with gloo (docs/sharding.md 6).

Every group gathers and each rank sums in the order of the ranks, so that results equal those of `v41.backends.cpu.ranks` bit for bit and
every rank has the same. Before each collective the group compares what it is about to do.
"""

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from v41.backends.cpu import backend as cpu
from v41.backends.cpu.ranks import CPU_BODIES, Meeting, RankError, combine
from v41.backends.sharded import Wire, sharded
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.spec.backend import Backend

WAIT = timedelta(seconds=120)
Groups = dict[tuple[str, ...], tuple[Any, tuple[int, ...]]]


def form_groups(mesh: Mesh, rank: int) -> Groups:
    """This rank's process group for every set of mesh axes. Every rank makes every group, in the same order, as torch.distributed wants."""
    sets = [tuple(n for n, bit in zip(mesh.names, bits, strict=True) if bit) for bits in subsets(len(mesh.names))]
    mine: Groups = {}
    for axes in sets:
        for ranks in mesh.groups(axes):
            group = dist.new_group(list(ranks), timeout=WAIT)
            if rank in ranks:
                mine[axes] = group, ranks
    return mine


def subsets(count: int) -> list[tuple[bool, ...]]:
    """Every choice of some of `count` things but the empty one."""
    return [tuple(bool(n >> i & 1) for i in range(count)) for n in range(1, 1 << count)]


def agree(meeting: Meeting, number: int, rank: int, group: Any, ranks: tuple[int, ...]) -> None:
    """RankError where the ranks of a group come to different collectives."""
    mine = torch.tensor([zlib.crc32(f"{number} {meeting}".encode())], dtype=torch.int64)
    marks = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(marks, mine, group)
    marked = [int(m) for m in marks]
    if len(set(marked)) > 1:
        others = [r for r, m in zip(ranks, marked, strict=True) if m != int(mine)]
        raise RankError(f"rank {rank} comes to collective {number}, {meeting}; ranks {others} of its group come to another one")


def exchange(tensor: Tensor, group: Any, ranks: tuple[int, ...]) -> list[Tensor]:
    """The tensors of all ranks of a group; bytes travel, so that every dtype does."""
    raw = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    got = [torch.empty_like(raw) for _ in ranks]
    dist.all_gather(got, raw, group)
    return [g.view(tensor.dtype).view(tensor.shape) for g in got]


def wire(mesh: Mesh, rank: int, meetings: list[Meeting]) -> Wire:
    """Collectives of this process; `meetings` gets each of them."""
    groups = form_groups(mesh, rank)

    def meet(kind: str, tensor: Tensor, axes: tuple[str, ...], axis: str) -> Tensor:
        in_order = tuple(n for n in mesh.names if n in axes)
        group, ranks = groups[in_order]
        meeting = Meeting(kind, axes, axis, tuple(tensor.shape), tensor.dtype)
        agree(meeting, len(meetings), rank, group, ranks)
        meetings.append(meeting)
        offers = dict(zip(ranks, exchange(tensor, group, ranks), strict=True))
        return combine(kind, [offers[r] for r in mesh.group(rank, axes)])

    return Wire(lambda t, axes, axis: meet("reduce", t, axes, axis), lambda t, axes, axis: meet("gather", t, axes, axis))


def run_rank(fn: Callable[[int, Backend], Any], mesh: Mesh, rules: Rules, *, ops: Backend = cpu) -> tuple[Any, list[Meeting]]:
    """(fn(rank, backend), this rank's collectives) in one process of an initialized process group of mesh.size ranks.

    RankError with the rank and its collective where it disagrees with its group or fails; a rank that waits for one that is gone ends after
    two minutes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size != mesh.size:
        raise ValueError(f"{size} processes, the mesh has {mesh.size} ranks")
    torch.set_num_threads(1)
    meetings: list[Meeting] = []
    mine = sharded(ops, rules, mesh, torch.tensor(rank, dtype=torch.int32), wire(mesh, rank, meetings), CPU_BODIES)
    try:
        with torch.no_grad():
            return fn(rank, mine), meetings
    except RankError:
        raise
    except Exception as e:
        last = f"; the last collective was {meetings[-1]}" if meetings else ""
        raise RankError(f"rank {rank} failed after {len(meetings)} collectives: {type(e).__name__}: {e}{last}") from e
