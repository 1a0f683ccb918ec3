# SPDX-License-Identifier: Apache-2.0
"""What would be read, in bytes, before anything is."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from v41.checkpoint import Folder, open_folder
from v41.params_io import PassedOver, check_folder, passed_over
from v41.released import DRAFT, VISION
from v41.spec.config import Config
from v41.spec.params import param_specs
from v41.spec.table import ParamSpec


@dataclass(frozen=True)
class Range:
    """Bytes start .. end - 1 of a file, which hold the tensor."""

    file: str
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class ReadPlan:
    """Ranges by file in the order of their bytes, and the parts that stay unread."""

    ranges: tuple[Range, ...]
    passed_over: tuple[PassedOver, ...]

    @property
    def bytes(self) -> int:
        return sum(r.end - r.start for r in self.ranges)

    def by_file(self) -> dict[str, int]:
        """Bytes of each file."""
        found: dict[str, int] = {}
        for r in self.ranges:
            found[r.file] = found.get(r.file, 0) + r.end - r.start
        return found


def plan_of(folder: Folder, draft: bool) -> ReadPlan:
    skip = VISION if draft else (*VISION, DRAFT)
    wanted = [(folder.files[n], e.start, e.end, n) for n, e in folder.entries.items() if not n.startswith(skip)]
    return ReadPlan(tuple(Range(file, name, start, end) for file, start, end, name in sorted(wanted)), tuple(passed_over(folder, draft)))


def read_plan(directory: str | Path, *, draft: bool = True) -> ReadPlan:
    """What `load_params` would read of a folder, from its headers alone. Raises ValueError as `load_params` does for a wrong folder."""
    directory = Path(directory)
    config, folder = Config.from_json(directory / "config.json"), open_folder(directory)
    check_folder(folder, config, draft)
    return plan_of(folder, draft)


@dataclass(frozen=True)
class Unit:
    """One unit of a streamed run: bytes that it reads in any case, and the most that it may read, which routing decides."""

    name: str
    least: int
    most: int


def _size(spec: ParamSpec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize


def _unit(name: str, specs: list[ParamSpec], tokens: int, k: int, columns: int) -> Unit:
    """Dense tensors whole; experts: at least k, at most k a token; table rows: at least one a column, at most one a column and token."""
    dense = least = most = 0
    for spec in specs:
        if spec.stacked:
            one, count = _size(spec) // spec.shape[0], spec.shape[0]
            least, most = least + min(k, count) * one, most + min(k * tokens, count) * one
        elif ".engram.embed." in spec.name:
            row = _size(spec) // spec.shape[0]
            least, most = least + columns * row, most + columns * tokens * row
        else:
            dense += _size(spec)
    return Unit(name, dense + least, dense + most)


def _call(call: int, tokens: int, fills: bool, config: Config, groups: dict[str, list[ParamSpec]], draft: bool) -> Iterator[Unit]:
    name, row = f"call{call:05d}.", 2 * config.hidden_size
    yield Unit(name + "embed", row, tokens * row)
    for i in range(config.num_hidden_layers):
        yield _unit(f"{name}layer{i:03d}", groups[f"layers.{i}"], tokens, config.num_experts_per_tok, config.engram_columns)
    yield _unit(name + "head", groups["head"], tokens, 0, 0)
    if draft and config.num_nextn_predict_layers:
        drafted = 0 if fills else tokens * config.dspark_block_size
        unit = _unit(name + "draft", groups["mtp"], drafted, min(drafted, config.draft_experts_per_tok), 0)
        again = 0 if fills else sum(_size(s) for s in groups["head"] if s.name == "head.weight")
        yield Unit(unit.name, unit.least + again + (row if drafted else 0), unit.most + again + 2 * tokens * (row if drafted else 0))


def stream_plan(config: Config, rows: int, steps: int, batch: int = 1, draft: bool = True) -> tuple[Unit, ...]:
    """The units of a streamed run: a prefill of `rows` tokens a sequence, then `steps` decode steps with their drafts."""
    groups: dict[str, list[ParamSpec]] = {"head": [], "mtp": []}
    for spec in param_specs(config, draft):
        parts = spec.name.split(".")
        key = ".".join(parts[:2]) if parts[0] == "layers" else "mtp" if parts[0] == "mtp" else "head"
        if spec.name != "embed.weight":
            groups.setdefault(key, []).append(spec)
    units: list[Unit] = []
    for call in range(steps + 1):
        units += _call(call, batch if call else rows * batch, call == 0, config, groups, draft)
    return tuple(units)
