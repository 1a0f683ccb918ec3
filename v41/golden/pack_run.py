# SPDX-License-Identifier: Apache-2.0
"""Running scenarios on the CPU backend: the tensors of every call and the states between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from v41 import api
from v41.backends.cpu import backend as cpu
from v41.cache_io import take
from v41.golden import pack_calls as calls
from v41.golden.pack_noise import EXACT, FLOAT64, TRIPS, encode, noise
from v41.golden.pack_ranks import RANKS, RULES, offers
from v41.golden.pack_scenarios import Call, Draft, Ranks, Restore, Rewind, Scenario, Step, Take, Verify, token_at
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.numerics import Numerics
from v41.spec.ops.experts import score
from v41.spec.ops.linear import wide_linear
from v41.spec.params import Params

Tensors = dict[str, Tensor]
GARBAGE = 7  # token of rows that are not real
FIRST_IDS = 64  # a refused draft is one of the first ids: never an image
MOST_LOGITS = 16


@dataclass
class Place:
    """Where a scenario stands: its state, what the last step gave, and what has been written down."""

    cache: Cache
    step: Tensors = field(default_factory=dict)
    valid: Tensor | None = None
    token: Tensor | None = None
    tensors: Tensors = field(default_factory=dict)
    listed: list[dict[str, Any]] = field(default_factory=list)
    scales: dict[str, float] = field(default_factory=dict)


def scored(ops: Backend) -> tuple[Backend, list[Tensor]]:
    """(backend, scores): what the gate of each layer chose from, bias included."""
    found: list[Tensor] = []

    def gate(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Any:
        numerics = options["numerics"]
        found.append(score(wide_linear(x, weight, numerics), options["function"], numerics) + bias.to(numerics.wide))
        return ops.gate(x, weight, bias, **options)

    return replace(ops, name=f"{ops.name}+scores", gate=gate), found


def with_scores(made: calls.Made, found: list[Tensor]) -> Tensors:
    """The tensors of a call with the router scores beside the choices they led to."""
    names = [n for n in made.tensors if n.endswith("route_experts")]
    return made.tensors | {n.replace("route_experts", "route_score"): s for n, s in zip(names, found, strict=True)}


def twins(params: Params, cache: Cache, given: Tensors, call: Callable[..., calls.Made], *args: Any) -> tuple[Tensors, dict[str, float]]:
    """The distances of a call's stored tensors from its twins, and the unit of each. Where both twins are the same, `exact` alone is given."""

    def far(other: Params) -> Tensors:
        ops, scores = scored(cpu)
        act = other.numerics.act
        inputs = [a.to(act) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        twin = with_scores(call(ops, other, calls.twin_cache(cache, other.numerics), *inputs, calls.cast(given, act)), scores)
        return {n: noise(t, twin[n]) for n, t in given.items() if t.is_floating_point() and t.numel()}

    if params.numerics.dtype == "float64":
        narrow = replace(params, numerics=Numerics("exact", params.numerics.index_keys, "float32"))
        return encoded({n + EXACT: t * FLOAT64 for n, t in far(narrow).items()})
    exact = {n + EXACT: t for n, t in far(calls.twin_of(params, False)).items()}
    if not params.numerics.rounds:
        return encoded(exact)
    trips = {n + TRIPS: t for n, t in far(calls.twin_of(params, True)).items()}
    codes, scales = encoded(exact | trips)
    for name in trips:
        plain = name.removesuffix(TRIPS) + EXACT
        if scales[name] == scales[plain] and same_bytes(codes[name], codes[plain]):
            codes.pop(name), scales.pop(name)
    return codes, scales


def encoded(far: Tensors) -> tuple[Tensors, dict[str, float]]:
    pairs = {n: encode(t) for n, t in far.items()}
    return {n: codes for n, (codes, _) in pairs.items()}, {n: scale for n, (_, scale) in pairs.items()}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def keep(place: Place, op: str, tensors: Tensors, far: tuple[Tensors, dict[str, float]] = ({}, {}), more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Writes one call down; far: the distances from its twins, which calls with taps have; more: what else the manifest says of it."""
    name = f"c{len(place.listed)}"
    place.listed.append({"name": name, "op": op, "taps": bool(far[0]), **more})
    place.tensors |= {f"{name}.{n}": t.contiguous() for n, t in (tensors | far[0]).items()}
    place.scales |= {f"{name}.{n}": s for n, s in far[1].items()}


def light(tensors: Tensors, valid: Tensor) -> Tensors:
    """Without taps: the outputs and the rows written; of a long call the logits of each newest row only."""
    found = {n: t for n, t in tensors.items() if n.startswith(("rows.", "draft.")) or n in ("logits", "main_hidden")}
    if "logits" in found and found["logits"].shape[1] > MOST_LOGITS:
        found["logits"] = found["logits"][torch.arange(len(valid)), (valid - 1).long()][:, None]
    return found


def best_after(logits: Tensor, valid: Tensor) -> Tensor:
    """The best token after each sequence's newest row."""
    last = logits[:, 0] if logits.shape[1] == 1 else logits[torch.arange(len(valid)), (valid - 1).clamp_min(0).long()]
    return last.argmax(-1).to(torch.int32)


def step(params: Params, place: Place, call: Step) -> None:
    length = place.cache.length.tolist()
    listed = [[token_at(params.config, call.stream, b, length[b] + r) if r < v else GARBAGE for r in range(call.rows)] for b, v in enumerate(call.valid)]
    tokens, valid = torch.tensor(listed, dtype=torch.int32), torch.tensor(call.valid, dtype=torch.int32)
    ops, scores = scored(cpu)
    made = calls.step(ops, params, place.cache, tokens, valid, {})
    full = with_scores(made, scores)
    far = twins(params, place.cache, full, calls.step, tokens, valid) if call.taps else ({}, {})
    keep(place, "step", {"tokens": tokens, "valid": valid} | (full if call.taps else light(full, valid)), far)
    place.step, place.valid, place.cache = full, valid, made.cache
    place.token = best_after(full["logits"], valid)


def draft(params: Params, place: Place, call: Draft) -> None:
    hidden, valid, token = place.step["main_hidden"], place.valid, place.token
    ops, scores = scored(cpu)
    made = calls.draft(ops, params, place.cache, hidden, valid, token, {})
    full = with_scores(made, scores)
    far = twins(params, place.cache, full, calls.draft, hidden, valid, token) if call.taps else ({}, {})
    keep(place, "draft", {"valid": valid, "token": token} | (full if call.taps else light(full, valid)), far)
    place.cache = made.cache


def verify(params: Params, place: Place, call: Verify) -> None:
    depth, token, cache = params.config.dspark_block_size, place.token, place.cache
    drafts: list[Tensor] = []
    for _ in range(depth):
        out, cache = api.step(params, cache, token[:, None])
        token = out.logits[:, 0].argmax(-1).to(torch.int32)
        drafts.append(token if len(drafts) < call.accepted else (token + 1) % FIRST_IDS)
        token = drafts[-1]
    tokens, valid = torch.stack((place.token, *drafts), 1), torch.tensor([depth + 1], dtype=torch.int32)
    made = calls.step(cpu, params, place.cache, tokens, valid, {})
    accepted, following = cpu.accept_greedy(made.tensors["logits"], tokens[:, 1:], valid - 1)
    keep(place, "verify", {"tokens": tokens, "valid": valid, "accepted": accepted, "next": following} | light(made.tensors, valid))
    place.cache = api.rewind(made.cache, place.cache.length + accepted + 1)
    place.step, place.valid, place.token = made.tensors, accepted + 1, following


def ranks(params: Params, place: Place, call: Ranks) -> None:
    tokens = torch.tensor([[token_at(params.config, call.stream, 0, int(place.cache.length[0]))]], dtype=torch.int32)
    valid = torch.ones(1, dtype=torch.int32)
    made = offers(params, place.cache, tokens, valid, cpu)
    more = {"ranks": RANKS, "rules": RULES, "order": made.order, "combine": made.combine}
    keep(place, "ranks", {"tokens": tokens, "valid": valid} | made.tensors, more=more)


def other(params: Params, place: Place, call: Call) -> None:
    """Calls that compute nothing."""
    if isinstance(call, Rewind):
        place.cache = api.rewind(place.cache, place.cache.length - call.back)
        keep(place, "rewind", {"length": place.cache.length})
    elif isinstance(call, Take):
        place.cache = take(place.cache, list(call.sequences))
        keep(place, "take", {"sequences": torch.tensor(call.sequences, dtype=torch.int32)})
    else:
        assert isinstance(call, Restore)
        keep(place, "restore", {f"state.{n}": t for n, t in api.export_cache(params, place.cache).items()})


RUN = {Step: step, Draft: draft, Verify: verify, Ranks: ranks}


def run_scenario(params: Params, scenario: Scenario, start: Cache) -> Place:
    """The scenario from its start."""
    place = Place(start)
    for call in scenario.calls:
        RUN.get(type(call), other)(params, place, call)  # type: ignore[operator]
    return place
