# SPDX-License-Identifier: Apache-2.0
"""One call of the model whose taps are judged and then replaced: what comes after a tap is computed from the given tensor (docs/golden-pack.md 5)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v41 import api, tree
from v41.golden.pack_rows import draft_rows_written, rows_written
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.numerics import Numerics
from v41.spec.params import Params

Tensors = dict[str, Tensor]
FREE = ("logits", "main_hidden", "candidates")  # taps that nothing else in the call is computed from


def forced(ops: Backend, given: Mapping[str, Tensor]) -> tuple[Backend, Tensors]:
    """(backend, taps): keeps what passes a tap, then hands on the given tensor of that name. A name that comes again holds further rows."""
    taps = Tensors()

    def tap(name: str, tensor: Tensor) -> Tensor:
        first = taps[name].shape[1] if name in taps else 0
        taps[name] = torch.cat((taps[name], tensor), 1) if name in taps else tensor
        want = given.get(name)
        if want is None or name.endswith(FREE):
            return tensor
        if name.endswith(("index_score", "topk_idxs")):
            want = want[:, first : first + tensor.shape[1]]
        return want if want.shape == tensor.shape else tensor

    return replace(ops, name=f"{ops.name}+forced", tap=tap), taps


@dataclass(frozen=True)
class Made:
    """What one call gave: taps, outputs and written rows by name, and the state after it."""

    tensors: Tensors
    cache: Cache


Step = Callable[[Backend, Params, Cache, Tensor, Tensor, Mapping[str, Tensor]], Made]
Draft = Callable[[Backend, Params, Cache, Tensor, Tensor, Tensor, Mapping[str, Tensor]], Made]


def step(ops: Backend, params: Params, cache: Cache, tokens: Tensor, valid: Tensor, given: Mapping[str, Tensor]) -> Made:
    """A step with its taps forced to `given` (none: it runs free)."""
    recording, taps = forced(ops, given)
    out, after = api.step(params, cache, tokens, valid=valid, ops=recording)
    found = taps | {"logits": out.logits} | ({} if out.hidden is None else {"main_hidden": out.hidden})
    return Made(found | rows_written(cache, after, tokens.shape[1]), after)


def draft(ops: Backend, params: Params, cache: Cache, hidden: Tensor, valid: Tensor, token: Tensor, given: Mapping[str, Tensor]) -> Made:
    """The draft rings filled from the valid rows of hidden, and a block drafted from token [batch]."""
    recording, taps = forced(ops, given)
    drafted, after = api.draft(params, cache, hidden, token, valid=valid, ops=recording)
    found = {"draft.tokens": drafted.tokens, "draft.logits": drafted.logits, "draft.confidence": drafted.confidence}
    return Made(taps | found | draft_rows_written(cache, after, hidden.shape[1]), after)


@dataclass(frozen=True)
class Twin(Numerics):
    """A regime in float64 arithmetic. With `trips` it keeps the regime's fp8 and fp4 round trips; without, nothing is rounded: `exact`."""

    trips: bool = True

    @property
    def act(self) -> torch.dtype:
        return torch.float64

    @property
    def wide(self) -> torch.dtype:
        return torch.float64

    @property
    def rounds(self) -> bool:
        return self.trips and self.regime != "exact"


def twin_of(params: Params, trips: bool) -> Params:
    """The parameters with the regime's twin."""
    n = params.numerics
    return replace(params, numerics=Twin(n.regime, n.index_keys, n.dtype, trips))


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensors:
    """Floats in another dtype."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}


def twin_cache(cache: Cache, numerics: Numerics) -> Cache:
    """The same state in another dtype."""
    return replace(tree.map(lambda t: t.to(numerics.act) if t.is_floating_point() else t, cache), numerics=numerics)
