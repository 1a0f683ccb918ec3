# SPDX-License-Identifier: Apache-2.0
"""Stacked bars of plans: bytes a rank, floor and estimate of a step."""

from importlib import import_module
from pathlib import Path
from typing import Any

from v41.sharding.plan_time import seconds_of
from v41.sharding.planner import Plan

LABELLED = 0.04  # of the highest bar: a smaller piece has no room for its number


def stacks(plans: list[Plan]) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """(bar -> piece -> GiB, bar -> piece -> ms)."""
    sizes = {p.placement.rules.name: {n: b / 2**30 for part in p.bytes_by_part.values() for n, b in part.items()} for p in plans}
    times = {
        f"{p.placement.rules.name}\n{kind}": {n: s * 1e3 for n, s in seconds_of(getattr(p, kind)).items() if n != "total"}
        for p in plans
        for kind in ("floor", "estimate")
    }
    return sizes, times


def panel(axes: Any, bars: dict[str, dict[str, float]], unit: str, title: str) -> None:
    """One panel: a bar for each entry, a color for each piece."""
    pieces = list(dict.fromkeys(n for bar in bars.values() for n in bar))
    highest = max(sum(bar.values()) for bar in bars.values())
    bottom = dict.fromkeys(bars, 0.0)
    for number, piece in enumerate(pieces):
        heights = [bar.get(piece, 0.0) for bar in bars.values()]
        hatch = "//" if number >= 10 else None
        axes.bar(list(bars), heights, bottom=list(bottom.values()), label=piece, color=f"C{number % 10}", hatch=hatch)
        for bar, height in zip(bars, heights, strict=True):
            if height > LABELLED * highest:
                axes.text(bar, bottom[bar] + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=8)
            bottom[bar] += height
    for bar, height in bottom.items():
        axes.text(bar, height, f"{height:.1f}", ha="center", va="bottom", fontweight="bold")
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw(plans: list[Plan], file: Path) -> None:
    """Writes the picture; the file's ending says which format. ValueError without matplotlib."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError as e:
        raise ValueError("--picture: matplotlib is not installed; it comes with the extra `plots`") from e
    matplotlib.use("Agg")
    figure, (left, right) = import_module("matplotlib.pyplot").subplots(1, 2, figsize=(15, 6.5), width_ratios=(1, 1.5))
    sizes, times = stacks(plans)
    panel(left, sizes, "GiB", "Bytes of the fullest rank")
    panel(right, times, "ms", f"One step, {plans[0].bucket.name}, capacity {plans[0].capacity}: planned, not measured")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
