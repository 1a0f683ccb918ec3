# SPDX-License-Identifier: Apache-2.0
"""The finding on one tensor: bytes, then NaN, then ids as sets, then floats by their gates; figures side by side."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from v41.conformance.choices import behind_candidates, judge_choice, kind_of, masked_rows
from v41.conformance.gates import gate
from v41.golden.metrics import BITS, agreement, histogram, same_bits, ulps
from v41.golden.pack_noise import EXACT, TRIPS

BAD = ("missing", "shape", "non-finite", "differs")


@dataclass(frozen=True)
class Finding:
    """One tensor. status: equal (bit for bit), within (its gate), flip (a choice within the margin), told (reported, not judged), or one of BAD."""

    name: str
    status: str
    reason: str = ""
    at: tuple[int, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)
    pair: tuple[Tensor, Tensor] | None = field(default=None, compare=False, repr=False)  # (got, want) where it is bad and they have one shape

    @property
    def bad(self) -> bool:
        return self.status in BAD

    def as_dict(self) -> dict[str, Any]:
        return asdict(replace(self, pair=None))


@dataclass(frozen=True)
class Stored:
    """The expected tensors of one call: values, and distances from the twins in float64 (`NAME#exact`, `NAME#trips`)."""

    want: Mapping[str, Tensor]
    far: Mapping[str, Tensor]
    block: int = 1  # rows of a candidate block


def figures(name: str, got: Tensor, want: Tensor) -> dict[str, Any]:
    """Error figures of two float tensors of one shape; -inf at the same place is left out."""
    known = torch.isfinite(want) & torch.isfinite(got)
    a, b = (torch.where(known, x, 0).double() for x in (got, want))
    error = (a - b).abs()
    centered = [x - x.mean() for x in (a, b)]
    numbers: dict[str, Any] = {
        "max_abs": float(error.max()) if error.numel() else 0.0,
        "relative_l2": float(error.norm() / b.norm().clamp_min(1e-300)),
        "cosine": float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300)),
        "pcc": float((centered[0] * centered[1]).sum() / (centered[0].norm() * centered[1].norm()).clamp_min(1e-300)),
    }
    if got.dtype in BITS:
        numbers["ulps"] = histogram(ulps(torch.where(known, got, 0), torch.where(known, want, 0)))
    if name.endswith("logits"):
        numbers |= agreement(a, b) | {"kl": divergence(a, b)}
    return numbers


def divergence(got: Tensor, want: Tensor) -> float:
    """Mean over rows of KL(softmax want, softmax got), in nats."""
    p, q = want.log_softmax(-1), got.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def not_finite(got: Tensor, want: Tensor) -> Tensor:
    """Where got is NaN, or an infinity that want has not."""
    return torch.isnan(got) | (torch.isinf(got) & (got.double() != want.double()))


def judge(name: str, got: Tensor | None, stored: Stored, every: Mapping[str, Tensor], bits: bool, trips: bool) -> Finding:
    """bits: only equal bytes pass. trips: the backend does the regime's round trips, so that the sharper gate holds too."""
    if got is not None and not bits:
        got = behind_candidates(name, got, stored.want, every)
    found = _judge(name, got, stored, every, bits, trips)
    same_shape = got is not None and got.shape == stored.want[name].shape
    return replace(found, pair=(got, stored.want[name])) if found.bad and same_shape else found


def _judge(name: str, got: Tensor | None, stored: Stored, every: Mapping[str, Tensor], bits: bool, trips: bool) -> Finding:
    want = stored.want[name]
    if got is None:
        return Finding(name, "missing", "the backend gave no such tensor")
    if got.dtype != want.dtype or got.shape != want.shape:
        return Finding(name, "shape", f"{got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}")
    if got.is_floating_point() and bool(not_finite(got, want).any()):
        wrong = not_finite(got, want)
        return Finding(name, "non-finite", f"{int(wrong.sum())} of {wrong.numel()}", index(wrong), {})
    if same_bits(got, want):
        return Finding(name, "equal")
    if got.is_floating_point() and bool((torch.isinf(want) & torch.isfinite(got)).any()):
        return Finding(name, "differs", "numbers where the stored tensor has infinities", index(torch.isinf(want) & torch.isfinite(got)))
    if kind_of(name) is not None:
        return Finding(name, *judge_choice(name, got, stored, trips, bits))
    if not got.is_floating_point():
        return Finding(name, "differs", f"{int((got != want).sum())} of {want.numel()}", index(got != want))
    if bits:
        return Finding(name, "differs", "other bits, where the backend claims the same", index(got != want), figures(name, got, want))
    return judge_floats(name, got, stored, every, trips)


def judge_floats(name: str, got: Tensor, stored: Stored, every: Mapping[str, Tensor], trips: bool) -> Finding:
    """By the gates of its twins; told where the pack has none."""
    want = stored.want[name]
    numbers = figures(name, got, want)
    if name + EXACT not in stored.far:
        return Finding(name, "told", "", index((got.double() - want.double()).abs()), numbers)
    flips = masked_rows(name, stored.want, every)
    if flips is not None:  # rows that another choice made are not comparable
        got = torch.where(flips, want, got)
    both = name + TRIPS in stored.far
    reasons = []
    for suffix in (EXACT, TRIPS) if trips and both else (EXACT,):
        found = gate(got, want, stored.far[name + suffix], both)
        numbers[suffix[1:]] = asdict(found)
        if not found.passes:
            reasons.append(
                f"error against {suffix[1:]} is {found.tensor:.3g} x the stored one's (limit {found.tensor_limit:.3g}), worst row {found.row:.3g} x "
                f"(limit {found.row_limit:.3g}), worst element {found.element:.3g} of its limit"
            )
    at = index((got.double() - want.double()).abs().nan_to_num(0, 0, 0))
    return Finding(name, "differs" if reasons else "within", "; ".join(reasons), at, numbers)


def index(tensor: Tensor) -> tuple[int, ...]:
    """Where the largest (or first true) element stands."""
    flat = tensor.int() if tensor.dtype == torch.bool else tensor
    return tuple(int(i) for i in torch.unravel_index(flat.argmax(), flat.shape)) if flat.numel() and flat.ndim else ()


def told(finding: Finding) -> Finding:
    """The same as a report that is not judged, but for what is always wrong."""
    return finding if finding.status in ("equal", "missing", "shape", "non-finite") else replace(finding, status="told", reason="")
