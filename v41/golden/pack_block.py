# SPDX-License-Identifier: Apache-2.0
"""One layer at its full widths: weights, state and inputs by the recipe (docs/golden-pack.md 8)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from v41 import api, recipe, tree
from v41.golden.folder import digest
from v41.golden.pack_calls import Made, Tensors, forced
from v41.golden.pack_numbers import Inputs
from v41.golden.pack_rows import rows_written
from v41.params_io import recipe_leaf
from v41.spec.backend import Backend
from v41.spec.cache import Cache, advance
from v41.spec.config import Config
from v41.spec.handed import Boundary, Handed
from v41.spec.numerics import Numerics
from v41.spec.ops.quant import act_round, index_round, kv_round
from v41.spec.params import Layer, Params, build_layer
from v41.spec.slots import call_rows
from v41.spec.table import ParamSpec

LENGTH, SPARE = 1151, 17  # positions held before the call: odd, more than any query selects of the released shape
ENGRAM_ROWS = 4096  # rows of an Engram table that are made


def blank(spec: ParamSpec) -> Tensor:
    """Zeros whose pages take no memory until they are written."""
    return torch.from_numpy(np.zeros(spec.shape, np.uint8)).view(spec.dtype)


def block_layer(config: Config, number: int, seed: int) -> Layer:
    """A layer by the recipe, without its routed experts (zeros so far) and with the first rows of its Engram table."""

    def leaf(spec: ParamSpec) -> Tensor:
        if spec.stacked:
            return blank(spec)
        if ".engram.embed." in spec.name:
            return recipe.generate(spec.name, spec.dtype, spec.shape, seed, slice(0, min(ENGRAM_ROWS, spec.shape[0])))
        return recipe_leaf(spec, seed)

    return build_layer(config, number, leaf)


def fill_experts(layer: Layer, config: Config, number: int, seed: int, ids: Iterable[int]) -> None:
    """Makes the named experts, in the stacks that are there."""
    wanted = set(ids)

    def leaf(spec: ParamSpec) -> Tensor | None:
        if not spec.stacked:
            return None
        part, kind = spec.name.split("{experts}.")[1].split(".")
        stack = getattr(getattr(layer.ffn.experts, part), kind)
        for e, (name, shape) in enumerate(spec.released()):
            if e in wanted:
                stack[e].copy_(recipe.generate(name, spec.dtype, shape, seed))
        return stack

    build_layer(config, number, leaf)


def block_params(config: Config, numerics: Numerics, number: int, seed: int) -> Params:
    """Parameters of which only layer `number` is there."""
    none = torch.zeros(0, dtype=torch.bfloat16)
    layers = tuple(block_layer(config, number, seed) if i == number else None for i in range(number + 1))
    return Params(none, layers, none, none, None, None, config, numerics)


def block_inputs(params: Params, number: int, rows: int) -> Tensors:
    """The state of the layer, what layers below hand to it, and the boundary before it, as `in.NAME`."""
    config, numerics, plan = params.config, params.numerics, params.config.layer_plan[number]
    i, dim, index_dim = Inputs(f"block.{number}", numerics), config.head_dim, config.index_head_dim
    held = LENGTH // max(plan.ratio, 1)

    def rounded(name: str, width: int, trip: Any, n: int) -> Tensor:
        x = i.act(name, 1, n, width)
        return trip(x, numerics) if numerics.rounds else x

    found = {"stream": i.act("stream", 1, rows, config.hc_mult, config.hidden_size), "pre": i.wide("pre", 1, rows, config.hc_mult).abs()}
    found |= {"length": torch.tensor([LENGTH], dtype=torch.int32), "window": rounded("window", dim, act_round, config.sliding_window)}
    if plan.ratio:
        found |= {"compressed": rounded("compressed", dim, kv_round, held), "index_keys": rounded("index_keys", index_dim, index_round, held)}
    if plan.owns_kv and plan.ratio > 1:
        found |= {n: i.wide(n, 1, plan.ratio - 1, dim) for n in ("group_kv", "group_score")}
    if plan.ratio and not plan.owns_index:
        order = i.words("topk", held).argsort()[: min(config.index_topk, held - 1)].sort().values
        found["topk_idxs"] = order.to(torch.int32).expand(1, rows, -1).contiguous()
    if plan.reads_candidates:
        count = -(-(held + rows) // config.candidate_block_size)
        blocks = torch.where(torch.arange(config.candidate_topk_blocks) < count, torch.arange(config.candidate_topk_blocks), -1)
        found["candidates"] = blocks.to(torch.int32).expand(1, rows, -1).contiguous()
    if plan.engram is not None:
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        made = min(ENGRAM_ROWS, config.engram_num_embeddings[plan.engram])
        found["hash_ids"] = i.ids("hash", 0, made, 1, rows, columns)
    return {f"in.{n}": t for n, t in found.items()}


def tail(rows: Tensor, size: int, length: int) -> Tensor:
    """A ring of `size` positions and a sink, of which the newest are given, up to position length - 1."""
    ring = torch.zeros((1, size + 1, rows.shape[-1]), dtype=rows.dtype)
    at = torch.arange(length - rows.shape[1], length) % size
    ring[:, at] = rows
    return ring


def buffer(rows: Tensor, capacity: int) -> Tensor:
    """Rows at the front of a buffer with a sink."""
    return torch.cat((rows, torch.zeros((1, capacity + 1 - rows.shape[1], rows.shape[2]), dtype=rows.dtype)), 1)


def block_state(params: Params, number: int, inputs: Tensors) -> tuple[Cache, Boundary]:
    """(cache, boundary before the layer) of the inputs."""
    t = {n.removeprefix("in."): x for n, x in inputs.items()}
    plan, length, rows = params.config.layer_plan[number], int(t["length"]), t["stream"].shape[1]
    cache = api.init_cache(params, 1, LENGTH + SPARE)
    cache = replace(cache, length=t["length"], high=t["length"])
    held = {n: buffer(t[n], cache.capacity // plan.ratio) for n in ("compressed", "index_keys") if n in t}
    state = replace(cache.layers[number], window=tail(t["window"], cache.window_ring, length))
    if plan.owns_kv:
        state = replace(state, **held)
    if "group_kv" in t:
        state = replace(state, **{n: tail(t[n], cache.group_ring(plan.ratio), length) for n in ("group_kv", "group_score")})
    layers = tuple(state if i == number else s for i, s in enumerate(cache.layers))
    call = call_rows(cache.length, torch.tensor([rows], dtype=torch.int32), rows, None)
    given = {} if plan.owns_kv else held
    handed = Handed(given.get("compressed"), given.get("index_keys"), t.get("topk_idxs"), t.get("candidates"))
    hashes: tuple[Tensor, ...] = ()
    if plan.engram is not None:
        hashes = tuple(t["hash_ids"] for _ in params.config.engram_layer_ids)
    return replace(cache, layers=layers), Boundary(t["stream"], t["pre"], call, handed, hashes, (), number)


def block_step(ops: Backend, params: Params, cache: Cache, boundary: Boundary, given: Tensors) -> Made:
    """The layer on the boundary, its taps forced to `given`, with the rows that it writes."""
    recording, taps = forced(ops, given)
    number, ran = boundary.layer, advance(cache, boundary.call.valid)
    _, after = api.layers(params, ran, boundary, number, number + 1, ops=recording)
    rows = rows_written(cache, after, boundary.call.rows)
    return Made(taps | {n: t for n, t in rows.items() if n.startswith(f"rows.layers.{number}.")}, after)


def in_act(boundary: Boundary, numerics: Numerics) -> Boundary:
    """The same boundary in the activations of other numerics."""
    act, handed = numerics.act, boundary.handed
    cast = {n: getattr(handed, n).to(act) for n in ("compressed", "index_keys") if getattr(handed, n) is not None}
    return replace(boundary, stream=boundary.stream.to(act), pre=boundary.pre.to(numerics.wide), handed=replace(handed, **cast))


def weight_digests(layer: Layer, config: Config, number: int, experts: Iterable[int]) -> dict[str, str]:
    """SHA-256 of every tensor that was made, by its released name."""
    specs: list[ParamSpec] = []

    def leaf(spec: ParamSpec) -> Tensor:
        specs.append(spec)
        return torch.empty(0)

    build_layer(config, number, leaf)
    found = {}
    for spec, tensor in zip(specs, tree.leaves(layer), strict=True):
        if not spec.stacked:
            found[spec.name] = digest(tensor)
        for e in sorted(experts) if spec.stacked else ():
            found[spec.name.replace("{experts}", str(e))] = digest(tensor[e])
    return found
