# SPDX-License-Identifier: Apache-2.0
"""Refolded weights: the same values, the same bytes back, and what does not fold is counted and left alone."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import cases_experts as cases
import pytest
import torch
from mutate import mutated
from safetensors.torch import load_file
from torch.utils import _pytree

import v41
from v41.backends.neuron import fold as folding
from v41.backends.neuron.fold import Count, fold, folded, unfold
from v41.backends.neuron.kernels.experts_layout import packed_tiles, prepared, restored
from v41.recipe import generate
from v41.spec.numerics import Numerics
from v41.spec.ops.experts import expert_weight, experts_held
from v41.spec.ops.quant import dequantize
from v41.spec.table import Folded, Fp4, Fp8

VECTORS = Path(__file__).parents[1] / "golden" / "ops"
TRN2 = Numerics("trn2")
E4M3 = torch.arange(256, dtype=torch.uint8)


def legacy(codes):
    """What the e4m3 with infinities says of a byte: like the other one up to 240, and no number above."""
    values = codes.view(torch.float8_e4m3fn).float()
    return torch.where((codes & 127) > 0x77, torch.nan, values)


def same(a, b):
    """Bytes of two weights."""
    assert type(a) is type(b)
    return all(torch.equal(getattr(a, n).contiguous().view(torch.uint8), getattr(b, n).contiguous().view(torch.uint8)) for n in ("weight", "scale"))


def blocks(spread, held=1, out=64, inner=128):
    """fp4 with all bytes and scales over `spread` binades."""
    return Fp4(
        cases.bytes_of(0, 256, held, out, inner // 2).view(torch.int8), cases.bytes_of(120, 121 + spread, held, out, inner // 32).view(torch.float8_e8m0fnu)
    )


def check_folded(w, made, count):
    assert isinstance(made, Folded) and count.inexact == 0
    assert torch.equal(dequantize(made, torch.float32), dequantize(w, torch.float32))
    assert torch.equal(legacy(made.weight.view(torch.uint8)).nan_to_num(1e9), made.weight.float()), "a byte above 240"
    assert same(unfold(made), w)


@pytest.mark.parametrize("rows", [0, 1, 32, 50, 64])
@pytest.mark.parametrize("spread", range(14))
def test_fp4_folds_exactly_over_fourteen_binades(spread, rows):
    w = blocks(spread)
    check_folded(w, *fold(w, rows))


def test_fifteen_binades_do_not_fold_and_are_counted():
    w = blocks(14, held=3)
    made, count = fold(w, 16)
    assert made is w and count.groups == 12 and 0 < count.inexact <= 12
    some, inexact = folded(w, 16)
    wrong = (dequantize(some, torch.float32) != dequantize(w, torch.float32)).unflatten(1, (4, 16)).flatten(2).any(-1)
    assert torch.equal(wrong, inexact) and int(wrong.sum()) == count.inexact
    scale = w.scale.view(torch.uint8).clone()
    scale[0] = 120
    some, count = fold(replace(w, scale=scale.view(torch.float8_e8m0fnu)))
    assert count == Count(3, 2) and isinstance(some, Fp4)
    assert Count(3, 2) + Count(4, 1) == Count(7, 3)


def test_zeros_keep_their_sign_and_zero_blocks_do_not_widen_a_group():
    codes = torch.tensor([[0x80, 0x08, 0x00, 0x88] * 4, [0x91, 0x27, 0x5B, 0xF6] * 4], dtype=torch.uint8).view(torch.int8)
    for far in (1, 250):
        w = Fp4(codes[None], torch.tensor([[[far], [120]]], dtype=torch.uint8).view(torch.float8_e8m0fnu))
        check_folded(w, *fold(w))
    none = Fp4(torch.zeros(1, 2, 16, dtype=torch.int8), torch.full((1, 2, 1), 90, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    check_folded(none, *fold(none))


@pytest.mark.parametrize("name", ["fp4_gemm.w", "expert.fp4.w1", "expert.fp4.w2", "expert.fp4.w3"])
def test_published_vectors_fold_exactly(name):
    file, part = name.split(".", 1)
    found = load_file(VECTORS / f"{file}.safetensors")
    w = Fp4(found["w_packed"], found["w_scale"]) if part == "w" else Fp4(found[f"{part}.weight"], found[f"{part}.scale"])
    made, count = fold(w)
    assert count == Count(1, 0)
    check_folded(w, made, count)


def test_every_published_byte_folds_to_its_published_values():
    found = load_file(VECTORS / "fp4_act_quant.safetensors")
    packed, values = found["all_codes.packed"], found["all_codes.values"]
    for scale in (100, 127, 140):
        w = Fp4(packed.view(1, 16, 16), torch.full((1, 16, 1), scale, dtype=torch.uint8).view(torch.float8_e8m0fnu))
        made, count = fold(w)
        check_folded(w, made, count)
        assert torch.equal(dequantize(made, torch.float32).flatten(), values.flatten() * 2.0 ** (scale - 127))


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
def test_recipe_experts_fold_exactly(matrix):
    shape = (5120, 1152) if matrix == "w2" else (2304, 2560)
    count = Count(0, 0)
    for e in (0, 200):
        name, rows = f"layers.7.ffn.experts.{e}.{matrix}", slice(0, 64)
        w = Fp4(
            generate(f"{name}.weight", torch.int8, shape, 3, rows)[None],
            generate(f"{name}.scale", torch.float8_e8m0fnu, (shape[0], shape[1] // 16), 3, rows)[None],
        )
        made, here = fold(w)
        check_folded(w, made, here)
        count = count + here
    assert count == Count(2, 0)


def test_fp8_folds_where_its_codes_have_room_only():
    w = Fp8(
        torch.tensor([[16, 0x77, 0x87 ^ 0x1F, 0x08] * 8], dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor([[127]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    )
    check_folded(w, *fold(w))
    top = Fp8(torch.tensor([[1, 0x7E] * 16], dtype=torch.uint8).view(torch.float8_e4m3fn), w.scale)
    made, count = fold(top)
    assert made is top and count == Count(1, 1)


def test_a_folded_stack_is_a_weight_of_the_spec():
    w = blocks(5, held=3)
    made, _ = fold(w)
    assert experts_held(made) == 3
    for e in range(3):
        assert torch.equal(expert_weight(made, e, TRN2), expert_weight(w, e, TRN2))
    leaves, structure = _pytree.tree_flatten(made)
    assert len(leaves) == 3 and same(unfold(_pytree.tree_unflatten(leaves, structure)), w)
    dropped = replace(made, blocks=None)
    assert len(_pytree.tree_leaves(dropped)) == 2
    with pytest.raises(ValueError, match=r"\(3, 64, 128\)"):
        unfold(dropped)
    with pytest.raises(ValueError, match="groups of 65 of 64"):
        fold(w, 65)


@pytest.mark.parametrize(("held", "dim", "inner"), [(1, 32, 32), (3, 160, 96), (2, 1280, 64), (1, 256, 288), (1, 1024, 32)])
def test_arranged_weights_come_back_byte_for_byte(held, dim, inner):
    w = cases.experts_of(held, dim, inner)
    for form in cases.FORMS:
        given = tuple(cases.in_form(m, form) for m in w)
        tiles = prepared(*given, TRN2)
        assert tiles.weight.is_contiguous() and tiles.weight.shape[:3] == (held, inner // 32, 128)
        for before, after in zip(given, restored(tiles), strict=True):
            assert torch.equal(before, after) if isinstance(before, torch.Tensor) else same(before, after)
    values = prepared(*w, Numerics("exact"))
    assert all(torch.equal(dequantize(m, torch.float32), v) for m, v in zip(w, restored(values), strict=True))


def test_where_each_element_stands():
    """Lane, tile and half of an item by the description, not by the code."""
    dim, inner = 512, 64
    w1, w3 = torch.arange(2 * inner * dim).reshape(2, 1, inner, dim).float()
    w2 = -torch.arange(1, dim * inner + 1).reshape(1, dim, inner).float()
    tiles = prepared(w1, w2, w3, Numerics("exact"))
    assert tiles.fold == 2 and tiles.weight.shape == (1, 2, 128, 4 * 64 + 128)
    for g, lane, q, s, c in ((0, 0, 0, 0, 0), (1, 77, 1, 1, 31), (1, 127, 0, 1, 5), (0, 3, 1, 0, 9)):
        column = q * 256 + lane * 2 + s
        assert tiles.weight[0, g, lane, (q * 2 + s) * 64 + c] == w1[0, g * 32 + c, column]
        assert tiles.weight[0, g, lane, (q * 2 + s) * 64 + 32 + c] == w3[0, g * 32 + c, column]
    for g, b, k, c in ((0, 0, 0, 0), (1, 3, 31, 127), (1, 2, 7, 40)):
        assert tiles.weight[0, g, 32 * b + k, 256 + c] == w2[0, b * 128 + c, g * 32 + k]


def test_an_item_is_read_in_long_runs_at_the_released_size():
    meta = [
        Fp4(torch.zeros(1, o, i // 2, dtype=torch.int8), torch.full((1, o, i // 32), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu))
        for o, i in ((32, 5120), (5120, 32), (32, 5120))
    ]
    assert prepared(*meta, TRN2).weight.shape == (1, 1, 128, 1920 + 320)
    assert prepared(*(fold(m)[0] for m in meta), TRN2).weight.shape == (1, 1, 128, 3840)


@pytest.mark.parametrize("byte", [0, 255])
def test_scales_that_the_kernel_cannot_make_are_refused(byte):
    w = list(cases.experts_of(1, 64, 32))
    scale = w[1].scale.view(torch.uint8).clone()
    scale[0, 5, 0] = byte
    w[1] = replace(w[1], scale=scale.view(torch.float8_e8m0fnu))
    with pytest.raises(ValueError, match="1 scales of w2"):
        packed_tiles(*w)


def test_a_model_of_folded_experts_computes_the_same():
    """A layer's stack through the spec's own definition."""
    w = cases.experts_of(4, 64, 32)
    x, (weights, ids) = cases.rows_of(5, 64), cases.routing("uniform", 5, 2, 4)
    one, two = (v41.spec.ops.experts.experts(x, weights, ids, *m, limit=10.0, numerics=TRN2) for m in (w, [fold(m)[0] for m in w]))
    assert torch.equal(one, two)


MUTANTS = (
    ("torch.ceil(torch.log2(top / LARGEST))", "torch.floor(torch.log2(top / LARGEST))", "codes above 240"),
    ("torch.ceil(torch.log2(top / LARGEST))", "torch.ceil(torch.log2(top / LARGEST)) + 1", "a binade less room"),
    ("(codes.float() * scale[..., None] != grouped).any(-1)", "(codes.float() != grouped / scale[..., None]).all(-1)", "inexact groups pass"),
    ("-out % rows", "0", "the last group"),
    ("w.weight.shape[-2], :]", "w.weight.shape[-2], :] * 2", "other scales back"),
)


@pytest.mark.parametrize(("old", "new", "what"), MUTANTS, ids=[m[2] for m in MUTANTS])
def test_a_wrong_fold_is_caught(old, new, what, tmp_path, monkeypatch):
    wrong = mutated(import_module("v41.backends.neuron.fold"), old, new, tmp_path)
    eights = Fp8((torch.randint(-7, 8, (40, 64)) / 4).to(torch.float8_e4m3fn), torch.full((2, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    caught = []
    for w, rows in ((blocks(13), 0), (blocks(13), 24), (blocks(14), 0), (eights, 0)):
        try:
            made, count = wrong.fold(w, rows)
            right, expected = folding.fold(w, rows)
            back = not isinstance(right, Folded) or same(wrong.unfold(made), w)
            caught.append(count != expected or not back or not torch.equal(dequantize(made, torch.float32), dequantize(w, torch.float32)))
        except (AttributeError, RuntimeError):
            caught.append(True)
    assert any(caught)
