# SPDX-License-Identifier: Apache-2.0
"""All ranks of a mesh by one captured graph (docs/neuron-graph.md 6): node by node, each node for every rank in order, on one thread.

What runs is the graph itself: its nodes, its collectives and its writes in place. At a collective the tensors of a group meet in the order of
its ranks, as in `v41.backends.cpu.ranks`, so both give the same bits. There is nothing to wait for, so nothing can hang: a rank that fails, or
that brings another shape or dtype than its group, ends the run with its number and the node's name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from v41.backends.cpu.ranks import RankError, combine
from v41.backends.neuron.calls import decode
from v41.backends.neuron.capture import Captured, Trees, joined, named
from v41.backends.neuron.graph_passes import Node
from v41.backends.neuron.ops import WRITE, definition_of, listed, own
from v41.backends.neuron.wires import GATHER, REDUCE, WAIT, axes_of
from v41.sharding.mesh import Mesh

Bodies = Callable[[str], Callable[..., Any]]
Values = dict[Node, Any]


def definitions(name: str) -> Callable[..., Any]:
    """The spec's body of a primitive: what the graph computes without kernels."""
    return definition_of(name)


def primitive(node: Node) -> str | None:
    """The name of the primitive that a node is; None for other nodes."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "v41":
        return None
    return str(node.target._schema.name).removeprefix("v41::")


def run_primitive(name: str, args: tuple[Any, ...], bodies: Bodies) -> Any:
    """One node of the v41 namespace with these bodies."""
    if name == WRITE:
        buffer, index, rows = args
        buffer.copy_(bodies("write_rows")(buffer, index, rows))
        return None
    tensors, call = args
    given, by_name = decode(tensors, call)
    return own(listed(bodies(name)(*given, **by_name)), tensors)


def run_node(node: Node, graph: fx.GraphModule, values: Values, bodies: Bodies) -> Any:
    """One node of one rank."""
    if node.op == "get_attr":
        return getattr(graph, str(node.target))
    args, by_name = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
    name = primitive(node)
    return node.target(*args, **by_name) if name is None else run_primitive(name, args, bodies)


def meet(node: Node, offers: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """What every rank has after a collective."""
    axes, reduces = axes_of(str(node.args[-1]), mesh), node.target is REDUCE
    answers: list[Tensor] = list(offers)
    for group in mesh.groups(axes):
        if not reduces and node.args[1] != len(group):
            raise RankError(f"{node.name}: a gather of {node.args[1]} ranks, the groups over {' x '.join(axes)} have {len(group)}")
        first = offers[group[0]]
        for r in group:
            if (offers[r].shape, offers[r].dtype) != (first.shape, first.dtype):
                other = f"{first.dtype} {list(first.shape)}"
                raise RankError(f"rank {r} brings {offers[r].dtype} {list(offers[r].shape)} to {node.name}, rank {group[0]} of its group {other}")
        met = combine("reduce" if reduces else "gather", [offers[r] for r in group])
        for r in group:
            answers[r] = met if reduces else met.flatten(0, 1)
    return answers


def last_uses(graph: fx.Graph) -> dict[Node, list[Node]]:
    """node -> the values that nobody reads after it."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        last.update(dict.fromkeys([*node.all_input_nodes, node], node))
    found: dict[Node, list[Node]] = {}
    for value, node in last.items():
        found.setdefault(node, []).append(value)
    return found


def start(captured: Captured, ranks: list[list[tuple[str, Tensor]]]) -> list[Values]:
    """Inputs by placeholder; RankError where a rank's arguments are not those of the graph."""
    holders = [n for n in captured.graph.graph.nodes if n.op == "placeholder"]
    begun = []
    for r, given in enumerate(ranks):
        if [n for n, _ in given] != list(captured.inputs):
            odd = sorted(set(captured.inputs) ^ {n for n, _ in given})
            raise RankError(f"rank {r} has {len(given)} inputs, the graph {len(captured.inputs)}; first difference {odd[0] if odd else 'in their order'}")
        for (name, tensor), holder in zip(given, holders, strict=True):
            want = holder.meta["val"]
            if (tensor.shape, tensor.dtype) != (want.shape, want.dtype):
                raise RankError(f"rank {r} input {name}: {tensor.dtype} {list(tensor.shape)}, captured {want.dtype} {list(want.shape)}")
        begun.append(dict(zip(holders, (t for _, t in given), strict=True)))
    return begun


def run_lockstep(captured: Captured, ranks: Sequence[Trees], mesh: Mesh, bodies: Bodies = definitions) -> list[Trees]:
    """The results of every rank, as trees; arguments are trees by name, one entry a rank, and what the graph donates is changed in place.

    bodies(name) is the body of a primitive (the spec's definitions). RankError with rank and node where a rank fails or disagrees.
    """
    if len(ranks) != mesh.size:
        raise RankError(f"arguments of {len(ranks)} ranks for a mesh of {mesh.size}")
    given = [named(trees) for trees in ranks]
    values, nodes = start(captured, given), captured.graph.graph
    over = last_uses(nodes)
    with torch.no_grad():
        for node in nodes.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                outputs = [[v[n] for n in node.args[0]] for v in values]
                break
            step(node, captured.graph, values, mesh, bodies)
            for v in values:
                for dead in over.get(node, []):
                    v.pop(dead, None)
    return [joined(captured, dict(g), out) for g, out in zip(given, outputs, strict=True)]


def step(node: Node, graph: fx.GraphModule, values: list[Values], mesh: Mesh, bodies: Bodies) -> None:
    """One node for all ranks."""
    if node.target in (REDUCE, GATHER):
        for v, answer in zip(values, meet(node, [v[node.args[0]] for v in values], mesh), strict=True):
            v[node] = answer
        return
    for r, v in enumerate(values):
        try:
            v[node] = v[node.args[0]] if node.target is WAIT else run_node(node, graph, v, bodies)
        except Exception as e:
            raise RankError(f"rank {r} failed in {node.name} ({node.target}): {type(e).__name__}: {e}") from e
