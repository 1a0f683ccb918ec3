# SPDX-License-Identifier: Apache-2.0
"""How far two tensors are apart (docs/golden.md 4)."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
ULP_STEPS = (0, 1, 2, 4, 16, 256)  # histogram: up to each of these, then beyond
TOP = (1, 5, 20)


@dataclass(frozen=True)
class Difference:
    """One tensor of two runs. `status`: equal (bit for bit), close (within the tolerance), differs, non-finite, or shape."""

    name: str
    kind: str  # float, set or exact
    status: str
    worst: list[int] = field(default_factory=list)  # index of the worst element, or of the first row of a set that differs
    numbers: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes; NaNs of one bit pattern are equal, 0 and -0 are not."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = BITS.get(a.dtype)
    return torch.equal(a, b) if bits is None else torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Representable numbers between a and b, element by element, in int64 (saturating in float64)."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(BITS[x.dtype]).long()
        low = torch.iinfo(BITS[x.dtype]).min
        return torch.where(bits < 0, low - bits, bits)

    return (ordered(a) - ordered(b)).abs()


def histogram(distance: Tensor) -> dict[str, int]:
    """Counts of ulp distances, `<= n` for each step and `more`."""
    counts, below = {}, 0
    for step in ULP_STEPS:
        upto = int((distance <= step).sum())
        counts[f"<={step}"] = upto - below
        below = upto
    return counts | {"more": distance.numel() - below}


def agreement(a: Tensor, b: Tensor) -> dict[str, float]:
    """Share of the k best logits that both have, averaged over rows."""
    shares = {}
    for k in TOP:
        k = min(k, a.shape[-1])
        best = [torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.topk(k, -1).indices, True) for x in (a, b)]
        shares[f"top{k}"] = float((best[0] & best[1]).sum(-1).double().mean() / k)
    return shares


def compare_floats(name: str, got: Tensor, want: Tensor, tolerance: float) -> Difference:
    """Relative L2, maximum, cosine and ulp histogram; -inf stands where both have it."""
    known = torch.isneginf(got) & torch.isneginf(want)
    bad = ~torch.isfinite(got) & ~known
    if bad.any():
        return Difference(name, "float", "non-finite", [int(i) for i in bad.nonzero()[0]], {"count": int(bad.sum())})
    a, b = (torch.where(known, 0, x).double() for x in (got, want))
    if not torch.isfinite(b).all():
        return Difference(name, "float", "differs", [int(i) for i in (~torch.isfinite(b)).nonzero()[0]], {"reason": "expected a non-finite value"})
    error = (a - b).abs()
    numbers: dict[str, Any] = {
        "max_abs": float(error.max()),
        "relative_l2": float(error.norm() / b.norm().clamp_min(1e-300)),
        "cosine": float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300)),
        "ulps": histogram(ulps(torch.where(known, 0, got), torch.where(known, 0, want))),
    }
    if name.endswith("logits"):
        numbers |= agreement(a, b)
    status = "close" if numbers["relative_l2"] <= tolerance else "differs"
    return Difference(name, "float", status, [int(i) for i in torch.unravel_index(error.argmax(), error.shape)], numbers)


def compare_sets(name: str, got: Tensor, want: Tensor, scores: Tensor | None) -> Difference:
    """Rows of ids as sets, -1 left out; with the scores they were chosen by, the margin that each changed row was decided by."""
    pairs = list(zip(got.flatten(0, -2).tolist(), want.flatten(0, -2).tolist(), strict=True))
    rows = [r for r, (a, b) in enumerate(pairs) if set(a) != set(b)]
    numbers: dict[str, Any] = {"rows": len(pairs), "rows_that_differ": len(rows)}
    if not rows:
        return Difference(name, "set", "differs", [], numbers | {"reason": "same sets, another order"})
    a, b = (set(x) - {-1} for x in pairs[rows[0]])
    numbers |= {"only_in_got": sorted(a - b), "only_in_want": sorted(b - a)}
    if scores is not None:
        flat = scores.flatten(0, -2)
        numbers["margins"] = [_margin(flat[r], set(pairs[r][0]) ^ set(pairs[r][1])) for r in rows[:20]]
    return Difference(name, "set", "differs", [rows[0]], numbers)


def _margin(scores: Tensor, changed: set[int]) -> float:
    """Largest score difference among the ids that changed places: 0 is a tie."""
    found = scores[[i for i in sorted(changed) if i >= 0]].double()
    return float(found.max() - found.min())


def compare(name: str, got: Tensor, want: Tensor, tolerance: float, scores: Tensor | None = None) -> Difference:
    """The difference of one tensor; ids and flags must be equal, floats within a relative L2 of `tolerance`."""
    kind = "float" if want.is_floating_point() else "set" if name.endswith(("topk_idxs", "route_experts")) else "exact"
    if got.dtype != want.dtype or got.shape != want.shape:
        return Difference(name, kind, "shape", [], {"got": [str(got.dtype), list(got.shape)], "want": [str(want.dtype), list(want.shape)]})
    if kind == "float" and torch.isnan(got).any():
        return compare_floats(name, got, want, tolerance)
    if same_bits(got, want):
        return Difference(name, kind, "equal")
    if kind == "float":
        return compare_floats(name, got, want, tolerance)
    if kind == "set":
        return compare_sets(name, got, want, scores)
    wrong = (got != want).nonzero()
    return Difference(name, "exact", "differs", [int(i) for i in wrong[0]], {"count": len(wrong), "of": want.numel()})
