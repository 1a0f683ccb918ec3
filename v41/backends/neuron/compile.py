# SPDX-License-Identifier: Apache-2.0
"""A bucket as a compiled step (docs/neuron-graph.md 5): captured once, handed to torch.compile whole, called with caches that it changes in place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from v41.backends.neuron import ops as neuron
from v41.backends.neuron.buckets import STOPS, arguments, function_of, local_params
from v41.backends.neuron.capture import Captured, Trees, capture, joined, named
from v41.backends.neuron.device import device_backend, require
from v41.backends.neuron.graph_donate import SMALL
from v41.backends.neuron.packed import packed
from v41.sharding.bucket import Bucket
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.spec.backend import Backend
from v41.spec.cache import SLACK, Cache
from v41.spec.params import Params
from v41.spec.verify import SpecState

BACKENDS = ("cpu", "neuron-sim", "neuron")
WHOLE = 1 << 62  # a limit that every cache keeps: on the CPU index_put and copy_ are the write in place


def record_of(backend: str) -> tuple[Backend, dict[str, Callable], int]:
    """(record, bodies of partial sums, bytes that may be copied back) of a backend's name; ValueError for a name that is none."""
    if backend == "cpu":
        return Backend("spec"), {}, WHOLE
    if backend == "neuron-sim":
        return neuron.backend, neuron.bodies, SMALL
    if backend == "neuron":
        require()
        return (*device_backend(), SMALL)
    raise ValueError(f"backend: {backend!r} is not one of {BACKENDS}")


@dataclass(frozen=True)
class Compiled:
    """A step of fixed shapes. `captured` is what was compiled; `weights` are the leaves of its parameters, which stay where they are."""

    captured: Captured
    bucket: Bucket
    weights: tuple[tuple[str, Tensor], ...]
    rank: Tensor
    run: Callable[..., Any]

    def __call__(self, cache: Cache, given: SpecState | Tensor, valid: Tensor | None = None) -> Any:
        """decode: (cache, state) -> (Emitted, SpecState, Cache). prefill: (cache, tokens, valid) -> (token, Cache).

        The cache given is changed in place and given back: it must not be used again. Fewer rows of a prompt than the bucket has are padded.
        ValueError for shapes and dtypes that are not the bucket's, before anything is computed.
        """
        trees: Trees = {"cache": cache, "rank": self.rank}
        if self.bucket.kind == "decode":
            trees["state"] = with_stops(given)
        else:
            trees |= padded(given, valid, self.bucket)
        leaves = [*self.weights, *separate(named(trees))]
        checked(self.captured, leaves)
        same_numbers(self.captured, trees)
        with torch.no_grad():
            found = joined(self.captured, dict(leaves), self.run(*[t for _, t in leaves]))
        return (found["emitted"], found["state"], found["cache"]) if self.bucket.kind == "decode" else (found["token"], found["cache"])


def with_stops(state: Any) -> Any:
    """The state with as many places for stop tokens as the graph has; ValueError for anything that is no state."""
    if not isinstance(state, SpecState):
        raise ValueError(f"state: a {type(state).__name__}, not a SpecState")
    return replace(state, stops=functional.pad(state.stops, (0, max(STOPS - state.stops.shape[1], 0)), value=-1))


def separate(leaves: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Leaves that share memory taken apart: a cache is changed in place, and torch compiles anew for arguments that are one."""
    seen: set[int] = set()
    found = []
    for name, leaf in leaves:
        place = leaf.untyped_storage().data_ptr()
        usual = leaf.stride() == torch.empty(leaf.shape, device="meta").stride() and leaf.nbytes == leaf.untyped_storage().nbytes()
        found.append((name, leaf if usual and place not in seen else leaf.clone(memory_format=torch.contiguous_format)))
        seen.add(place)
    return found


def padded(tokens: SpecState | Tensor, valid: Tensor | None, bucket: Bucket) -> Trees:
    """Tokens [batch, up to rows] and their valid counts for the bucket; ValueError for too many rows."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[0] != bucket.batch or not 0 < tokens.shape[1] <= bucket.rows:
        shape = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens: {shape}, bucket {bucket.name} takes [{bucket.batch}, 1..{bucket.rows}]")
    rows = tokens.shape[1]
    valid = torch.full((bucket.batch,), rows, dtype=torch.int32) if valid is None else valid.to(torch.int32)
    return {"tokens": functional.pad(tokens.to(torch.int32), (0, bucket.rows - rows)), "valid": valid}


def checked(captured: Captured, leaves: list[tuple[str, Tensor]]) -> None:
    """ValueError where the arguments are not those that were captured."""
    holders = [n.meta["val"] for n in captured.graph.graph.nodes if n.op == "placeholder"]
    names = [n for n, _ in leaves]
    if names != list(captured.inputs):
        odd = sorted(set(names) ^ set(captured.inputs))
        raise ValueError(f"{odd[0] if odd else 'arguments'}: not the arguments of the compiled step")
    for (name, leaf), want in zip(leaves, holders, strict=True):
        if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
            raise ValueError(f"{name}: {leaf.dtype} {list(leaf.shape)}, compiled for {want.dtype} {list(want.shape)}")


def same_numbers(captured: Captured, trees: Trees) -> None:
    """ValueError where numbers that stand in the graph are others in the arguments: several capacities have the same shapes, and so have two rules."""
    for tree_name, field in (("cache", "capacity"), ("cache", "slack"), ("state", "rule")):
        if tree_name in trees:
            got, want = (getattr(t[tree_name], field) for t in (trees, captured.result))
            if got != want:
                raise ValueError(f"{tree_name}.{field}: {got!r}, compiled for {want!r}")


def check_share(params: Params, rules: Rules, mesh: Mesh, rank: int) -> None:
    """ValueError where stored parameters are not those of this rank. Prepared ones have other leaves and are not compared."""
    wanted = local_params(params.config, params.numerics, rules, mesh, rank, params.draft is not None)
    got, want = (dict(named({"params": p})) for p in (params, wanted))
    if got.keys() != want.keys():
        return
    for name, leaf in got.items():
        if leaf.shape != want[name].shape and not name.startswith("params.engram_map."):
            raise ValueError(f"{name}: {list(leaf.shape)}, rank {rank} of {rules.name} holds {list(want[name].shape)}: give it what shard_params makes")


def compiled(
    params: Params, rules: Rules, mesh: Mesh, bucket: Bucket, capacity: int, backend: str, rank: int = 0, rule: str = "greedy", slack: int = SLACK
) -> Compiled:
    """The step of one rank, whose parameters these are. On meshes of several ranks a call needs the groups of `wires.register_groups`."""
    ops, bodies, limit = record_of(backend)
    params = params if backend == "cpu" else packed(params)
    captured = capture(function_of(bucket, rules, mesh, ops, bodies), arguments(params, bucket, capacity, rule, slack), limit=limit)
    run = torch.compile(captured.graph.forward, backend="neuron" if backend == "neuron" else "aot_eager", fullgraph=True, dynamic=False)
    device = params.embed.device
    return Compiled(captured, bucket, tuple(named({"params": params})), torch.tensor(rank, dtype=torch.int32, device=device), run)
