# SPDX-License-Identifier: Apache-2.0
"""The public functions of speculation: arguments checked, a backend picked, the spec called (docs/speculation.md)."""

from typing import Any

import torch
from torch import Tensor

from v41 import checks
from v41.api import _backend, inference
from v41.spec import verify
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.ops.accept import RULES
from v41.spec.params import Params
from v41.spec.verify import Emitted, SpecState

MOST = 2**31 - 1


def _per_sequence(name: str, value: Any, batch: int, dtype: torch.dtype, low: int | float, high: int | float, device: torch.device) -> Tensor:
    """A number or one per sequence as a tensor [batch] of the dtype; ValueError where it leaves low..high (NaN does)."""
    given = torch.as_tensor(value, device=device)
    if dtype == torch.int32 and (given.dtype.is_floating_point or given.dtype == torch.bool):
        raise ValueError(f"{name}: dtype {given.dtype}, not integers")
    if given.ndim == 0:
        given = given.expand(batch)
    checks.same_shape(name, given, (batch,))
    bad = ~((given >= low) & (given <= high))
    if bad.any():
        b = int(bad.nonzero()[0])
        raise ValueError(f"{name}: {given[b].item()} at sequence {b} leaves {low}..{high}")
    return given.to(dtype).clone()


def _depth(params: Params, cache: Cache, depth: int | None) -> int:
    """Drafts per step; ValueError where the draft head makes fewer or the cache cannot rewind so far."""
    most = params.config.dspark_block_size if params.draft is not None else 0
    depth = most if depth is None else depth
    if type(depth) is not int or not 0 <= depth <= most:
        what = f"dspark_block_size is {most}" if params.draft is not None else "params have no draft head"
        raise ValueError(f"depth: {depth!r} leaves 0..{most} ({what})")
    if depth > cache.slack:
        raise ValueError(f"depth: {depth} drafts may have to be rewound, the cache's slack is {cache.slack}")
    return depth


def refuse_regime(params: Params) -> None:
    """ValueError where the regime takes one row at a time."""
    numerics = params.numerics
    if numerics.needs_start:
        raise ValueError(
            f"params: regime {numerics.regime!r} with index_keys {numerics.index_keys!r} has no speculation: it follows the released "
            "calls, one prefill from empty and then one row at a time, and cannot run a row per draft"
        )


def _stops(stops: Any, batch: int, params: Params, device: torch.device) -> Tensor:
    """[batch, stops] int32 from None, a sequence of ids for all, or a tensor."""
    if stops is None:
        return torch.full((batch, 0), -1, dtype=torch.int32, device=device)
    given = torch.as_tensor(stops, device=device)
    given = given.to(torch.int32) if given.numel() == 0 else given
    if given.dtype not in (torch.int32, torch.int64) or given.ndim not in (1, 2) or (given.ndim == 2 and given.shape[0] != batch):
        raise ValueError(f"stops: {given.dtype} {list(given.shape)}, not token ids [any] or [{batch}, any]")
    given = given.expand(batch, -1) if given.ndim == 1 else given
    checks.first_bad("stops", (given < -1) | (given >= params.config.vocab_size), given, f"is not a token id (0..{params.config.vocab_size - 1}) or -1")
    return given.to(torch.int32).clone()


def _checked_logits(params: Params, cache: Cache, logits: Any) -> Tensor:
    if not isinstance(logits, Tensor) or logits.dtype != params.numerics.wide:
        raise ValueError(f"logits: {getattr(logits, 'dtype', type(logits).__name__)}, not a tensor of {params.numerics.wide}")
    checks.same_shape("logits", logits, (cache.batch, params.config.vocab_size))
    return logits


def _checked_budget(cache: Cache, budget: Any) -> Tensor:
    left = _per_sequence("budget", budget, cache.batch, torch.int32, 0, MOST, cache.length.device)
    bare = (left > 0) & (cache.length == 0)
    if bare.any():
        raise ValueError(f"cache: sequence {int(bare.nonzero()[0])} holds no position, so that there are no logits to start from")
    return left


def _checked_heat(rule: str, temperature: Any, cache: Cache) -> Tensor:
    if rule not in RULES:
        raise ValueError(f"rule: {rule!r} is not one of {RULES}")
    heat = _per_sequence("temperature", temperature, cache.batch, torch.float32, 0.0, 1e6, cache.length.device)
    if rule == "greedy" and (heat > 0).any():
        raise ValueError(f"temperature: {heat.tolist()} with rule 'greedy', which draws nothing; take 'token' or 'block'")
    return heat


