# SPDX-License-Identifier: Apache-2.0
"""Linear layers as kernels against their definitions."""

from importlib import import_module

import cases_linear as cases
import pytest
import torch
from mutate import everywhere

from v41.backends.neuron import sim
from v41.backends.neuron.kernels import act_round as rounding
from v41.backends.neuron.kernels import linear as layers
from v41.backends.neuron.launch import profiled, simulate
from v41.backends.neuron.prepare import tiled
from v41.spec.numerics import Numerics
from v41.spec.ops import linear as spec
from v41.spec.ops import quant

TRN2, EXACT = Numerics("trn2"), Numerics("exact")
EPS = 2.0**-24


def noise(x, w):
    """What fp32 sums of inner terms may differ by from the exact sum, in any order."""
    return x.shape[-1] * EPS * (x.double().abs() @ w.double().abs().T)


def misses(got, x, w, numerics):
    """Elements that are not a correct rounding of a value within fp32 noise of the exact sum of exact products."""
    rows = quant.act_round(x, numerics) if numerics.rounds else x
    values = quant.dequantize(w, torch.float64)
    want, slack = rows.double() @ values.T, noise(rows, values)
    if got.dtype == torch.bfloat16:
        half = torch.exp2(torch.frexp(want.abs() + slack).exponent.double() - 9)  # of the last of 8 bits
        slack = slack + half
    return int((~((got.double() - want).abs() <= slack)).sum())


def near(got, want):
    """`exact`: 1e-5 of the row's largest."""
    assert got.shape == want.shape and got.dtype == want.dtype
    assert ((got - want).abs().amax(-1) <= 1e-5 * want.abs().amax(-1)).all()


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize(("what", "rows", "inner", "out"), cases.SHAPES, ids=[s[0] for s in cases.SHAPES])
def test_a_linear_layer_is_its_definition(what, rows, inner, out, form):
    x, w = cases.activations(rows, inner, torch.bfloat16), cases.FORMS[form](out, inner)
    got, want = layers.linear(simulate, x, w, TRN2), spec.linear(x, w, TRN2)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert misses(got, x, w, TRN2) == 0 and misses(want, x, w, TRN2) == 0
    wide = layers.partial_linear(simulate, x, w, TRN2)
    assert wide.dtype == torch.float32 and misses(wide, x, w, TRN2) == 0


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize(("what", "rows", "inner", "out"), cases.SHAPES[2:6], ids=[s[0] for s in cases.SHAPES[2:6]])
def test_in_exact_float32_only_the_order_of_sums_differs(what, rows, inner, out, form):
    x, w = cases.activations(rows, inner, torch.float32)[5:], cases.FORMS[form](out, inner)
    x = torch.cat((x, torch.randn(3, inner)))
    for name in ("linear", "partial_linear"):
        near(getattr(layers, name)(simulate, x, w, EXACT), getattr(spec, name)(x, w, EXACT))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "rows", "inner", "out"), cases.FULL, ids=[s[0] for s in cases.FULL])
@pytest.mark.parametrize("form", cases.FORMS)
def test_a_linear_layer_of_full_size_is_its_definition(what, rows, inner, out, form):
    x, w = cases.activations(rows, inner, torch.bfloat16), cases.FORMS[form](out, inner)
    assert misses(layers.linear(simulate, x, w, TRN2), x, w, TRN2) == 0


@pytest.mark.parametrize("name", ["plain_linear", "wide_linear"])
@pytest.mark.parametrize(("what", "rows", "inner", "out"), cases.NARROW + cases.SHAPES[3:8], ids=str)
def test_plain_and_wide_layers_are_their_definitions(what, rows, inner, out, name):
    x, w = cases.activations(rows, inner, torch.bfloat16), torch.randn(out, inner).bfloat16()
    for weight in (w, tiled(w)):
        got, want = getattr(layers, name)(simulate, x, weight, TRN2), getattr(spec, name)(x, weight, TRN2)
        assert got.shape == want.shape and got.dtype == want.dtype == (torch.float32 if name == "wide_linear" else torch.bfloat16)
        assert plain_misses(got, x, w) == 0 and plain_misses(want, x, w) == 0
    exact = torch.randn(rows, inner)
    near(getattr(layers, name)(simulate, exact, w, EXACT), getattr(spec, name)(exact, w, EXACT))


def plain_misses(got, x, w):
    """`misses` of a product without a round trip."""
    return misses(got, x, w, EXACT)


