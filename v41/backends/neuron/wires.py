# SPDX-License-Identifier: Apache-2.0
"""Collectives as nodes of a graph, with names of groups that are the same on every rank (docs/neuron-graph.md 4).

torch.distributed names its groups by a counter that differs from rank to rank, and that name stands in the graph: so groups are named
after their mesh axes, and whoever runs the graph registers a process group under each name.
"""

from typing import Any

import torch
from torch import Tensor

from v41.backends.sharded import Wire
from v41.sharding.mesh import Mesh

PREFIX = "v41."
COLLECTIVES = torch.ops._c10d_functional
REDUCE, GATHER, WAIT = COLLECTIVES.all_reduce.default, COLLECTIVES.all_gather_into_tensor.default, COLLECTIVES.wait_tensor.default


def group_name(axes: tuple[str, ...]) -> str:
    """The name of the groups over these mesh axes."""
    return PREFIX + "+".join(axes)


def axes_of(name: str, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes of a group's name; ValueError for a name that this mesh has not."""
    axes = tuple(name.removeprefix(PREFIX).split("+"))
    if not name.startswith(PREFIX) or any(a not in mesh.names for a in axes):
        raise ValueError(f"group {name!r}: the mesh has the axes {', '.join(mesh.names)}")
    return axes


def in_order(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """`axes`, if the shares of their groups lie in the order of the ranks, which is the order that a process group has."""
    if axes != tuple(n for n in mesh.names if n in axes):
        raise ValueError(f"a collective over {axes}: ranks of a group lie in the order of the mesh axes {mesh.names}")
    return axes


def functional(mesh: Mesh) -> Wire:
    """Every collective as two nodes, the collective and the wait for it."""

    def reduce(tensor: Tensor, axes: tuple[str, ...], axis: str) -> Tensor:
        return WAIT(REDUCE(tensor, "sum", group_name(in_order(axes, mesh))))

    def gather(tensor: Tensor, axes: tuple[str, ...], axis: str) -> Tensor:
        ways = mesh.ways(in_order(axes, mesh))
        return WAIT(GATHER(tensor[None].contiguous(), ways, group_name(axes)))

    return Wire(reduce, gather)


def register_groups(mesh: Mesh, groups: dict[tuple[str, ...], Any]) -> None:
    """Gives this rank's process group over each set of mesh axes its name. On a device: not run."""
    for axes, group in groups.items():
        name: Any = group_name(in_order(axes, mesh))
        torch._C._distributed_c10d._register_process_group(name, group)
