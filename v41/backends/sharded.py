# SPDX-License-Identifier: Apache-2.0
"""A backend as one rank of a mesh: the collectives of the spec by logical axis, in terms of two that know mesh axes (docs/sharding.md 3)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.spec.backend import Backend
from v41.spec.ops import partial
from v41.spec.ops.choose import first_of
from v41.spec.ops.place import EMBED, MARKOV
from v41.spec.table import Dim
from v41.spec.types import I32, Act, Wide

WIDE = (torch.float32, torch.float64)
LOOKUP = {EMBED: "embed", MARKOV: "embed", "engram_rows": "engram"}  # under which name of `Rules.merged` a lookup goes


@dataclass(frozen=True)
class Wire:
    """How the ranks of a group meet. Both take (tensor, mesh axes, logical axis); the last is for messages and counts only.

    reduce  the sum, in the order of the ranks, in the tensor's dtype
    gather  the tensors of all ranks in the order of their shares, stacked in a new first dim
    """

    reduce: Callable[[Tensor, tuple[str, ...], str], Tensor]
    gather: Callable[[Tensor, tuple[str, ...], str], Tensor]


@dataclass(frozen=True)
class Placed:
    """One rank under rules: its methods are the collectives of the backend. `rank` is a tensor, so that all ranks share one graph."""

    rules: Rules
    mesh: Mesh
    rank: I32[Tensor, ""]
    wire: Wire

    def cut(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of more than one rank that cut a logical axis, slowest first; none for ""."""
        if not axis:
            return ()
        part, _, plain = axis.rpartition(".")
        return tuple(m for m in self.rules.cut(Dim(tuple(plain.split("*"))), part) if self.mesh.length(m) > 1)

    def over(self, axes: str) -> tuple[str, ...]:
        """The mesh axes over which a partial sum of these logical axes is spread, in the mesh's order."""
        found = {m for axis in axes.split() for m in self.cut(axis)}
        return tuple(m for m in self.mesh.names if m in found)

    def share(self, axes: tuple[str, ...], device: torch.device) -> I32[Tensor, ""]:
        """`Mesh.share` of this rank, as a tensor."""
        found, rank = torch.zeros((), dtype=torch.int32, device=device), self.rank.to(device)
        for axis in axes:
            place = self.mesh.names.index(axis)
            stride = self.mesh.ways(self.mesh.names[place + 1 :])
            found = found * self.mesh.length(axis) + torch.div(rank, stride, rounding_mode="floor") % self.mesh.length(axis)
        return found

    def once(self, term: Tensor, axes: tuple[str, ...], of: tuple[str, ...]) -> Tensor:
        """A term that is spread over `axes`, for a sum over `of`: zeros but on the first of the ranks that hold the same share."""
        rest = tuple(m for m in of if m not in axes)
        return torch.where(self.share(rest, term.device) == 0, term, 0) if rest else term

    def all_reduce(self, tensor: Wide[Tensor, "*n"], axis: str) -> Wide[Tensor, "*n"]:
        """See v41/spec/collectives.py. ValueError for partial sums in a narrow dtype."""
        axes = self.over(axis)
        if not axes:
            return tensor
        if tensor.dtype not in WIDE:
            raise ValueError(f"all_reduce of {axis}: partial sums in {tensor.dtype}; they are summed in {WIDE[0]} or {WIDE[1]} and rounded afterwards")
        return self.wire.reduce(tensor, axes, axis)

    def all_gather(self, tensor: Tensor, axis: str, dim: int) -> Tensor:
        """See v41/spec/collectives.py."""
        axes = self.cut(axis)
        return torch.cat(self.wire.gather(tensor, axes, axis).unbind(0), dim) if axes else tensor

    def sum_terms(self, terms: tuple[Wide[Tensor, "*n"], ...], axes: tuple[str, ...]) -> Wide[Tensor, "*n"]:
        """See v41/spec/collectives.py. A term that every rank holds whole is added after the reduction."""
        spans = [self.over(a) for a in axes]
        spread = [s for s in spans if s]
        of = tuple(m for m in self.mesh.names if any(m in s for s in spread))
        total = None
        for term, span in zip(terms, spans, strict=True):
            if span:
                mine = self.once(term, span, of)
                total = mine if total is None else total + mine
        total = total if total is None else self.all_reduce(total, " ".join(a for a, s in zip(axes, spans, strict=True) if s))
        for term, span in zip(terms, spans, strict=True):
            if not span:
                total = term if total is None else total + term
        return total

    def lookups(self, found: tuple[Act[Tensor, "b *n"], ...], axes: tuple[str, ...]) -> tuple[Act[Tensor, "b *n"], ...]:
        """See v41/spec/collectives.py. Those that the rules merge share the reduction of the one that is spread most."""
        spans = [self.over(a) for a in axes]
        free = [i for i, a in enumerate(axes) if spans[i] and LOOKUP[a] in self.rules.merged]
        of = max((spans[i] for i in free), key=len, default=())
        joint = [i for i in free if set(spans[i]) <= set(of)]
        out = list(found)
        for i in (i for i in range(len(found)) if spans[i] and i not in joint):
            out[i] = self.wire.reduce(found[i], spans[i], axes[i])
        if joint:
            parts = [self.once(found[i], spans[i], of).flatten(1) for i in joint]
            total = self.wire.reduce(torch.cat(parts, 1), of, " ".join(dict.fromkeys(axes[i] for i in joint)))
            for i, part in zip(joint, total.split([p.shape[1] for p in parts], 1), strict=True):
                out[i] = part.view(found[i].shape) if part.is_contiguous() else part.reshape(found[i].shape)
        return tuple(out)

    def first(self, axis: str, size: int, device: torch.device) -> I32[Tensor, ""]:
        """See v41/spec/collectives.py."""
        return self.share(self.cut(axis), device) * size

    def width(self, axis: str, size: int) -> int:
        """What each rank holds of an axis of that size, padding included."""
        part, _, plain = axis.rpartition(".")
        return self.rules.share(Dim((plain,), 1, (size,)), size, part, self.mesh)

    def recut(self, tensor: Tensor, axis: str, to: str, size: int) -> Tensor:
        """See v41/spec/collectives.py."""
        now, then = self.cut(axis), self.cut(to)
        if now == then and (not then or self.width(axis, size) == self.width(to, size)):
            return tensor
        whole = self.all_gather(tensor, axis, -1)[..., :size]
        if not then:
            return whole
        width = self.width(to, size)
        padded = functional.pad(whole, (0, width * self.mesh.ways(then) - size))
        return padded.index_select(-1, self.first(to, width, tensor.device) + torch.arange(width, dtype=torch.int32, device=tensor.device))

    def choice_cut(self, axis: str) -> str:
        """See v41/spec/collectives.py."""
        return axis if self.rules.choice == "candidates" and self.cut(axis) else ""

    def elect(self, score: Wide[Tensor, "*n"], token: I32[Tensor, "*n"], row: Act[Tensor, "*n d"], axis: str) -> tuple[I32[Tensor, "*n"], Act[Tensor, "*n d"]]:
        """See v41/spec/collectives.py. Score, token and row travel as bytes in one exchange, so that an id never passes through a float."""
        told = (score[..., None], token[..., None], row)
        parts = [t.contiguous().view(torch.uint8) if t.numel() else t.to(torch.uint8) for t in told]
        offers = self.wire.gather(torch.cat(parts, -1), self.cut(axis), f"{axis} elect").split([p.shape[-1] for p in parts], -1)
        dense = [o.clone(memory_format=torch.contiguous_format) for o in offers]
        scores, tokens, rows = ((d.view(t.dtype) if t.numel() else t[None]).flatten(1, -2) for d, t in zip(dense, told, strict=True))
        best = first_of((scores == scores.amax(0))[..., 0].T)
        each = torch.arange(best.shape[0], dtype=torch.int32, device=row.device)
        return tokens[best, each, 0].view(token.shape), rows[best, each].view(row.shape) if row.numel() else row


PARTIAL = {"moe_inter": ("experts", partial.experts), "shared_inter": ("shared_expert", partial.shared_expert)}
PARTIAL |= {"index_heads": ("index_scores", partial.index_scores)}


def sharded(ops: Backend, rules: Rules, mesh: Mesh, rank: I32[Tensor, ""], wire: Wire, bodies: dict[str, Callable] | None = None) -> Backend:
    """`ops` as one rank of the mesh. `bodies`: this backend's own versions of primitives whose axis of summation is cut."""
    place = Placed(rules, mesh, rank, wire)
    bodies = bodies or {}
    changed: dict[str, Any] = {name: bodies.get(name, body) for axis, (name, body) in PARTIAL.items() if place.cut(axis)}
    meets = ("all_reduce", "all_gather", "sum_terms", "lookups", "first", "recut", "choice_cut", "elect")
    changed |= {m: getattr(place, m) for m in meets}
    return replace(ops, name=f"{ops.name}+{rules.name}", **changed)
