# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint folder holds, from config.json, index and headers alone (docs/checkpoints.md 2)."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from v41.checkpoint import Entry, Folder, open_folder, read_header
from v41.checkpoint.reader import read_index
from v41.params_io import PassedOver, passed_over
from v41.released import Findings, component, findings, parameters
from v41.spec.config import Config
from v41.spec.plan import LayerPlan


@dataclass(frozen=True)
class Count:
    """Tensors, their bytes, and the parameters that they hold: FP4 unpacked, scales left out."""

    tensors: int
    bytes: int
    parameters: int


@dataclass(frozen=True)
class LayerLine:
    """One backbone layer. `role`: window, full (own keys and selection), reindex (own selection) or reuse; the rest as in the plan."""

    layer: int
    role: str
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidates: str | None
    engram: bool
    draft_tap: bool
    count: Count


@dataclass(frozen=True)
class FolderReport:
    """A folder in numbers, and what is wrong with it. `problems`: files that are missing or contradict each other."""

    path: str
    total: Count
    components: dict[str, Count]
    dtypes: dict[str, Count]
    shards: dict[str, Count]
    layers: tuple[LayerLine, ...]
    passed_over: tuple[PassedOver, ...]
    findings: Findings
    problems: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether `load_params` would take the folder, as far as headers tell."""
        return not (self.problems or self.findings.missing or self.findings.unknown or self.findings.wrong)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"complete": self.complete}


Sizes = dict[str, tuple[int, int]]  # bytes and parameters by tensor


def sizes_of(entries: dict[str, Entry]) -> Sizes:
    return {name: (e.nbytes, parameters(name, e.torch_dtype, e.shape)) for name, e in entries.items()}


def count(sizes: Iterable[tuple[int, int]]) -> Count:
    """The sum of some tensors."""
    found = list(sizes)
    return Count(len(found), sum(n for n, _ in found), sum(p for _, p in found))


def grouped(sizes: Sizes, key: Callable[[str], str]) -> dict[str, Count]:
    """Counts by key(name), in the order of first appearance."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for name, size in sizes.items():
        groups.setdefault(key(name), []).append(size)
    return {name: count(group) for name, group in groups.items()}


def role(plan: LayerPlan) -> str:
    """What a layer owns, in one word."""
    if plan.ratio == 0:
        return "window"
    return "full" if plan.owns_kv else "reindex" if plan.owns_index else "reuse"


def layer_lines(config: Config, sizes: Sizes) -> tuple[LayerLine, ...]:
    """One line a backbone layer."""
    groups = grouped(sizes, lambda name: name.split(".")[1] if name.startswith("layers.") else "")
    lines = []
    for i, p in enumerate(config.layer_plan):
        candidates = "makes" if p.makes_candidates else "reads" if p.reads_candidates else None
        held = groups.get(str(i), Count(0, 0, 0))
        lines.append(LayerLine(i, role(p), p.ratio, p.kv_source, p.index_source, candidates, p.engram is not None, p.tap is not None, held))
    return tuple(lines)


def survey(path: Path) -> tuple[Folder, tuple[str, ...]]:
    """The folder, and what keeps `open_folder` from taking it. What can be read of a folder that is incomplete is still read."""
    files, _ = read_index(path)
    try:
        return open_folder(path), ()
    except ValueError as error:
        problems = [str(error)]
    entries: dict[str, Entry] = {}
    found: dict[str, str] = {}
    for shard in sorted(set(files.values())):
        if not (path / shard).is_file():
            problems.append(f"{path / shard}: missing, {sum(s == shard for s in files.values())} tensors are listed for it")
            continue
        try:
            header = read_header(path / shard)
        except ValueError as error:
            problems.append(str(error))
            continue
        entries |= header
        found |= dict.fromkeys(header, shard)
    return Folder(path, found, entries), tuple(dict.fromkeys(problems))


def inspect_folder(directory: str | Path, *, draft: bool = True) -> FolderReport:
    """What a folder holds and lacks; only headers are read. draft=False: the draft head may be absent, and is passed over.

    Raises ValueError where there is no config.json or no index that can be read; everything else is in the report.
    """
    directory = Path(directory)
    config = Config.from_json(directory / "config.json")
    folder, problems = survey(directory)
    sizes = sizes_of(folder.entries)
    return FolderReport(
        path=str(directory),
        total=count(sizes.values()),
        components=grouped(sizes, component),
        dtypes=grouped(sizes, lambda name: folder.entries[name].dtype),
        shards=grouped(sizes, lambda name: folder.files[name]),
        layers=layer_lines(config, sizes),
        passed_over=tuple(passed_over(folder, draft)),
        findings=findings(folder, config, draft),
        problems=problems,
    )
