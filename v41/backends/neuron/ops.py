# SPDX-License-Identifier: Apache-2.0
"""The backend record of compiled steps: every primitive is one node of the graph, under its own name (docs/neuron-graph.md 2).

`torch.ops.v41.<primitive>(Tensor[] tensors, str call) -> Tensor[]` is one mechanism for all of them. On the CPU such an operator runs the
kernel of that name in the simulator, or the spec's definition where there is no kernel; on fake tensors it is the definition's shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from v41.backends.neuron.calls import decode, encode
from v41.backends.neuron.kernels import KERNELS
from v41.backends.neuron.kernels import experts as expert_kernels
from v41.backends.neuron.kernels import index_scores as index_kernels
from v41.backends.neuron.kernels.experts_layout import ExpertTiles, SharedTiles
from v41.backends.neuron.launch import simulate
from v41.backends.neuron.packed import hashing
from v41.backends.sharded import PARTIAL
from v41.spec.backend import Backend, definition
from v41.spec.numerics import Numerics
from v41.spec.ops.place import write_rows

# What never is a kernel: names for a person, what ranks do together, and the identity that a backend with a host may narrow.
GLUE = ("tap", "all_reduce", "all_gather", "sum_terms", "lookups", "first", "recut", "choice_cut", "elect", "seen_rows")
# Primitives of a rank that holds part of their sum (v41/spec/ops/partial.py).
PARTS = {name: f"partial_{name}" for name, _ in PARTIAL.values()}
DEFINITIONS: dict[str, Any] = {f.name: definition(f) for f in fields(Backend)[1:] if f.name not in GLUE}
DEFINITIONS |= {PARTS[name]: body for name, body in PARTIAL.values()}
# Whole and split experts are the same kernel; sums of a part are never rounded by it.
PART_KERNELS: dict[str, Any] = {
    "partial_experts": expert_kernels.experts,
    "partial_shared_expert": expert_kernels.shared_expert,
    "partial_index_scores": index_kernels.partial_index_scores,
}
WRITE = "write_rows_"  # the donated form of write_rows


class Meta(NamedTuple):
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def meta_of(tensor: Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tensor.dtype)


@cache
def results(name: str, call: str, given: tuple[Meta, ...]) -> tuple[Meta, ...]:
    """What a primitive gives for tensors of these shapes: its definition on tensors without memory, once for each distinct call."""
    with _disable_current_modes(), torch.no_grad():
        args, named = decode([torch.empty(m.shape, dtype=m.dtype, device="meta") for m in given], call)
        return tuple(meta_of(t) for t in listed(definition_of(name)(*args, **named)))


def listed(value: Any) -> list[Tensor]:
    """A result as a list."""
    return list(value) if isinstance(value, tuple) else [value]


def own(found: list[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The results in memory of their own: an operator of a graph returns no alias of an argument or of another result."""
    taken = {t.untyped_storage().data_ptr() for t in given}
    out = []
    for t in found:
        place = t.untyped_storage().data_ptr()
        out.append(t.clone(memory_format=torch.contiguous_format) if place in taken or not t.is_contiguous() else t)
        taken.add(place)
    return out


def definition_of(name: str) -> Callable[..., Any]:
    """The spec's body of a primitive, for the arguments that a graph has."""
    return hashing(DEFINITIONS[name]) if name == "engram_hash" else untiled(DEFINITIONS[name]) if "expert" in name else DEFINITIONS[name]


def untiled(body: Callable[..., Any]) -> Callable[..., Any]:
    """A body of experts for weights in the kernels' layout, which the spec does not know: their shapes, and an error for their values."""

    def run(x: Tensor, *rest: Any, limit: float, numerics: Numerics) -> Any:
        tiles = rest[-3]
        if not isinstance(tiles, ExpertTiles | SharedTiles):
            return body(x, *rest, limit=limit, numerics=numerics)
        if tiles.weight is None or tiles.weight.is_meta:
            return x.new_zeros(x.shape, dtype=numerics.wide)
        raise ValueError("experts in tiles: only their kernel reads them")

    return run


def kernel_of(name: str) -> Callable[..., Any] | None:
    """The kernel behind a primitive or a part of one; None where there is none."""
    return PART_KERNELS.get(name) or KERNELS.get(name)


def body_of(name: str) -> Callable[..., Any]:
    """What an operator computes on the CPU: its kernel in the simulator, else the definition."""
    kernel = kernel_of(name)
    if kernel is None:
        return definition_of(name)

    def run(*args: Any, **named: Any) -> Any:
        return kernel(simulate, *(args if name != "write_rows" else (args[0].clone(), *args[1:])), **named)

    return run


def register(name: str) -> None:
    """Makes the operator of one primitive."""
    torch.library.define(f"v41::{name}", "(Tensor[] tensors, str call) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))

    @torch.library.impl(f"v41::{name}", "cpu")
    @torch.compiler.disable
    def run(tensors: list[Tensor], call: str) -> list[Tensor]:
        args, named = decode(tensors, call)
        return own(listed(body_of(name)(*args, **named)), tensors)

    @torch.library.register_fake(f"v41::{name}")
    def shapes(tensors: list[Tensor], call: str) -> list[Tensor]:
        found = results(name, call, tuple(meta_of(t) for t in tensors))
        return [torch.empty(m.shape, dtype=m.dtype, device=tensors[0].device) for m in found]


def register_write() -> None:
    """Makes the donated form of write_rows: it changes its buffer and gives nothing."""
    torch.library.define(f"v41::{WRITE}", "(Tensor(a!) buffer, Tensor index, Tensor rows) -> ()", tags=(torch.Tag.pt2_compliant_tag,))

    @torch.library.impl(f"v41::{WRITE}", "cpu")
    @torch.compiler.disable
    def run(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
        buffer.copy_(body_of("write_rows")(buffer, index, rows))

    @torch.library.register_fake(f"v41::{WRITE}")
    def shapes(buffer: Tensor, index: Tensor, rows: Tensor) -> None:
        return None


def caller(name: str) -> Callable[..., Any]:
    """The operator of a primitive with the primitive's own arguments. Tensors are made contiguous: a kernel reads storage."""

    def call(*args: Any, **named: Any) -> Any:
        tensors, text = encode(args, named)
        found = getattr(torch.ops.v41, name).default([t.contiguous() for t in tensors], text)
        return found[0] if len(found) == 1 else tuple(found)

    return call


for primitive in DEFINITIONS:
    register(primitive)
register_write()
assert DEFINITIONS["write_rows"] is write_rows

changed: dict[str, Any] = {n: caller(n) for n in DEFINITIONS if n not in PARTS.values()}
backend = replace(Backend("neuron"), **changed)
bodies = {name: caller(part) for name, part in PARTS.items()}  # for `v41.backends.sharded.sharded`


def without_kernel() -> tuple[str, ...]:
    """The primitives that run as the spec's definition, because no kernel of that name exists."""
    return tuple(sorted(n for n in DEFINITIONS if kernel_of(n) is None))
