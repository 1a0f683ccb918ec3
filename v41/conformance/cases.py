# SPDX-License-Identifier: Apache-2.0
"""Every case by name, as data: what it needs of a backend and how it is run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from v41.conformance import primitives
from v41.conformance.blocks import teacher_forced
from v41.conformance.free import free_run
from v41.conformance.judge import Finding, Stored, judge
from v41.conformance.sharded import rank_cases, sharded_call
from v41.conformance.states import CHECKS, applies
from v41.conformance.target import Target
from v41.conformance.walk import Opened, Stop, every_stop
from v41.spec.numerics import Numerics

MOVES = ("rewind", "take", "restore")


@dataclass(frozen=True)
class Case:
    """name: `kind/what/regime`. kinds: primitive, block, step, free, state, ranks."""

    name: str
    needs: tuple[str, ...]
    run: Callable[[Target], Iterable[Finding]]
    stop: Stop | None = None
    opened: Opened | None = None


def regime_name(n: Numerics) -> str:
    return f"{n.regime}-{n.dtype}" if n.regime == "exact" else n.regime


def primitive_cases(numerics: Numerics) -> Iterator[Case]:
    """Every edge of every primitive in one regime."""
    regime = regime_name(numerics)
    for edge in primitives.edges(numerics):

        def run(target: Target, edge: primitives.Edge = edge) -> Iterator[Finding]:
            expected = primitives.expected(edge, numerics)
            got = primitives.call(target.ops, edge, numerics)
            bits = numerics.regime in target.claims.bits
            trips = target.claims.why_not(("round_trips",)) is None
            for name in expected.want:
                yield judge(name, got.get(name), Stored(expected.want, expected.far), got, bits, trips)

        yield Case(f"primitive/{edge.name}/{regime}", (f"regime:{regime}", f"primitive:{edge.primitive}"), run)


def needs_of(opened: Opened, stop: Stop) -> tuple[str, ...]:
    """What a call asks of a backend."""
    found = [f"regime:{opened.regime}", stop.op if stop.op in ("draft", "ranks") else "step"]
    if stop.taps:
        found.append("taps")
    if stop.before.batch > 1:
        found.append("batch")
    if stop.op in ("step", "verify") and stop.inputs["tokens"].shape[1] > 1 and bool((stop.before.length > 0).any()):
        found.append("chunks")
    return tuple(found)


def pack_cases(opened: Opened) -> Iterator[Case]:
    """The calls of a pack from their stored states, the checks of state at each, every scenario run free, and some calls on ranks."""
    regime, every = opened.regime, [s for s in every_stop(opened) if s.op not in MOVES]
    for stop in every:

        def run(target: Target, stop: Stop = stop) -> list[Finding]:
            return teacher_forced(target, opened, stop)

        yield Case(f"{'block' if stop.taps else 'step'}/{stop.name}/{regime}", needs_of(opened, stop), run, stop, opened)
    for stop in every:
        for check, (needs, body) in CHECKS.items():
            if applies(opened, stop, check):

                def run_check(target: Target, stop: Stop = stop, body: Callable = body) -> Iterable[Finding]:
                    return body(target, opened, stop)

                yield Case(f"state/{check}.{stop.name}/{regime}", (*needs_of(opened, stop), *needs), run_check, stop, opened)
    for name in dict.fromkeys(s.scenario for s in every if s.op not in ("ranks", "block")):

        def run_free(target: Target, name: str = name) -> Iterator[Finding]:
            return free_run(target, opened, name)

        needs = tuple(dict.fromkeys(n for s in every if s.scenario == name for n in needs_of(opened, s) if n != "taps"))
        yield Case(f"free/{name}/{regime}", needs, run_free)
    for stop in rank_cases(opened, every):

        def run_ranks(target: Target, stop: Stop = stop) -> Iterator[Finding]:
            return sharded_call(target, opened, stop)

        yield Case(f"ranks/{stop.name}/{regime}", (*needs_of(opened, stop), "ranks"), run_ranks, stop, opened)


def all_cases(packs: Sequence[Opened], numerics: Sequence[Numerics]) -> list[Case]:
    """Primitives in the given numerics, then packs."""
    return [c for n in numerics for c in primitive_cases(n)] + [c for p in packs for c in pack_cases(p)]
