# SPDX-License-Identifier: Apache-2.0
"""The spec as one compiled graph a shape: captured on tensors without memory, compiled whole, taps in and out as arguments and results."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from v41 import checks
from v41.backends.neuron.capture import filled, named, trace
from v41.conformance.claims import Claims
from v41.conformance.target import Target
from v41.golden.pack_calls import Made, Tensors, forced
from v41.golden.pack_rows import draft_rows_written, rows_written
from v41.spec import draft as drafting
from v41.spec import model
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.params import Params

Trees = dict[str, Any]
LACKS = {
    "regime:released": "its slot lists follow the position, which a graph of one shape has not",
    "ranks": "the ranks of one process meet on the host",
}


class Graphs:
    """Compiled functions by what their shapes follow from; a graph is made once and holds for every value."""

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Callable[..., Any], Trees, tuple[str, ...]]] = {}

    def call(self, kind: str, fn: Callable[..., tuple[Tensors, Cache]], trees: Trees, given: Mapping[str, Tensor]) -> tuple[Tensors, Cache]:
        """fn(given, **trees) through its graph."""
        forced_names = tuple(sorted(given))
        every = trees | {"given": tuple(given[n] for n in forced_names)}
        key = (kind, forced_names, trees["params"].numerics, trees["params"].config, tuple((n, tuple(t.shape), t.dtype) for n, t in named(every)))
        if key not in self.made:
            self.made[key] = compiled(fn, every, forced_names)
        run, result, names = self.made[key]
        leaves = run(*[t for _, t in named(every)])
        found = filled(result, list(leaves))
        return dict(zip(names, found["taps"], strict=True)), found["cache"]


def compiled(fn: Callable[..., tuple[Tensors, Cache]], every: Trees, forced_names: tuple[str, ...]) -> tuple[Callable[..., Any], Trees, tuple[str, ...]]:
    """(compiled graph of leaves, the trees of its results, names of its taps)."""
    names: list[str] = []

    def flat(given: tuple[Tensor, ...], **trees: Any) -> Trees:
        taps, cache = fn(dict(zip(forced_names, given, strict=True)), **trees)
        names.extend(taps)
        return {"taps": tuple(taps.values()), "cache": cache}

    graph, result = trace(flat, every)
    return torch.compile(graph.forward, backend="aot_eager", fullgraph=True, dynamic=False), result, tuple(names)


def target() -> Target:
    """The compiled CPU: claims the bits of the regimes whose sums do not depend on which rows share a product."""
    graphs, spec = Graphs(), Backend("spec")

    def step(ops: Backend, params: Params, cache: Cache, tokens: Tensor, valid: Tensor, given: Mapping[str, Tensor]) -> Made:
        checks.fits(cache, valid)

        def body(forced_to: Tensors, params: Params, cache: Cache, tokens: Tensor, valid: Tensor) -> tuple[Tensors, Cache]:
            recording, taps = forced(ops, forced_to)
            _, after = model.step(params, cache, tokens, valid, None, "all", recording)
            return taps, after

        taps, after = graphs.call("step", body, {"params": params, "cache": cache, "tokens": tokens, "valid": valid}, given)
        return Made(taps | rows_written(cache, after, tokens.shape[1]), after)

    def draft(ops: Backend, params: Params, cache: Cache, hidden: Tensor, valid: Tensor, token: Tensor, given: Mapping[str, Tensor]) -> Made:
        def body(forced_to: Tensors, params: Params, cache: Cache, hidden: Tensor, valid: Tensor, token: Tensor) -> tuple[Tensors, Cache]:
            recording, taps = forced(ops, forced_to)
            drafted, after = drafting.draft(params, cache, hidden, valid, token, None, None, recording)
            found = {"draft.tokens": drafted.tokens, "draft.logits": drafted.logits, "draft.confidence": drafted.confidence}
            return taps | found, after

        trees = {"params": params, "cache": cache, "hidden": hidden, "valid": valid, "token": token}
        taps, after = graphs.call("draft", body, trees, given)
        return Made(taps | draft_rows_written(cache, after, hidden.shape[1]), after)

    return Target("cpu-compiled", spec, Claims(LACKS, frozenset({"faithful", "trn2"})), step, draft)
