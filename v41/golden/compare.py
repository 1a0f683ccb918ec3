# SPDX-License-Identifier: Apache-2.0
"""Two golden folders, or one and a fresh run of it: the first tensor that differs, and how far every one is apart."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from v41.golden.folder import Golden
from v41.golden.make import compute
from v41.golden.metrics import Difference, compare
from v41.params_io import init_params, load_params, tensor_digests, weights_digest
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.params import Params

# The order in which a layer computes its taps.
ORDER = "engram_out attn_in candidates index_score topk_idxs attn_out route_weights route_experts ffn_out h_out pre_mix_out".split()
NAME = re.compile(r"(?:after_(prefill|decode)\.)?(?:step(\d+)\.)?(?:(layers|mtp)\.(\d+)\.)?(.*)")
NO_ROW = {"topk_idxs": -1, "index_score": -float("inf"), "candidates": False}
PARTS = ("prefill", "decode", "caches", "outputs")


def computed_at(part: str, name: str) -> tuple[Any, ...]:
    """Sorts tensors by when they are computed, so that the first difference is the cause of the others."""
    after, step, kind, layer, rest = NAME.fullmatch(name).groups()
    place = {"layers": 1, "mtp": 3, None: 0 if rest == "engram_hash_ids" else 2}[kind]
    inner = ORDER.index(rest) if rest in ORDER else len(ORDER)
    return PARTS.index(part), after == "decode", int(step or -1), place, int(layer or 0), inner, rest


def common(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """(part, name) in both, in order of computation."""
    both = [(p, n) for p in PARTS for n in a.get(p, {}) if n in b.get(p, {})]
    return sorted(both, key=lambda pn: computed_at(*pn))


def one_sided(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> list[str]:
    """`part/name` of the tensors that only one side has."""
    names = [{f"{p}/{n}" for p, ns in side.items() for n in ns} for side in (a, b)]
    return sorted(names[0] ^ names[1])


def differences(a: Any, b: Any, listed: list[tuple[str, str]], tolerance: float) -> Iterator[Difference]:
    """The difference of every listed tensor; a and b give one by (part, name)."""
    names = set(listed)
    for part, name in listed:
        scores = None
        beside = (part, name.removesuffix("topk_idxs") + "index_score")
        if name.endswith("topk_idxs") and beside in names:
            scores = b(*beside)
        found = compare(name, *same_width(name, a(part, name), b(part, name)), tolerance, scores)
        yield Difference(f"{part}/{name}", found.kind, found.status, found.worst, found.numbers)


def same_width(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The narrower of two lists over compressed rows filled up with what stands for no row: regimes and capacities differ in columns only."""
    neutral = NO_ROW.get(name.rpartition(".")[2])
    if neutral is None or a.dtype != b.dtype or a.shape[:-1] != b.shape[:-1]:
        return a, b
    width = max(a.shape[-1], b.shape[-1])
    a, b = (functional.pad(t, (0, width - t.shape[-1]), value=neutral) for t in (a, b))
    return a, b


def diff(a: Golden, b: Golden, tolerance: float) -> list[Difference]:
    """Every tensor that both folders have; ValueError when there is none."""
    listed = common(a.manifest["tensors"], b.manifest["tensors"])
    if not listed:
        raise ValueError(f"{a.path} and {b.path} have no tensor in common: nothing to compare")
    return list(differences(a.read, b.read, listed, tolerance))


def params_of(golden: Golden, checkpoint: Path | None) -> Params:
    """The parameters that a folder was made with: from a checkpoint, or by the recipe that its manifest names. ValueError when they are others."""
    made, numerics = golden.manifest["weights"], Numerics(**golden.manifest["numerics"])
    draft = golden.manifest["run"]["draft"]
    if checkpoint is not None:
        params = load_params(checkpoint, numerics=numerics, draft=draft)
    elif made["recipe"] is not None:
        known = golden.manifest.get("token_map")
        token_map = None if known is None else torch.tensor(known)
        params = init_params(Config.from_dict(golden.manifest["config"]), made["recipe"]["seed"], token_map, numerics=numerics, draft=draft)
    else:
        raise ValueError(f"{golden.path}: made from a checkpoint that no recipe gives; name it as the second argument")
    if weights_digest(params) != made["sha256"]:
        now, before = tensor_digests(params), made.get("read", {}).get("whole", {})
        names = [n for n in now if before.get(n) != now[n]]
        raise ValueError(
            f"{golden.path}: made with other weights (sha256 {made['sha256'][:16]}) than {checkpoint or 'its recipe gives'}; "
            f"{len(names)} tensors differ: {', '.join(names[:5])}"
        )
    return params


def check(golden: Golden, checkpoint: Path | None, tolerance: float) -> list[Difference]:
    """Recomputes a folder, its own tokens fed to the decode steps, and compares every tensor."""
    params, run = params_of(golden, checkpoint), golden.manifest["run"]
    stored = golden.part("outputs")
    forced = stored["tokens"][:, :-1] if run["steps"] else None
    parts = compute(params, stored["prompt"], stored["lengths"], run["steps"], run["taps"], forced)
    missing = one_sided(parts, golden.manifest["tensors"])
    if missing:
        raise ValueError(f"{golden.path}: {len(missing)} tensors stand on one side only, {missing[0]} first")

    def fresh(part: str, name: str) -> Tensor:
        return parts[part][name]

    return list(differences(fresh, golden.read, common(parts, golden.manifest["tensors"]), tolerance))
