# SPDX-License-Identifier: Apache-2.0
"""Golden packs: one folder that says what the model computes, for people who do not read its code (docs/golden-pack.md)."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41 import api
from v41.checkpoint import write_file
from v41.golden import folder
from v41.golden.folder import Golden
from v41.golden.make import one_thread
from v41.golden.pack_facts import covers, gaps
from v41.golden.pack_ranks import divides
from v41.golden.pack_run import Place, run_scenario
from v41.golden.pack_scenarios import Scenario, long_length, scenarios
from v41.params_io import tensor_digests, weights_digest
from v41.spec.cache import SLACK, Cache
from v41.spec.params import Params

KIND, SCHEMA, LICENCE = "v41 golden pack", 1, "Apache-2.0"
REFERENCE = "deepseek-ai/DeepSeek-V4.1-Flash dba1be0a40aa45a94ad051997016db3960a90277"
SPARE = 24  # positions behind the longest scenario start
Told = Callable[[str], None]
FIELDS: dict[str, tuple[type, ...]] = dict.fromkeys(("numerics", "versions", "run", "weights", "config", "gaps", "coverage", "tensors"), (dict,)) | {
    "licence": (str,),
    "reference": (str,),
    "index_keys": (str,),
    "ties": (str,),
    "config_sha256": (str,),
    "capacity": (int,),
    "slack": (int,),
    "scenarios": (list,),
    "smallest_gap": (float, int, type(None)),
}


def quiet(text: str) -> None:
    """Tells nobody."""


def chosen_scenarios(params: Params, names: Sequence[str] | None) -> tuple[Scenario, ...]:
    """The named scenarios and those that they start from; ValueError for a name that the model and its numerics have not."""
    every = {s.name: s for s in scenarios(params.config, params.numerics) if s.name != "ranks" or divides(params)}
    wanted = list(every if names is None else names)
    unknown = [n for n in wanted if n not in every]
    if unknown:
        raise ValueError(f"scenarios: {unknown[0]!r} is not one of {', '.join(every)} (regime {params.numerics.regime!r})")
    for name in wanted:
        start = every[name].start
        if start is not None and start not in wanted:
            wanted.append(start)
    return tuple(s for n, s in every.items() if n in wanted)


def capacity_of(params: Params) -> int:
    """Positions of every state in a pack."""
    return min(long_length(params.config) + SPARE, params.config.max_position_embeddings)


def empty(params: Params, batch: int) -> Cache:
    return api.init_cache(params, batch, capacity_of(params))


def check_out(path: Path) -> None:
    """ValueError when the path is a file or a folder that holds anything but an earlier pack."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"out: {path} is a file")
    if not path.exists() or not any(path.iterdir()):
        return
    names = {f.name.removesuffix(".part") for f in path.iterdir()}
    if folder.MANIFEST in names and json.loads((path / folder.MANIFEST).read_text(encoding="utf-8")).get("kind") != KIND:
        raise ValueError(f"out: {path} holds {folder.MANIFEST} of something else; choose an empty folder")
    foreign = sorted(n for n in names if n != folder.MANIFEST and not n.endswith(".safetensors"))
    if foreign or folder.MANIFEST not in names:
        raise ValueError(f"out: {path} holds {(foreign or sorted(names))[0]}, which is no pack's; choose an empty folder")


def prepare(path: Path) -> None:
    """Makes the folder and empties it, the old manifest first."""
    check_out(path)
    path.mkdir(parents=True, exist_ok=True)
    for name in (folder.MANIFEST, *(f.name for f in path.glob("*.safetensors"))):
        (path / name).unlink(missing_ok=True)


