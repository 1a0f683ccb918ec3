# SPDX-License-Identifier: Apache-2.0
"""The public functions: arguments checked, a backend picked, the spec called."""

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from v41 import checks, tree
from v41.backends.cpu import backend as cpu
from v41.backends.record import recorder
from v41.spec import cache as caches
from v41.spec import draft as drafting
from v41.spec import export, model
from v41.spec.backend import Backend
from v41.spec.cache import SLACK, Cache
from v41.spec.draft import Drafted
from v41.spec.handed import Boundary
from v41.spec.model import Output
from v41.spec.ops.choose import Sample
from v41.spec.params import Params

P = ParamSpec("P")
T = TypeVar("T")
Taps = dict[str, Tensor]


def inference(fn: Callable[P, T]) -> Callable[P, T]:
    """fn without autocast and gradients, in inference mode, where an operation costs less. What it gives are ordinary tensors."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast("cpu", enabled=False), torch.inference_mode():
            found = fn(*args, **kwargs)
        with torch.no_grad():
            return ordinary(found)

    return run


def ordinary(found: Any) -> Any:
    """Trees whose inference tensors are copied: those may not be changed in place by a caller."""
    if isinstance(found, tuple):
        return tuple(ordinary(f) for f in found)
    return tree.map(lambda t: t.clone() if t.is_inference() else t, found)


def owned(taps: Taps) -> Taps:
    """The same dict with `ordinary` tensors, one after the other, so that none of them is held twice for long."""
    for name, tap in taps.items():
        taps[name] = ordinary(tap)
    return taps


def available_backends() -> dict[str, Backend]:
    """Installed backends by name: ours, and those registered under the entry-point group `v41.backends`."""
    found = {"cpu": cpu}
    for point in entry_points(group="v41.backends"):
        found[point.name] = point.load()
    return found


def _backend(ops: Backend | None, device: torch.device) -> Backend:
    if ops is not None:
        return checks.kind("ops", ops, Backend)
    if device.type == "cpu":
        return cpu
    found = available_backends()
    if device.type not in found:
        raise ValueError(f"ops: no backend for device {device.type!r}; installed: {sorted(found)}")
    return found[device.type]


def init_cache(params: Params, batch: int, capacity: int, *, slack: int = SLACK) -> Cache:
    """An empty cache for `batch` sequences of up to `capacity` positions; `slack` positions can be rewound.

    Raises ValueError for sizes below 1 (slack: below 0) and a capacity above max_position_embeddings.
    """
    checks.kind("params", params, Params)
    for name, value, least in (("batch", batch, 1), ("capacity", capacity, 1), ("slack", slack, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: {value!r} is not an integer of at least {least}")
    most = params.config.max_position_embeddings
    if capacity > most:
        raise ValueError(f"capacity: {capacity} is above max_position_embeddings {most}")
    return caches.init_cache(params.config, params.numerics, batch, capacity, slack, params.draft is not None, params.embed.device)


def _checked(params: Params, cache: Cache, tokens: Tensor, valid: Any) -> tuple[Tensor, int | None]:
    """(valid, start) after every check of a step's arguments."""
    checks.same_model(params, cache)
    tokens = checks.integers("tokens", tokens, (cache.batch, None), cache.length.device)
    rows = tokens.shape[1]
    valid = checks.valid_rows(valid, cache.batch, rows, tokens.device)
    checks.token_ids("tokens", tokens, torch.arange(rows, device=tokens.device) < valid[:, None], params.config)
    checks.fits(cache, valid)
    return valid, checks.first_position(cache, valid, rows)


@inference
def step(params: Params, cache: Cache, tokens: Tensor, *, valid: Any = None, logits: str | None = None, ops: Backend | None = None) -> tuple[Output, Cache]:
    """One pure step over tokens [batch, rows]: row r of sequence b is position cache.length[b] + r.

    valid [batch]: leading rows that are real (all); the others write nothing and get zero logits. logits: "all", "last" or "none".
    Returns (Output(logits float32 [batch, rows or 1, vocab], hidden [batch, rows, taps * dim] or None), cache); the arguments are
    untouched. Raises ValueError, before anything is computed, for bad shapes, ids, lengths and for calls that the regime has not.
    """
    valid, start = _checked(params, cache, tokens, valid)
    rows = checks.logit_rows(logits, params)
    return model.step(params, cache, tokens, valid, start, rows, _backend(ops, tokens.device))


def record(
    params: Params, cache: Cache, tokens: Tensor, *, valid: Any = None, logits: str | None = None, ops: Backend | None = None
) -> tuple[Output, Cache, Taps]:
    """`step`, plus every tap by name."""
    checks.same_model(params, cache)
    recording, taps = recorder(_backend(ops, cache.length.device))
    out, cache = step(params, cache, tokens, valid=valid, logits=logits, ops=recording)
    return out, cache, owned(taps)


