# SPDX-License-Identifier: Apache-2.0
"""`golden make --stream`: a progress bar in bytes around v41.stream."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from v41.stream import Job, make_part, make_streamed, stream_plan
from v41.stream.make import layer_range
from v41.stream.plan import Unit

Show = Callable[[int, int, str], None]


@contextmanager
def byte_bar() -> Iterator[Show]:
    """show(bytes done, bytes expected, what) on stderr where that is a terminal: bytes, rate and time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def metered(job: Job, units: Iterable[Unit], show: Show) -> Job:
    """The job with its reads shown. What units to come may read at most is expected, which makes the time left an upper bound."""
    left = {unit.name: unit.most for unit in units}
    state: dict[str, Any] = {"done": 0, "before": 0, "last": "start"}

    def on_read(count: int) -> None:
        state["done"] += count
        show(state["done"], max(state["done"], state["before"] + sum(left.values())), state["last"])

    def on_unit(name: str) -> None:
        left.pop(name, None)
        state["before"], state["last"] = state["done"], name
        show(state["done"], state["before"] + sum(left.values()), name)

    return replace(job, source=replace(job.source, on_read=on_read), on_unit=on_unit)


def stream_make(job: Job, prompts: list[list[int]], steps: int, out: Path, taps: bool, recipe: dict[str, Any] | None, layers: str | None) -> dict[str, Any]:
    """The manifest of a streamed golden folder, or of layers a:b of its prefill."""
    config, rows = job.params.config, max(map(len, prompts))
    units = stream_plan(config, rows, max(steps, 0), len(prompts), job.params.draft is not None)
    part = None if layers is None else layer_range(layers, config.num_hidden_layers)
    if part is not None:
        units = tuple(u for u in units if u.name in {f"call00000.layer{i:03d}" for i in range(part[1])})
    with byte_bar() as show:
        job = metered(job, units, show)
        if part is None:
            return make_streamed(job, prompts, steps, out, taps, recipe)
        return make_part(job, prompts, steps, out, taps, recipe, part)
