# SPDX-License-Identifier: Apache-2.0
"""Vectors of single operations (tests/golden/ops) as checks: what no text of the tiny model reaches, such as images and clamps."""

import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
from helpers import EXACT64, OPS, RELEASED
from safetensors.torch import load_file
from torch import Tensor

from v41.spec.backend import Backend
from v41.spec.numerics import Numerics
from v41.spec.ops import mix
from v41.spec.ops.index import candidate_rows, mask_rows
from v41.spec.params import Params
from v41.spec.table import Fp4, Fp8

EPS = 1e-20
Compared = Iterator[tuple[str, Tensor, Tensor, float]]


@cache
def stored(name: str) -> dict[str, Tensor]:
    return load_file(OPS / f"{name}.safetensors")


def expert(params: Params, ops: Backend) -> Compared:
    """One fp4 expert, with rows that reach the clamps."""
    t = stored("expert")
    w1, w2, w3 = (Fp4(t[f"fp4.w{i}.weight"][None], t[f"fp4.w{i}.scale"][None]) for i in (1, 2, 3))
    ids = torch.zeros((6, 1), dtype=torch.int32)
    yield "fp4.out", ops.experts(t["fp4.x"], torch.ones(6, 1), ids, w1, w2, w3, limit=10.0, numerics=RELEASED), t["fp4.out"], 1e-3
    got = ops.experts(t["fp4.x"], t["fp4.route_weight"], ids, w1, w2, w3, limit=10.0, numerics=RELEASED)
    yield "fp4.out_weighted", got, t["fp4.out_weighted"], 1e-3


def engram_hash(params: Params, ops: Backend) -> Compared:
    """The released hash around two images."""
    t = stored("engram_hash")
    at = torch.arange(8)[:, None] - torch.arange(4)
    ids, known = t["ids"][:, at.clamp_min(0)].int(), t["mask"][:, at.clamp_min(0)] & (at >= 0)
    pad = torch.tensor(2, dtype=torch.int32)
    rows = [ops.engram_hash(ids, known, pad, t["multipliers"][i], t["primes"][i], t["offsets"][i]) for i in range(2)]
    yield "prefill8_masked", torch.stack(rows, 2), t["prefill8_masked"], 0.0


def engram_gate(params: Params, ops: Backend) -> Compared:
    """The gate, with a masked position and a dot product of 0."""
    t = stored("engram_gate")
    kv = ops.linear(t["rows"].flatten(2), Fp8(t["wkv.weight"], t["wkv.scale"]), RELEASED)
    for mask, name in ((None, "out"), (t["mask"], "out_masked")):
        got = ops.engram_gate(t["x"], kv, t["q_weight"], t["k_weight"], mask, eps=EPS, numerics=RELEASED)
        yield name, got, t[name], 1e-3
    # bfloat16 hides the floor. In float64 a stream of zeros, whose dot product is 0, has the gate sigmoid(0.001).
    exact = ops.engram_gate(t["x"].double(), kv.double(), t["q_weight"], t["k_weight"], None, eps=EPS, numerics=EXACT64)
    value = kv[:, 4, 4 * 64 :].double() / (1 + math.exp(-0.001))
    yield "exact[4]", exact[:, 4], value[:, None].expand(-1, 4, -1), 1e-9


def rms_norm(params: Params, ops: Backend) -> Compared:
    """Rows from 1e-5 to 1e5 and a row of zeros, each on its own."""
    t = stored("rms_norm")
    for row in range(6):
        yield f"out[{row}]", ops.rms_norm(t["x"], t["weight"], params.config.rms_norm_eps)[row], t["out"][row], 1e-3


def act_quant(params: Params, ops: Backend) -> Compared:
    """Maxima exactly at and one step above a scale, the floor, ties."""
    t = stored("act_quant")
    for row in range(14):
        yield f"qdq[{row}]", ops.act_round(t["x"], params.numerics)[row], t["qdq"][row], 0.0


def fp4_act_quant(params: Params, ops: Backend) -> Compared:
    """Both small formats."""
    t = stored("fp4_act_quant")
    for row in range(14):
        yield f"e8m0_block32.qdq[{row}]", ops.index_round(t["x"], params.numerics)[row], t["e8m0_block32.qdq"][row], 0.0
        yield f"e4m3_block16.qdq[{row}]", ops.kv_round(t["x"], Numerics())[row], t["e4m3_block16.qdq"][row], 0.0


def candidate_blocks(params: Params, ops: Backend) -> Compared:
    """Prefill masks with one to three blocks."""
    t = stored("candidate_blocks")
    visible = t["prefill.lens"].int().flatten().expand(2, -1).contiguous()
    for blocks, size in ((2, 4), (3, 4), (1, 8), (9, 4)):
        chosen = ops.candidate_blocks(mask_rows(t["prefill.score"], visible), visible, blocks, size, RELEASED)
        name = f"prefill.blocks{blocks}x{size}"
        yield name, candidate_rows(chosen, t["prefill.score"].shape[-1], size), t[name], 0.0


def gate(params: Params, ops: Backend) -> Compared:
    """Routing with huge and zero rows."""
    t = stored("gate")
    for name, top in (("sqrtsoftplus.top2", 2), ("sqrtsoftplus.top1", 1), ("sigmoid.top3", 3), ("softmax.top3", 3)):
        options = {"k": top, "function": name.split(".")[0], "normalize": True, "route_scale": 1.5, "numerics": RELEASED}
        weights, ids = ops.gate(t[name + ".x"], t[name + ".weight"], t[name + ".bias"], **options)
        yield name + ".experts", ids, t[name + ".experts"], 0.0
        yield name + ".route_weights", weights, t[name + ".route_weights"], 1e-6


def hyper_connections(params: Params, ops: Backend) -> Compared:
    """Mixes whose Sinkhorn steps have not settled, position by position: two float32 results are within 1e-6."""
    t, iters = stored("hyper_connections"), params.config.hc_sinkhorn_iters
    made = mix.hc_split_sinkhorn(t["mixes"], t["scale"], t["base"], 4, iters, params.config.hc_eps, RELEASED)
    for name, got in zip(("pre", "post", "comb"), made, strict=True):
        for position in range(8):
            yield f"{name}[{position}]", got[:, position], t[name][:, position], 1e-6


VECTORS: dict[str, Callable[[Params, Backend], Compared]] = {
    f.__name__: f for f in (expert, engram_hash, engram_gate, rms_norm, act_quant, fp4_act_quant, candidate_blocks, gate, hyper_connections)
}
