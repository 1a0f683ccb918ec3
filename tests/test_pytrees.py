# SPDX-License-Identifier: Apache-2.0
"""Parameters, caches and results are pytrees for torch, with the same leaves as v41.tree and their static fields as structure."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import torch
from torch.utils import _pytree

import v41
from v41 import pytrees, tree
from v41.spec import cache, draft, handed, model, params, slots, table, verify
from v41.spec.ops import choose

TINY = Path(__file__).parent.parent / "checkpoints" / "tiny"


def holds_tensors(cls: type) -> bool:
    return any(any(w in str(f.type) for w in ("Tensor", "Annotated", "tuple")) or is_dataclass(f.type) for f in fields(cls) if not tree.is_static(f))


def test_every_value_class_of_the_spec_is_registered() -> None:
    known = {*pytrees.WEIGHTS, *pytrees.PARTS, *pytrees.WHOLE, *pytrees.STATE, *pytrees.RESULTS}
    modules = (cache, choose, draft, handed, model, params, slots, table, verify)
    found = {c for m in modules for c in vars(m).values() if isinstance(c, type) and is_dataclass(c) and c.__module__ == m.__name__}
    assert {c for c in found if holds_tensors(c)} == known


def test_torch_sees_the_same_leaves_and_gives_the_same_value_back() -> None:
    p = v41.load_params(TINY)
    out, c = v41.step(p, v41.init_cache(p, 2, 8), torch.zeros(2, 3, dtype=torch.int64))
    boundary, _ = v41.embed(p, c, torch.zeros(2, 1, dtype=torch.int64))
    for value in (p, c, boundary, out):
        leaves, structure = _pytree.tree_flatten(value)
        assert [id(a) for a in leaves] == [id(b) for b in tree.leaves(value)]
        again = _pytree.tree_unflatten(leaves, structure)
        assert type(again) is type(value) and [n for n, _ in tree.paths(again)] == [n for n, _ in tree.paths(value)]
        for f in fields(value):
            assert not tree.is_static(f) or getattr(again, f.name) == getattr(value, f.name)
