# SPDX-License-Identifier: Apache-2.0
"""One kernel at one shape, and what it must cost there (docs/kernels.md 1)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KINDS = ("gemm", "attention", "small")
PHASES = ("decode", "prefill")
HBM_BYTES_PER_US = 0.72e6  # both cores of a logical core
MACS_PER_US = 2 * 128 * 128 * 2400.0  # both cores, bfloat16


@dataclass(frozen=True)
class BenchCase:
    """One kernel at one shape.

    kernel      a name of KERNELS
    shape       for people: sizes and weight form
    kind, phase one of KINDS, one of PHASES
    make        the wrapper's arguments after `run`
    must_bytes  bytes that must move between HBM and the cores
    must_macs   multiply-adds that must happen, in bfloat16 ones (a float32 one counts four)
    chain_us    the algorithm's own dependent chain, stated in `note`
    """

    kernel: str
    shape: str
    kind: str
    phase: str
    make: Callable[[], tuple[Any, ...]]
    must_bytes: int
    must_macs: int
    chain_us: float
    note: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.phase not in PHASES:
            raise ValueError(f"{self.kernel} {self.shape}: kind {self.kind!r} of {KINDS}, phase {self.phase!r} of {PHASES}")

    @property
    def floor_us(self) -> float:
        """max(bytes / 0.72 TB/s, multiply-adds / peak of both cores, the dependent chain)."""
        return max(self.must_bytes / HBM_BYTES_PER_US, self.must_macs / MACS_PER_US, self.chain_us)
