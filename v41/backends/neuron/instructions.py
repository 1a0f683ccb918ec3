# SPDX-License-Identifier: Apache-2.0
"""Instructions of a captured graph against the compiler's limit (docs/neuron-graph.md 9)."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from v41.backends.neuron.calls import decode
from v41.backends.neuron.capture import Captured
from v41.backends.neuron.graph_passes import Node, tensors_of
from v41.backends.neuron.graph_read import kind_of, owner
from v41.backends.neuron.launch import profiled
from v41.backends.neuron.ops import WRITE, kernel_of
from v41.backends.neuron.sim.report import Report

LIMIT = 5_000_000  # instructions of one graph that the compiler takes
TILE, VECTOR = 128, 16  # weights of a PE tile on a side; vector instructions of a kernel beside its products, assumed


@dataclass(frozen=True)
class Counted:
    """Instructions of a graph: `profiled` counted by the simulator at the graph's own shapes, `estimated` by a rule.

    modeled_us: the simulator's time of those kernels, one after the other, on zeros: experts with a single hit, and no collective.
    """

    profiled: dict[str, int]
    estimated: dict[str, int]
    modeled_us: dict[str, float]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.profiled.values()) + sum(self.estimated.values())

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        modeled = {n: round(t, 1) for n, t in self.modeled_us.items()}
        counts = {"total": self.total, "limit": LIMIT, "profiled": self.profiled, "estimated": self.estimated, "rule": RULE}
        return counts | {"modeled_us": modeled | {"total": round(sum(self.modeled_us.values()), 1)}}


GATHERED = 1 << 12  # rows
# Kernels that multiply with a weight: the rule counts its tiles.
PRODUCTS = set(
    "linear partial_linear plain_linear wide_linear grouped_linear gate hc_mixes experts shared_expert partial_experts partial_shared_expert".split()
)
RULE = "a node of torch: elements / 128 lanes / 512; a kernel: 2 a 128 x 128 tile of each weight and 128 rows, and 16 a 128 rows"


def rows_of(shape: tuple[int, ...]) -> int:
    """Tiles of 128 rows of a tensor whose last dim is a row."""
    count = 1
    for n in shape[:-1]:
        count *= n
    return -(-count // TILE)


def estimate(node: Node) -> int:
    """The rule, for one node."""
    outs = list(tensors_of(node))
    if not outs or owner(node) is not node:
        return 0
    if getattr(node.target, "namespace", "") != "v41":
        return sum(max(1, -(-t.numel() // (TILE * 512))) for t in outs)
    read = [t for n in node.all_input_nodes for t in tensors_of(n)]
    rows = max(rows_of(tuple(t.shape)) for t in outs)
    codes = [t for t in read if t.ndim >= 2 and t.dtype in (torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.uint8)]
    codes = codes if kind_of(node) in PRODUCTS else []
    tiles = sum(rows_of(tuple(t.shape)) * -(-t.shape[-1] * (2 if t.dtype == torch.int8 else 1) // TILE) for t in codes[1:])
    return rows * VECTOR + 2 * tiles


def call_of(node: Node) -> tuple[str, tuple[Any, ...]]:
    """What makes two calls one launch: name, constants, shapes."""
    name = kind_of(node)
    given = tuple((tuple(t.shape), t.dtype) for n in node.all_input_nodes for t in tensors_of(n))
    return ("write_rows" if name == WRITE else name), (node.args[1] if name != WRITE else "", given)


def shape_of(node: Node, kind: str) -> tuple[int, ...]:
    """The shape of a kernel's argument; of a table that is gathered from as few rows as matter."""
    shape = tuple(node.meta["val"].shape)
    return (min(shape[0], GATHERED), *shape[1:]) if kind in ("engram_rows", "embedding") else shape


def launched(node: Node) -> tuple[int, float]:
    """(instructions, modeled microseconds) of the launches behind one kernel node, on zeros of its shapes."""
    name, reports = kind_of(node), list[Report]()
    given = node.args if name == WRITE else node.args[0]
    zeros = [torch.zeros(shape_of(n, name), dtype=n.meta["val"].dtype) for n in given]
    args, named = (tuple(zeros), {}) if name == WRITE else decode(zeros, str(node.args[1]))
    kernel = kernel_of("write_rows" if name == WRITE else name)
    assert kernel is not None
    kernel(profiled(reports), *args, **named)
    return sum(r.instructions for r in reports), sum(r.time_us for r in reports)


def count(captured: Captured, profile: int = 0) -> Counted:
    """Instructions by kind of node. Kernels that read at most `profile` bytes are run once in the simulator for each distinct call."""
    known: dict[Any, tuple[int, float]] = {}
    times: dict[str, float] = {}
    by_profile: Counter[str] = Counter()
    by_rule: Counter[str] = Counter()
    for node in captured.graph.graph.nodes:
        if node.op != "call_function":
            continue
        is_kernel = getattr(node.target, "namespace", "") == "v41" and kernel_of(call_of(node)[0]) is not None
        shapes = ((shape_of(n, kind_of(node)), t) for n in node.all_input_nodes for t in tensors_of(n))
        size = sum(prod(shape) * t.itemsize for shape, t in shapes) if is_kernel else 0
        if is_kernel and size <= profile:
            key = call_of(node)
            if key not in known:
                known[key] = launched(node)
            by_profile[key[0]] += known[key][0]
            times[key[0]] = times.get(key[0], 0.0) + known[key][1]
        else:
            by_rule[kind_of(node) if getattr(node.target, "namespace", "") == "v41" else "torch"] += estimate(node)
    return Counted(dict(by_profile), dict(by_rule), dict(times))
