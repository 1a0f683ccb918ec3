# SPDX-License-Identifier: Apache-2.0
"""A pack's own tensors brought back in another layout, as a port in another language may write them: each is refused or differs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from v41.checkpoint import write_file
from v41.conformance.results import judge_folder
from v41.conformance.walk import Opened, tensors_of

Tensors = dict[str, Tensor]


def each(ending: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, int], Tensors]:
    """A change of every tensor whose name ends so."""
    return lambda t, rope: {n: change(x).contiguous() if n.endswith(ending) and x.numel() > 1 else x for n, x in t.items()}


def exchanged(t: Tensors, rope: int) -> Tensors:
    """Two layers exchanged."""

    def other(name: str) -> str:
        return name.replace("layers.0.", "layers.X.").replace("layers.1.", "layers.0.").replace("layers.X.", "layers.1.")

    return {n: t[other(n)] if other(n) in t and t[other(n)].shape == x.shape else x for n, x in t.items()}


def halves(t: Tensors, rope: int) -> Tensors:
    """Turned dims as two halves instead of adjacent pairs."""

    def split(x: Tensor) -> Tensor:
        turned = x[..., -rope:]
        return torch.cat((x[..., :-rope], turned[..., 0::2], turned[..., 1::2]), -1)

    return each("window", split)(t, rope)


def swapped_bytes(x: Tensor) -> Tensor:
    """Big-endian."""
    return x.contiguous().view(torch.uint8).unflatten(-1, (-1, x.dtype.itemsize)).flip(-1).flatten(-2).contiguous().view(x.dtype)


def as_float16(x: Tensor) -> Tensor:
    """The bits of float16 numbers, called bfloat16."""
    return x.to(torch.float16).view(torch.bfloat16)


CHANGES: dict[str, Callable[[Tensors, int], Tensors]] = {
    "two layers exchanged": exchanged,
    "turned dims in halves": halves,
    "big-endian": each("attn_out", swapped_bytes),
    "float16 bits": each("attn_out", as_float16),
    "copies and dims exchanged": each("h_out", lambda x: x.mT.reshape(x.shape)),
    "columns reversed": each("ffn_out", lambda x: x.flip(-1)),
    "positions shifted by one": each("h_out", lambda x: x.roll(1, 1)),
    "comb-like matrix transposed": each("pre_mix_out", lambda x: x.flip(-1)),
    "best index first": each("topk_idxs", lambda x: x.flip(-1)),
    "experts counted from one": each("route_experts", lambda x: x + 1),
    "routing weights ascending": each("route_weights", lambda x: x.flip(-1)),
    "compressed rows in reverse": each("compressed", lambda x: x.flip(1)),
    "ids as int64": each("topk_idxs", lambda x: x.long()),
    "logits rounded to bfloat16": each("logits", lambda x: x.bfloat16()),
    "logits of the row before": each("logits", lambda x: x.roll(1, 1)),
    "NaN in one element": each("attn_in", lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 5, torch.nan, x)),
    "one element off by a step": each("h_out", lambda x: torch.where(torch.arange(x.numel()).view(x.shape) == 5, x * 1.5 + 1, x)),
}


def brought(opened: Opened, scenario: str) -> Tensors:
    """What a perfect port would bring."""
    return {n: t for n, t in tensors_of(opened, scenario).items() if "#" not in n and not n.endswith("route_score")}


def layouts(opened: Opened, folder: Path) -> Iterator[tuple[str, str | None]]:
    """(change, where it was noticed or None); the unchanged folder first, which must pass."""
    clean, rope = brought(opened, "prefill"), opened.params.config.qk_rope_head_dim
    for number, (name, change) in enumerate({"unchanged: nothing may be noticed": lambda t, r: t, **CHANGES}.items()):
        out = folder / f"layout{number}"
        out.mkdir()
        write_file(out / "prefill.safetensors", change(clean, rope))
        verdict = judge_folder(out, opened)
        found = verdict.first.reason if verdict.first else None
        if number == 0:
            found = None if found else "passes"
        yield name, found
