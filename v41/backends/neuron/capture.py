# SPDX-License-Identifier: Apache-2.0
"""A function over trees of tensors as one flat graph, taken on tensors without memory (docs/neuron-graph.md 1).

Every leaf of the arguments is an input with its path as a name. On fake tensors a read of a value, a shape that follows values and a branch
on a value are errors, so that what is captured holds for every value.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from v41 import tree
from v41.backends.neuron.graph_donate import SMALL, donate
from v41.backends.neuron.graph_passes import clean

Trees = dict[str, Any]


class CaptureError(ValueError):
    """A function that is no graph: it reads a value on the host."""


@dataclass(frozen=True)
class Captured:
    """One graph of a rank.

    graph      flat: a placeholder a leaf, in the order of `inputs`
    inputs     path of every leaf of the arguments, `cache.layers.3.window`
    outputs    path of every tensor that the graph returns
    donated    cache leaf -> how the graph changes it in place: `write_rows`, `copy`, or `kept` where it does not change
    fresh      cache leaves that are returned as new tensors because they could not be donated, with the reason
    result     the results' trees, of tensors without memory
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    donated: dict[str, str]
    fresh: dict[str, str]
    result: Trees


def named(trees: Trees) -> list[tuple[str, Tensor]]:
    """(path, leaf) of every tensor of the arguments."""
    return [pair for name, node in trees.items() for pair in tree.paths(node, name)]


def filled(trees: Trees, leaves: list[Tensor]) -> Trees:
    """The arguments with other leaves."""
    rest = iter(leaves)
    return {name: tree.map(lambda _: next(rest), node) for name, node in trees.items()}


def fake(mode: FakeTensorMode, trees: Trees) -> Trees:
    """The arguments as fake tensors on the CPU: nothing is allocated."""
    with mode:
        return {n: tree.map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu"), node) for n, node in trees.items()}


def line_of(error: BaseException) -> str:
    """The innermost line outside torch, for a message."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename and f.filename != __file__]
    own = [f for f in frames if "/v41/spec/" in f.filename] or frames
    last = frames[-1] if frames and "/v41/" not in frames[-1].filename else (own[-1] if own else None)
    return f"{'/'.join(last.filename.rsplit('/', 2)[-2:])}:{last.lineno}" if last else "?"


def trace(fn: Callable[..., Trees], trees: Trees) -> tuple[fx.GraphModule, Trees]:
    """(graph of fn on the leaves, fn's results)."""
    mode, told = FakeTensorMode(), []
    given = fake(mode, trees)

    def flat(*leaves: Tensor) -> list[Tensor]:
        results = fn(**filled(given, list(leaves)))
        told.append(results)
        return [t for _, t in named(results)]

    try:
        with mode, torch.no_grad():
            graph = make_fx(flat)(*[t for _, t in named(given)])
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise CaptureError(f"host read at {line_of(e)}: {e.func} needs the values of a tensor, which a graph has not") from e
    return graph, told[0]


def capture(fn: Callable[..., Trees], trees: Trees, owned: str = "cache", limit: int = SMALL) -> Captured:
    """fn(**trees) as a graph; its results are trees by name. What is named `owned` among arguments and results is donated.

    limit: bytes of the largest state that is copied back whole where no write_rows makes it.

    CaptureError with the line where fn reads a value of a tensor.
    """
    graph, results = trace(fn, trees)
    inputs, outputs = [n for n, _ in named(trees)], [n for n, _ in named(results)]
    clean(graph)
    donated, fresh, left = donate(graph, inputs, outputs, owned, limit)
    return Captured(graph, tuple(inputs), tuple(left), donated, fresh, results)


def joined(captured: Captured, inputs: dict[str, Tensor], outputs: list[Tensor]) -> Trees:
    """The results' trees of a run: tensors that the graph returned, and inputs that it changed in place."""
    told = dict(zip(captured.outputs, outputs, strict=True))
    return filled(captured.result, [told[n] if n in told else inputs[n] for n, _ in named(captured.result)])
