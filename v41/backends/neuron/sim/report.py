# SPDX-License-Identifier: Apache-2.0
"""What a run cost: counters per engine, time by the model, memory peaks, warnings; as a table and as JSON."""

import json
from dataclasses import asdict, dataclass

from v41.backends.neuron.sim.cost import DMA_FIXED, ENGINES
from v41.backends.neuron.sim.memory import PSUM_BANKS, SBUF_BYTES


@dataclass(frozen=True)
class EngineUse:
    """Totals of one engine on the busier core."""

    engine: str
    instructions: int
    busy_us: float
    elements: int
    bytes: int
    flops: int
    descriptors: int


@dataclass(frozen=True)
class Report:
    """One run. Times are microseconds of the model in docs/nki-simulator.md; nothing was run on a device.

    time_us = max(engine_us + dma_chain_us, critical_path_us, 2):
    engine_us, the busiest engine; dma_chain_us, 2 us per DMA on the longest chain of dependent DMAs;
    critical_path_us, the longest chain of dependent instructions with their own durations.
    schedule_us is an in-order list schedule of the same graph, for comparison.
    """

    kernel: str
    cores: int
    instructions: int
    time_us: float
    engine_us: float
    dma_chain_us: float
    critical_path_us: float
    schedule_us: float
    control_us: float
    sbuf_peak_bytes: int
    psum_peak_bytes: int
    psum_peak_banks: int
    engines: tuple
    warnings: tuple

    def json(self):
        """The report as a JSON object."""
        return json.dumps(asdict(self) | {"warnings": [str(w) for w in self.warnings]}, indent=1)

    def table(self):
        """The report as text."""
        head = f"{'engine':8}{'instr':>9}{'busy us':>11}{'elements':>13}{'bytes':>13}{'flops':>15}{'descriptors':>13}"
        rows = [
            f"{e.engine:8}{e.instructions:9}{e.busy_us:11.2f}{e.elements:13}{e.bytes:13}{e.flops:15}{e.descriptors:13}" for e in self.engines if e.instructions
        ]
        tail = [
            f"time {self.time_us:.2f} us = max(busiest engine {self.engine_us:.2f} + dependent DMAs "
            f"{self.dma_chain_us:.2f}, critical path {self.critical_path_us:.2f}); in-order schedule "
            f"{self.schedule_us:.2f}; loops and barriers {self.control_us:.2f}",
            f"SBUF peak {self.sbuf_peak_bytes} of {SBUF_BYTES} bytes per partition; PSUM peak "
            f"{self.psum_peak_bytes} bytes in {self.psum_peak_banks} of {PSUM_BANKS} banks",
            *(f"warning {w}" for w in self.warnings),
        ]
        title = f"{self.kernel} on {self.cores} core{'s' if self.cores > 1 else ''} (model, not run on a device)"
        return "\n".join([title, head, *rows, *tail])


def _time(clock):
    engine = max(c.busy_us for c in clock.counters.values()) + clock.control_us
    chain = DMA_FIXED * clock.dmas
    return max(engine + chain, clock.path, DMA_FIXED), engine, chain


def build(kernel, programs, warnings):
    """The Report of one or two finished programs; the slower core decides."""
    slow = max((p.clock for p in programs), key=lambda clock: _time(clock)[0])
    time, engine, chain = _time(slow)
    return Report(
        kernel=kernel,
        cores=len(programs),
        instructions=sum(p.clock.instructions for p in programs),
        time_us=time,
        engine_us=engine,
        dma_chain_us=chain,
        critical_path_us=slow.path,
        schedule_us=slow.schedule,
        control_us=slow.control_us,
        sbuf_peak_bytes=max(p.chip.sbuf_peak for p in programs),
        psum_peak_bytes=max(p.chip.psum_peak for p in programs),
        psum_peak_banks=max(p.chip.bank_peak for p in programs),
        engines=tuple(_use(name, slow.counters[name]) for name in ENGINES),
        warnings=tuple(warnings),
    )


def _use(name, counter):
    return EngineUse(
        name,
        counter.instructions,
        counter.busy_us,
        counter.elements,
        counter.bytes,
        counter.flops,
        counter.descriptors,
    )
