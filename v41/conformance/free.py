# SPDX-License-Identifier: Apache-2.0
"""Scenarios run free: a backend's own states and its own choices from the first call on. Reported, and equal where bits are claimed."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from v41.conformance.blocks import fit, run_call
from v41.conformance.judge import Finding, judge, told
from v41.conformance.target import Target
from v41.conformance.walk import Opened, Stop, after, start_of, stops
from v41.spec.cache import Cache

OUTPUTS = ("logits", "main_hidden", "draft.tokens", "draft.logits", "draft.confidence", "accepted", "next")
MOVES = ("rewind", "take", "restore", "ranks")


def chain(opened: Opened, name: str) -> list[str]:
    """The scenario behind those that it starts from."""
    start = opened.scenario(name)["start"]
    return [*([] if start is None else chain(opened, start)), name]


def free_run(target: Target, opened: Opened, name: str) -> Iterator[Finding]:
    """Findings on the outputs of the scenario's own calls. The tokens fed are the stored ones."""
    names = chain(opened, name)
    state: Cache = start_of(opened, names[0])
    hidden: Tensor | None = None
    bits = opened.params.numerics.regime in target.claims.bits
    for stop in (s for n in names for s in stops(opened, n)):
        if stop.op in MOVES:
            state = after(stop.op, state, stop.inputs, dict(stop.stored.want))
            continue
        made = run_call(target, opened, replace(stop, before=state, hidden=hidden), {})
        got = fit(stop, made.tensors)
        state, hidden = moved(stop, state, made.cache), got.get("main_hidden", hidden)
        if stop.scenario == name:
            yield from outputs(stop, got, bits)


def moved(stop: Stop, before: Cache, made: Cache) -> Cache:
    """The state behind a call; behind a verification with the stored number of accepted drafts, so that calls stay comparable."""
    if stop.op != "verify":
        return made
    return replace(made, length=before.length + stop.stored.want["accepted"] + 1)


def outputs(stop: Stop, got: dict[str, Tensor], bits: bool) -> Iterator[Finding]:
    for n in OUTPUTS:
        if n in stop.stored.want:
            found = judge(n, got.get(n), replace(stop.stored, far={}), got, bits, False)
            yield replace(found if bits else told(found), name=f"{stop.call}.{n}")
