# SPDX-License-Identifier: Apache-2.0
"""One table for every tensor: a field's annotation is its dtype and logical axes, `at` its checkpoint name.

`BF16[Tensor, "vocab dim"]` is one tensor. `Annotated[Fp8, "heads*head_dim q_lora"]` is a quantized weight: a tensor of codes and one
of scales. An axis `a*b` is two logical axes in one dimension, the outer one first: that is the one which sharding may cut. The shape
checker cannot bind such an axis, so a plain tensor that has one is `Annotated[F32[Tensor, "mixes flat"], "mixes copies*dim"]`.
"""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import prod
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import torch
from torch import Tensor

from v41.spec.types import BF16, E4M3, E8M0, F32, I8


@dataclass(frozen=True)
class Fp8:
    """e4m3 codes with one power-of-two scale per 32 x 32 tile: value = code * scale of its tile."""

    weight: E4M3[Tensor, "out in"]
    scale: E8M0[Tensor, "out_tiles in_tiles"]


@dataclass(frozen=True)
class Fp8Rows:
    """e4m3 codes with one power-of-two scale per row and 32 columns."""

    weight: E4M3[Tensor, "rows in"]
    scale: E8M0[Tensor, "rows in_blocks"]


@dataclass(frozen=True)
class Fp4:
    """Stacked e2m1 weights, two codes a byte (low nibble: even column), one power-of-two scale per row and 32 columns."""

    weight: I8[Tensor, "*stack out half_in"]
    scale: E8M0[Tensor, "*stack out in_blocks"]


@dataclass(frozen=True)
class Tiled:
    """Values of a weight in the order in which a kernel reads them: element [b, p, t, j] is row b * columns + j, column 128 t + p.

    Zeros stand for columns from `inner` on. `scale` is that of the checkpoint's codes, with which they come back, or None for a weight
    that is stored as its values (docs/kernels.md 3).
    """

    weight: BF16[Tensor, "blocks lanes tiles columns"] | F32[Tensor, "blocks lanes tiles columns"]
    scale: E8M0[Tensor, "out_tiles in_tiles"] | None
    inner: int = field(metadata={"static": True})


@dataclass(frozen=True)
class Folded:
    """A weight as e4m3 codes of at most 240 and one power of two for `rows` output rows: value = code * scale of its group.

    240 is the largest code of the e4m3 with infinities, so both kinds of hardware read the same value. `blocks` are the scales of the checkpoint,
    with which its bytes come back, or None where they were dropped; `stored` names the checkpoint's form.
    """

    weight: E4M3[Tensor, "*stack out in"]
    scale: F32[Tensor, "*stack groups"]
    blocks: E8M0[Tensor, "*stack out_blocks in_blocks"] | None
    rows: int = field(metadata={"static": True})
    stored: str = field(metadata={"static": True})


# Where weights are kept as their values, a bfloat16 tensor stands for a quantized weight. Its axes are not bound: a primitive takes several weights.
Fp8Like = Fp8 | Folded | Tiled | BF16[Tensor, "_out _in"]
PlainLike = Tiled | BF16[Tensor, "out in"]
Fp4Like = Fp4 | Folded | BF16[Tensor, "... _out _in"]


# What a stored dimension counts: weight dims and scale dims, each as the divisor of the logical size.
LAYOUT: dict[type, tuple[tuple[torch.dtype, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]]] = {
    Fp8: ((torch.float8_e4m3fn, (1, 1)), (torch.float8_e8m0fnu, (32, 32))),
    Fp8Rows: ((torch.float8_e4m3fn, (1, 1)), (torch.float8_e8m0fnu, (1, 32))),
    Fp4: ((torch.int8, (1, 1, 2)), (torch.float8_e8m0fnu, (1, 1, 32))),
}


class Dim(NamedTuple):
    """One stored dimension: its logical axes, outermost first, how many logical elements one stored element covers, and the axes' sizes."""

    axes: tuple[str, ...]
    per: int = 1
    sizes: tuple[int, ...] = ()


class ParamSpec(NamedTuple):
    """One tensor of the table. `{experts}` in a name: one checkpoint tensor per index of the first dimension."""

    name: str
    dtype: torch.dtype
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]

    @property
    def stacked(self) -> bool:
        return "{experts}" in self.name

    def released(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every checkpoint tensor behind this one."""
        if not self.stacked:
            yield self.name, self.shape
        else:
            for e in range(self.shape[0]):
                yield self.name.replace("{experts}", str(e)), self.shape[1:]


def at(name: str) -> Any:
    """A field's checkpoint name, appended to the name of what holds it."""
    return field(metadata={"at": name})


def static() -> Any:
    """A field that is structure, not data."""
    return field(metadata={"static": True})


def parse_axes(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(dim.split("*")) for dim in text.split())


def spec_of(name: str, dtype: torch.dtype, axes: str, sizes: Mapping[str, int], per: tuple[int, ...] = ()) -> ParamSpec:
    """The table entry of one tensor; sizes that do not divide are rounded up, as the release does."""
    counts = per or (1,) * len(axes.split())
    dims = tuple(Dim(a, p, tuple(sizes[n] for n in a)) for a, p in zip(parse_axes(axes), counts, strict=True))
    shape = tuple(-(-prod(d.sizes) // d.per) for d in dims)
    return ParamSpec(name, dtype, dims, shape)


def without_none(kind: Any) -> Any:
    """X of `X | None`; anything else as it is."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(a for a in get_args(kind) if a is not type(None))
    return kind


def field_specs(kind: Any, name: str, sizes: Mapping[str, int]) -> list[ParamSpec]:
    """The tensors behind one field that holds tensors: one, or codes and scales."""
    if get_origin(kind) is Annotated:
        cls, axes = get_args(kind)
        if cls not in LAYOUT:
            return [spec_of(name, getattr(torch, cls.dtypes[0]), axes, sizes)]
        (code, per_code), (scale, per_scale) = LAYOUT[cls]
        return [spec_of(f"{name}.weight", code, axes, sizes, per_code), spec_of(f"{name}.scale", scale, axes, sizes, per_scale)]
    return [spec_of(name, getattr(torch, kind.dtypes[0]), kind.dim_str, sizes)]


def holds_tensors(kind: Any) -> bool:
    return get_origin(kind) is Annotated or hasattr(kind, "dim_str")


def parts(cls: type) -> Iterator[tuple[str, Any, str]]:
    """(field name, kind without None, checkpoint name) of every field that stands in the checkpoint."""
    for f in fields(cls):
        if "at" in f.metadata:
            yield f.name, without_none(f.type), f.metadata["at"]


def is_part(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)
