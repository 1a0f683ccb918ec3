# SPDX-License-Identifier: Apache-2.0
"""What is done to a graph before it is read: constants folded, equal nodes joined, dead ones dropped. No result changes in a bit."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

Node = Any  # torch.fx.Node: its arguments are typed too loosely to check
FOLDED = 1 << 20  # elements of the largest constant that is worth a place in the graph


def is_aten(node: Node) -> bool:
    """A function of torch without side effects."""
    return node.op == "call_function" and getattr(node.target, "namespace", "") in ("aten", "prims") and not node.target._schema.is_mutable


def value_of(node: Node) -> Any:
    """The fake result of a node."""
    return node.meta.get("val")


def tensors_of(node: Node) -> Iterator[Tensor]:
    """Every fake tensor that a node gives."""
    value = value_of(node)
    yield from (v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, Tensor))


def constants(graph: fx.GraphModule) -> dict[Node, Any]:
    """Values of the nodes that depend on no input, computed."""
    known: dict[Node, Any] = {}
    for node in graph.graph.nodes:
        small = all(t.numel() <= FOLDED for t in tensors_of(node))
        is_getitem = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
        if small and (is_aten(node) or is_getitem) and all(n in known for n in node.all_input_nodes):
            args, named = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
            with torch.no_grad():
                known[node] = node.target(*args, **named)
    return known


def as_text(value: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """What makes two constants equal."""
    return str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def fold(graph: fx.GraphModule) -> None:
    """Nodes that depend on no input become tensors of the graph, equal ones a single tensor."""
    known = constants(graph)
    made: dict[Any, Node] = {}
    for node, value in known.items():
        if not isinstance(value, Tensor) or all(user in known for user in node.users):
            continue
        key = as_text(value)
        if key not in made:
            name = f"constant{len(made)}"
            graph.register_buffer(name, value.contiguous().clone())
            with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
                made[key] = graph.graph.get_attr(name)
                made[key].meta["val"] = value_of(node)
        node.replace_all_uses_with(made[key])


def join(graph: fx.GraphModule) -> None:
    """Of equal nodes only the first stays. Kernels and collectives are left alone: their number is what the model says."""
    seen: dict[str, Node] = {}
    for node in graph.graph.nodes:
        if not is_aten(node):
            continue
        key = f"{node.target} {node.args!r} {node.kwargs!r}"
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


def see_through(graph: fx.GraphModule) -> None:
    """Nodes that only name their argument again go."""
    for node in graph.graph.nodes:
        if node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            node.replace_all_uses_with(node.args[0])


def drop(graph: fx.GraphModule) -> None:
    """Nodes whose result nobody reads go; inputs stay, and so does what changes an input."""
    for node in reversed(list(graph.graph.nodes)):
        mutable = node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if not node.users and not mutable and node.op not in ("placeholder", "output"):
            graph.graph.erase_node(node)


def clean(graph: fx.GraphModule) -> None:
    """All of them."""
    see_through(graph)
    drop(graph)
    fold(graph)
    join(graph)
    drop(graph)
    graph.graph.lint()
    graph.recompile()
