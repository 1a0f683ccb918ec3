# SPDX-License-Identifier: Apache-2.0
"""Caches as values: taking sequences, saving and restoring."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from v41 import checks, tree
from v41.api import init_cache
from v41.checkpoint import read_header, read_tensor, write_file
from v41.golden import folder
from v41.spec.cache import Cache
from v41.spec.params import Params

FILE = "cache.safetensors"
SLOT = "index_slot"  # its shape follows what the slot holds (docs/model.md 7.9)


def take(cache: Cache, sequences: Any) -> Cache:
    """The sequences named by index, in that order: permutes, drops, or forks (an index may repeat).

    Raises ValueError for an index outside the batch.
    """
    checks.kind("cache", cache, Cache)
    index = checks.integers("sequences", checks.tensor_of("sequences", sequences, cache.length.device), (None,), cache.length.device)
    wrong = (index < 0) | (index >= cache.batch)
    if wrong.any():
        raise ValueError(f"sequences: {index.tolist()} leaves 0..{cache.batch - 1}")
    return tree.map(lambda leaf: leaf[index], cache)


def _identity(params: Params) -> dict[str, Any]:
    """What a saved cache must share with the parameters that continue it."""
    return {
        "config_sha256": folder.text_digest(params.config.source),
        "numerics": params.numerics.describe(),
        "draft": params.draft is not None,
    }


def save_cache(params: Params, cache: Cache, directory: str | Path) -> None:
    """Writes every leaf and a manifest with the digests of config, numerics and tensors, which is written last."""
    checks.same_model(params, cache)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / folder.MANIFEST).unlink(missing_ok=True)
    leaves = dict(tree.paths(cache))
    write_file(directory / FILE, leaves)
    sizes = {"batch": cache.batch, "capacity": cache.capacity, "slack": cache.slack}
    manifest = {"kind": "v41 cache", "schema": folder.SCHEMA, **_identity(params), **sizes, "tensors": folder.describe(leaves)}
    folder.write_json(directory / folder.MANIFEST, manifest)


def load_cache(params: Params, directory: str | Path) -> Cache:
    """The cache that was saved, bit for bit.

    Raises ValueError with file and reason where the folder is incomplete or changed, or belongs to another config, other numerics or a
    model with or without a draft head.
    """
    directory = Path(directory)
    file = directory / folder.MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{file}: no manifest of a saved cache ({e})") from e
    if not isinstance(manifest, dict) or manifest.get("kind") != "v41 cache" or manifest.get("schema") != folder.SCHEMA:
        raise ValueError(f"{file}: not a saved cache of schema {folder.SCHEMA}")
    folder.check_fields(file, manifest, {"batch": (int,), "capacity": (int,), "slack": (int,), "tensors": (dict,)})
    for key, want in _identity(params).items():
        if manifest.get(key) != want:
            raise ValueError(f"{file}: {key} is {manifest.get(key)!r}, the parameters have {want!r}")
    held = _leaves(directory / FILE, manifest["tensors"])
    blank = init_cache(params, manifest["batch"], manifest["capacity"], slack=manifest["slack"])
    wanted = dict(tree.paths(blank))
    if set(held) != set(wanted):
        raise ValueError(f"{directory / FILE}: holds {sorted(set(held) ^ set(wanted))[0]} where the parameters' cache does not, or lacks it")
    for name, leaf in wanted.items():
        if held[name].dtype != leaf.dtype or (held[name].shape != leaf.shape and name != SLOT):
            raise ValueError(f"{directory / FILE}: {name} is {held[name].dtype} {list(held[name].shape)}, not {leaf.dtype} {list(leaf.shape)}")
    names = iter(wanted)
    return tree.map(lambda _: held[next(names)], blank)


def _leaves(file: Path, listed: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the file, each checked against its digest."""
    if not file.is_file():
        raise ValueError(f"{file}: missing, the manifest lists {len(listed)} tensors in it")
    entries = read_header(file)
    if set(entries) != set(listed):
        raise ValueError(f"{file}: {sorted(set(entries) ^ set(listed))[0]} stands only in the file or only in the manifest")
    leaves = {name: read_tensor(file, name, entry) for name, entry in entries.items()}
    for name, leaf in leaves.items():
        if not isinstance(listed[name], dict) or folder.digest(leaf) != listed[name].get("sha256"):
            raise ValueError(f"{file}: {name} has other bytes than the manifest's sha256 says")
    return leaves
