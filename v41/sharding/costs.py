# SPDX-License-Identifier: Apache-2.0
"""What the planner takes as given: every constant of the hardware and of others' measurements, each with its source.

Nothing here was measured by this project. "Near-twin": a published port of a model of the same family (42 MoE layers of 288 experts,
4-stream hyper-connections, hidden size 4096) to 64 logical cores of trn2, batch 1.
"PR71": the public pull request 71 of vllm-neuron, this model.
A logical core is two physical cores (LNC=2).
"""

from dataclasses import dataclass, field, fields
from typing import Any

DOCS = "NKI documentation"
TWIN = "measured on a near-twin"
US = 1e-6


def cost(value: float, unit: str, source: str) -> Any:
    """A constant with its unit and source."""
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Costs:
    """Times in seconds, rates per second and logical core, unless the unit says otherwise."""

    hbm: float = cost(0.72e12, "B/s", f"{DOCS}: 2.9 TB/s a chip, 4 logical cores")
    usable: float = cost(20e9, "B", f"{DOCS}: 24 GB a logical core, less the runtime's own buffers: 3 to 4 GB assumed")
    flops: float = cost(158e12, "FLOP/s", f"{DOCS}: 79 TFLOP/s dense bf16 a physical core")
    cores: int = cost(2, "physical cores", f"{DOCS}: LNC=2")
    tile_rows: int = cost(128, "rows", f"{DOCS}: PE tile, 128 x 128 weights")
    tile: float = cost(0.105 * US, "s/tile, physical core", f"{TWIN}: 128 x 128 weight load and narrow product, 192 in 20 us")
    pe_clock: float = cost(2.4e9, "rows/s", f"{DOCS}: one moving row a cycle")
    lanes: int = cost(128, "lanes", f"{DOCS}: vector engine")
    vector_clock: float = cost(0.96e9, "elements/s and lane", f"{DOCS}: vector engine, one input")
    instruction: float = cost(0.1 * US, "s", f"{DOCS}: 60 to 100 cycles of a vector instruction")
    dma: float = cost(2 * US, "s", f"{DOCS}: DMA start to first byte and semaphore, 1.3 to 2 us; every dependent transfer pays it")
    dma_wide: float = cost(0.9, "of hbm", f"{DOCS}: efficiency curve at rows of 4 KiB and above")
    dma_rows: float = cost(0.5, "of hbm", f"{DOCS}: the same at rows of 1 KiB")
    fp4_passes: float = cost(1.125, "vector passes", "derived: 5 instructions on words of 8 codes, and the scale at double rate")
    fp4_naive: float = cost(3.5, "vector passes", "derived: 5 instructions on bytes of 2 codes, and the scale")
    fp8_naive: float = cost(5.0, "vector passes", "derived: exact e4m3fn decode, 4 operations an element, and the scale")
    experts_fixed: float = cost(35 * US, "s", f"{TWIN}: MoE kernel call beside its hits")
    router: float = cost(23 * US, "s", f"{TWIN}: router kernel at one row")
    mixes: float = cost(23 * US, "s", f"{TWIN}: mixes with 20 Sinkhorn iterations, one row; rows lie on partitions")
    combine: float = cost(6 * US, "s", f"{TWIN}: combine of 4 streams, tuned; taken for the collapse as well")
    hop: float = cost(17.5 * US / 12, "s", f"{TWIN}: fastest of 630 all-reduces of 64 ranks, 17.5 us, which reads as 12 hops")
    link: float = cost(100e9, "B/s", f"{TWIN}: slope of the same in bytes")
    collective: float = cost(40 * US / 12, "s", f"{TWIN}: plan value 40 us a collective of 64 ranks, spread over its 12 hops")
    isolated: float = cost(10 * US, "s", f"{TWIN}: first kernel call behind something else, 33 us against 23 us chained")
    waits: float = cost(19.0 / 79.5, "of the step", f"{TWIN}: core barriers 11.2, semaphores 4.4, idle 3.4 of 77 to 82 ms")
    late: float = cost(0.0, "s/collective", f"part of `waits`; where waits are tuned away, {TWIN}: 2.07 ms for 90 all-reduces")
    page: float = cost(2**28, "B", "published advice for the compiler: scratchpad pages of 256 MiB")
    graph: float = cost(1.12e-3, "s", "PR71: fixed cost of a graph execution")
    graphs: int = cost(120, "graphs", "PR71: graph executions a forward, its drafts included")
    round_trip: float = cost(1.57e-3, "s", "published measurements of host round trips: 0.7 to 3.5 ms, the geometric middle")
    pr71_fp4: float = cost(3.8, "vector passes", "PR71: a second core for its fp4 products saved 21.4 ms x 2.75 tokens")
    pr71_fp8: float = cost(1.03, "vector passes", "PR71: the same for its fp8 products, 4.5 ms x 2.75")
    outside_world: float = cost(1.9e-3, "s", "PR71: all-reduce of 64 ranks outside a graph")
    outside_group: float = cost(0.1e-3, "s", "PR71: all-reduce of 8 consecutive ranks outside a graph")


def table() -> list[tuple[str, float, str, str]]:
    """(name, value, unit, source) of every constant."""
    values = Costs()
    return [(f.name, getattr(values, f.name), f.metadata["unit"], f.metadata["source"]) for f in fields(Costs)]
