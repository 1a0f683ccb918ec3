# SPDX-License-Identifier: Apache-2.0
"""What is judged: a backend, how it runs a call, and what it claims. Ours, and those of other packages (docs/conformance.md 2)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from v41 import api
from v41.conformance.claims import Claims
from v41.golden import pack_calls as calls
from v41.spec.backend import Backend

GROUP = "v41.conformance"  # entry points: a function without arguments that gives a Target
EVERY_BIT = frozenset({"faithful", "released", "exact", "trn2"})


@dataclass(frozen=True)
class Target:
    """A backend to judge. step and draft may run the call elsewhere, in a compiled graph for example; taps come back with it."""

    name: str
    ops: Backend
    claims: Claims = field(default_factory=Claims)
    step: calls.Step = calls.step
    draft: calls.Draft = calls.draft


def cpu() -> Target:
    """The CPU backend, which claims the bits of every regime."""
    return Target("cpu", api.available_backends()["cpu"], Claims(bits=EVERY_BIT))


def compiled() -> Target:
    from v41.conformance.target_compiled import target

    return target()


def simulated() -> Target:
    from v41.conformance.target_sim import target

    return target()


OURS: dict[str, Callable[[], Target]] = {"cpu": cpu, "cpu-compiled": compiled, "neuron-sim": simulated}


def target_names() -> list[str]:
    """Everything that --backend takes."""
    points = [p.name for group in (GROUP, "v41.backends") for p in entry_points(group=group)]
    return list(dict.fromkeys([*OURS, *points]))


def target_named(name: str) -> Target:
    """Ours by name, else what another package registers: a Target under `v41.conformance`, or a Backend, which then claims nothing special."""
    if name in OURS:
        return OURS[name]()
    for point in entry_points(group=GROUP):
        if point.name == name:
            made = point.load()()
            if not isinstance(made, Target):
                raise ValueError(f"backend: entry point {name!r} of {GROUP} gave a {type(made).__name__}, not a Target")
            return made
    found = api.available_backends()
    if name not in found:
        raise ValueError(f"backend: {name!r} is not one of {', '.join(target_names())}")
    if not isinstance(found[name], Backend):
        raise ValueError(f"backend: entry point {name!r} gave a {type(found[name]).__name__}, not a Backend")
    return Target(name, found[name])
