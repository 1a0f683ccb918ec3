# SPDX-License-Identifier: Apache-2.0
"""A verdict as text."""

from collections.abc import Iterator

from rich.table import Table

from v41.conformance.judge import Finding
from v41.conformance.run import FAILED, Result, Verdict

SHOWN = ("max_abs", "relative_l2", "cosine", "pcc", "kl", "top1", "top5", "top20")


def errors(finding: Finding) -> str:
    """Error ratios beside their limits."""
    parts = []
    for kind in ("exact", "trips"):
        found = finding.numbers.get(kind)
        if found:
            parts.append(f"{kind} {found['tensor']:.2f}/{found['tensor_limit']:.2f} row {found['row']:.2f}/{found['row_limit']:.2f}")
    return ", ".join(parts)


def figures_table(results: list[Result], most: int) -> Table:
    """The worst tensors that are not equal, with every figure beside its gate."""
    table = Table("case", "tensor", "status", "at", *SHOWN[:4], "ulps 0 1 2 4 16 256 more", "error ratio / limit")
    rows = [(r, f) for r in results for f in r.findings if f.numbers and f.status != "equal"]
    for r, f in sorted(rows, key=lambda rf: (not rf[1].bad, -rf[1].numbers.get("relative_l2", 0.0)))[:most]:
        n = f.numbers
        ulps = " ".join(str(v) for v in n.get("ulps", {}).values())
        table.add_row(r.case, f.name, f.status, str(list(f.at)), *(f"{n[k]:.3g}" if k in n else "" for k in SHOWN[:4]), ulps, errors(f))
    return table


def logit_lines(results: list[Result]) -> Iterator[str]:
    """What free runs are reported by."""
    for r in results:
        for f in r.findings:
            if "kl" in f.numbers and r.case.startswith("free/") and f.status != "equal":
                n = f.numbers
                tops = " ".join(f"{k} {n[k]:.3f}" for k in SHOWN[5:])
                yield f"{r.case} {f.name}: KL {n['kl']:.3g} nats, {tops}, relative L2 {n['relative_l2']:.3g}, cosine {n['cosine']:.5f}"


def summary(verdict: Verdict) -> Iterator[str]:
    """The verdict line by line: what failed first and why, then every other failure, skips, counts."""
    for note in verdict.notes:
        yield f"note: {note}"
    skips: dict[str, int] = {}
    for r in verdict.results:
        if r.status == "skip":
            skips[r.reason] = skips.get(r.reason, 0) + 1
    for reason, count in skips.items():
        yield f"skipped {count}: {reason}"
    for entry in verdict.idle:
        yield f"FAIL {entry} matches no case"
    first = verdict.first
    if first is not None:
        yield f"first divergence: {first.case}"
        yield f"  {first.reason}"
        if first.cause:
            yield f"  likely cause: {first.cause}"
        yield f"  again: v41 conformance --backend {verdict.backend} --include '{first.case}'"
    for r in verdict.results:
        if r.status in FAILED and r is not first:
            yield f"{r.status.upper()} {r.case}: {r.reason}"
    yield f"{verdict.backend}: " + ", ".join(f"{n} {s}" for s, n in verdict.counts.items())
