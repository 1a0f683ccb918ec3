# SPDX-License-Identifier: Apache-2.0
"""Caches written in place (docs/neuron-graph.md 3): the functional writes of the spec become changes of the graph's own inputs.

This is sound where the write is the last to read the old rows, which is checked on the graph, reader by reader. A cache whose write cannot be
proven so is returned as a new tensor, with the reason; the lint reports it.
"""

from collections.abc import Iterator

import torch
from torch import fx

from v41.backends.neuron.calls import decode
from v41.backends.neuron.graph_passes import Node, drop, value_of

SMALL = 1 << 14  # bytes of a state that is copied back whole: counters and short rings


def is_view(node: Node) -> bool:
    """Whether a node gives an alias of its first argument."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return False
    returns = node.target._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not node.target._schema.is_mutable


def base(node: Node) -> Node:
    """What a chain of views looks at."""
    while is_view(node):
        node = node.args[0]
    return node


def readers(node: Node) -> Iterator[Node]:
    """Every node that reads the memory of this one, through views too."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


def write_of(node: Node) -> Node | None:
    """The write_rows behind an output, if it is one."""
    node = base(node)
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem" and node.args[0].target is torch.ops.v41.write_rows.default:
        return node
    return None


def refusal(write: Node, source: Node, order: dict[Node, int]) -> str | None:
    """Why a write cannot be done in the memory of its buffer; None where it can."""
    call = write.args[0]
    if base(call.args[0][0]) is not source:
        return f"its rows are written to {base(call.args[0][0]).name}, not to the cache"
    late = [r for r in readers(source) if r is not call and order[r] > order[call] and r.op != "output"]
    return f"{late[0].name} reads the old rows after they are written" if late else None


def in_place(graph: fx.GraphModule, write: Node) -> None:
    """The write as a change of its buffer; whoever read its result reads the buffer."""
    call = write.args[0]
    tensors, text = call.args
    (buffer, index, rows), _ = decode(tensors, text)
    with graph.graph.inserting_before(call):
        changed = graph.graph.call_function(torch.ops.v41.write_rows_.default, (buffer, index, rows))
        changed.meta["val"] = None
    write.replace_all_uses_with(buffer)


def copied(graph: fx.GraphModule, pairs: list[tuple[Node, Node]], sources: set[Node], output: Node) -> None:
    """Small states copied back at the end, each from a value that no other copy changes."""
    with graph.graph.inserting_before(output):
        values = []
        for _, value in pairs:
            shared = base(value) in sources
            values.append(cloned(graph, value) if shared else value)
        for (source, _), value in zip(pairs, values, strict=True):
            graph.graph.call_function(torch.ops.aten.copy_.default, (source, value)).meta["val"] = value_of(source)


def cloned(graph: fx.GraphModule, node: Node) -> Node:
    made = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
    made.meta["val"] = value_of(node)
    return made


def donate(graph: fx.GraphModule, inputs: list[str], outputs: list[str], owned: str, limit: int) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """(donated, fresh, outputs that are left): see `Captured`. Changes the graph. limit: bytes of the largest state that is copied back."""
    nodes = list(graph.graph.nodes)
    order = {n: i for i, n in enumerate(nodes)}
    place = dict(zip(inputs, (n for n in nodes if n.op == "placeholder"), strict=True))
    output = nodes[-1]
    donated: dict[str, str] = {}
    fresh: dict[str, str] = {}
    left: list[int] = []
    pairs: list[tuple[Node, Node]] = []
    writes: list[Node] = []
    for i, (path, node) in enumerate(zip(outputs, output.args[0], strict=True)):
        source = place.get(path) if path.startswith(owned + ".") else None
        if source is None:
            left.append(i)
        elif node is source:
            donated[path] = "kept"
        elif (write := write_of(node)) is not None and (why := refusal(write, source, order)) is None:
            donated[path] = "write_rows"
            writes.append(write)
        elif write is None and value_of(source).nbytes <= limit:
            donated[path] = "copy"
            pairs.append((source, node))
        else:
            fresh[path] = why if write is not None else "it is computed anew, not written by write_rows"
            left.append(i)
    for write in writes:
        in_place(graph, write)
    changed = {place[p] for p, how in donated.items() if how != "kept"}
    copied(graph, pairs, changed, output)
    with graph.graph.inserting_before(output):
        kept = [cloned(graph, n) if base(n) in changed else n for n in (output.args[0][i] for i in left)]
    output.args = (kept,)
    drop(graph)
    graph.graph.lint()
    graph.recompile()
    return donated, fresh, [outputs[i] for i in left]
