# SPDX-License-Identifier: Apache-2.0
"""Whether rules fit a model and a mesh, before anything is cut."""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from v41.sharding.caches import empty_specs
from v41.sharding.distinct import distinct
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.spec.cache import SLACK, Cache
from v41.spec.config import Config
from v41.spec.params import Params
from v41.spec.table import ParamSpec, holds_tensors, is_part, parse_axes, without_none
from v41.tree import is_static

# Axes whose cut the functions of the model close: by a sum, or by putting shares side by side. Any other cut would give wrong results.
CLOSED = frozenset(
    {
        *("vocab", "heads", "o_groups", "index_heads", "experts", "moe_inter", "shared_inter", "engram_rows"),
        *("engram.engram_parts*dim", "main_proj.dim", "markov_head.vocab"),
    }
)


@cache
def all_specs(config: Config) -> tuple[ParamSpec, ...]:
    """One parameter of every kind, then the caches of one sequence."""
    parameters = [s for s, _ in distinct(config, config.num_nextn_predict_layers > 0)]
    return (*parameters, *empty_specs(config, 1, max(config.compress_ratios, default=1) or 1, SLACK))


def axes_of(kind: Any) -> Iterator[str]:
    """Every logical axis of the tensors of a part, from its annotations."""
    kind = without_none(kind)
    if get_origin(kind) is tuple:
        yield from axes_of(get_args(kind)[0])
    elif holds_tensors(kind):
        text = get_args(kind)[1] if get_origin(kind) is Annotated else kind.dim_str
        yield from (a for dim in parse_axes(text) for a in dim)
    elif is_part(kind):
        yield from (a for f in fields(kind) if not is_static(f) for a in axes_of(f.type))


def check(config: Config, rules: Rules, mesh: Mesh) -> None:
    """ValueError with names and numbers where the rules are not total, cut what no function closes, or do not fit the sizes."""
    known = set(axes_of(Params)) | set(axes_of(Cache))
    stray = sorted(k for k in (*rules.axes, *rules.padding) if not set(k.rpartition(".")[2].split("*")) <= known)
    missing = sorted(a for a in known if a not in rules.axes)
    if stray or missing:
        raise ValueError(f"rules {rules.name}: axes that no tensor has {stray}, axes without a rule {missing}")
    opened = sorted(k for k in rules.axes if mesh.ways(rules.of(k)) > 1 and k not in CLOSED)
    if opened:
        raise ValueError(f"rules {rules.name}: nothing closes a cut of {opened}")
    if rules.of("heads") != rules.of("o_groups"):
        raise ValueError(f"rules {rules.name}: heads over {rules.of('heads')}, but o_groups, which hold them, over {rules.of('o_groups')}")
    if rules.of("gate.experts"):
        raise ValueError(f"rules {rules.name}: gate.experts over {rules.of('gate.experts')}: every rank routes by itself")
    shared, routed = rules.of("shared_inter"), rules.over("experts", "moe_inter")
    if mesh.ways(shared) > 1 and not set(shared) <= set(routed):
        raise ValueError(f"rules {rules.name}: shared_inter over {shared}, not within the routed experts' reduction over {routed}")
    for spec in all_specs(config):
        rules.local_shape(spec, mesh)
