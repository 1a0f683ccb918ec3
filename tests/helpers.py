# SPDX-License-Identifier: Apache-2.0
"""What the tests of the spec share: golden files, comparisons, one loaded model, and a config that is quick to vary."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import jaxtyping
import torch
from safetensors.torch import load_file
from torch import Tensor

import v41
from v41.spec.handed import Boundary, Handed

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
OPS = GOLDEN / "ops"
TINY = GOLDEN / "tiny"

RELEASED = v41.Numerics("released")
OWNER = v41.Numerics("released", index_keys="owner")
FAITHFUL = v41.Numerics()
EXACT = v41.Numerics("exact")
EXACT_STALE = v41.Numerics("exact", index_keys="reference")
EXACT64 = v41.Numerics("exact", dtype="float64")
PROMPT = 133  # tokens of the golden prompt
LOGIT_BOUND = 1e-3  # tests/golden/tiny/README.md, 1: what holds on any CPU


@cache
def _loaded() -> v41.Params:
    return v41.load_params(TINY / "checkpoint")


def tiny(numerics: v41.Numerics = FAITHFUL) -> v41.Params:
    """The golden tiny model; it is read once, since numerics are a field beside the tensors."""
    return replace(_loaded(), numerics=numerics)


def config() -> v41.Config:
    """The tiny model's config."""
    return _loaded().config


@cache
def released_config() -> v41.Config:
    """The published config of the full-size model."""
    return v41.Config.from_json(ROOT / "v41" / "data" / "released_config.json")


@cache
def golden(part: str) -> dict[str, Tensor]:
    """One file of the golden run, `main.prefill` for example."""
    return load_file(TINY / f"{part}.safetensors")


@contextmanager
def unchecked() -> Iterator[None]:
    """Without shape checks: for repeats of calls that were checked before."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


# One layer on stored inputs (tests/golden/tiny/README.md, 2)


def stored_rows(source: int, name: str, width: int) -> Tensor:
    """A source's rows after the prefill as a cache buffer: the rows, then a sink."""
    rows = golden("main.caches")[f"after_prefill.layers.{source}.{name}"]
    return torch.cat((rows, torch.zeros(1, 1, width, dtype=rows.dtype)), 1)


def stored_selection(source: int) -> Tensor:
    chosen = golden("main.prefill")[f"layers.{source}.topk_idxs"]
    return torch.where(chosen >= 0, chosen - PROMPT, -1)


def stored_candidates(source: int) -> Tensor:
    """The stored mask as block numbers, ascending, -1 last."""
    blocks = golden("main.prefill")[f"layers.{source}.candidates"][..., :: config().candidate_block_size]
    number = torch.where(blocks, torch.arange(blocks.shape[-1]), 1 << 20).sort(-1).values[..., : config().candidate_topk_blocks]
    return torch.where(number == 1 << 20, -1, number).int()


def handed(layer: int, c: v41.Config) -> Handed:
    """What the layers below hand to a layer, from the stored tensors."""
    plan = c.layer_plan[layer]
    if plan.ratio == 0 or plan.owns_kv:
        compressed = keys = None
    else:
        compressed = stored_rows(plan.kv_source, "compress_kv_cache", c.head_dim)
        keys = stored_rows(plan.kv_source, "index_k_cache", c.index_head_dim)
    chosen = None if plan.ratio == 0 or plan.owns_index else stored_selection(plan.index_source)
    return Handed(compressed, keys, chosen, stored_candidates(c.candidate_source_layer_id) if plan.reads_candidates else None)


def stored_boundary(layer: int, params: v41.Params) -> tuple[v41.Cache, Boundary]:
    """An empty cache, and the boundary of the golden prompt before a layer, all of it from stored tensors."""
    stored = golden("main.prefill")
    first, cache = v41.embed(params, v41.init_cache(params, batch=1, capacity=PROMPT + 1), golden("main.outputs")["prompt"])
    if layer == 0:
        return cache, first
    below = f"layers.{layer - 1}."
    hashes = tuple(h.int().contiguous() for h in stored["engram_hash_ids"].unbind(2))
    return cache, Boundary(stored[below + "h_out"], stored[below + "pre_mix_out"], first.call, handed(layer, params.config), hashes, (), layer)


# A config that is quick to vary

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "n_routed_experts": 4,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 5,
    "candidate_block_size": 2,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [29 + 31 + 37 + 41],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 29,
    "engram_compressed_vocab_size": 50,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 3,
    "dspark_noise_token_id": 60,
    "dspark_target_layer_ids": [2, 3],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}


def published(**changes: object) -> dict:
    """A published config.json of four small layers with every part; a change to None leaves the key out of text_config."""
    found = json.loads((TINY / "checkpoint" / "config.json").read_text())
    text = found["text_config"] | SMALL | changes
    return found | {"text_config": {k: v for k, v in text.items() if v is not None or k == "rope_scaling"}}


def relative(got: Tensor, want: Tensor) -> float:
    """Relative L2 error; infinite where got is not finite and want is."""
    got, want = got.double(), want.double()
    same = got == want  # infinities at the same places are no error
    if not torch.isfinite(got[~same]).all() or not torch.isfinite(want[~same]).all():
        return float("inf")
    size = want[torch.isfinite(want)].norm().clamp_min(1e-30)
    return float((got[~same] - want[~same]).norm() / size)


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return x.contiguous().flatten().view(torch.uint8) if x.numel() else torch.zeros(0, dtype=torch.uint8)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Same dtype, shape and bytes; zeros of different sign differ."""
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(raw(got), raw(want))


def steps_apart(got: Tensor, want: Tensor) -> int:
    """The largest distance of two bfloat16 tensors, counted in bfloat16 numbers."""

    def line(x: Tensor) -> Tensor:
        code = x.contiguous().view(torch.int16).int()
        return torch.where(code < 0, -(code & 0x7FFF), code)

    assert got.dtype == want.dtype == torch.bfloat16 and got.shape == want.shape
    return int((line(got) - line(want)).abs().max())


def half_step(values: Tensor, digits: int) -> Tensor:
    """Half the distance between neighbors of numbers with that many significant bits: the error of one rounding, float64."""
    exponent = torch.frexp(values.double()).exponent
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - digits - 1)
