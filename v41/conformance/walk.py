# SPDX-License-Identifier: Apache-2.0
"""A pack as a sequence of calls, each with the state that it starts from; states are put together from stored rows, nothing is computed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41 import api, tree
from v41.cache_io import take
from v41.checkpoint import read_header, read_tensor
from v41.conformance.judge import Stored
from v41.golden.compare import params_of
from v41.golden.folder import Golden, digest
from v41.golden.metrics import same_bits
from v41.golden.pack import open_pack
from v41.golden.pack_block import block_state
from v41.golden.pack_block_make import rebuilt
from v41.golden.pack_noise import EXACT, TRIPS, decode
from v41.golden.pack_rows import with_draft_rows, with_rows
from v41.spec.cache import Cache
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import Params

INPUTS = ("tokens", "valid", "token", "length", "sequences")


@dataclass(frozen=True)
class Opened:
    """A pack with the parameters that it was made with. held: scenarios read so far, their states and calls."""

    pack: Golden
    params: Params
    held: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def regime(self) -> str:
        n = self.params.numerics
        return f"{n.regime}-{n.dtype}" if n.regime == "exact" else n.regime

    def scenario(self, name: str) -> dict[str, Any]:
        return next(s for s in self.pack.manifest["scenarios"] if s["name"] == name)


@dataclass(frozen=True)
class Stop:
    """One call of a scenario: what goes in, what is expected, the states before and after it. hidden: of the step before, for drafts."""

    scenario: str
    call: str
    op: str
    taps: bool
    inputs: dict[str, Tensor]
    stored: Stored
    before: Cache
    after: Cache
    hidden: Tensor | None

    @property
    def name(self) -> str:
        return f"{self.scenario}.{self.call}"


def open_with_params(path: str | Path, checkpoint: Path | None) -> Opened:
    """The pack and its parameters, from the recipe or the checkpoint."""
    pack = open_pack(path)
    run, recipe = pack.manifest["run"], pack.manifest["weights"]["recipe"]
    if "block" in run:
        numerics = Numerics(**pack.manifest["numerics"])
        return Opened(pack, rebuilt(Config.from_dict(pack.manifest["config"]), numerics, run["block"], recipe["seed"], run["experts"]))
    return Opened(pack, params_of(pack, checkpoint))


def tensors_of(opened: Opened, scenario: str) -> dict[str, Tensor]:
    """Every tensor of a scenario, its header read once. ValueError for one whose bytes are not those of its digest."""
    key = f"tensors of {scenario}"
    if key not in opened.held:
        file, entries = opened.pack.path / f"{scenario}.safetensors", opened.pack.manifest["tensors"][scenario]
        found = {name: read_tensor(file, name, entry) for name, entry in read_header(file).items()}
        for name, tensor in found.items():
            if digest(tensor) != entries[name]["sha256"]:
                raise ValueError(f"{file}: {name} has other bytes than the manifest's sha256 says")
        opened.held[key] = found
    return opened.held[key]


def stored_of(opened: Opened, scenario: str, call: str) -> tuple[dict[str, Tensor], Stored]:
    """(inputs, expected tensors) of one call."""
    entries = opened.pack.manifest["tensors"][scenario]
    inputs: dict[str, Tensor] = {}
    want: dict[str, Tensor] = {}
    far: dict[str, Tensor] = {}
    for full, tensor in tensors_of(opened, scenario).items():
        name = full.removeprefix(call + ".")
        if name == full:
            continue
        if name.endswith((EXACT, TRIPS)):
            far[name] = decode(tensor, entries[full]["scale"])
        else:
            (inputs if name in INPUTS or name.startswith("in.") else want)[name] = tensor
    return inputs, Stored(want, far, opened.params.config.candidate_block_size)


def start_of(opened: Opened, name: str) -> Cache:
    """The state that a scenario starts from."""
    scenario = opened.scenario(name)
    if scenario["start"] is None:
        return api.init_cache(opened.params, scenario["batch"], opened.pack.manifest["capacity"], slack=opened.pack.manifest["slack"])
    return stops(opened, scenario["start"])[-1].after


def after(op: str, before: Cache, inputs: dict[str, Tensor], want: dict[str, Tensor]) -> Cache:
    """The state behind a call."""
    if op == "step":
        return with_rows(before, inputs["valid"], want)
    if op == "draft":
        return with_draft_rows(before, inputs["valid"], want)
    if op == "verify":
        return api.rewind(with_rows(before, inputs["valid"], want), before.length + want["accepted"] + 1)
    if op == "rewind":
        return api.rewind(before, inputs["length"])
    if op == "take":
        return take(before, inputs["sequences"])
    if op in ("restore", "ranks", "block"):
        return before
    raise ValueError(f"op: {op!r} is not one of step, draft, verify, rewind, take, restore, ranks, block")


def stops(opened: Opened, name: str) -> list[Stop]:
    """Every call of a scenario."""
    if name not in opened.held:
        opened.held[name] = list(_stops(opened, name))
    return opened.held[name]


def _stops(opened: Opened, name: str) -> Iterator[Stop]:
    state, hidden = start_of(opened, name), None
    for call in opened.scenario(name)["calls"]:
        inputs, stored = stored_of(opened, name, call["name"])
        state = block_state(opened.params, opened.pack.manifest["run"]["block"], inputs)[0] if call["op"] == "block" else state
        behind = after(call["op"], state, inputs, dict(stored.want))
        yield Stop(name, call["name"], call["op"], call["taps"], inputs, stored, state, behind, hidden)
        state, hidden = behind, stored.want.get("main_hidden", hidden)


def every_stop(opened: Opened) -> Iterator[Stop]:
    for scenario in opened.pack.manifest["scenarios"]:
        yield from stops(opened, scenario["name"])


def same_state(a: Cache, b: Cache) -> str | None:
    """The first leaf that differs in a byte, sinks left out; None where none does."""
    for (name, x), (_, y) in zip(tree.paths(a), tree.paths(b), strict=True):
        body = slice(None) if x.ndim == 1 else slice(0, -1)
        index = (slice(None), body) if x.ndim > 1 else (slice(None),)
        if x.shape != y.shape or not same_bits(x[index].contiguous(), y[index].contiguous()):
            return name
    return None


def live_of(stop: Stop) -> Tensor:
    """Rows of a step that are real, [batch, rows]."""
    return torch.arange(stop.inputs["tokens"].shape[1]) < stop.inputs["valid"][:, None]
