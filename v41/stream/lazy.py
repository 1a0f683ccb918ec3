# SPDX-License-Identifier: Apache-2.0
"""Parameters whose heavy tensors are placeholders, and a backend that reads what a primitive touches of them.

A placeholder is told by its identity: the spec hands every parameter to its primitive as the object that it is. Placeholders lie on the
meta device, so that a primitive which is not replaced here cannot compute with one.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from v41.spec.backend import Backend
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import Draft, EngramMap, Layer, Params, build_draft, build_layer, build_params
from v41.spec.table import Fp4, Fp8Rows, ParamSpec
from v41.stream.source import Source


@dataclass(frozen=True)
class Lazy:
    """Names of placeholders by identity. `held` keeps them alive, so that an identity is not given twice."""

    names: dict[int, str] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)

    def placeholder(self, spec: ParamSpec) -> Tensor:
        """A tensor without memory in the place of `spec`."""
        return self.note(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), spec.name)

    def note(self, tensor: Tensor, name: str) -> Tensor:
        self.names[id(tensor)] = name
        self.held.append(tensor)
        return tensor

    def name(self, tensor: Tensor) -> str | None:
        """The released name behind a placeholder ({experts} in it: one tensor an expert), None for a real tensor."""
        return self.names.get(id(tensor))

    def leaf(self, source: Source, spec: ParamSpec) -> Tensor:
        """A placeholder for routed experts and Engram tables, the tensor itself for the rest."""
        heavy = spec.stacked or ".engram.embed." in spec.name
        return self.placeholder(spec) if heavy else source.read(spec.name)


def skeleton(config: Config, numerics: Numerics, known: EngramMap | None, draft: bool) -> tuple[Params, Lazy]:
    """Parameters that hold no weight. The embedding is one value seen at every place: it is what says on which device a cache lies."""
    lazy = Lazy()

    def leaf(spec: ParamSpec) -> Tensor:
        if spec.name != "embed.weight":
            return lazy.placeholder(spec)
        return lazy.note(torch.full((1, 1), torch.nan, dtype=spec.dtype).expand(spec.shape), spec.name)

    return build_params(config, numerics, leaf, known, draft), lazy


def real_layer(config: Config, layer: int, source: Source) -> tuple[Layer, Lazy]:
    """One layer with its dense tensors read."""
    lazy = Lazy()
    return build_layer(config, layer, lambda s: lazy.leaf(source, s)), lazy


def real_draft(config: Config, source: Source) -> tuple[Draft | None, Lazy]:
    """The draft head with its dense tensors read: all stages together."""
    lazy = Lazy()
    return build_draft(config, lambda s: lazy.leaf(source, s)), lazy


def expert_stack(source: Source, names: tuple[str, str], e: int) -> Fp4:
    """A stack of one expert: codes and scales."""
    codes, scales = (source.read(name.replace("{experts}", str(e)))[None] for name in names)
    return Fp4(codes, scales)


def reading(ops: Backend, source: Source, *lazies: Lazy) -> Backend:
    """`ops` with the four primitives that meet placeholders reading what they need. Arithmetic stays that of `ops`."""
    names = {key: name for lazy in lazies for key, name in lazy.names.items()}

    def embedding(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        if id(table) not in names:
            return ops.embedding(ids, table, dtype)
        rows = source.gather(names[id(table)], ids)
        return ops.embedding(torch.arange(ids.numel(), dtype=torch.int32).view(ids.shape), rows, dtype)

    def engram_rows(table: Fp8Rows, hash_ids: Tensor, numerics: Numerics) -> Tensor:
        if id(table.weight) not in names:
            return ops.engram_rows(table, hash_ids, numerics)
        found = Fp8Rows(*(source.gather(names[id(t)], hash_ids) for t in (table.weight, table.scale)))
        return ops.engram_rows(found, torch.arange(hash_ids.numel(), dtype=torch.int32).view(hash_ids.shape), numerics)

    def wide_linear(x: Tensor, w: Tensor, numerics: Numerics) -> Tensor:
        if id(w) not in names:
            return ops.wide_linear(x, w, numerics)
        name, single = names[id(w)], numerics.wide == torch.float32
        return ops.wide_linear(x, source.read_as(name, torch.float32) if single else source.read(name), numerics)

    def experts(x: Tensor, weights: Tensor, ids: Tensor, w1: Fp4, w2: Fp4, w3: Fp4, *, limit: float, numerics: Numerics) -> Tensor:
        total = torch.zeros(x.shape, dtype=numerics.wide)
        for e in ids.unique().tolist():
            row, column = (ids == e).nonzero(as_tuple=True)
            one = [expert_stack(source, (names[id(w.weight)], names[id(w.scale)]), e) for w in (w1, w2, w3)]
            y = ops.experts(x[row], weights[row, column][:, None], torch.zeros_like(ids[row, :1]), *one, limit=limit, numerics=numerics)
            total[row] += y
        return total

    name = f"{ops.name}+stream"
    return replace(ops, name=name, embedding=embedding, engram_rows=engram_rows, wide_linear=wide_linear, experts=experts)
