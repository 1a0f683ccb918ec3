# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step: a floor that no schedule beats, and an estimate with the overheads that others measured. The two are never mixed.

floor: each part's roofline, parts one after another, and the fewest hops of every collective.
estimate: each kernel max(DMA, PE, decoding) with its dependent transfers and instruction chains, planned collectives, waits.
"""

from collections.abc import Iterable, Sequence
from math import log2

from v41.sharding.costs import Costs
from v41.sharding.plan_collectives import Collective
from v41.sharding.plan_work import Work

LINK, LATENCY, HBM, FLOPS, PE, DECODE, CHAIN, MEASURED = (
    *("link bytes", "collective latency", "HBM", "FLOPs", "PE weight loads", "decoding weights"),
    *("instructions and DMA latency", "measured kernel"),
)
Parts = dict[str, dict[str, float]]  # part -> what bounds -> seconds


def hops(ranks: int) -> int:
    """Of a reduction or gather: down and up a binary tree; 64 ranks: 12."""
    return 2 * round(log2(ranks))


def add(parts: Parts, part: str, bound: str, seconds: float) -> None:
    """Adds seconds to a part under what bounds them."""
    bounds = parts.setdefault(part, {})
    bounds[bound] = bounds.get(bound, 0.0) + seconds


def floor_parts(work: Iterable[Work], found: Iterable[Collective], costs: Costs) -> Parts:
    """Rooflines of every kernel, and hops and bytes of every collective."""
    parts: Parts = {}
    for w in work:
        memory, math = (w.bytes + min(w.row_bytes, w.region)) / costs.hbm, w.flops / costs.flops
        add(parts, w.part, HBM if memory >= math else FLOPS, w.calls * max(memory, math))
    for c in found:
        add(parts, "collectives", LATENCY, c.number * hops(c.ranks) * costs.hop)
        add(parts, "collectives", LINK, c.number * c.bytes / costs.link)
    return parts


def kernel(w: Work, costs: Costs) -> dict[str, float]:
    """What bounds -> seconds of one call."""
    memory = w.bytes / (costs.dma_wide * costs.hbm) + w.row_bytes / (costs.dma_rows * costs.hbm)
    pe = (w.tiles * max(costs.tile, w.columns / costs.pe_clock) + w.moving / costs.pe_clock) / costs.cores
    decode = w.decoded / (costs.lanes * costs.vector_clock * costs.cores)
    streams = {HBM: memory, PE: pe, DECODE: decode}
    longest = max(streams, key=lambda n: streams[n])
    chain = sum(n * (costs.instruction + size / (costs.lanes * costs.vector_clock)) for n, size in w.chain)
    found = {longest: streams[longest], CHAIN: chain + w.dmas * costs.dma, MEASURED: w.fixed}
    short = w.least - sum(found.values())
    return found | ({MEASURED: w.fixed + short} if short > 0 else {})


def kernel_parts(work: Iterable[Work], costs: Costs) -> Parts:
    """The kernels of an estimate, without what stands between them."""
    parts: Parts = {}
    for w in work:
        for bound, seconds in kernel(w, costs).items():
            add(parts, w.part, bound, w.calls * seconds)
    return parts


def estimate_parts(work: Iterable[Work], found: Sequence[Collective], costs: Costs) -> Parts:
    """One graph: kernels, collectives at their plan value, the first kernel behind each, and waits as a share of the whole step."""
    parts = kernel_parts(work, costs)
    for c in found:
        add(parts, "collectives", LATENCY, c.number * hops(c.ranks) * costs.collective)
        add(parts, "collectives", LINK, c.number * c.bytes / costs.link)
        add(parts, "isolated calls", MEASURED, c.number * costs.isolated)
    busy, late = total(parts), costs.late * sum(c.number for c in found)
    add(parts, "waits", MEASURED, busy * costs.waits / (1 - costs.waits) + late)
    return parts


def eager_parts(work: Iterable[Work], found: Iterable[Collective], layers: int, world: int, costs: Costs) -> Parts:
    """Many graphs with the host between them: executions, a round trip an MoE layer, collectives outside a graph, kernels."""
    parts = kernel_parts(work, costs)
    add(parts, "graph executions", MEASURED, costs.graphs * costs.graph)
    add(parts, "host round trips", MEASURED, layers * costs.round_trip)
    for c in found:
        add(parts, "collectives", MEASURED, c.number * (costs.outside_world if c.ranks == world else costs.outside_group))
    return parts


def total(parts: Parts) -> float:
    """All seconds."""
    return sum(s for bounds in parts.values() for s in bounds.values())


def seconds_of(parts: Parts) -> dict[str, float]:
    """part -> seconds, and `total`."""
    return {p: sum(b.values()) for p, b in parts.items()} | {"total": total(parts)}


def bounds_of(parts: Parts) -> dict[str, str]:
    """part -> what bounds most of it."""
    return {p: max(b, key=lambda n: b[n]) for p, b in parts.items() if any(b.values())}
