# SPDX-License-Identifier: Apache-2.0
"""Experts made ready at load: the form that the rules ask for, what falls back, and the same layer."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny

from v41.backends.neuron.fold import Count, unfold
from v41.backends.neuron.kernels import experts as kernels
from v41.backends.neuron.kernels.experts_layout import restored
from v41.backends.neuron.launch import simulate
from v41.backends.neuron.prepare_experts import form_of, joint, prepare_experts, prepare_moe
from v41.sharding.tables import TABLES, rules_named
from v41.spec.backend import Backend
from v41.spec.block import moe
from v41.spec.numerics import Numerics
from v41.spec.table import Folded, Fp4

TRN2 = Numerics("trn2")
LEAN, PR71 = rules_named("lean"), rules_named("pr71")


def model():
    return replace(tiny(), numerics=TRN2)


def test_rules_say_how_experts_stay_in_memory_and_which_sums_are_one():
    assert {name: form_of(rules) for name, rules in TABLES.items()} == {name: "codes" if name == "fast" else "fp4" for name in TABLES}
    assert {name for name, rules in TABLES.items() if joint(rules)} == {"lean", "fast", "tp", "single"}


def test_every_layer_and_stage_is_prepared_and_counted():
    params = model()
    made, count = prepare_experts(params, "codes", LEAN)
    layers = (*made.layers, *made.draft.stages)
    assert all(p.ffn.experts.w1.weight.dtype == torch.uint8 and not p.ffn.experts.w1.packed for p in layers)
    assert count.inexact == 0 and count.groups == 3 * sum(p.ffn.experts.w1.weight.shape[0] for p in (*params.layers, *params.draft.stages))
    assert made.layers[0].attn is params.layers[0].attn and made.layers[0].ffn.gate is params.layers[0].ffn.gate
    assert params.layers[0].ffn.experts.w2 is not None
    with pytest.raises(ValueError, match="'fp8'"):
        prepare_experts(params, "fp8", LEAN)


@pytest.mark.parametrize("form", ["codes", "fp4"])
def test_the_checkpoint_comes_back(form):
    params = model()
    made, _ = prepare_experts(params, form, LEAN)
    for before, after in zip(params.layers, made.layers, strict=True):
        e = before.ffn.experts
        for w, back in zip((e.w1, e.w2, e.w3), restored(after.ffn.experts.w1), strict=True):
            found = unfold(replace(back, blocks=w.scale)) if isinstance(back, Folded) else back
            assert torch.equal(found.weight, w.weight) and torch.equal(found.scale.view(torch.uint8), w.scale.view(torch.uint8))


def test_a_matrix_that_does_not_fold_leaves_its_layer_in_fp4():
    params = model()
    ffn = params.layers[1].ffn
    scale = ffn.experts.w2.scale.view(torch.uint8).clone()
    scale[0, :2] = torch.tensor([60, 180], dtype=torch.uint8)[:, None]
    wide = Fp4(torch.full_like(ffn.experts.w2.weight, 0x11), scale.view(torch.float8_e8m0fnu))
    made, count = prepare_moe(replace(ffn, experts=replace(ffn.experts, w2=wide)), "codes", LEAN, TRN2)
    held = scale.shape[0]
    assert made.experts.w1.packed and count == Count(3 * held, 1)


@pytest.mark.parametrize("rules", [LEAN, PR71], ids=["one call", "two calls"])
@pytest.mark.parametrize("form", ["codes", "fp4"])
def test_a_prepared_layer_computes_the_same(form, rules):
    params = model()
    ffn, config = params.layers[2].ffn, params.config
    made, _ = prepare_moe(ffn, form, rules, TRN2)
    launched = []

    def run(kernel, cores, *args):
        launched.append(kernel)
        return simulate(kernel, cores, *args)

    def experts(*args, limit, numerics):
        return kernels.experts(run, *args, limit=limit, numerics=numerics)

    def shared(*args, limit, numerics):
        return kernels.shared_expert(run, *args, limit=limit, numerics=numerics)

    x = torch.randn(1, 5, config.hidden_size).bfloat16()
    k = config.num_experts_per_tok
    want = moe(ffn, x, k, "", config, TRN2, Backend("spec"))
    got = moe(made, x, k, "", config, TRN2, replace(Backend("kernels"), experts=experts, shared_expert=shared))
    assert len(launched) == (1 if rules is LEAN else 2)
    assert got.dtype == want.dtype and (got.float() - want.float()).abs().max() <= 2.0**-7 * want.float().abs().max()
