# SPDX-License-Identifier: Apache-2.0
"""Weights kept as their values: bfloat16 tensors in the place of fp8 and fp4 ones (docs/performance.md 2)."""

import warnings
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from v41.spec.ops.quant import dequantize
from v41.spec.params import Params
from v41.spec.table import Fp4, Fp8
from v41.tree import is_static

RESIDENT = ("bytes", "bf16")
LEAST = 127 - 117  # the smallest scale byte with which every code is a bfloat16 number


@dataclass(frozen=True)
class Kept:
    """What a conversion did: tensors that became values, and the names of those that stayed codes because a scale lies below 2^-117."""

    converted: int
    codes: tuple[str, ...]


def checked_resident(resident: str) -> str:
    """The value; ValueError where it is none of `RESIDENT`."""
    if resident not in RESIDENT:
        raise ValueError(f"resident: {resident!r} is not one of {RESIDENT}")
    return resident


def exact_values(w: Fp8 | Fp4) -> Tensor | None:
    """The values of a weight in bfloat16, or None where one of them is none. A stack goes matrix by matrix, so that little is held twice."""
    scale = w.scale.view(torch.uint8)
    if scale.numel() and (int(scale.min()) < LEAST or int(scale.max()) == 0xFF):
        return None
    if w.weight.ndim == 2:
        return dequantize(w, torch.bfloat16)
    return torch.stack([dequantize(Fp4(c, s), torch.bfloat16) for c, s in zip(w.weight, w.scale, strict=True)])


def as_values(node: Any, prefix: str = "") -> tuple[Any, Kept]:
    """A tree of parameters with every weight that is exact in bfloat16 as such a tensor. Tables that are only looked up in keep their codes."""
    if isinstance(node, Fp8 | Fp4):
        values = exact_values(node)
        return (node, Kept(0, (prefix,))) if values is None else (values, Kept(1, ()))
    if isinstance(node, tuple):
        items = [as_values(item, f"{prefix}.{i}") for i, item in enumerate(node)]
        return tuple(m for m, _ in items), joined([k for _, k in items])
    if not is_dataclass(node) or isinstance(node, type):
        return node, Kept(0, ())
    made = {f.name: as_values(getattr(node, f.name), f"{prefix}.{f.name}".lstrip(".")) for f in fields(node) if not is_static(f)}
    return replace(node, **{n: m for n, (m, _) in made.items()}), joined([k for _, k in made.values()])


def kept_as(resident: str, params: Params) -> Params:
    """The parameters as `load_params` gives them; a warning names weights that are not exact in bfloat16 and so keep their codes."""
    if resident == "bytes":
        return params
    params, kept = as_values(params)
    if kept.codes:
        warnings.warn(f"resident: {len(kept.codes)} weights keep their codes, with scales below 2^-117: {list(kept.codes[:3])}", stacklevel=3)
    return params


def joined(kept: list[Kept]) -> Kept:
    return Kept(sum(k.converted for k in kept), tuple(name for k in kept for name in k.codes))
