# SPDX-License-Identifier: Apache-2.0
"""Weights as the kernels read them, made once at load, and back byte for byte (docs/kernels.md 3)."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from v41 import tree
from v41.backends.neuron.fold import fold, unfold
from v41.backends.neuron.kernels.folded import one_block
from v41.spec.ops.quant import BLOCK, dequantize
from v41.spec.params import Compressor, DraftOut, Gate, Hyper, MoE, Params
from v41.spec.table import Folded, Fp8, Tiled

LANES, WIDEST, CORES = 128, 2048, 2
GROUP = 128  # output rows with one power of two where a weight folds
# Weights that are stored as their values and that a product of many columns reads.
PLAIN: dict[type, tuple[str, ...]] = {
    **{Compressor: ("wkv", "wgate"), DraftOut: ("markov_head",), Params: ("head",)},
    **{Gate: ("weight",), Hyper: ("fn",)},
}


def prepare(params: Params) -> Params:
    """params with every dense weight in the form that its kernel reads; the rest is shared with params, which does not change.

    A quantized weight whose codes fold exactly to codes of at most 240 with one power of two for 128 output rows stays at one byte (`Folded`);
    any other becomes its values, exact in bfloat16, in tiles (`Tiled`). The spec's definitions take both.
    """
    return _changed(params, lambda w: dense(w) if isinstance(w, Fp8) else None, tiled)


def restore(params: Params) -> Params:
    """The checkpoint's parameters from prepared ones, byte for byte."""
    return _changed(params, lambda w: unfold(w) if isinstance(w, Folded) else codes(w) if isinstance(w, Tiled) else None, lambda w: w)


def dense(w: Fp8) -> Folded | Tiled:
    """One quantized weight."""
    made, _ = fold(w, min(GROUP, w.weight.shape[0]))
    return made if isinstance(made, Folded) else tiled(w)


def tiled(w: Fp8 | Tensor) -> Tiled:
    """The values of a weight, exact in bfloat16, in blocks of at most 2048 columns of the product, an even number of blocks where that divides.

    A float32 tensor stays float32, in one block. ValueError where a value is no bfloat16: a scale below 2^-117 or a product above the largest bfloat16.
    """
    if isinstance(w, Tensor) and w.dtype == torch.float32:
        return one_block(w)
    values = dequantize(w, torch.bfloat16)
    if not values.is_meta and not (values.isfinite().all() and torch.equal(values.float(), dequantize(w, torch.float32))):
        raise ValueError(f"prepare: a weight {tuple(values.shape)} has values that bfloat16 does not hold")
    out, inner = values.shape
    blocks = CORES * -(-out // (CORES * WIDEST))
    blocks = blocks if out % blocks == 0 else CORES if out % CORES == 0 else 1
    lanes = functional.pad(values, (0, -inner % LANES)).unflatten(1, (-1, LANES)).unflatten(0, (blocks, -1))
    return Tiled(lanes.permute(0, 3, 2, 1).contiguous(), w.scale if isinstance(w, Fp8) else None, inner)


def codes(w: Tiled) -> Fp8 | Tensor:
    """The stored form of a tiled weight: a value over its scale is the code, and zeros keep their sign."""
    if w.scale is None:
        return dequantize(w, w.weight.dtype).contiguous()
    values = dequantize(w, torch.float64)
    scale = w.scale.double().repeat_interleave(BLOCK, 0)[: values.shape[0]].repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    return Fp8((values / scale).float().to(torch.float8_e4m3fn).contiguous(), w.scale)


def _changed(node: Any, weight: Callable[[Any], Any], plain: Callable[[Any], Any]) -> Any:
    """The tree with weight(part) in place of every part for which that is not None, and plain(tensor) at the tensors of PLAIN."""
    found = weight(node)
    if found is not None:
        return found
    if isinstance(node, tuple):
        return tuple(_changed(item, weight, plain) for item in node)
    if isinstance(node, MoE):  # its experts have a layout of their own
        return replace(node, gate=_changed(node.gate, weight, plain))
    if not is_dataclass(node):
        return node
    named, parts = PLAIN.get(type(node), ()), {f.name: getattr(node, f.name) for f in fields(node) if not tree.is_static(f)}
    made = {n: plain(p) if n in named and isinstance(p, Tensor) else _changed(p, weight, plain) for n, p in parts.items()}
    held: Any = node
    return replace(held, **made)
