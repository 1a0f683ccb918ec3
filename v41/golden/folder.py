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
    return {
        name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "sha256": digest(t)} for name, t in sorted(tensors.items())
    }


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


def prepare(path: Path) -> None:
    """Makes the folder; ValueError when it holds anything but an earlier golden folder. The old manifest goes first: what is half written is no folder."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"out: {path} is a file")
    path.mkdir(parents=True, exist_ok=True)
    known = {MANIFEST, *(f"{p}.safetensors" for p in PARTS)}
    foreign = sorted(f.name for f in path.iterdir() if f.name.removesuffix(".part") not in known)
    if foreign:
        raise ValueError(f"out: {path} holds {foreign[0]}, which no golden folder has; choose an empty folder")
    for name in known:
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


def open_golden(path: str | Path) -> Golden:
    """Opens a folder and checks manifest and headers against each other. ValueError with file and reason for anything amiss."""
    path = Path(path)
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror}; not a golden folder, or one whose making was interrupted") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{file}: not JSON: {e}") from e
    if not isinstance(manifest, dict) or manifest.get("kind") != "v41 golden":
        raise ValueError(f"{file}: no manifest of a golden folder (kind is not 'v41 golden')")
    if manifest.get("schema") != SCHEMA:
        raise ValueError(f"{file}: schema {manifest.get('schema')!r}; this version reads {SCHEMA}")
    if not isinstance(manifest.get("tensors"), dict) or not manifest["tensors"]:
        raise ValueError(f"{file}: lists no tensors")
    for part, listed in manifest["tensors"].items():
        _check_part(path / f"{part}.safetensors", listed)
    return Golden(path, manifest)


def _check_part(file: Path, listed: dict[str, Any]) -> None:
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
