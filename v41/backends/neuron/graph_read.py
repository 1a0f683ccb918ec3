# SPDX-License-Identifier: Apache-2.0
"""Figures of a captured graph: its hash, nodes, collectives, memory alive at once (docs/neuron-graph.md 9)."""

import hashlib
import json
from collections import Counter
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from v41.backends.neuron.capture import Captured
from v41.backends.neuron.graph_donate import is_view
from v41.backends.neuron.graph_passes import Node, as_text, tensors_of, value_of
from v41.backends.neuron.wires import GATHER, REDUCE, axes_of
from v41.sharding.mesh import Mesh
from v41.sharding.plan_collectives import Collective

Meetings = Counter[tuple[str, str, int, int]]  # (kind, axis, ranks, bytes) -> count


def kind_of(node: Node) -> str:
    """How a node is counted: `linear`, `aten.add.Tensor`, `all_reduce`."""
    if node.op != "call_function":
        return node.op
    space, name = getattr(node.target, "namespace", ""), getattr(node.target, "__name__", str(node.target))
    if space == "v41":
        return name.removesuffix(".default")
    return f"{space}.{name}" if space == "aten" else name.removesuffix(".default")


def kernels(captured: Captured) -> dict[str, int]:
    """Primitive -> nodes."""
    names = [kind_of(n) for n in captured.graph.graph.nodes if getattr(n.target, "namespace", "") == "v41"]
    return dict(sorted(Counter(names).items()))


def nodes(captured: Captured) -> dict[str, int]:
    """Kind -> nodes, most first."""
    return dict(Counter(kind_of(n) for n in captured.graph.graph.nodes).most_common())


def graph_hash(captured: Captured) -> str:
    """SHA-256 of every node with its arguments, shapes and dtypes, of every constant's bytes, and of what is donated."""
    digest, number = hashlib.sha256(), {}
    for i, node in enumerate(captured.graph.graph.nodes):
        number[node] = i
        args = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        shapes = [(str(t.dtype), tuple(t.shape), t.stride()) for t in tensors_of(node)]
        target = "" if node.op == "placeholder" else node.target
        digest.update(f"{node.op} {target} {args!r} {shapes}\n".encode())
        if node.op == "get_attr":
            digest.update(as_text(getattr(captured.graph, str(node.target)))[2])
    digest.update(json.dumps([captured.inputs, captured.outputs, sorted(captured.donated.items())]).encode())
    return digest.hexdigest()


def axis_name(axes: tuple[str, ...], mesh: Mesh) -> str:
    """`world` where every mesh axis of several ranks takes part, else those axes."""
    long = [n for n in mesh.names if mesh.length(n) > 1]
    taken = [n for n in axes if n in long]
    return "world" if set(taken) == set(long) else "+".join(taken)


def collectives(captured: Captured, mesh: Mesh) -> Meetings:
    """The collectives as nodes of the graph. bytes: what a rank holds after one."""
    found: Meetings = Counter()
    for node in captured.graph.graph.nodes:
        if node.target in (REDUCE, GATHER):
            axes = axes_of(str(node.args[-1]), mesh)
            kind = "reduce" if node.target is REDUCE else "gather"
            found[kind, axis_name(axes, mesh), mesh.ways(axes), value_of(node).nbytes] += 1
    return found


def planned(found: list[Collective] | tuple[Collective, ...], mesh: Mesh) -> Meetings:
    """The planner's collectives in the same form."""
    total: Meetings = Counter()
    for c in found:
        total[c.kind, axis_name(c.axes, mesh), c.ranks, c.bytes] += c.number
    return total


def as_list(found: Meetings) -> list[dict[str, Any]]:
    """As JSON values, largest groups first."""
    order = sorted(found.items(), key=lambda kv: (-kv[0][2], kv[0]))
    return [{"kind": k, "axis": a, "ranks": r, "count": n, "bytes": b} for (k, a, r, b), n in order]


def given_bytes(captured: Captured) -> dict[str, int]:
    """Bytes of the graph's arguments by the first word of their paths."""
    found: dict[str, int] = {}
    holders = (n for n in captured.graph.graph.nodes if n.op == "placeholder")
    for path, node in zip(captured.inputs, holders, strict=True):
        name = path.partition(".")[0]
        found[name] = found.get(name, 0) + value_of(node).nbytes
    return found


def owner(node: Node) -> Node:
    """The node whose memory this one reads: behind views, parts of results and waits."""
    while is_view(node) or kind_of(node) in ("getitem", "wait_tensor"):
        node = node.args[0]
    return node


def alive_bytes(captured: Captured) -> int:
    """The most bytes of intermediates alive at once if nodes run in their order and nothing is fused: an upper bound for scratch."""
    ends: dict[Node, int] = {}
    listed = list(captured.graph.graph.nodes)
    for i, node in enumerate(listed):
        ends.update({owner(n): i for n in [*node.all_input_nodes, node]})
    change = [0] * (len(listed) + 1)
    for i, node in enumerate(listed):
        if node.op == "call_function" and owner(node) is node and value_of(node) is not None:
            size = sum(t.nbytes for t in tensors_of(node))
            change[i] += size
            change[ends[node] + 1] -= size
    return max(accumulate(change))


def count_dtype(captured: Captured, dtype: Any) -> int:
    """Tensors of a dtype, arguments and constants included."""
    return sum(any(isinstance(t, Tensor) and t.dtype == dtype for t in tensors_of(n)) for n in captured.graph.graph.nodes)