@inference
def init_spec(
    params: Params,
    cache: Cache,
    logits: Tensor,
    *,
    rule: str = "greedy",
    depth: int | None = None,
    budget: Any = MOST,
    stops: Any = None,
    temperature: Any = 0.0,
    top_p: Any = 1.0,
    seed: Any = 0,
    sequence: Any = None,
    floor: Any = 0.0,
    ops: Backend | None = None,
) -> SpecState:
    """The state after a prefill: chooses the first token (state.token) from the logits [batch, vocab] of the newest positions, and drafts.

    rule: "greedy", "token" or "block"; depth: drafts per step (dspark_block_size; 0 is plain decoding). One for all or one a sequence:
    budget, tokens that may follow state.token (0: the sequence stays idle); stops, token ids that end it; temperature, top_p; seed, and
    sequence, the id in its uniforms (0, 1, ...), both 0 .. 2^31 - 1; floor, the least survival by confidence at which a draft is offered.
    Raises ValueError for values out of range, a regime that takes one row at a time, a depth above the cache's slack.
    """
    checks.same_model(params, cache)
    refuse_regime(params)
    batch, device, vocab = cache.batch, cache.length.device, params.config.vocab_size
    heat, depth = _checked_heat(rule, temperature, cache), _depth(params, cache, depth)
    logits = _checked_logits(params, cache, logits)
    ids = _per_sequence("sequence", range(batch) if sequence is None else sequence, batch, torch.int32, 0, MOST, device)
    zero = torch.zeros(batch, dtype=torch.int32, device=device)
    state = SpecState(
        token=zero,
        drafts=torch.zeros((batch, depth), dtype=torch.int32, device=device),
        offered=zero,
        q=None if rule == "greedy" else torch.zeros((batch, depth, vocab), dtype=params.numerics.wide, device=device),
        since=zero,
        alive=torch.ones(batch, dtype=torch.bool, device=device),
        budget=_checked_budget(cache, budget),
        stops=_stops(stops, batch, params, device),
        key=torch.stack((_per_sequence("seed", seed, batch, torch.int32, 0, MOST, device), ids), 1),
        temperature=heat,
        top_p=_per_sequence("top_p", top_p, batch, torch.float32, 1e-6, 1.0, device),
        floor=_per_sequence("floor", floor, batch, torch.float32, 0.0, 1.0, device),
        rule=rule,
    )
    return verify.first_state(params, cache, logits, state, _backend(ops, device))


def check_state(params: Params, cache: Cache, state: SpecState) -> None:
    """ValueError where a step cannot run from this state: see `spec_step`."""
    checks.same_model(params, cache)
    refuse_regime(params)
    if not isinstance(state, SpecState):
        raise ValueError(f"state: a {type(state).__name__}, not a SpecState")
    batch, device = cache.batch, cache.length.device
    if state.rule not in RULES or (state.rule != "greedy") != (state.q is not None):
        raise ValueError(f"state: rule {state.rule!r} with{'out' if state.q is None else ''} draft distributions")
    _depth(params, cache, state.depth)
    checks.integers("state.token", state.token, (batch,), device)
    if state.drafts.dtype != torch.int32 or state.drafts.shape[0] != batch:
        raise ValueError(f"state.drafts: {state.drafts.dtype} {list(state.drafts.shape)}, not torch.int32 [{batch}, depth]")
    checks.first_bad("state.offered", (state.offered < 0) | (state.offered > state.depth), state.offered, f"leaves 0..{state.depth}")
    rows = torch.cat((state.token[:, None], state.drafts), 1)
    live = state.alive[:, None] & (torch.arange(state.depth + 1, device=device) <= state.offered[:, None])
    checks.token_ids("state", rows, live, params.config)
    full = state.alive & (cache.length >= cache.capacity)
    if full.any():
        b = int(full.nonzero()[0])
        raise ValueError(f"cache: sequence {b} holds {int(cache.length[b])} positions, its capacity, and its state is not idle")


@inference
def spec_step(params: Params, cache: Cache, state: SpecState, *, ops: Backend | None = None) -> tuple[Emitted, SpecState, Cache]:
    """One step: the target runs on the pending token and the drafts, accepts, commits the accepted rows, and the next block is drafted.

    Returns (Emitted(tokens int32 [batch, depth + 1], -1 behind counts [batch]), state, cache). An idle sequence emits nothing and keeps
    its state; no shape depends on what is accepted. Raises ValueError for a state of another batch, depth or regime, a draft that is no
    token id, and for a live sequence that is full.
    """
    check_state(params, cache, state)
    return verify.spec_step(params, cache, state, _backend(ops, cache.length.device))
