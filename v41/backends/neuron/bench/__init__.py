# SPDX-License-Identifier: Apache-2.0
"""What kernels cost by the simulator's model, next to what they must cost (docs/kernels.md 1). Nothing here was run on a device."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from v41.backends.neuron.bench.case import KINDS, PHASES, BenchCase
from v41.backends.neuron.kernels import KERNELS
from v41.backends.neuron.launch import profiled
from v41.backends.neuron.sim.report import Report

__all__ = ["FAMILIES", "KINDS", "PHASES", "BenchCase", "Measured", "cases", "measure"]

# One module each in this package, with its cases in CASES.
FAMILIES: tuple[str, ...] = ("attention", "choice", "engram", "index", "linear", "mixes", "moe", "router", "rows")


@dataclass(frozen=True)
class Measured:
    """What one case cost: all its launches one after the other."""

    case: BenchCase
    reports: tuple[Report, ...]

    @property
    def time_us(self) -> float:
        return sum(r.time_us for r in self.reports)

    @property
    def ratio(self) -> float:
        return self.time_us / self.case.floor_us

    @property
    def parts(self) -> dict[str, float]:
        """Microseconds by engine of the busier core, of loops and barriers, of dependent DMAs and of the longest dependent chain."""
        engines = {e.engine: sum(x.busy_us for r in self.reports for x in r.engines if x.engine == e.engine) for e in self.reports[0].engines}
        others = {"loops": "control_us", "DMA latency": "dma_chain_us", "chain": "critical_path_us"}
        return {n: us for n, us in engines.items() if us} | {n: sum(getattr(r, f) for r in self.reports) for n, f in others.items()}

    @property
    def bound_by(self) -> str:
        """The largest part of the slowest launch: an engine, "loops" (and barriers), "DMA latency", or "chain" where dependent instructions outlast all."""
        r = max(self.reports, key=lambda r: r.time_us)
        if r.critical_path_us >= r.engine_us + r.dma_chain_us:
            return "chain"
        if r.dma_chain_us > r.engine_us:
            return "DMA latency"
        busiest = max(r.engines, key=lambda e: e.busy_us)
        return busiest.engine if busiest.busy_us >= r.control_us else "loops"

    def as_dict(self) -> dict[str, Any]:
        """One entry of `v41 bench kernels --json`."""
        c = self.case
        return {
            **{"kernel": c.kernel, "shape": c.shape, "kind": c.kind, "phase": c.phase},
            **{"seconds": self.time_us * 1e-6, "bound_by": self.bound_by, "roofline_ratio": self.ratio},
            "sbuf_peak": max(r.sbuf_peak_bytes for r in self.reports),
            "psum_peak": max(r.psum_peak_bytes for r in self.reports),
            "instructions": sum(r.instructions for r in self.reports),
        }


def measure(case: BenchCase) -> Measured:
    """Runs the case in the simulator and takes down what every launch cost."""
    reports: list[Report] = []
    KERNELS[case.kernel](profiled(reports), *case.make())
    return Measured(case, tuple(reports))


def cases() -> tuple[BenchCase, ...]:
    """The cases of all families."""
    return tuple(case for family in FAMILIES for case in import_module(f"{__name__}.{family}").CASES)
