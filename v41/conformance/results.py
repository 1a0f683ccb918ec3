# SPDX-License-Identifier: Apache-2.0
"""A folder of tensors that any program wrote, judged against a pack: SCENARIO.safetensors with the pack's names (docs/conformance.md 8)."""

from pathlib import Path

from torch import Tensor

from v41.checkpoint import read_header, read_tensor
from v41.conformance.blocks import fit, judged_names
from v41.conformance.causes import cause_of
from v41.conformance.judge import Finding, judge, told
from v41.conformance.run import Result, Verdict, status_of
from v41.conformance.walk import Opened, Stop, every_stop

Brought = dict[str, dict[str, Tensor]]


def read_folder(path: Path, opened: Opened) -> dict[str, Brought]:
    """Tensors by scenario and call. ValueError for a folder without any, a file of no scenario, a name that the pack has not."""
    if not path.is_dir():
        raise ValueError(f"results: {path} is no folder")
    listed = opened.pack.manifest["tensors"]
    found: dict[str, Brought] = {}
    for file in sorted(path.glob("*.safetensors")):
        if file.stem not in listed:
            raise ValueError(f"results: {file} is no scenario of {opened.pack.path}; there are {', '.join(listed)}")
        for name, entry in read_header(file).items():
            if name not in listed[file.stem]:
                raise ValueError(f"results: {file}: {name} is no tensor of the pack's {file.stem}")
            call, _, rest = name.partition(".")
            found.setdefault(file.stem, {}).setdefault(call, {})[rest] = read_tensor(file, name, entry)
    return found


def judge_stop(stop: Stop, got: dict[str, Tensor]) -> tuple[Finding, ...]:
    """Findings on what was brought for one call; calls without stored taps are told."""
    got = fit(stop, got)
    found = [judge(n, got[n], stop.stored, got, False, True) for n in judged_names(stop.stored) if n in got]
    return tuple(found if stop.taps else [told(f) for f in found])


def judge_folder(path: Path, opened: Opened) -> Verdict:
    """The verdict. Inputs that were copied along are not looked at; what was not brought is not judged, and said."""
    brought = read_folder(path, opened)
    results, absent = [], 0
    for stop in every_stop(opened):
        got = brought.get(stop.scenario, {}).get(stop.call)
        if got is None:
            absent += 1
            continue
        findings = judge_stop(stop, got)
        found = Result(f"results/{stop.name}/{opened.regime}", status_of(findings), "", findings)
        if found.first is not None:
            reason = f"{found.first.name}: {found.first.status} {found.first.reason}"
            found = Result(found.case, found.status, reason, findings, 0.0, cause_of(stop, found.first, opened))
        results.append(found)
    counts: dict[str, int] = {}
    for r in results:
        counts[r.status] = counts.get(r.status, 0) + 1
    return Verdict(str(path), tuple(results), (), (f"{absent} calls of the pack were not brought",), counts)
