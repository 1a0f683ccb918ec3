# SPDX-License-Identifier: Apache-2.0
"""Parameters from a checkpoint folder or from the recipe, and back."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from v41 import recipe
from v41.checkpoint import Folder, check_values, open_folder, write_folder
from v41.engram_map import default_token_map, engram_map, map_from_tokenizer
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import EngramMap, Params, build_params, param_specs
from v41.spec.table import ParamSpec
from v41.tree import leaves

VISION = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
DRAFT = "mtp."
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class PassedOver:
    """Tensors of a checkpoint that were deliberately not read: why, how many, how many bytes."""

    what: str
    tensors: int
    bytes: int


def passed_over(folder: Folder, draft: bool) -> list[PassedOver]:
    """The parts of a folder that the text model does not read: vision, and the draft head where it is not wanted."""
    groups = {"vision": VISION} if draft else {"vision": VISION, "draft head": (DRAFT,)}
    found = []
    for what, prefixes in groups.items():
        sizes = [e.nbytes for name, e in folder.entries.items() if name.startswith(prefixes)]
        if sizes:
            found.append(PassedOver(what, len(sizes), sum(sizes)))
    return found


def check_folder(folder: Folder, config: Config, draft: bool = True) -> None:
    """ValueError that names the first tensors that are missing, unknown, or of another dtype or shape than the table says."""
    want = {name: (s.dtype, shape) for s in param_specs(config) for name, shape in s.released()}
    skip = VISION if config.vision else ()
    have = {n: e for n, e in folder.entries.items() if not n.startswith(skip)}
    missing = [n for n in want if n not in have and (draft or not n.startswith(DRAFT))]
    unknown = [n for n in have if n not in want]
    if missing or unknown:
        raise ValueError(f"{folder.path}: {len(missing)} tensors missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}")
    for name, entry in have.items():
        dtype, shape = want[name]
        if (entry.torch_dtype, tuple(entry.shape)) != (dtype, shape):
            raise ValueError(f"{folder.path}: {name} is {entry.torch_dtype} {list(entry.shape)}, the table says {dtype} {list(shape)}")


def read_leaf(folder: Folder, spec: ParamSpec) -> Tensor:
    """One tensor of the table; a stack is read expert by expert into one buffer."""
    if not spec.stacked:
        tensor = folder.read(spec.name)
    else:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        for e, (name, _) in enumerate(spec.released()):
            folder.read(name, tensor[e])
    check_values(spec.name, tensor)
    return tensor


def load_params(directory: str | Path, *, numerics: Numerics | None = None, draft: bool = True) -> Params:
    """The parameters of a folder in the released layout, every tensor in its stored dtype.

    directory holds config.json, the shards with their index and, for a model with Engram, tokenizer.json. With draft=False the draft head
    is passed over. Raises ValueError naming tensor and file for anything missing, unknown, or of the wrong dtype, shape or value.
    """
    directory = Path(directory)
    config = Config.from_json(directory / "config.json")
    folder = open_folder(directory)
    check_folder(folder, config, draft)
    known = map_from_tokenizer(config, directory / "tokenizer.json") if config.engram_layer_ids else None
    return build_params(config, numerics or Numerics(), lambda s: read_leaf(folder, s), known, draft)


def init_params(
    config: Config, seed: int, token_map: Tensor | None = None, *, numerics: Numerics | None = None, draft: bool = True
) -> Params:
    """Parameters by the weight recipe (docs/recipe.md): bytes that depend on tensor name and seed only.

    token_map [vocab]: the Engram token map; without one, id modulo engram_compressed_vocab_size with the pad id kept.
    """
    known: EngramMap | None = None
    if config.engram_layer_ids:
        known = engram_map(config, default_token_map(config) if token_map is None else torch.as_tensor(token_map))
    return build_params(config, numerics or Numerics(), lambda s: recipe_leaf(s, seed), known, draft)


def recipe_leaf(spec: ParamSpec, seed: int) -> Tensor:
    """One tensor of the table by the recipe; a stack is made expert by expert."""
    made = [recipe.generate(name, spec.dtype, shape, seed) for name, shape in spec.released()]
    return torch.stack(made) if spec.stacked else made[0]


def released_tensors(params: Params) -> Iterator[tuple[str, Tensor]]:
    """(released name, tensor) of every parameter, in the order of the table."""
    tensors = leaves(replace(params, engram_map=None))
    for spec, tensor in zip(param_specs(params.config, params.draft is not None), tensors, strict=True):
        for e, (name, _) in enumerate(spec.released()):
            yield name, tensor[e] if spec.stacked else tensor


def save_params(params: Params, directory: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes config.json, shards and index in the released layout; the bytes of every tensor are kept. The tokenizer is not written.

    Raises ValueError for parameters without their draft head: their config announces it, so that the folder could not be loaded.
    """
    if params.draft is None and params.config.num_nextn_predict_layers:
        raise ValueError("params: loaded with draft=False; the folder would lack the tensors mtp.* that its config.json announces")
    directory = Path(directory)
    write_folder(directory, released_tensors(params), shard_bytes)
    text = json.dumps(params.config.to_dict(), indent=2, ensure_ascii=False)
    part = directory / "config.json.part"
    part.write_text(text, encoding="utf-8")
    os.replace(part, directory / "config.json")