@pytest.mark.parametrize(("rows", "inner", "out"), [(6, 576, 96), (6, 1408, 3), (2, 64, 24)])
def test_float32_weights_are_not_narrowed(rows, inner, out):
    x, w = torch.randn(rows, inner).bfloat16(), torch.randn(out, inner)
    near(layers.wide_linear(simulate, x, w, TRN2), spec.wide_linear(x, w, TRN2))


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize(("groups", "out", "head_dim"), [(1, 64, 64), (2, 128, 64), (4, 96, 32), (3, 96, 64), (3, 72, 96)])
def test_a_grouped_layer_is_its_definition(groups, out, head_dim, form):
    x, w = torch.randn(2, 3, 2 * groups, head_dim).bfloat16(), cases.FORMS[form](out, 2 * head_dim)
    got, want = layers.grouped_linear(simulate, x, w, groups, TRN2), spec.grouped_linear(x, w, groups, TRN2)
    assert got.shape == want.shape == (2, 3, out)
    values = quant.dequantize(w, torch.bfloat16).unflatten(0, (groups, -1))
    for g in range(groups):
        part = x.unflatten(2, (groups, -1))[:, :, g].flatten(2).flatten(0, 1)
        cut = slice(g * out // groups, (g + 1) * out // groups)
        assert plain_misses(got.flatten(0, 1)[:, cut], part, values[g]) == 0
        assert plain_misses(want.flatten(0, 1)[:, cut], part, values[g]) == 0


def test_a_row_of_nan_stays_alone():
    for rows, inner, out in ((6, 576, 96), (6, 2048, 4)):
        x, w = torch.randn(rows, inner).bfloat16(), torch.randn(out, inner).bfloat16()
        bad = torch.where(torch.arange(rows)[:, None] == 2, torch.nan, x)
        rest = [r for r in range(rows) if r != 2]
        for name in ("linear", "plain_linear", "wide_linear"):
            layer = getattr(layers, name)
            got = layer(simulate, bad, w, TRN2)
            assert torch.equal(got[rest], layer(simulate, x, w, TRN2)[rest]) and got[2].isnan().all()


def test_no_rows_give_no_rows():
    w = cases.tiles(64, 128)
    for name, dtype in (("linear", torch.bfloat16), ("partial_linear", torch.float32), ("plain_linear", torch.bfloat16), ("wide_linear", torch.float32)):
        got = getattr(layers, name)(simulate, torch.zeros(2, 0, 128, dtype=torch.bfloat16), w, TRN2)
        assert got.shape == (2, 0, 64) and got.dtype == dtype
    assert rounding.act_round(simulate, torch.zeros(0, 64, dtype=torch.bfloat16), TRN2).shape == (0, 64)


@pytest.mark.parametrize("shape", [(6, 5120), (1, 32), (3, 2, 96), (200, 64), (129, 4096)])
def test_the_round_trip_is_its_definition_to_the_bit(shape):
    n = shape[-1]
    x = cases.activations(max(8, torch.Size(shape[:-1]).numel()), n, torch.bfloat16)[-torch.Size(shape[:-1]).numel() :].unflatten(0, shape[:-1])
    first = cases.activations(8, n, torch.bfloat16)
    for values in (x, first):
        got = rounding.act_round(simulate, values, TRN2)
        assert torch.equal(got.view(torch.int16), quant.act_round(values, TRN2).view(torch.int16))


def test_every_code_at_every_place_of_its_binade_rounds_as_defined():
    every = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # every finite magnitude
    spread = every.unflatten(0, (-1, 32)).T.flatten()  # each group spans all binades
    for values in (every, -every, spread):
        got = rounding.act_round(simulate, values[None], TRN2)
        assert torch.equal(got.view(torch.int16), quant.act_round(values[None], TRN2).view(torch.int16))


def test_other_regimes_and_odd_inner_sizes_are_refused():
    x, w = torch.randn(2, 64).bfloat16(), cases.coded(64, 64)
    for layer in (layers.linear, layers.partial_linear, rounding.act_round):
        args = (x,) if layer is rounding.act_round else (x, w)
        with pytest.raises(ValueError, match="not faithful bfloat16"[:12]):
            layer(simulate, *args, Numerics())
    with pytest.raises(ValueError, match="exact float64"):
        layers.wide_linear(simulate, x.double(), w.weight.to(torch.bfloat16), Numerics("exact", dtype="float64"))
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        layers.linear(simulate, x.float(), w, TRN2)
    with pytest.raises(ValueError, match="33 columns"):
        rounding.act_round(simulate, torch.zeros(2, 33, dtype=torch.bfloat16), TRN2)
    with pytest.raises(ValueError, match="inner size is odd"):
        layers.linear(simulate, torch.randn(2, 63).bfloat16(), cases.coded(64, 63), TRN2)


def test_kernels_run_without_a_warning():
    for rows, inner, out in ((6, 576, 128), (260, 128, 64)):
        x = torch.randn(rows, inner).bfloat16()
        for form in cases.FORMS.values():
            reports = []
            layers.linear(profiled(reports), x, form(out, inner), TRN2)
            assert len(reports) == 1 and [str(w) for r in reports for w in r.warnings] == []


MUTANTS = (
    ("gemm", "accumulate=more", "accumulate=False", "sums restart at every tile"),
    ("gemm", "min(low + COLUMNS, size)\n        nisa", "min(low + COLUMNS, size // 2 * 2)\n        nisa", "the last odd column is dropped"),
    ("gemm", "first_block = 0 if by_rows else me * some", "first_block = 0", "both cores take the first columns"),
    ("gemm", "g * inner, rows", "0, rows", "every group reads the first columns of x"),
    ("gemm", 'if kind == "folded":', 'if kind == "fold":', "the power of two is forgotten"),
    ("gemm", "parts, at = held[t0 : t0 + chunk], c - low", "parts, at = held[t0 : t0 + chunk], 0", "kept weights of the first group again"),
    ("operand", "start = row * width + column + first * P", "start = column + first * P", "the first block of rows again"),
    ("operand", "chunk * rows : (chunk + 1) * rows", "0:rows", "the first part of every row"),
    ("weights", "operand0=0xF0", "operand0=0xF2", "the code 256 is not doubled"),
    ("weights", "offset=n - 1", "offset=0", "the last columns take the first scale"),
    ("weights", "found.append(last[:, 0, :])", "found.append(held[0 : inner % P, 0, :])", "the first tile instead of the short last one"),
    ("narrow", "op=nl.multiply)", "op=nl.add)", "chunks that differ are summed too"),
    ("act_round", "first = nl.program_id(0) * mine", "first = 0", "both cores round the first half"),
    ("act_round", "size = min(P, first + mine - row)", "size = min(P, mine - P)", "the last tile has the size of another"),
    ("tiles", "op=nl.greater)", "op=nl.greater_equal)", "an exact power of two is doubled"),
)


@pytest.mark.parametrize(("path", "old", "new", "what"), MUTANTS, ids=[m[3] for m in MUTANTS])
def test_a_wrong_kernel_is_caught(path, old, new, what, tmp_path, monkeypatch):
    everywhere(import_module(f"v41.backends.neuron.kernels.{path}"), old, new, tmp_path, monkeypatch)
    assert any(differs() for differs in (codes_differ, tiles_differ, folds_differ, values_differ, groups_differ, trip_differs))


def differs_in(form, shapes):
    for _, rows, inner, out in shapes:
        x, w = cases.activations(rows, inner, torch.bfloat16), cases.FORMS[form](out, inner)
        try:
            if misses(layers.linear(simulate, x, w, TRN2), x, w, TRN2):
                return True
        except sim.SimError:
            return True
    return False


def codes_differ():
    return differs_in("codes", (cases.SHAPES[5], cases.SHAPES[9]))


def tiles_differ():
    return differs_in("tiled", (cases.SHAPES[4], cases.SHAPES[11]))


def folds_differ():
    return differs_in("folded", cases.SHAPES[:1])


def values_differ():
    x, w = torch.randn(6, 1408).bfloat16(), torch.randn(3, 1408).bfloat16()
    return differs_in("values", (cases.SHAPES[3], cases.SHAPES[6])) or plain_misses(layers.plain_linear(simulate, x, w, TRN2), x, w) > 0


def groups_differ():
    x, w = torch.randn(1, 3, 4, 64).bfloat16(), cases.tiles(64, 128)
    got, want = layers.grouped_linear(simulate, x, w, 2, TRN2), spec.grouped_linear(x, w, 2, TRN2)
    return bool(((got - want).abs() > 2.0**-7 * want.abs().amax()).any())


def trip_differs():
    for x in (cases.activations(8, 64, torch.bfloat16), cases.activations(66, 4096, torch.bfloat16)):
        try:
            if not torch.equal(rounding.act_round(simulate, x, TRN2), quant.act_round(x, TRN2)):
                return True
        except sim.SimError:
            return True
    return False


def test_the_unchanged_kernels_pass_what_the_wrong_ones_fail():
    assert not any(differs() for differs in (codes_differ, tiles_differ, folds_differ, values_differ, groups_differ, trip_differs))
