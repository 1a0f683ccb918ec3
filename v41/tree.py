# SPDX-License-Identifier: Apache-2.0
"""Pytrees of frozen dataclasses. A field is static (metadata `static`), None, a tensor, or another tree.

torch.utils._pytree takes None for a leaf; here an absent part has no leaves, so that `map` never sees it.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree


def is_static(field: Any) -> bool:
    """Whether a dataclass field is part of the structure, not of the data."""
    return bool(field.metadata.get("static"))


def paths(node: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of every leaf in declaration order, `layers.3.attn.wq_a.weight` for example."""
    if isinstance(node, torch.Tensor):
        yield prefix, node
    elif is_dataclass(node):
        for f in fields(node):
            if not is_static(f):
                yield from paths(getattr(node, f.name), f"{prefix}.{f.name}" if prefix else f.name)
    elif isinstance(node, tuple):
        for i, item in enumerate(node):
            yield from paths(item, f"{prefix}.{i}" if prefix else str(i))
    elif node is not None:
        raise TypeError(f"{prefix}: a {type(node).__name__} is no tree")


def leaves(node: Any) -> list[torch.Tensor]:
    """The tensors of a tree in declaration order."""
    return [leaf for _, leaf in paths(node)]


def map(fn: Callable[..., Any], node: Any, *others: Any) -> Any:
    """The tree of fn(leaf, *leaves of the others at the same place)."""
    if isinstance(node, torch.Tensor):
        return fn(node, *others)
    if node is None:
        return None
    if isinstance(node, tuple):
        return tuple(map(fn, item, *(o[i] for o in others)) for i, item in enumerate(node))
    changed = {f.name: map(fn, getattr(node, f.name), *(getattr(o, f.name) for o in others)) for f in fields(node) if not is_static(f)}
    return replace(node, **changed)


def register(*classes: type) -> None:
    """Makes dataclasses pytrees for torch: tensors and subtrees are children, static fields and Nones are structure."""
    for cls in classes:
        names = [f.name for f in fields(cls) if not is_static(f)]
        static = [f.name for f in fields(cls) if is_static(f)]

        def flatten(value: Any, names: list[str] = names, static: list[str] = static) -> tuple[list[Any], Any]:
            present = tuple(n for n in names if getattr(value, n) is not None)
            return [getattr(value, n) for n in present], (present, tuple(getattr(value, n) for n in static))

        def unflatten(children: Any, context: Any, cls: type = cls, names: list[str] = names, static: list[str] = static) -> Any:
            given = dict(zip(context[0], children, strict=True)) | dict(zip(static, context[1], strict=True))
            return cls(**{n: given.get(n) for n in [*names, *static]})

        _pytree.register_pytree_node(cls, flatten, unflatten)
