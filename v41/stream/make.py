# SPDX-License-Identifier: Apache-2.0
"""Golden folders of a streamed run: the files of a run in memory, byte for byte but for the manifest's `weights`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41 import api
from v41.engram_map import engram_map
from v41.golden import folder
from v41.golden.compare import common, differences, one_sided
from v41.golden.folder import Golden
from v41.golden.make import check_steps, compute, one_thread, prompt_tensor, write
from v41.golden.metrics import Difference
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.stream.records import Records, open_records
from v41.stream.run import Job, call_name, job_over, prepare_run, run_embed, run_layer, streamed
from v41.stream.source import Log, recipe_source

Parts = dict[str, dict[str, Tensor]]


def records_path(out: Path) -> Path:
    """Where the records of a run lie: beside its folder, until that is whole."""
    return out.with_name(out.name + ".records")


def describe_job(job: Job, tokens: Tensor, steps: int, taps: bool) -> dict[str, Any]:
    """What two runs must share to share records."""
    params = job.params
    known = None if params.engram_map is None else folder.digest(params.engram_map.token_map)
    return {
        "kind": "v41 records",
        "schema": folder.SCHEMA,
        "config_sha256": folder.text_digest(params.config.source),
        "numerics": params.numerics.describe(),
        "versions": folder.versions(),
        "token_map": known,
        "prompt": tokens.tolist(),
        "steps": steps,
        "taps": taps,
        "draft": params.draft is not None,
        "norm_sha256": folder.digest(replace(job.source, log=Log()).read("norm.weight")),  # another checkpoint has another
    }


def _weights(job: Job, recipe: dict[str, Any] | None) -> dict[str, Any]:
    return {"sha256": None, "recipe": recipe, "streamed": True, "read": job.log.as_dict()}


def make_streamed(job: Job, prompts: Sequence[Sequence[int]], steps: int, out: Path, taps: bool, recipe: dict[str, Any] | None) -> dict[str, Any]:
    """As `golden.make.make`, one layer in memory at a time. A run that was killed goes on at the unit where it stopped."""
    tokens, lengths = prompt_tensor(prompts)
    check_steps(steps)
    records = open_records(records_path(out), describe_job(job, tokens, steps, taps))
    folder.prepare(out)
    job = replace(job, records=records)
    parts = compute(job.params, tokens, lengths, steps, taps, run=streamed(job))
    manifest = write(job.params, tokens, lengths, {"steps": steps, "taps": taps}, parts, _weights(job, recipe), out)
    records.remove()
    return manifest


def layer_range(text: str, count: int) -> tuple[int, int]:
    """`a:b` as numbers; ValueError unless 0 <= a < b <= count."""
    a, _, b = text.partition(":")
    if not (a.isdecimal() and b.isdecimal() and int(a) < int(b) <= count):
        raise ValueError(f"--layers: {text!r}; expected a:b with 0 <= a < b <= {count}")
    return int(a), int(b)


def make_part(
    job: Job, prompts: Sequence[Sequence[int]], steps: int, out: Path, taps: bool, recipe: dict[str, Any] | None, layers: tuple[int, int]
) -> dict[str, Any]:
    """Layers a .. b - 1 of the prefill alone: their taps as a golden folder. The records stay, for later layers and for the whole run.

    Raises ValueError where the layers below a have no records yet.
    """
    tokens, lengths = prompt_tensor(prompts)
    check_steps(steps)
    job = replace(job, records=open_records(records_path(out), describe_job(job, tokens, steps, taps)))
    folder.prepare(out)
    parts = compute_part(job, tokens, lengths, steps, layers)
    run = {"steps": steps, "taps": True, "layers": list(layers)}
    return write(job.params, tokens, lengths, run, parts, _weights(job, recipe), out)


def compute_part(job: Job, tokens: Tensor, lengths: Tensor, steps: int, layers: tuple[int, int]) -> Parts:
    """The taps of layers a .. b - 1 of the prefill; with records, those of the layers below must be there."""
    cache = api.init_cache(job.params, tokens.shape[0], tokens.shape[1] + steps + 1)
    with one_thread(job.params):
        boundary, cache, taps = run_embed(job, cache, tokens, lengths)
        kept = taps if layers[0] == 0 else {}
        while boundary.layer < layers[1]:
            _need_record(job.records, boundary.layer, layers[0])
            number = boundary.layer
            boundary, cache, seen = run_layer(job, 0, cache, boundary)
            kept |= seen if number >= layers[0] else {}
    return {"outputs": {"prompt": tokens, "lengths": lengths}, "prefill": kept}


def _need_record(records: Records | None, layer: int, first: int) -> None:
    if records is None or layer >= first or (records.path / f"{call_name(0)}.layer{layer:03d}.safetensors").is_file():
        return
    raise ValueError(
        f"--layers: layer {first} needs the boundary behind layer {first - 1}; {records.path} has no record of layer {layer}: run {layer}:{first} first"
    )


def job_of(golden: Golden, checkpoint: Path | None) -> Job:
    """The job that made a streamed folder: over a checkpoint, or over the recipe that its manifest names."""
    made, manifest = golden.manifest["weights"], golden.manifest
    numerics, draft = Numerics(**manifest["numerics"]), manifest["run"]["draft"]
    if checkpoint is not None:
        job = prepare_run(checkpoint, numerics, draft)
        if folder.text_digest(job.params.config.source) != manifest["config_sha256"]:
            raise ValueError(f"{golden.path}: made with another config than {checkpoint / 'config.json'}")
        return job
    if made["recipe"] is None:
        raise ValueError(f"{golden.path}: made from a checkpoint that no recipe gives; name it as the second argument")
    config, listed = Config.from_dict(manifest["config"]), manifest.get("token_map")
    known = None if listed is None else engram_map(config, torch.tensor(listed))
    return job_over(config, recipe_source(config, made["recipe"]["seed"]), numerics, known, draft)


def check_streamed(golden: Golden, checkpoint: Path | None, tolerance: float) -> list[Difference]:
    """Streams a folder's run again; first the checkpoint tensors and rows whose digest is another, then every tensor of the folder."""
    job, run, stored = job_of(golden, checkpoint), golden.manifest["run"], golden.part("outputs")
    tokens, lengths = stored["prompt"], stored["lengths"]
    if "layers" in run:
        parts = compute_part(job, tokens, lengths, run["steps"], tuple(run["layers"]))
    else:
        forced = stored["tokens"][:, :-1] if run["steps"] else None
        parts = compute(job.params, tokens, lengths, run["steps"], run["taps"], forced, run=streamed(job))
    missing = one_sided(parts, golden.manifest["tensors"])
    if missing:
        raise ValueError(f"{golden.path}: {len(missing)} tensors stand on one side only, {missing[0]} first")

    def fresh(part: str, name: str) -> Tensor:
        return parts[part][name]

    found = weight_differences(golden.manifest["weights"]["read"], job.log.as_dict())
    return found + list(differences(fresh, golden.read, common(parts, golden.manifest["tensors"]), tolerance))


def weight_differences(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """Checkpoint tensors, and rows of tensors, that both runs read and that have other bytes now, sorted by name."""
    found = []
    for name, digest in now["whole"].items():
        was = before["whole"].get(name, digest)
        if was != digest:
            found.append(Difference(f"weights/{name}", "exact", "differs", [], {"sha256": digest, "sha256_before": was}))
    for name, rows in now["rows"].items():
        was = before["rows"].get(name, {})
        wrong = [int(row) for row, digest in rows.items() if was.get(row, digest) != digest]
        if wrong:
            found.append(Difference(f"weights/{name}", "exact", "differs", wrong[:1], {"rows": wrong[:20], "count": len(wrong)}))
    return found
