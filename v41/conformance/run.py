# SPDX-License-Identifier: Apache-2.0
"""Running cases: skips with reasons, expected failures, a time budget, and the verdict (docs/conformance.md 7)."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from v41.conformance.cases import Case
from v41.conformance.causes import cause_of
from v41.conformance.judge import Finding
from v41.conformance.patterns import Patterns
from v41.conformance.target import Target

STATUSES = ("pass", "flip", "fail", "error", "xfail", "xpass", "told", "skip", "excluded", "late")
PASSED, FAILED = ("pass", "flip", "xfail"), ("fail", "error", "xpass")
COMPARED = ("equal", "within", "flip")


@dataclass(frozen=True)
class Result:
    """One case. status: of STATUSES; `told` compared nothing, `late` was not begun within the budget."""

    case: str
    status: str
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    cause: str = ""

    @property
    def first(self) -> Finding | None:
        """The first tensor that is wrong, in order of computation: the others follow from it."""
        return next((f for f in self.findings if f.bad), None)

    def as_dict(self) -> dict[str, Any]:
        kept = [f.as_dict() for f in self.findings if f.status != "equal"]
        equal = sum(f.status == "equal" for f in self.findings)
        return {"case": self.case, "status": self.status, "reason": self.reason, "cause": self.cause, "equal": equal, "findings": kept}


@dataclass(frozen=True)
class Verdict:
    """A whole run. idle: patterns that matched nothing."""

    backend: str
    results: tuple[Result, ...]
    idle: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 2 nothing was compared."""
        if self.idle or any(r.status in FAILED for r in self.results):
            return 1
        return 0 if any(r.status in PASSED for r in self.results) else 2

    @property
    def first(self) -> Result | None:
        """The failure to look at: a primitive before a block, a block before what runs free."""
        return next((r for r in self.results if r.status in FAILED), None)


def status_of(findings: Sequence[Finding]) -> str:
    """fail where one tensor is wrong, flip where a choice moved within its margin, told where nothing was compared."""
    if any(f.bad for f in findings):
        return "fail"
    if any(f.status == "flip" for f in findings):
        return "flip"
    return "pass" if any(f.status in COMPARED for f in findings) else "told"


def run_case(case: Case, target: Target) -> Result:
    """One case; an exception of the backend is a failure of it."""
    started = time.monotonic()
    try:
        with torch.no_grad():
            findings = tuple(case.run(target))
    except Exception as e:
        return Result(case.name, "error", f"{type(e).__name__}: {e}", (), time.monotonic() - started)
    found = Result(case.name, status_of(findings), "", findings, time.monotonic() - started)
    if found.first is None:
        return found
    return replace(found, reason=f"{found.first.name}: {found.first.status} {found.first.reason}", cause=cause_of(case.stop, found.first, case.opened))


def expected(result: Result, patterns: Patterns) -> Result:
    """With xfail: a failure is expected, anything that passes is not."""
    why = patterns.expected_to_fail(result.case)
    if why is None:
        return result
    if result.status in ("fail", "error"):
        return replace(result, status="xfail", reason=f"{why} ({result.reason})")
    if result.status in ("pass", "flip"):
        return replace(result, status="xpass", reason=f"passes, though it is listed to fail: {why}")
    return result


def run(cases: Sequence[Case], target: Target, patterns: Patterns, max_seconds: float | None, told: Callable[[Result], None]) -> Verdict:
    """Every case in order. What the backend lacks, by its claims or its file, is skipped with the reason."""
    claims = replace(target.claims, lacks={**target.claims.lacks, **patterns.lacks})
    target, started = replace(target, claims=claims), time.monotonic()
    results = []
    for case in cases:
        lacking = claims.why_not(case.needs)
        if not patterns.runs(case.name):
            result = Result(case.name, "excluded")
        elif lacking is not None:
            result = Result(case.name, "skip", lacking)
        elif max_seconds is not None and time.monotonic() - started > max_seconds:
            result = Result(case.name, "late", f"not begun within {max_seconds:g} s")
        else:
            result = expected(run_case(case, target), patterns)
        results.append(result)
        told(result)
    counts = Counter(r.status for r in results)
    idle = patterns.idle(c.name for c in cases)
    return Verdict(target.name, tuple(results), tuple(idle), (), {s: counts[s] for s in STATUSES if counts[s]})
