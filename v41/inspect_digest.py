# SPDX-License-Identifier: Apache-2.0
"""Digests of every tensor of a folder, as a list that can be stored and compared with."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from v41.checkpoint import Folder, tensor_bytes
from v41.golden.folder import write_json

BAND = 64 << 20  # bytes hashed at once
KIND = "v41 digests"


def tensor_digest(folder: Folder, name: str, on_read: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of a tensor's bytes, BAND bytes in memory at a time."""
    entry, total = folder.entries[name], hashlib.sha256()
    if entry.nbytes <= BAND or not entry.shape:
        total.update(tensor_bytes(name, folder.read(name)))
        on_read(entry.nbytes)
        return total.hexdigest()
    rows = max(1, BAND * entry.shape[0] // entry.nbytes)
    for first in range(0, entry.shape[0], rows):
        band = folder.rows(name, first, min(first + rows, entry.shape[0]))
        total.update(tensor_bytes(name, band))
        on_read(band.nbytes)
    return total.hexdigest()


def folder_digests(folder: Folder, on_read: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """The list: dtype, shape and SHA-256 of every tensor by name. Files are read in the order of their bytes."""
    ordered = sorted(folder.entries, key=lambda name: (folder.files[name], folder.entries[name].start))
    found = {}
    for name in ordered:
        entry = folder.entries[name]
        found[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "sha256": tensor_digest(folder, name, on_read)}
    return {"kind": KIND, "tensors": dict(sorted(found.items()))}


def read_digests(path: Path) -> dict[str, Any]:
    """A stored list; ValueError for a file that is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no list of digests: {error}") from error
    if not isinstance(value, dict) or value.get("kind") != KIND or not isinstance(value.get("tensors"), dict):
        raise ValueError(f"{path}: no list of digests (kind is not {KIND!r})")
    return value


def compare_digests(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The tensors that only one list has, or whose dtype, shape or bytes are others, each with its reason."""
    before, now = stored["tensors"], found["tensors"]
    lines = [f"{name}: {'not in the stored list' if name in now else 'only in the stored list'}" for name in sorted(set(before) ^ set(now))]
    for name in sorted(set(before) & set(now)):
        other = [key for key in ("dtype", "shape", "sha256") if before[name].get(key) != now[name][key]]
        lines += [f"{name}: {key} {before[name].get(key)} in the stored list, {now[name][key]} here" for key in other]
    return lines


def digest_against(folder: Folder, path: Path, on_read: Callable[[int], None]) -> list[str] | None:
    """Compares with a stored list, or stores one where there is none yet (None)."""
    stored = read_digests(path) if path.exists() else None
    found = folder_digests(folder, on_read)
    if stored is None:
        write_json(path, found)
        return None
    return compare_digests(stored, found)
