# SPDX-License-Identifier: Apache-2.0
"""The kernels of one step on the fullest rank, each as the amounts that decide its time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from v41.sharding.costs import Costs
from v41.sharding.hits import expected_hits
from v41.sharding.placement import Placement
from v41.spec.config import Config
from v41.spec.table import Dim

NORM, ROPE, ROUND = 5, 6, 8  # vector instructions of an RMSNorm, a rotation, an fp8 round trip (docs/sharding.md 5)


@dataclass(frozen=True)
class Work:
    """One kernel, called `calls` times. Amounts are per call and logical core.

    bytes: read from HBM in long rows; row_bytes: gathered in rows of about 1 KiB, out of a region of so many bytes.
    tiles: 128 x 128 weight tiles, each against `columns` rows of activations; moving: further rows that pass the PE.
    decoded: weights that the vector engine decodes, times its passes. chain: (instructions, elements of each) that wait for each other.
    dmas: transfers that wait for each other. fixed, least: measured seconds that are added, or that it takes in all.
    """

    part: str
    name: str
    calls: float = 1
    bytes: float = 0
    row_bytes: float = 0
    region: float = inf
    flops: float = 0
    tiles: float = 0
    columns: float = 1
    moving: float = 0
    decoded: float = 0
    chain: tuple[tuple[float, float], ...] = ()
    dmas: float = 1
    fixed: float = 0
    least: float = 0


@dataclass(frozen=True)
class Step:
    """What the kernels of a step depend on."""

    config: Config
    placement: Placement
    capacity: int
    costs: Costs

    def matrix(self, part: str, name: str, rows: int, inside: int, out: int, quantized: bool = True) -> Work:
        """A weight matrix [out, inside] of this rank against so many rows."""
        naive = quantized and self.placement.resident.dense == "fp8-naive"
        weights = inside * out
        return Work(
            part,
            name,
            bytes=weights * (1 if naive else 2),
            flops=2 * rows * weights,
            tiles=self.tiled(inside, out),
            columns=rows,
            decoded=weights * self.costs.fp8_naive if naive else 0,
        )

    def tiled(self, inside: int, out: int) -> int:
        """Weight tiles, ragged ones counted whole."""
        return -(-inside // self.costs.tile_rows) * -(-out // self.costs.tile_rows)


def attention(s: Step, part: str, rows: int, selected: int, cached: int) -> Iterator[Work]:
    """One layer's attention: projections, gathered sparse attention, output."""
    c, heads = s.config, s.config.num_attention_heads // s.placement.ways("heads")
    groups, keys = c.o_groups // s.placement.ways("o_groups"), c.sliding_window + selected
    d, wide, lat = c.head_dim, rows * c.hidden_size, rows * c.q_lora_rank
    yield replace(
        s.matrix(part, "wq_a, wkv", rows, c.hidden_size, c.q_lora_rank + d),
        chain=((ROUND, wide), (NORM, lat), (NORM + ROPE + ROUND, rows * d)),
        dmas=2,
    )
    yield replace(s.matrix(part, "wq_b", rows, c.q_lora_rank, heads * d), chain=((ROUND, lat), (ROPE, rows * heads * d)))
    lanes = s.costs.lanes * -(-rows * heads // s.costs.lanes)
    yield Work(
        part,
        "sparse attention",
        bytes=(c.sliding_window + rows) * d * 2,
        row_bytes=rows * selected * d * 2,
        region=cached * d * 2,
        flops=4 * rows * heads * keys * d,
        moving=rows * 3 * keys * (d / s.costs.tile_rows),
        chain=((6, lanes * keys), (ROPE, rows * heads * d)),
        dmas=2,
    )
    inside = c.num_attention_heads // c.o_groups * d
    out_a = s.matrix(part, "wo_a", rows, inside, c.o_lora_rank)
    yield replace(out_a, bytes=out_a.bytes * groups, flops=out_a.flops * groups, tiles=out_a.tiles * groups, decoded=out_a.decoded * groups)
    yield replace(s.matrix(part, "wo_b", rows, groups * c.o_lora_rank, c.hidden_size), chain=((ROUND, rows * groups * c.o_lora_rank),))


def hyper(s: Step, part: str, rows: int) -> Work:
    """One sublayer's mixes, collapse, norm and combine."""
    c, k = s.config, s.costs
    mixes, flat = (2 + c.hc_mult) * c.hc_mult, c.hc_mult * c.hidden_size
    times = -(-rows // k.lanes)
    return Work(
        part,
        "hyper-connection",
        bytes=mixes * flat * 4 + 2 * rows * flat * 2,
        flops=2 * rows * mixes * flat,
        tiles=s.tiled(flat, mixes),
        columns=rows,
        chain=((NORM, rows * c.hidden_size),),
        fixed=(k.mixes + 2 * k.combine) * times,
    )


def router(s: Step, part: str, rows: int, experts: int) -> Work:
    gate = s.matrix(part, "router", rows, s.config.hidden_size, experts, quantized=False)
    return replace(gate, least=s.costs.router * -(-rows // s.costs.lanes))


def experts(s: Step, part: str, rows: int, count: int, k: int) -> Iterator[Work]:
    """The routed experts that have rows, on the fullest rank, and the shared expert."""
    c, p = s.config, s.placement
    groups, inter = p.ways("experts"), c.moe_intermediate_size // p.ways("moe_inter")
    hits = expected_hits(count, k, rows, groups)
    weights = 3 * c.hidden_size * inter
    width = 1.0 if p.resident.experts == "e4m3" else 0.5 + 1 / 32
    passes = {"e4m3": 0.0, "fp4": s.costs.fp4_passes, "fp4-naive": s.costs.fp4_naive}[p.resident.experts]
    padded = rows if rows <= s.costs.lanes else s.costs.lanes * -(-rows * k // (count * s.costs.lanes))
    yield Work(
        part,
        "routed experts",
        bytes=hits * weights * width,
        flops=2 * weights * rows * k / groups,
        tiles=hits * (2 * s.tiled(c.hidden_size, inter) + s.tiled(inter, c.hidden_size)),
        columns=padded,
        decoded=hits * weights * passes,
        chain=((hits * (4 + ROUND), padded * inter),),
        fixed=s.costs.experts_fixed,
    )
    size = c.sizes["shared_inter"]
    own = p.rules.share(Dim(("shared_inter",), 1, (size,)), size, "shared_experts.", p.mesh)
    up, down = s.matrix(part, "", rows, c.hidden_size, own), s.matrix(part, "", rows, own, c.hidden_size)
    yield replace(
        up,
        name="shared expert",
        bytes=3 * up.bytes,
        flops=3 * up.flops,
        tiles=2 * up.tiles + down.tiles,
        decoded=3 * up.decoded,
        chain=((4 + 2 * ROUND, rows * own),),
    )
