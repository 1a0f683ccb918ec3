# SPDX-License-Identifier: Apache-2.0
"""Parameters from a checkpoint folder or from the recipe, and back."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from v41 import recipe
from v41.checkpoint import Folder, check_values, open_folder, tensor_bytes, write_folder
from v41.engram_map import default_token_map, engram_map, map_from_tokenizer
from v41.released import DRAFT, VISION, findings
from v41.resident import checked_resident, kept_as
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import EngramMap, Params, build_params, param_specs
from v41.spec.table import ParamSpec
from v41.tree import leaves

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
    """ValueError that names the first tensors that are missing, unknown, or of another dtype or shape than the table says, and their file.

    With draft=False the draft head, and always the vision part, may be absent, but only as a whole.
    """
    found = findings(folder, config, draft)
    if found.missing or found.unknown:
        stray = [f"{n} in {folder.files[n]}" for n in found.unknown[:3]]
        raise ValueError(
            f"{folder.path}: {len(found.missing)} tensors missing {list(found.missing[:3])}, {len(found.unknown)} unknown {stray}; "
            f"{config.num_hidden_layers} layers by its config.json"
        )
    for name, reason in found.wrong:
        raise ValueError(f"{folder.path / folder.files[name]}: {name} is {reason}")


def read_checked(folder: Folder, name: str, out: Tensor | None = None) -> Tensor:
    """One released tensor; ValueError with file, tensor and index for a value that none may have."""
    tensor = folder.read(name, out)
    check_values(f"{folder.path / folder.files[name]}: {name}", tensor)
    return tensor


def read_leaf(folder: Folder, spec: ParamSpec) -> Tensor:
    """One tensor of the table; a stack is read expert by expert into one buffer."""
    if not spec.stacked:
        return read_checked(folder, spec.name)
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    for e, (name, _) in enumerate(spec.released()):
        read_checked(folder, name, tensor[e])
    return tensor


def folder_map(config: Config, directory: Path, token_map: Tensor | None = None) -> EngramMap | None:
    """What the Engram hash needs, from the folder's tokenizer.json or a token map given instead; None for a model without Engram."""
    if not config.engram_layer_ids:
        return None
    return map_from_tokenizer(config, directory / "tokenizer.json") if token_map is None else engram_map(config, torch.as_tensor(token_map))


def checked_numerics(value: Numerics | None) -> Numerics:
    """The value, `faithful` for None; ValueError for anything else, a regime's name for example."""
    if value is not None and not isinstance(value, Numerics):
        raise ValueError(f"numerics: {value!r} is a {type(value).__name__}, not v41.Numerics")
    return value or Numerics()


def load_params(
    directory: str | Path, *, numerics: Numerics | None = None, draft: bool = True, token_map: Tensor | None = None, resident: str = "bytes"
) -> Params:
    """The parameters of a folder in the released layout, every tensor in its stored dtype, or (resident="bf16") fp8 and fp4 weights as values.

    directory holds config.json, the shards with their index and, for a model with Engram, tokenizer.json (or token_map [vocab] is given).
    With draft=False the draft head is neither read nor needed; what is passed over: `v41.inspect_folder`, before anything is read:
    `v41.read_plan`. Raises ValueError naming tensor and file for anything missing, unknown, or of the wrong dtype, shape or value.
    """
    directory, resident = Path(directory), checked_resident(resident)
    config = Config.from_json(directory / "config.json")
    folder = open_folder(directory)
    check_folder(folder, config, draft)
    known = folder_map(config, directory, token_map)
    return kept_as(resident, build_params(config, checked_numerics(numerics), lambda s: read_leaf(folder, s), known, draft))


def init_params(
    config: Config,
    seed: int,
    token_map: Tensor | None = None,
    *,
    numerics: Numerics | None = None,
    draft: bool = True,
    resident: str = "bytes",
) -> Params:
    """Parameters by the weight recipe (docs/recipe.md): bytes that depend on tensor name and seed only. `resident` as for `load_params`.

    token_map [vocab]: the Engram token map; without one, id modulo engram_compressed_vocab_size with the pad id kept.
    """
    known: EngramMap | None = None
    resident = checked_resident(resident)
    if config.engram_layer_ids:
        known = engram_map(config, default_token_map(config) if token_map is None else torch.as_tensor(token_map))
    return kept_as(resident, build_params(config, checked_numerics(numerics), lambda s: recipe_leaf(s, seed), known, draft))


def recipe_leaf(spec: ParamSpec, seed: int) -> Tensor:
    """One tensor of the table by the recipe; a stack is made expert by expert."""
    made = [recipe.generate(name, spec.dtype, shape, seed) for name, shape in spec.released()]
    return torch.stack(made) if spec.stacked else made[0]


def released_tensors(params: Params) -> Iterator[tuple[str, Tensor]]:
    """(released name, tensor) of every parameter, in the order of the table. ValueError where weights are not kept as the checkpoint's bytes."""
    tensors, specs = leaves(replace(params, engram_map=None)), list(param_specs(params.config, params.draft is not None))
    if [t.dtype for t in tensors] != [s.dtype for s in specs]:
        raise ValueError(
            f"params: {len(tensors)} tensors where the checkpoint has {len(specs)}: weights are kept as values or in a device's form, from which "
            'the bytes of codes and scales do not come back; load them with resident="bytes"'
        )
    return ((name, t[e] if s.stacked else t) for s, t in zip(specs, tensors, strict=True) for e, (name, _) in enumerate(s.released()))


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


def weights_digest(params: Params) -> str:
    """SHA-256 over the released name, dtype, shape and bytes of every parameter, in the order of the table."""
    total = hashlib.sha256()
    for name, tensor in released_tensors(params):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor_bytes(name, tensor))
    return total.hexdigest()


def tensor_digests(params: Params) -> dict[str, str]:
    """SHA-256 of the bytes of every parameter by its released name."""
    return {name: hashlib.sha256(tensor_bytes(name, tensor)).hexdigest() for name, tensor in released_tensors(params)}
