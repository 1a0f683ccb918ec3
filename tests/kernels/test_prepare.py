# SPDX-License-Identifier: Apache-2.0
"""Weights made ready at load: the same values, and the same bytes back."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import cases_linear as cases
import pytest
import torch
from helpers import tiny
from mutate import mutated

import v41
from v41 import tree
from v41.backends.neuron.kernels import KERNELS
from v41.backends.neuron.launch import simulate
from v41.backends.neuron.prepare import codes, dense, prepare, restore, tiled
from v41.spec.backend import Backend
from v41.spec.ops import quant
from v41.spec.table import Folded, Fp8, Tiled

SIZES = ((64, 128), (96, 64), (65, 40), (1, 32), (4160, 32), (6, 300))


def raw(t):
    """The bytes of a tensor."""
    return t.contiguous().flatten().view(torch.uint8)


def same(a, b):
    """Whether two trees have the same leaves at the same places, byte for byte."""
    pairs = list(zip(tree.paths(a), tree.paths(b), strict=True))
    return all(n == m and s.dtype == t.dtype and s.shape == t.shape and torch.equal(raw(s), raw(t)) for (n, s), (m, t) in pairs)


def every_code(scale):
    """A weight of all codes but NaN under one scale byte."""
    every = torch.tensor([c for c in range(256) if c & 127 != 127] + [0, 128], dtype=torch.uint8).reshape(32, 8)
    return Fp8(every.view(torch.float8_e4m3fn), torch.full((1, 1), scale, dtype=torch.uint8).view(torch.float8_e8m0fnu))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_tiled_weight_has_the_same_values_and_gives_its_bytes_back(size):
    w = cases.coded(*size)
    made = tiled(w)
    assert torch.equal(quant.dequantize(made, torch.float32), quant.dequantize(w, torch.float32))
    assert same(codes(made), w) and made.weight.is_contiguous()
    assert made.weight.shape[0] * made.weight.shape[3] == size[0] and made.weight.shape[1] == 128


def test_where_each_value_stands():
    values = torch.arange(8 * 300).reshape(8, 300) % 251
    made = tiled(values.bfloat16())
    assert made.weight.shape == (2, 128, 3, 4) and made.scale is None and made.inner == 300
    for row, column in ((0, 0), (3, 129), (4, 299), (7, 128)):
        assert made.weight[row // 4, column % 128, column // 128, row % 4] == values[row, column]
    assert not made.weight[:, 300 - 256 :, 2].any()


@pytest.mark.parametrize("scale", [3, 19, 127, 200, 246])
def test_every_code_survives_under_small_and_large_scales(scale):
    w = every_code(scale)
    assert same(codes(tiled(w)), w)


@pytest.mark.parametrize("scale", [0, 2, 247, 254])
def test_values_that_bfloat16_does_not_hold_are_refused(scale):
    with pytest.raises(ValueError, match=r"\(32, 8\)"):
        tiled(every_code(scale))


def test_a_weight_that_folds_stays_at_one_byte_and_comes_back():
    w = cases.foldable(96, 64)
    flat = Fp8(w.weight, torch.full_like(w.scale.view(torch.uint8), 120).view(torch.float8_e8m0fnu))
    made = dense(flat)
    assert isinstance(made, Folded) and made.weight.element_size() == 1
    assert torch.equal(quant.dequantize(made, torch.float32), quant.dequantize(flat, torch.float32))
    odd = Fp8(
        flat.weight.view(torch.uint8).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(0x0B, dtype=torch.uint8)).view(flat.weight.dtype), flat.scale
    )
    assert isinstance(dense(odd), Tiled)  # 11 * 2^-9 halved is no code


def test_prepared_parameters_compute_the_same_and_restore_to_the_same_bytes():
    params = replace(tiny(), numerics=v41.Numerics("trn2"))
    before = [raw(t).clone() for t in tree.leaves(params)]
    made = prepare(params)
    kinds = {type(layer.attn.wq_a) for layer in made.layers} | {type(made.head), type(made.draft.inp.main_proj)}
    kinds |= {type(layer.ffn.gate.weight) for layer in made.layers} | {type(layer.hc_attn.fn) for layer in made.layers}
    assert kinds == {Tiled}
    assert same(restore(made), params)
    assert all(torch.equal(raw(t), b) for t, b in zip(tree.leaves(params), before, strict=True))
    tokens = torch.arange(24)[None] % 300 + 3
    outs = []
    for p in (params, made):
        outs.append(v41.step(p, v41.init_cache(p, 1, 64), tokens, ops=Backend("spec")))
    assert same(outs[0][1], outs[1][1]) and torch.equal(outs[0][0].logits, outs[1][0].logits)


def test_a_step_whose_linear_layers_are_kernels_over_prepared_weights_is_the_step_of_the_spec():
    params = tiny(v41.Numerics("exact"))
    names = ("linear", "partial_linear", "plain_linear", "wide_linear", "grouped_linear")
    ops = replace(Backend("kernels"), **{n: partial(KERNELS[n], simulate) for n in names})
    tokens = torch.arange(7)[None] + 3
    want, _ = v41.step(params, v41.init_cache(params, 1, 16), tokens, ops=Backend("spec"))
    made = prepare(params)
    got, _ = v41.step(made, v41.init_cache(made, 1, 16), tokens, ops=ops)
    assert (got.logits - want.logits).abs().max() <= 1e-5 * want.logits.abs().max()


def test_prepared_parameters_are_not_written_as_a_checkpoint(tmp_path):
    made = prepare(tiny())
    with pytest.raises(ValueError, match="device's form"):
        v41.save_params(made, tmp_path / "out")
    assert not any(tmp_path.rglob("*.safetensors"))


def test_what_is_not_prepared_is_shared():
    params = tiny()
    made = prepare(params)
    assert made.embed is params.embed and made.layers[2].ffn.experts is params.layers[2].ffn.experts and made.layers[2].attn_norm is params.layers[2].attn_norm


MUTANTS = (
    ("unflatten(1, (-1, LANES))", "unflatten(1, (LANES, -1)).transpose(1, 2)", "neighbors on a lane"),
    ("repeat_interleave(BLOCK, 1)[:, : values.shape[1]]", "repeat_interleave(BLOCK, 1)[:, : values.shape[1]].flip(1)", "scales of other columns"),
    ("if w.scale is None:", "if w.inner % 2:", "a plain weight has no codes"),
)


@pytest.mark.parametrize(("old", "new", "what"), MUTANTS, ids=[m[2] for m in MUTANTS])
def test_a_wrong_preparation_is_caught(old, new, what, tmp_path):
    wrong = mutated(import_module("v41.backends.neuron.prepare"), old, new, tmp_path)
    differs = False
    for w in (cases.coded(96, 384), cases.plain(64, 384)):
        try:
            made = wrong.tiled(w)
            differs |= not torch.equal(quant.dequantize(made, torch.float32), quant.dequantize(w, torch.float32)) or not same(wrong.codes(made), w)
        except (AttributeError, RuntimeError):
            differs = True
    assert differs


def test_a_prepared_weight_is_read_back_as_it_lay():
    """Not as a slice of its tiles: the BLAS adds in another order over rows that lie apart."""
    weight = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        found = quant.dequantize(tiled(weight), dtype)
        assert found.is_contiguous() and torch.equal(found, weight.to(dtype))
