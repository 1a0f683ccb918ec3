# SPDX-License-Identifier: Apache-2.0
"""The collectives of one step, from the rules: what the functions of v41/spec close, on which ranks, with how many bytes."""

from collections.abc import Iterator
from typing import NamedTuple

from v41.sharding.bucket import Bucket
from v41.sharding.placement import Placement
from v41.spec.config import Config
from v41.spec.plan import QUERIES
from v41.spec.table import Dim

ACT, WIDE, PAIR = 2, 4, 8  # bytes: activation, fp32 sum, (value, id) of a candidate

LOOKUP = {"embed.vocab": "embed", "markov_head.vocab": "embed", "engram_rows": "engram"}  # axis -> its name in `Rules.merged`


class Collective(NamedTuple):
    """`number` collectives of one purpose. bytes: what a rank holds after one: a reduction its tensor, a gather all shares."""

    phase: str  # step or draft
    of: str  # the logical axis that it closes
    kind: str  # reduce or gather
    axes: tuple[str, ...]
    ranks: int
    number: int
    bytes: int

    def axis(self, names: tuple[str, ...]) -> str:
        """`world` where every mesh axis takes part, else the mesh axes."""
        return "world" if set(self.axes) == set(names) else "+".join(self.axes)


def made(p: Placement, phase: str, of: str, kind: str, axes: tuple[str, ...], count: int, size: int) -> Iterator[Collective]:
    """One entry, or none where nothing is cut."""
    ranks = p.mesh.ways(axes)
    if ranks > 1 and count:
        yield Collective(phase, of, kind, axes, ranks, count, size)


def lookups(p: Placement, phase: str, sizes: list[tuple[str, int]]) -> Iterator[Collective]:
    """Reductions of lookups that are known together: (axis, bytes) of each. Those that the rules merge are one."""
    cut = [(a, n) for a, n in sizes if p.ways(a) > 1]
    merged = [(a, n) for a, n in cut if LOOKUP[a] in p.rules.merged]
    names = " ".join(dict.fromkeys(a for a, _ in merged))
    if merged:
        yield from made(p, phase, names, "reduce", p.rules.over(*(a for a, _ in merged)), 1, sum(n for _, n in merged))
    for axis, n in cut:
        if LOOKUP[axis] not in p.rules.merged:
            yield from made(p, phase, axis, "reduce", p.rules.of(axis), 1, n)


def layer_sums(config: Config, p: Placement, phase: str, layers: int, rows: int) -> Iterator[Collective]:
    """Attention outputs and expert sums of so many layers; the shared expert's part rides in the experts' reduction."""
    size = rows * config.hidden_size * WIDE
    yield from made(p, phase, "o_groups", "reduce", p.rules.of("o_groups"), layers, size)
    yield from made(p, phase, "experts moe_inter", "reduce", p.rules.over("experts", "moe_inter"), layers, size)


def vocabulary(config: Config, p: Placement, axis: str) -> int:
    """The vocabulary with the padding of all ranks."""
    part, size = axis.partition(".")[0], config.vocab_size
    return p.rules.share(Dim(("vocab",), 1, (size,)), size, part, p.mesh) * p.mesh.ways(p.rules.of(axis))


def cut_alike(config: Config, p: Placement, a: str, b: str) -> bool:
    """Whether a rank holds the same columns of both vocabularies."""
    ways = [tuple(m for m in p.rules.of(axis) if p.mesh.length(m) > 1) for axis in (a, b)]
    return ways[0] == ways[1] and vocabulary(config, p, a) == vocabulary(config, p, b)


def choice(p: Placement, phase: str, axis: str, rows: int, count: int, config: Config, row: int) -> Iterator[Collective]:
    """Choosing the best token of logits that are cut: whole logits, or the best candidate of each rank with `row` bytes about it."""
    axes = p.rules.of(axis)
    whole = p.rules.choice == "logits"
    size = rows * vocabulary(config, p, axis) * WIDE if whole else rows * (PAIR + row) * p.mesh.ways(axes)
    yield from made(p, phase, axis, "gather", axes, count, size)


def step_collectives(config: Config, p: Placement, bucket: Bucket, capacity: int) -> Iterator[Collective]:
    """The target's step: lookups, layers, index scores (64 queries at a time, of the whole buffer, the row that nobody reads included), choice."""
    rows, tables = bucket.tokens, len(config.engram_layer_ids)
    table_row = rows * config.engram_columns * config.engram_head_dim * ACT
    yield from lookups(p, "step", [("embed.vocab", rows * config.hidden_size * ACT), *([("engram_rows", table_row)] * tables)])
    memory, parts = rows * (config.hc_mult + 1) * config.hidden_size * ACT, "engram.engram_parts*dim"
    together = LOOKUP["engram_rows"] in p.rules.merged
    calls, size = (1, memory * tables) if together else (tables, memory)
    yield from made(p, "step", parts, "gather", p.rules.of(parts), calls if tables else 0, size)
    yield from layer_sums(config, p, "step", config.num_hidden_layers, rows)
    for plan in (q for q in config.layer_plan if q.owns_index):
        for part in (min(QUERIES, bucket.rows - i) for i in range(0, bucket.rows, QUERIES)):
            size = part * bucket.batch * (capacity // plan.ratio + 1) * WIDE
            yield from made(p, "step", "index_heads", "reduce", p.rules.of("index_heads"), 1, size)
    yield from choice(p, "step", "head.vocab", bucket.logits, 1, config, 0)


def draft_collectives(config: Config, p: Placement, bucket: Bucket) -> Iterator[Collective]:
    """The draft head: rings from the step's rows, then, in a decode bucket, one block of drafts."""
    block, stages = config.dspark_block_size * bucket.batch, config.num_nextn_predict_layers
    main = "main_proj.dim"
    yield from made(p, "draft", main, "gather", p.rules.of(main), 1, bucket.tokens * config.hidden_size * ACT)
    if not bucket.drafts:
        return
    told = config.dspark_markov_rank * ACT
    yield from lookups(p, "draft", [("embed.vocab", block * config.hidden_size * ACT), ("markov_head.vocab", bucket.batch * told)])
    yield from layer_sums(config, p, "draft", stages, block)
    head, markov = "head.vocab", "markov_head.vocab"
    if not (p.rules.choice == "candidates" and cut_alike(config, p, head, markov)):
        yield from made(p, "draft", head, "gather", p.rules.of(head), 1, block * vocabulary(config, p, head) * WIDE)
    if p.rules.choice == "logits":
        yield from made(p, "draft", markov, "reduce", p.rules.of(markov), config.dspark_block_size - 1, bucket.batch * told)
    yield from choice(p, "draft", markov, bucket.batch, config.dspark_block_size, config, told)


def collectives(config: Config, p: Placement, bucket: Bucket, capacity: int) -> list[Collective]:
    """All of one step, draft and choice included, entries of one purpose and size together."""
    found = list(step_collectives(config, p, bucket, capacity))
    if config.num_nextn_predict_layers and bucket.fills:
        found += draft_collectives(config, p, bucket)
    counts: dict[Collective, int] = {}
    for c in found:
        key = c._replace(number=0)
        counts[key] = counts.get(key, 0) + c.number
    return [c._replace(number=n) for c, n in counts.items()]


def totals(found: list[Collective], names: tuple[str, ...], phases: tuple[str, ...] = ("step", "draft")) -> dict[str, int]:
    """Mesh axis -> collectives."""
    sums: dict[str, int] = {}
    for c in found:
        if c.phase in phases:
            sums[c.axis(names)] = sums.get(c.axis(names), 0) + c.number
    return sums
