# SPDX-License-Identifier: Apache-2.0
"""A call of a primitive as tensors and a text: the text holds everything but the tensors, and so is a constant of a graph.

Tensors stand in the order of the arguments; weights in a number format, settings of numerics and samples are records of `KINDS`.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.kernels.experts_layout import ExpertTiles, SharedTiles
from v41.spec.numerics import Numerics
from v41.spec.ops.choose import Sample
from v41.spec.table import Folded, Fp4, Fp8, Fp8Rows, Tiled

KINDS: dict[str, type] = {k.__name__: k for k in (Fp8, Fp8Rows, Fp4, Folded, Tiled, ExpertTiles, SharedTiles, Numerics, Sample)}
# 8-bit floats cross the edge of a graph as bytes: what the bytes of a field are.
BYTES: dict[tuple[str, str], torch.dtype] = {
    **{(kind, "weight"): torch.float8_e4m3fn for kind in ("Fp8", "Fp8Rows", "Folded")},
    **{(kind, "scale"): torch.float8_e8m0fnu for kind in ("Fp8", "Fp8Rows", "Fp4", "Tiled")},
    ("Folded", "blocks"): torch.float8_e8m0fnu,
}


def written(value: Any, tensors: list[Tensor]) -> Any:
    """A value as JSON; its tensors are appended to `tensors`. TypeError for what has no form here."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return [written(v, tensors) for v in value]
    record: Any = value
    name = type(value).__name__
    if KINDS.get(name) is not type(value):
        raise TypeError(f"an argument of a primitive is a {name}; a graph holds tensors, numbers, text, tuples and {', '.join(KINDS)}")
    return {"is": name, **{f.name: written(getattr(record, f.name), tensors) for f in fields(record)}}


def encode(args: Sequence[Any], named: dict[str, Any]) -> tuple[list[Tensor], str]:
    """(tensors, text) of a call."""
    tensors: list[Tensor] = []
    call = [written(tuple(args), tensors), {n: written(v, tensors) for n, v in sorted(named.items())}]
    return tensors, json.dumps(call, separators=(",", ":"))


def read(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `written`."""
    if isinstance(value, list):
        return tuple(read(v, tensors) for v in value)
    if not isinstance(value, dict):
        return value
    if "is" in value:
        name = value["is"]
        return KINDS[name](**{n: as_floats(name, n, read(v, tensors)) for n, v in value.items() if n != "is"})
    return tensors[value["tensor"]] if "tensor" in value else getattr(torch, value["dtype"])


def as_floats(kind: str, field: str, value: Any) -> Any:
    """Bytes of an 8-bit float as what they are."""
    carried = (kind, field) in BYTES and isinstance(value, Tensor) and value.dtype == torch.uint8
    return value.view(BYTES[kind, field]) if carried else value


def decode(tensors: Sequence[Tensor], call: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of a call."""
    args, named = json.loads(call)
    return read(args, tensors), {n: read(v, tensors) for n, v in named.items()}
