# SPDX-License-Identifier: Apache-2.0
"""A golden folder: safetensors parts and a manifest with the digest of every tensor (docs/golden.md 1)."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from v41.checkpoint import read_header, read_tensor, tensor_bytes, write_file

SCHEMA = 1
MANIFEST = "manifest.json"
PARTS = ("outputs", "prefill", "decode", "caches")


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, row-major and little-endian."""
    return hashlib.sha256(tensor_bytes("", tensor)).hexdigest()


def describe(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """dtype, shape and digest of every tensor, sorted by name."""
    return {name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "sha256": digest(t)} for name, t in sorted(tensors.items())}


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """What the last bits of a run depend on besides the inputs."""
    from v41 import __version__

    return {"v41": __version__, "torch": torch.__version__, "numpy": numpy.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def write_json(path: Path, value: Any) -> None:
    """Written beside `path`, then renamed."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)


FIELDS: dict[str, tuple[type, ...]] = dict.fromkeys(("numerics", "versions", "run", "weights", "config", "tensors"), (dict,)) | {"config_sha256": (str,)}
RUN: dict[str, tuple[type, ...]] = {"batch": (int,), "lengths": (list,), "steps": (int,), "taps": (bool,), "draft": (bool,)}
KNOWN = (MANIFEST, *(f"{p}.safetensors" for p in PARTS))


def check_out(path: Path) -> None:
    """ValueError when the path is a file, or a folder that holds anything but an earlier golden folder. Nothing is written."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"out: {path} is a file")
    foreign = sorted(f.name for f in path.iterdir() if f.name.removesuffix(".part") not in KNOWN) if path.exists() else []
    if foreign:
        raise ValueError(f"out: {path} holds {foreign[0]}, which no golden folder has; choose an empty folder")


def prepare(path: Path) -> None:
    """Makes the folder and empties it, the old manifest first: what is half written is no folder."""
    check_out(path)
    path.mkdir(parents=True, exist_ok=True)
    for name in KNOWN:
        (path / name).unlink(missing_ok=True)


def write_part(path: Path, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes PART.safetensors and gives its manifest entry."""
    write_file(path / f"{part}.safetensors", tensors)
    return describe(tensors)


@dataclass(frozen=True)
class Golden:
    """A folder that was opened: its manifest, and its tensors read on demand."""

    path: Path
    manifest: dict[str, Any]

    def names(self) -> list[tuple[str, str]]:
        """(part, tensor) of everything in the folder, outputs last: what is computed first comes first."""
        order = ("prefill", "decode", "caches", "outputs")
        return [(p, n) for p in order for n in self.manifest["tensors"].get(p, {})]

    def read(self, part: str, name: str) -> Tensor:
        """One tensor; ValueError where its bytes are not those that the manifest digests."""
        file = self.path / f"{part}.safetensors"
        tensor = read_tensor(file, name, read_header(file)[name])
        if digest(tensor) != self.manifest["tensors"][part][name]["sha256"]:
            raise ValueError(f"{file}: {name} has other bytes than the manifest's sha256 says")
        return tensor

    def part(self, part: str) -> dict[str, Tensor]:
        return {name: self.read(part, name) for name in self.manifest["tensors"].get(part, {})}


def read_manifest(file: Path, kind: str, schema: int, what: str) -> dict[str, Any]:
    """The JSON object of a manifest of this kind and schema. ValueError with the file, and `what` it is not, for anything else."""
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror}; not a {what}, or one whose making was interrupted") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{file}: not JSON: {e}") from e
    if not isinstance(manifest, dict) or manifest.get("kind") != kind:
        raise ValueError(f"{file}: no manifest of a {what} (kind is not {kind!r})")
    if manifest.get("schema") != schema:
        raise ValueError(f"{file}: schema {manifest.get('schema')!r}; this version reads {schema}")
    return manifest


def open_golden(path: str | Path) -> Golden:
    """Opens a folder and checks manifest and headers against each other. ValueError with file and reason for anything amiss."""
    path = Path(path)
    file = path / MANIFEST
    manifest = read_manifest(file, "v41 golden", SCHEMA, "golden folder")
    check_fields(file, manifest, FIELDS)
    check_fields(file, manifest["run"], RUN)
    check_fields(file, manifest["weights"], {"sha256": (str, type(None)), "recipe": (dict, type(None))})
    if manifest["weights"]["recipe"] is not None:
        check_fields(file, manifest["weights"]["recipe"], {"seed": (int,)})
    if not manifest["tensors"]:
        raise ValueError(f"{file}: lists no tensors")
    check_listed(file, manifest["tensors"])
    for part, listed in manifest["tensors"].items():
        check_part(path / f"{part}.safetensors", listed)
    return Golden(path, manifest)


def check_fields(file: Path, value: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> None:
    """ValueError for the first key that is missing or of another type."""
    for key, kinds in fields.items():
        if key not in value or not isinstance(value[key], kinds):
            found = f"a {type(value[key]).__name__}" if key in value else "missing"
            raise ValueError(f"{file}: {key} is {found}, not a {' or '.join(k.__name__ for k in kinds)}")


def check_listed(file: Path, parts: dict[str, Any]) -> None:
    """ValueError where a part is unknown or a tensor's entry has not dtype, shape and sha256."""
    for part, listed in parts.items():
        if part not in PARTS or not isinstance(listed, dict) or not all(isinstance(e, dict) for e in listed.values()):
            raise ValueError(f"{file}: tensors.{part} is no list of a golden folder's tensors")
        for entry in listed.values():
            check_fields(file, entry, {"dtype": (str,), "shape": (list,), "sha256": (str,)})


def check_part(file: Path, listed: dict[str, Any]) -> None:
    """ValueError where a safetensors file has not exactly the listed tensors."""
    if not file.is_file():
        raise ValueError(f"{file}: missing, the manifest lists {len(listed)} tensors in it")
    held = read_header(file)
    for name in sorted(set(listed) ^ set(held)):
        raise ValueError(f"{file}: {name} is {'in the file only' if name in held else 'missing, the manifest lists it'}")
    for name, entry in held.items():
        got = {"dtype": str(entry.torch_dtype).removeprefix("torch."), "shape": list(entry.shape)}
        want = {k: listed[name].get(k) for k in got}
        if got != want:
            raise ValueError(f"{file}: {name} is {got}, the manifest says {want}")
