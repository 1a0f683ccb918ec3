# SPDX-License-Identifier: Apache-2.0
"""Counters per engine and the time model (docs/nki-simulator.md, Time model).

Durations are microseconds on one physical core. Constants are published or
third-party figures; none was measured by this project.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "dma", "sync")
HBM_BYTES_PER_US = 0.36e6
DMA_FIXED = 2.0
PE_GHZ, V_GHZ, S_GHZ, G_GHZ = 2.4, 0.96, 1.2, 1.2
PE_WEIGHTS = 0.105  # measured by others: a 128x128 weight load with a narrow matmul
V_FIXED, S_FIXED, G_FIXED = 0.1, 0.19, 0.1
LOOP_FIXED = 7.0
SENDRECV_FIXED = 4.0  # "several us"


def dma_efficiency(run):
    """Share of the HBM bandwidth at `run` contiguous bytes per descriptor: 0.25 at 512, 0.5 at 1024, 0.9 from 4096 on."""
    points = ((512, 0.25), (1024, 0.5), (4096, 0.9))
    if run <= points[0][0]:
        return points[0][1] * run / points[0][0]
    for (b0, e0), (b1, e1) in pairwise(points):
        if run <= b1:
            return e0 + (e1 - e0) * math.log2(run / b0) / math.log2(b1 / b0)
    return points[-1][1]


def dma_busy(nbytes, run, share=1.0):
    """Time that a transfer keeps the DMA engines busy; the fixed 2 us of latency is separate."""
    return nbytes / (dma_efficiency(run) * share * HBM_BYTES_PER_US)


def matmul_busy(rows, columns, new_weights, four_byte):
    """One matmul of `columns` moving columns: 105 ns when it loads weights, else max(columns, 64) cycles; fp32 at quarter rate."""
    stream = max(columns, 64) / (PE_GHZ * 1000.0) * (4 if four_byte else 1)
    return max(stream, PE_WEIGHTS * max(rows, 32) / 128) if new_weights else stream


def vector_busy(elements, cycles=1.0):
    """VectorE: 0.1 us plus elements per partition at `cycles` each."""
    return V_FIXED + elements * cycles / (V_GHZ * 1000.0)


def scalar_busy(elements):
    """ScalarE: 0.19 us plus elements per partition."""
    return S_FIXED + elements / (S_GHZ * 1000.0)


def gpsimd_busy(cycles):
    """GpSimd: 0.1 us (assumed) plus cycles."""
    return G_FIXED + cycles / (G_GHZ * 1000.0)


@dataclass
class Counter:
    """Totals of one engine."""

    instructions: int = 0
    bytes: int = 0
    flops: int = 0
    elements: int = 0
    descriptors: int = 0
    busy_us: float = 0.0


@dataclass
class Clock:
    """Counters, the critical path, the depth of dependent DMAs and an in-order schedule.

    A point in time is the tuple (path, dmas, schedule): end of the longest
    dependent chain in us, DMAs on a chain, end in the in-order schedule in us.
    """

    counters: dict = field(default_factory=lambda: {e: Counter() for e in ENGINES})
    free: dict = field(default_factory=lambda: dict.fromkeys(ENGINES, 0.0))
    path: float = 0.0
    dmas: int = 0
    schedule: float = 0.0
    control_us: float = 0.0
    instructions: int = 0
    floor: tuple = (0.0, 0, 0.0)

    def issue(self, engine, busy, latency, ready):
        """Place one instruction after `ready` on its engine; returns its end."""
        base, floor = ready, self.floor
        path = max(base[0], floor[0]) + busy + latency
        dmas = max(base[1], floor[1]) + (engine == "dma")
        start = max(base[2], floor[2], self.free[engine])
        self.free[engine] = start + busy
        end = start + busy + latency
        self.path, self.dmas = max(self.path, path), max(self.dmas, dmas)
        self.schedule = max(self.schedule, end)
        counter = self.counters[engine]
        counter.instructions += 1
        counter.busy_us += busy
        self.instructions += 1
        return path, dmas, end

    def barrier(self, added=0.0, other=None):
        """Everything later waits for everything so far (and for the other core), plus `added` us."""
        now = (self.path, self.dmas, self.schedule)
        if other is not None:
            now = tuple(max(a, b) for a, b in zip(now, other, strict=True))
        self.control_us += added
        self.floor = (now[0] + added, now[1], now[2] + added)
        self.path, self.dmas, self.schedule = self.floor

    def now(self):
        """The end of everything so far."""
        return self.path, self.dmas, self.schedule