@inference
def embed(params: Params, cache: Cache, tokens: Tensor, *, valid: Any = None, ops: Backend | None = None) -> tuple[Boundary, Cache]:
    """The boundary before layer 0, and the cache with its length advanced. step = head after layers(0, n) after embed."""
    valid, start = _checked(params, cache, tokens, valid)
    return model.embed(params, cache, tokens, valid, start, _backend(ops, tokens.device))


@inference
def layers(params: Params, cache: Cache, boundary: Boundary, a: int, b: int, *, ops: Backend | None = None) -> tuple[Boundary, Cache]:
    """Layers a .. b - 1 on a boundary before layer a. Raises ValueError when the boundary lies elsewhere."""
    checks.same_model(params, cache)
    checks.joins(cache, boundary)
    count = params.config.num_hidden_layers
    if type(a) is not int or type(b) is not int or not 0 <= a <= b <= count:
        raise ValueError(f"layers: {a!r}..{b!r} are no layers of a model with {count}")
    if boundary.layer != a:
        raise ValueError(f"layers: the boundary lies before layer {boundary.layer}, not {a}")
    return model.layers(params, cache, boundary, b, _backend(ops, boundary.stream.device))


@inference
def head(params: Params, boundary: Boundary, *, logits: str | None = None, ops: Backend | None = None) -> Tensor | None:
    """Logits of a boundary behind the last layer."""
    checks.kind("params", params, Params)
    checks.kind("boundary", boundary, Boundary)
    if boundary.layer != params.config.num_hidden_layers:
        raise ValueError(f"head: the boundary lies before layer {boundary.layer} of {params.config.num_hidden_layers}")
    return model.head(params, boundary, checks.logit_rows(logits, params), _backend(ops, boundary.stream.device))


@inference
def draft(
    params: Params,
    cache: Cache,
    hidden: Tensor,
    token: Tensor | None,
    *,
    valid: Any = None,
    sample: Sample | None = None,
    ops: Backend | None = None,
) -> tuple[Drafted | None, Cache]:
    """Writes the draft rings from the valid rows of hidden, the positions from cache.draft_length on, then drafts from token [batch].

    token=None only writes the rings (and gives None). Raises ValueError where the rows do not end at cache.length.
    """
    valid = _checked_draft(params, cache, hidden, token, valid, sample)
    held = checks.first_position(cache, torch.ones_like(valid), 1) if params.numerics.compact else None
    return drafting.draft(params, cache, hidden, valid, token, sample, held, _backend(ops, hidden.device))


def record_draft(
    params: Params,
    cache: Cache,
    hidden: Tensor,
    token: Tensor | None,
    *,
    valid: Any = None,
    sample: Sample | None = None,
    ops: Backend | None = None,
) -> tuple[Drafted | None, Cache, Taps]:
    """`draft`, plus every tap of the draft head by name."""
    checks.same_model(params, cache)
    recording, taps = recorder(_backend(ops, cache.length.device))
    drafted, cache = draft(params, cache, hidden, token, valid=valid, sample=sample, ops=recording)
    return drafted, cache, owned(taps)


def _checked_draft(params: Params, cache: Cache, hidden: Tensor, token: Tensor | None, valid: Any, sample: Sample | None) -> Tensor:
    """`valid` after every check of a draft's arguments."""
    checks.same_model(params, cache)
    if params.draft is None:
        raise ValueError("params: no draft head (the config has none, or it was loaded with draft=False)")
    config, batch = params.config, cache.batch
    if not isinstance(hidden, Tensor) or hidden.dtype != params.numerics.act:
        raise ValueError(f"hidden: {getattr(hidden, 'dtype', type(hidden).__name__)}, not a tensor of {params.numerics.act}")
    checks.same_shape("hidden", hidden, (batch, None, len(config.dspark_target_layer_ids) * config.hidden_size))
    valid = checks.valid_rows(valid, batch, hidden.shape[1], cache.length.device)
    end = cache.draft_length + valid
    if (end != cache.length).any():
        b = int((end != cache.length).nonzero()[0])
        raise ValueError(
            f"hidden: sequence {b} has draft rows up to position {int(cache.draft_length[b])} and gets {int(valid[b])} more, which do not join on: "
            f"the cache holds {int(cache.length[b])} positions"
        )
    if token is not None:
        token = checks.integers("token", token, (batch,), cache.length.device)
        checks.token_ids("token", token, torch.ones_like(token, dtype=torch.bool), config)
    if sample is not None:
        checks.draws(sample, batch, config.dspark_block_size)
    return valid


def rewind(cache: Cache, length: Any) -> Cache:
    """Forgets the newest positions: the cache as it was at length [batch]. Nothing is copied.

    Raises ValueError where a sequence would go back more than `slack` positions from the most it ever held.
    """
    return caches.rewind(cache, checks.rewind_length(cache, length))


def export_cache(params: Params, cache: Cache) -> dict[str, Tensor]:
    """Live rows of every cache under the release's names and in its layout (docs/golden.md 3)."""
    checks.same_model(params, cache)
    return dict(export.export_cache(cache, int(cache.length.max())))
