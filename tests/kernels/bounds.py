# SPDX-License-Identifier: Apache-2.0
"""How far a kernel may lie from the exact value: intervals that follow from roundings, and the strict run that tests use.

U = 2^-24 is the relative error of one float32 operation. A sum of n terms in any order is within n * U times the sum of their sizes.
`Near` is a value in float64 with the error that it may have; `rounded` rounds both ends of the interval, so that a value beside a tie of
bfloat16 gets room for one step and no other value does.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from v41.backends.neuron import sim
from v41.backends.neuron.sim.rules import Policy

U = 2.0**-24


def strict(kernel: Any, cores: int, *args: Any) -> Any:
    """One launch in which warnings raise as well, on outputs whose bytes are all checked to be written."""
    return sim.simulate(kernel[cores], sim.PEDANTIC)(*args)


def strict_but(*rules: str) -> Any:
    """`strict`, in which these warnings, which the case explains, do not raise."""
    policy = Policy(promote=sim.PEDANTIC.promote - set(rules))
    return lambda kernel, cores, *args: sim.simulate(kernel[cores], policy)(*args)


class Near(NamedTuple):
    """A value and the largest error it may have, in float64."""

    value: Tensor
    error: Tensor

    def ends(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return tuple((self.value + s * self.error).to(dtype).double() for s in (-1, 1))


def rounded(near: Near, dtype: torch.dtype) -> Near:
    """The value rounded to dtype, and how far a rounding of anything in the interval may lie from it."""
    value = near.value.to(dtype).double()
    low, high = near.ends(dtype)
    return Near(value, torch.maximum(high - value, value - low))


def check_near(got: Tensor, near: Near, what: str) -> None:
    """got is a rounding to its dtype of something in the interval."""
    low, high = near.ends(got.dtype)
    bad = ~((got.double() >= low) & (got.double() <= high))
    if bad.any():
        i = tuple(int(v) for v in bad.nonzero()[0])
        raise AssertionError(f"{what}: {int(bad.sum())} of {bad.numel()} outside; at {i} got {got[i]}, exact {near.value[i]} +- {near.error[i]}")


def check_rows(got: Tensor, want: Tensor, what: str) -> None:
    """`exact` float32: within 1e-5 of each row's largest magnitude."""
    largest = want.abs().amax(-1, keepdim=True)
    worst = ((got - want).abs() - 1e-5 * largest).max()
    assert worst <= 0, f"{what}: {float(worst)} above 1e-5 of the row's largest"


def check_equal(got: Tensor, want: Tensor, what: str) -> None:
    """Bits."""
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {got.shape}, not {want.dtype} {want.shape}"
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    bad = got.contiguous().view(same) != want.contiguous().view(same)
    if bad.any():
        i = tuple(int(v) for v in bad.nonzero()[0])
        raise AssertionError(f"{what}: {int(bad.sum())} of {bad.numel()} differ; at {i} got {got[i]}, not {want[i]}")