def describe(tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """As in a golden folder, with the unit of encoded distances."""
    return {n: e | ({"scale": scales[n]} if n in scales else {}) for n, e in folder.describe(tensors).items()}


def run_all(params: Params, chosen: Sequence[Scenario], told: Told) -> Iterator[tuple[Scenario, Place]]:
    """Every scenario after the one that it starts from."""
    ends: dict[str, Cache] = {}
    for scenario in chosen:
        told(scenario.name)
        place = run_scenario(params, scenario, empty(params, scenario.batch) if scenario.start is None else ends[scenario.start])
        ends[scenario.name] = place.cache
        yield scenario, place


@torch.no_grad()
def make_pack(params: Params, recipe: dict[str, Any] | None, out: Path, names: Sequence[str] | None = None, told: Told = quiet) -> dict[str, Any]:
    """Writes a pack, its manifest last; gives the manifest. names: of scenarios, all by default."""
    chosen = chosen_scenarios(params, names)
    prepare(out)
    listed, tensors, entries = [], {}, {}
    with one_thread(params):
        for scenario, place in run_all(params, chosen, told):
            write_file(out / f"{scenario.name}.safetensors", place.tensors)
            listed.append({"name": scenario.name, "start": scenario.start, "batch": scenario.batch, "calls": place.listed})
            tensors[scenario.name], entries[scenario.name] = place.tensors, describe(place.tensors, place.scales)
    manifest = head_of(params, recipe) | facts(params, listed, tensors) | {"scenarios": listed, "tensors": entries}
    write_manifest(out, manifest)
    return manifest


def head_of(params: Params, recipe: dict[str, Any] | None) -> dict[str, Any]:
    """What was computed, from what, by what."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "licence": LICENCE,
        "reference": REFERENCE,
        "numerics": params.numerics.describe(),
        "index_keys": params.numerics.index_keys,
        "ties": "torch.topk" if params.numerics.compact else "lower index",
        "versions": folder.versions(),
        "run": {"draft": params.draft is not None},
        "weights": {"sha256": weights_digest(params), "recipe": recipe, "streamed": False, "read": {"whole": tensor_digests(params), "rows": {}}},
        "config_sha256": folder.text_digest(params.config.source),
        "config": params.config.to_dict(),
        "token_map": None if params.engram_map is None else params.engram_map.token_map.tolist(),
        "capacity": capacity_of(params),
        "slack": SLACK,
    }


def facts(params: Params, listed: list[dict[str, Any]], tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    found = gaps(params.config, tensors)
    smallest = [g["smallest"] for g in found.values() if g["smallest"] is not None]
    return {"smallest_gap": min(smallest, default=None), "gaps": found, "coverage": covers(params, listed, tensors)}


def write_manifest(out: Path, manifest: Mapping[str, Any]) -> None:
    """JSON with a line for each tensor and weight, so that differences of two packs can be read."""

    def lines(value: Mapping[str, Any], deep: int) -> str:
        inner = (f"{json.dumps(k)}: {lines(v, deep - 1) if isinstance(v, dict) and deep and v else json.dumps(v)}" for k, v in value.items())
        return "{\n" + ",\n".join(inner) + "\n}"

    part = out / (folder.MANIFEST + ".part")
    part.write_text(lines(manifest, 2) + "\n", encoding="utf-8")
    os.replace(part, out / folder.MANIFEST)


def open_pack(path: str | Path) -> Golden:
    """Opens a pack; parts are its scenarios. ValueError with file and reason where manifest and files disagree or a field is amiss."""
    path = Path(path)
    file = path / folder.MANIFEST
    manifest = folder.read_manifest(file, KIND, SCHEMA, "golden pack")
    folder.check_fields(file, manifest, FIELDS)
    for scenario in manifest["scenarios"]:
        folder.check_fields(file, scenario, {"name": (str,), "start": (str, type(None)), "batch": (int,), "calls": (list,)})
        for call in scenario["calls"]:
            folder.check_fields(file, call, {"name": (str,), "op": (str,), "taps": (bool,)})
    if not manifest["tensors"]:
        raise ValueError(f"{file}: lists no tensors")
    for part, listed in manifest["tensors"].items():
        for entry in listed.values():
            folder.check_fields(file, entry, {"dtype": (str,), "shape": (list,), "sha256": (str,)})
        folder.check_part(path / f"{part}.safetensors", listed)
    return Golden(path, manifest)
