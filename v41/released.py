# SPDX-License-Identifier: Apache-2.0
"""The released layout as a list: name, dtype and shape of every tensor that a folder with this config may hold, vision included."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from v41.checkpoint import Folder
from v41.checkpoint.header import NAMES
from v41.spec.config import Config
from v41.spec.params import param_specs

VISION = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
DRAFT = "mtp."
VISION_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "patch_size", "downsample_ratio")
# Component of a tensor (docs/checkpoints.md 2): the first pair whose text stands in the name. Draft stages have their own list.
COMPONENTS = (
    ("vision.", "vision tower"),
    ("aligner.", "aligner, image delimiters"),
    ("image_", "aligner, image delimiters"),
    ("attn.compressor.", "compressors"),
    ("attn.indexer.", "indexers"),
    (".attn.", "backbone attention"),
    ("attn_norm.", "block norms"),
    ("ffn_norm.", "block norms"),
    ("ffn.gate.", "router gates"),
    ("ffn.experts.", "routed experts"),
    ("ffn.shared_experts.", "shared experts"),
    ("hc_", "hyper-connections"),
    ("engram.embed.", "engram tables"),
    ("engram.", "engram resident"),
    ("embed.", "token embedding"),
    ("head.", "head, final norm"),
    ("norm.", "head, final norm"),
)
DRAFT_COMPONENTS = (
    ("ffn.experts.", "draft routed experts"),
    ("ffn.shared_experts.", "draft shared experts"),
    (".attn.", "draft attention"),
    ("ffn.gate.", "draft gates, mixes, norms"),
    ("hc_", "draft gates, mixes, norms"),
    ("attn_norm.", "draft gates, mixes, norms"),
    ("ffn_norm.", "draft gates, mixes, norms"),
    ("", "draft heads"),
)


@dataclass(frozen=True)
class Listed:
    """One released tensor: stored dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def as_dict(self, name: str) -> dict[str, Any]:
        return {"name": name, "dtype": NAMES[self.dtype], "shape": list(self.shape)}


@dataclass(frozen=True)
class Findings:
    """What a folder lacks, has too much, or has in another form: tensor names, the last with its reason."""

    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    wrong: tuple[tuple[str, str], ...]


def component(name: str) -> str:
    """The part of the model that a tensor belongs to."""
    rules = DRAFT_COMPONENTS if name.startswith(DRAFT) else COMPONENTS
    return next((part for text, part in rules if text in name), "unknown")


def vision_tensors(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the vision part, all bfloat16; nothing for a config without one."""
    if not config.vision:
        return
    v, out = config.to_dict()["vision_config"], config.hidden_size
    lacks = [key for key in VISION_KEYS if type(v.get(key)) is not int]
    if lacks:
        raise ValueError(f"config: vision_config.{lacks[0]} is {v.get(lacks[0])!r}, not an integer")
    dim, inter, patch = v["hidden_size"], v["intermediate_size"], v["patch_size"]
    yield from ((name, (out,)) for name in ("image_start", "image_end", "image_newline"))
    yield from (("aligner.w1.weight", (out, dim * v["downsample_ratio"] ** 2)), ("aligner.w1.bias", (out,)))
    yield from (("aligner.w2.weight", (out, out)), ("aligner.w2.bias", (out,)))
    yield from (("vision.patch_embed.proj.weight", (dim, 3 * patch * patch)), ("vision.patch_embed.proj.bias", (dim,)))
    yield ("vision.norm.weight", (dim,))
    for b in range(v["num_hidden_layers"]):
        name = f"vision.blocks.{b}."
        yield from ((name + "attn.wqkv.weight", (3 * dim, dim)), (name + "attn.wqkv.bias", (3 * dim,)))
        yield from ((name + "attn.wo.weight", (dim, dim)), (name + "attn.wo.bias", (dim,)))
        yield from ((name + "mlp.w1.weight", (2 * inter, dim)), (name + "mlp.w2.weight", (dim, inter)))
        yield from ((name + "norm1.weight", (dim,)), (name + "norm2.weight", (dim,)))


def released_table(config: Config) -> dict[str, Listed]:
    """Every tensor by name: the text model in the order of its table, then vision."""
    text = {name: Listed(s.dtype, shape) for s in param_specs(config) for name, shape in s.released()}
    return text | {name: Listed(torch.bfloat16, shape) for name, shape in vision_tensors(config)}


def parameters(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Logical parameters of a tensor: two per byte of packed FP4, none for a scale."""
    count = prod(shape)
    return 0 if name.endswith(".scale") else 2 * count if dtype == torch.int8 else count


def optional(name: str, draft: bool) -> str | None:
    """The part that a folder may lack as a whole: vision always, the draft head where it is not wanted; None for all other tensors."""
    if name.startswith(VISION):
        return "vision"
    return "draft head" if name.startswith(DRAFT) and not draft else None


def findings(folder: Folder, config: Config, draft: bool = True) -> Findings:
    """A folder against the table. A part that may be absent must be absent whole: some of its tensors are all of them, or an error."""
    table, have = released_table(config), folder.entries
    present = {optional(name, draft) for name in have}
    missing = tuple(n for n in table if n not in have and optional(n, draft) in present | {None})
    unknown = tuple(n for n in have if n not in table)
    wrong = []
    for name, entry in have.items():
        want = table.get(name)
        if want is not None and (entry.torch_dtype, tuple(entry.shape)) != (want.dtype, want.shape):
            wrong.append((name, f"{entry.dtype} {list(entry.shape)}, the table says {NAMES[want.dtype]} {list(want.shape)}"))
    return Findings(missing, unknown, tuple(wrong))
