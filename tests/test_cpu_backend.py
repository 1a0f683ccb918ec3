# SPDX-License-Identifier: Apache-2.0
"""The CPU backend's bodies against the spec's, bit for bit: every regime, weights as bytes and as values, one thread and two."""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from helpers import EXACT, EXACT64, FAITHFUL, RELEASED, TINY, same_bits, tiny
from torch import Tensor

import v41
from v41 import tree
from v41.backends.cpu import attend, backend, mix, moe, product, released, round, widen
from v41.params_io import tensor_digests, weights_digest
from v41.resident import as_values
from v41.spec.backend import Backend
from v41.spec.ops import partial, quant
from v41.spec.ops import product as spec_product
from v41.spec.table import Fp4, Fp8

SPEC = Backend("spec")
TRN2 = v41.Numerics("trn2")
REGIMES = [FAITHFUL, EXACT, TRN2, RELEASED, EXACT64]
FAST = [FAITHFUL, EXACT, TRN2]
ROWS = (*range(10), 128)
SIZES = ((32, 32), (8, 64), (33, 96), (70, 160), (264, 256), (520, 1056))
every = pytest.mark.parametrize("numerics", REGIMES, ids=lambda n: f"{n.regime}-{n.dtype}")
fast = pytest.mark.parametrize("numerics", FAST, ids=lambda n: n.regime)


def e8m0(*shape: int, low: int = 100, high: int = 140) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def fp8(rows: int, columns: int) -> Fp8:
    codes = torch.randint(0, 254, (rows, columns), dtype=torch.uint8)
    codes = torch.where(codes >= 127, codes + 1, codes)  # neither NaN code
    return Fp8(codes.view(torch.float8_e4m3fn), e8m0(-(-rows // 32), -(-columns // 32)))


def fp4(*shape: int) -> Fp4:
    *stack, rows, columns = shape
    return Fp4(torch.randint(-128, 128, (*stack, rows, columns // 2), dtype=torch.int8), e8m0(*stack, rows, columns // 32))


def forms(w: Fp8 | Fp4) -> Iterator[Fp8 | Fp4 | Tensor]:
    """A weight as bytes and as values."""
    yield w
    yield as_values(w)[0]


def act(numerics: v41.Numerics, *shape: int) -> Tensor:
    return (torch.randn(shape) * 3).to(numerics.act)


def same(name: str, *arguments: object, ops: Backend = backend, **named: object) -> bool:
    """Whether both bodies of a primitive give the same bits, and leave their arguments alone."""
    before = [a.clone() for a in arguments if isinstance(a, Tensor)]
    got, want = getattr(ops, name)(*arguments, **named), getattr(SPEC, name)(*arguments, **named)
    kept = all(same_bits(a, b) for a, b in zip((a for a in arguments if isinstance(a, Tensor)), before, strict=True))
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    return kept and all(same_bits(g, w) for g, w in pairs)


# Weights


def test_every_fp8_code_with_every_scale_becomes_its_value():
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127].view(torch.float8_e4m3fn)
    for byte in range(255):
        w = Fp8(codes.repeat(33, 1)[:, :250], torch.full((2, 8), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu))
        out = widen.room(33, 250, codes.device)
        widen.widen(w, out)
        assert same_bits(out.contiguous(), quant.dequantize(w, torch.float32))


def test_every_pair_of_fp4_codes_with_every_scale_becomes_its_values():
    codes = torch.arange(-128, 128, dtype=torch.int8)
    for byte in range(255):
        w = Fp4(codes.view(8, 32), torch.full((8, 2), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu))
        out = widen.room(8, 64, codes.device)
        widen.widen(w, out)
        assert same_bits(out.contiguous(), quant.dequantize(w, torch.float32))


@pytest.mark.parametrize("piece", [1 << 11, 1 << 18])
def test_a_weight_that_is_widened_in_steps_is_the_whole(monkeypatch, piece):
    monkeypatch.setattr(widen, "PIECE", piece)
    for w in (fp8(200, 96), fp8(33, 40), fp4(77, 64)):
        out = widen.room(*widen.sizes(w), torch.device("cpu"))
        widen.widen(w, out)
        assert same_bits(out.contiguous(), quant.dequantize(w, torch.float32))


def test_a_weight_in_any_other_form_becomes_a_float32_matrix():
    w = torch.randn(64, 32)
    assert widen.plain(w) is w
    assert product.times(torch.randn(3, 32), w).shape == (3, 64)


# Products


@every
def test_linear_layers_have_the_bits_of_the_spec(numerics):
    for out, columns in SIZES[: 3 if numerics is RELEASED else None]:
        for w in forms(fp8(out, columns)):
            for rows in ROWS:
                x = act(numerics, rows, columns)
                assert same("linear", x, w, numerics), (rows, out, columns)
                assert same("partial_linear", x, w, numerics), (rows, out, columns)
        plain = torch.randn(out, columns).bfloat16()
        for rows in ROWS:
            x = act(numerics, 1, rows, columns)
            assert same("plain_linear", x, plain, numerics), (rows, out, columns)
            assert same("wide_linear", x, plain, numerics), (rows, out, columns)
            assert same("wide_linear", x, plain.float(), numerics), (rows, out, columns)


@every
def test_the_grouped_layer_has_the_bits_of_the_spec(numerics):
    for heads, dim, out, groups in ((4, 32, 64, 2), (16, 16, 256, 8), (8, 24, 96, 1)):
        for w in forms(fp8(out, heads * dim // groups)):
            for rows in ROWS:
                assert same("grouped_linear", act(numerics, 1, rows, heads, dim), w, groups, numerics)
            assert same("grouped_linear", act(numerics, 3, 2, heads, dim), w, groups, numerics)


@fast
@pytest.mark.parametrize("held", [1 << 13, 1 << 16])
def test_a_product_in_pieces_has_the_bits_of_the_whole(monkeypatch, numerics, held):
    monkeypatch.setattr(product, "HELD", held)
    for out, columns in ((256, 96), (300, 64), (1000, 160), (289, 256)):
        for w in forms(fp8(out, columns)):
            for rows in (1, 5, 130):
                assert same("partial_linear", act(numerics, rows, columns), w, numerics), (rows, out, columns)


def test_pieces_cover_every_output_once_and_none_is_short():
    for outputs in (1, 31, 256, 257, 300, 1000, 4096, 129_280):
        for columns in (64, 5120, 1 << 21):
            cuts = list(product.pieces(outputs, columns))
            assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])] and cuts[-1][1] == outputs
            assert all(a % 32 == 0 and (b - a >= product.LEAST or outputs < product.LEAST) for a, b in cuts)


def test_space_for_widened_weights_is_the_threads_own_and_a_large_matrix_has_its_own():
    cpu = torch.device("cpu")
    with torch.inference_mode(), ThreadPoolExecutor(1) as pool:
        mine, theirs = widen.room(8, 64, cpu), pool.submit(widen.room, 8, 64, cpu).result()
    assert mine.data_ptr() != theirs.data_ptr() and mine.stride() == (64 + widen.PAD, 1)
    again, large = widen.room(33, 32, cpu), widen.room(1 << 10, 1 << 10, cpu)
    assert again.data_ptr() == mine.data_ptr() and large.data_ptr() != mine.data_ptr() and large.shape == (1 << 10, 1 << 10)
    again.zero_()  # not allowed on memory that inference mode made


def test_threads_that_multiply_at_once_do_not_meet_in_that_space():
    weights = [fp8(160, 96) for _ in range(4)]
    x = act(EXACT, 5, 96)
    want = [product.times(x, w) for w in weights]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda w: [product.times(x, w) for _ in range(50)], weights)
        assert all(same_bits(g, one) for got, one in zip(found, want, strict=True) for g in got)


# The order of `released`


def hard_row() -> Tensor:
    """A rounded activation whose sum with fp4 values leaves float32: sixteen times the largest code, sixteen times the smallest."""
    return torch.tensor([448.0] * 16 + [2.0**-9] * 16)


def hard_weight(rows: int) -> Fp4:
    """6 and 0.5 where `hard_row` has its codes."""
    return Fp4(torch.tensor([0x77] * 8 + [0x11] * 8, dtype=torch.int8).repeat(rows, 1), e8m0(rows, 1, low=127, high=128))


def test_block_sums_are_rounded_once_whatever_the_activations_are():
    x = quant.act_round(act(RELEASED, 40, 96) * torch.exp2(torch.randint(-9, 9, (40, 96))), RELEASED)
    x[::3, :32] = hard_row().bfloat16()
    assert 0 < int((~released.exact_blocks(x.float())).sum()) < 40
    for low, high in ((100, 140), (127, 128), (0, 60), (195, 240)):
        w = fp4(64, 96)
        w = replace(w, scale=e8m0(64, 3, low=low, high=high))
        for rows in (x, x[:1], x[1:4], x[::3], x[:0]):
            want = spec_product.block_product(rows, quant.dequantize(w, torch.float32), RELEASED)
            assert same_bits(released.in_blocks(rows.float(), w), want) and same_bits(released.in_blocks(rows.float(), as_values(w)[0]), want)


def test_block_sums_do_not_depend_on_how_many_are_held(monkeypatch):
    x, w = quant.act_round(act(RELEASED, 21, 96), RELEASED), fp8(200, 96)
    want = spec_product.block_product(x, quant.dequantize(w, torch.float32), RELEASED)
    for held, together in ((1, 128), (1 << 21, 4), (1 << 12, 5), (1 << 21, 128)):
        monkeypatch.setattr(released, "HELD", held)
        monkeypatch.setattr(released, "TOGETHER", together)
        assert same_bits(released.in_blocks(x.float(), w), want), (held, together)


def test_rows_that_are_told_exact_have_sums_without_any_rounding():
    for spread in (0, 3, 6, 9):
        x = quant.act_round(act(RELEASED, 200, 32) * torch.exp2(-spread * torch.rand(200, 32)), RELEASED).float()
        terms = x.double()[:, None] * quant.dequantize(fp4(50, 32), torch.float64)
        exact = terms.sum(-1)
        partial_sums = terms.cumsum(-1)
        fits = (exact.float().double() == exact).all(-1) & (partial_sums.float().double() == partial_sums).all((-1, -2))
        told = released.exact_blocks(x)[:, 0]
        assert told.any() and not (told & ~fits).any()
    assert not released.exact_blocks(torch.stack((hard_row(), hard_row() * 2.0**-100, hard_row() * 2.0**60))).any()
    assert released.exact_blocks(torch.zeros(2, 64)).all()


def test_sums_in_order_are_those_of_the_spec():
    for out, columns in ((8, 64), (33, 250), (520, 700)):
        x, w = act(RELEASED, 5, columns).float(), torch.randn(out, columns).bfloat16().float()
        assert same_bits(released.in_order(x, w), spec_product.in_order(x, w))


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
def test_products_shared_out_between_threads_have_the_bits_of_one():
    for out, columns in ((64, 64), (256, 96), (520, 256)):
        w = fp8(out, columns)
        for rows in (1, 4, 9, 128, 132):
            x = act(FAITHFUL, rows, columns)
            got = product.times(x.float(), w)
            torch.set_num_threads(1)
            assert same_bits(got, product.times(x.float(), w)) and same("linear", x, w, FAITHFUL)
            torch.set_num_threads(2)
    assert product.groups_of(4, 256, 96) == 8 and product.groups_of(4, 33, 96) == 1


# Experts


def routed(rows: int, held: int, k: int, first: int = 0) -> Tensor:
    """Distinct experts of each row, some of them of another rank where first is not 0."""
    return torch.stack([torch.randperm(held + 2 * first)[:k] for _ in range(rows)]).int() - first if rows else torch.zeros(0, k, dtype=torch.int32)


def stacks(held: int, dim: int, inter: int) -> list[tuple[Fp4 | Tensor, ...]]:
    return [*zip(*(list(forms(fp4(held, *shape))) for shape in ((inter, dim), (dim, inter), (inter, dim))), strict=True)]


@every
def test_routed_experts_have_the_bits_of_the_spec(numerics):
    for w in stacks(6, 64, 32):
        for rows in (*ROWS[: 4 if numerics is RELEASED else None], 40):
            for first in (0, 3):
                ids = routed(rows, 6, 2, first)
                args = act(numerics, rows, 64), torch.rand(rows, 2, dtype=numerics.wide), ids, *w
                assert same("experts", *args, limit=1.5, numerics=numerics), (rows, first)
                got, want = moe.partial_experts(*args, limit=0.0, numerics=numerics), partial.experts(*args, limit=0.0, numerics=numerics)
                assert same_bits(got, want.expand(got.shape).contiguous()), (rows, first)


@fast
def test_experts_in_batches_and_experts_without_rows_change_nothing(monkeypatch, numerics):
    monkeypatch.setattr(moe, "AT_ONCE", 20)
    w = stacks(6, 64, 32)[0]
    ids = routed(40, 5, 3)
    assert len(moe.batches(ids, 6)) > 2
    assert same("experts", act(numerics, 40, 64), torch.rand(40, 3), ids, *w, limit=1.5, numerics=numerics)
    monkeypatch.setattr(moe, "TOGETHER", 8)
    assert len(list(moe.parts(moe.pack(ids, 0, 6).slices))) > 2
    assert same("experts", act(numerics, 40, 64), torch.rand(40, 3), ids, *w, limit=1.5, numerics=numerics)
    none = torch.full((3, 2), 9, dtype=torch.int32)
    got = backend.experts(act(numerics, 3, 64), torch.rand(3, 2), none, *w, limit=1.5, numerics=numerics)
    assert same_bits(got, torch.zeros(3, 64))


@every
def test_the_shared_expert_has_the_bits_of_the_spec(numerics):
    for dim, inter in ((64, 32), (96, 64)):
        for w in zip(*(list(forms(fp8(*shape))) for shape in ((inter, dim), (dim, inter), (inter, dim))), strict=True):
            for rows in ROWS[: 5 if numerics is RELEASED else None]:
                assert same("shared_expert", act(numerics, rows, dim), *w, limit=1.0, numerics=numerics), (rows, dim, inter)


# Round trips


def edges() -> Tensor:
    """Every finite bfloat16 number, each as the largest of a block and beside every kind of tie, then zeros and blocks that overflow."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[torch.isfinite(numbers)]
    steps = torch.linspace(-1, 1, 31).to(torch.bfloat16)
    return torch.cat((numbers[:, None], numbers[:, None] * steps), 1)


@pytest.mark.parametrize("numerics", [FAITHFUL, TRN2, RELEASED], ids=lambda n: n.regime)
def test_round_trips_have_the_bits_of_the_spec_for_every_largest_number(numerics):
    for x in (edges(), torch.zeros(0, 64).bfloat16(), -torch.zeros(2, 32).bfloat16()):
        assert same("act_round", x, numerics) and same("index_round", x, numerics)
        assert all(same("act_round", part, numerics) for part in x.split(1000))  # few enough for codes


def test_ties_between_all_neighboring_codes_go_to_the_even_one():
    codes = torch.arange(126, dtype=torch.uint8)
    low, high = (c.view(torch.float8_e4m3fn).float() for c in (codes, codes + 1))
    middle = (low + high) / 2
    want = torch.where(codes % 2 == 0, low, high)
    assert same_bits(round.nearest(middle, *round.E4M3), want) and same_bits(round.nearest(-middle, *round.E4M3), -want)
    below, above = torch.nextafter(middle, low), torch.nextafter(middle, high)
    assert same_bits(round.nearest(below, *round.E4M3), low) and same_bits(round.nearest(above, *round.E4M3), high)


# The rest


@every
def test_norm_and_rotation_have_the_bits_of_the_spec(numerics):
    for shape in ((1, 1, 64), (2, 3, 64), (1, 9, 5, 96), (1, 0, 64)):
        x = act(numerics, *shape)
        assert same("rms_norm", x, torch.randn(shape[-1]).bfloat16(), 1e-20)
        for half in (1, 5, 8, 16, 32):
            f, at = torch.rand(half), torch.randint(0, 1 << 20, shape[:2], dtype=torch.int32)
            assert same("rope", x, at, f) and same("rope_inverse", x, at, f)
            got, want = backend.rope(x[..., ::2], at, f[: half // 2]), SPEC.rope(x[..., ::2], at, f[: half // 2])
            assert same_bits(got.contiguous(), want.contiguous())


@every
@pytest.mark.parametrize("copies", [2, 4, 8])
def test_mixes_and_expansion_have_the_bits_of_the_spec(numerics, copies):
    mixes = copies * (copies + 2)
    for rows in (*range(1, 10), 63, 64, 128):
        stream, x = act(numerics, 1, rows, copies, 32), act(numerics, 1, rows, 32)
        fn, scale, base = torch.randn(mixes, copies * 32) / 8, torch.rand(3), torch.randn(mixes)
        assert same("hc_mixes", stream, fn, scale, base, iters=20, eps=1e-6, norm_eps=1e-20, numerics=numerics), rows
        _, post, comb = SPEC.hc_mixes(stream, fn, scale, base, iters=3, eps=1e-6, norm_eps=1e-20, numerics=numerics)
        assert same("hc_post", x, stream, post, comb), rows


@fast
def test_mixes_and_expansion_of_parts_of_the_rows_are_those_of_all(monkeypatch, numerics):
    monkeypatch.setattr(mix, "AT_ONCE", 4)
    monkeypatch.setattr(mix, "TOGETHER", 3)
    stream = act(numerics, 2, 7, 4, 32)
    args = torch.randn(24, 128) / 8, torch.rand(3), torch.randn(24)
    assert same("hc_mixes", stream, *args, iters=20, eps=1e-6, norm_eps=1e-20, numerics=numerics)
    assert same("hc_post", act(numerics, 2, 7, 32), stream, torch.rand(2, 7, 4), torch.rand(2, 7, 4, 4))


def listed(rows: int, width: int, held: int, dead: float) -> Tensor:
    found = torch.randint(0, held, (2, rows, width), dtype=torch.int32)
    return torch.where(torch.rand(found.shape) < dead, -1, found)


@every
def test_attention_has_the_bits_of_the_spec_with_slots_that_are_none(numerics):
    for heads, width, far, rows in ((8, 64, 64, 1), (8, 128, 40, 5), (2, 32, 0, 3), (4, 64, 5, 9), (3, 7, 3, 2), (4, 128, 128, 128)):
        for dead in (0.0, 0.4, 1.0):
            window, compressed = act(numerics, 2, 60, 32), act(numerics, 2, 33, 32)
            near, chosen = listed(rows, width, 60, dead), listed(rows, far, 33, dead)
            args = act(numerics, 2, rows, heads, 32), window, near, compressed, chosen, torch.randn(heads), 32**-0.5, numerics
            assert same("sparse_attn", *args), (heads, width, far, rows, dead)


@fast
def test_attention_never_meets_a_row_that_is_not_listed(numerics):
    window, compressed = act(numerics, 1, 60, 32), act(numerics, 1, 33, 32)
    near, far = (torch.where(t == 0, -1, t)[:1] for t in (listed(4, 64, 60, 0.3), listed(4, 16, 33, 0.3)))
    args = act(numerics, 1, 4, 8, 32), window, near, compressed, far, torch.randn(8), 0.2, numerics
    want = backend.sparse_attn(*args)
    window[:, 0], compressed[:, 0] = torch.nan, torch.inf
    assert same_bits(backend.sparse_attn(*args), want)


def test_attention_over_parts_of_the_queries_is_that_over_all(monkeypatch):
    args = act(FAITHFUL, 2, 9, 4, 32), act(FAITHFUL, 2, 60, 32), listed(9, 64, 60, 0.2), act(FAITHFUL, 2, 33, 32), listed(9, 16, 33, 0.2)
    sink = torch.randn(4)
    want = backend.sparse_attn(*args, sink, 0.2, FAITHFUL)
    monkeypatch.setattr(attend, "GATHERED", 4 * 2 * 80 * 32)
    assert same_bits(backend.sparse_attn(*args, sink, 0.2, FAITHFUL), want)


@every
def test_runs_that_no_query_lists_are_left_out_and_change_nothing(monkeypatch, numerics):
    calls = []
    monkeypatch.setattr(attend, "gather", lambda *a, body=attend.gather: calls.append((a[1].shape[2], a[3].shape[2])) or body(*a))
    sizes = []
    for near, far in (
        (slice(0, 200), slice(0, 90)),
        (slice(70, 80), slice(0, 0)),
        (slice(64, 128), slice(56, 57)),
        (slice(0, 0), slice(60, 90)),
        (slice(0, 0),) * 2,
    ):
        lists = listed(5, 200, 60, 0.3), listed(5, 90, 33, 0.3)
        for one, part in zip(lists, (near, far), strict=True):
            kept = one[:, :, part].clone()
            one.fill_(-1)
            one[:, :, part] = kept
            one[:, 0, part.start : part.start + (part.stop > part.start)] = 7
        args = act(numerics, 2, 5, 4, 32), act(numerics, 2, 60, 32), lists[0], act(numerics, 2, 33, 32), lists[1]
        assert same("sparse_attn", *args, torch.randn(4), 0.2, numerics), (near, far)
        sizes.append(calls[-1] if calls else None)
    if numerics in (FAITHFUL, EXACT, RELEASED):
        assert sizes == [(200, 90), (64, 0), (136, 90), (0, 34), (0, 0)]


def test_what_is_told_here_is_every_body_that_the_backend_replaces():
    told = {"linear", "partial_linear", "plain_linear", "wide_linear", "grouped_linear", "experts", "shared_expert", "act_round", "index_round"}
    told |= {"rms_norm", "rope", "rope_inverse", "hc_mixes", "hc_post", "sparse_attn", "seen_rows"}  # seen_rows: tests/test_definitions.py
    assert {f.name for f in fields(backend)[1:] if getattr(backend, f.name) is not getattr(SPEC, f.name)} == told


# Wrong bodies that these checks see

WRONG = {
    "one bit less of a code": (round, "E4M3", (2.0**-6, 2), lambda: same("act_round", edges(), FAITHFUL)),
    "subnormal codes rounded as normal ones": (round, "E4M3", (2.0**-9, 3), lambda: same("act_round", edges(), FAITHFUL)),
    "fp4 steps of one": (round, "E2M1", (2.0, 1), lambda: same("index_round", edges(), FAITHFUL)),
    "fp8 scale one power short": (widen, "FP8_SHORT", 2.0**7, lambda: same("linear", act(FAITHFUL, 4, 64), fp8(64, 64), FAITHFUL)),
    "scales that overflow": (widen, "FP4_MOST", 255, lambda: wide_scale()),
    "float32 sums of every row": (released, "EXACT", 2.0**40, lambda: hard()),
    "float32 sums of tiny terms": (released, "SCALES", (0, 255), lambda: tiny_terms()),
    "products of one row": (product, "full_rows", lambda x: x, lambda: same("partial_linear", act(EXACT, 1, 256), fp8(264, 256), EXACT)),
    "pieces of eight outputs": (product, "pieces", lambda n, c: ((a, a + 8) for a in range(0, n, 8)), lambda: small_pieces()),
    "no step between columns": (mix, "by_products", lambda comb, steps, eps: comb, lambda: mixed()),
    "a live run left out": (attend, "live_runs", lambda live: (64, live.shape[2]), lambda: attended()),
    "runs of 32 slots": (attend, "RUN", 32, lambda: attended()),
}


def hard() -> bool:
    w = hard_weight(40)
    want = spec_product.block_product(hard_row()[None].bfloat16(), quant.dequantize(w, torch.float32), RELEASED)
    return same_bits(released.in_blocks(hard_row()[None], w), want)


def tiny_terms() -> bool:
    w = Fp4(torch.full((40, 16), 0x11, dtype=torch.int8), e8m0(40, 1, low=0, high=1))
    x = torch.full((1, 32), 3 * 2.0**-24)  # a term is 3/8 of the smallest number, their sum 12 of it
    want = spec_product.block_product(x.bfloat16(), quant.dequantize(w, torch.float32), RELEASED)
    return same_bits(released.in_blocks(x, w), want)


def wide_scale() -> bool:
    w, out = Fp4(torch.full((1, 16), 1, dtype=torch.int8), e8m0(1, 1, low=250, high=251)), widen.room(1, 32, torch.device("cpu"))
    widen.widen(w, out)
    return same_bits(out.contiguous(), quant.dequantize(w, torch.float32))


def small_pieces() -> bool:
    before, product.HELD = product.HELD, 1
    try:
        return same("partial_linear", act(EXACT, 4, 256), torch.randn(64, 256).bfloat16(), EXACT)
    finally:
        product.HELD = before


def mixed() -> bool:
    args = act(FAITHFUL, 1, 2, 4, 32), torch.randn(24, 128) / 8, torch.rand(3), torch.randn(24)
    return same("hc_mixes", *args, iters=20, eps=1e-6, norm_eps=1e-20, numerics=FAITHFUL)


def attended() -> bool:
    lists = listed(4, 64, 60, 0.1), listed(4, 64, 33, 0.1)
    return same("sparse_attn", act(EXACT, 2, 4, 8, 32), act(EXACT, 2, 60, 32), lists[0], act(EXACT, 2, 33, 32), lists[1], torch.randn(8), 0.2, EXACT)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_body_is_seen(monkeypatch, what):
    module, name, value, check = WRONG[what]
    assert check()
    monkeypatch.setattr(module, name, value)
    assert not check()


# The whole model


def everything(params: v41.Params, ops: Backend) -> dict[str, Tensor]:
    """Logits, taps, drafts and caches of a prefill, a draft, a step and, where the regime has it, a step with drafts."""
    tokens = torch.randint(3, 300, (1, 47), generator=torch.Generator().manual_seed(3))
    cache = v41.init_cache(params, 1, 64)
    out, cache, taps = v41.record(params, cache, tokens[:, :45], ops=ops)
    drafted, cache, more = v41.record_draft(params, cache, out.hidden, tokens[:, 45], ops=ops)
    after, cache, last = v41.record(params, cache, tokens[:, 45:46], ops=ops)
    found = {f"prefill {n}": t for n, t in (taps | more).items()} | {f"step {n}": t for n, t in last.items()}
    found |= {"drafts": drafted.logits, "logits": after.logits} | {f"cache {n}": t for n, t in tree.paths(cache)}
    if params.numerics.regime == "faithful":
        _, cache = v41.draft(params, cache, after.hidden, None, ops=ops)
        state = v41.init_spec(params, cache, after.logits[:, -1], ops=ops)
        for n in range(2):
            emitted, state, cache = v41.spec_step(params, cache, state, ops=ops)
            found |= {f"spec {n} {k}": t for k, t in tree.paths((emitted, state, cache))}
    return {n: t.clone(memory_format=torch.contiguous_format) for n, t in found.items()}


@pytest.mark.parametrize("numerics", [FAITHFUL, RELEASED, EXACT, TRN2], ids=lambda n: n.regime)
def test_the_whole_model_has_the_bits_of_the_spec_with_weights_as_bytes_and_as_values(numerics):
    params = tiny(numerics)
    want = everything(params, SPEC)
    assert len(want) > 150
    for held in (params, as_values(params)[0]):
        got = everything(held, backend)
        assert [n for n in want if not same_bits(got[n], want[n])] == []


# Weights as values


def test_parameters_load_with_weights_as_values():
    params, stored = v41.load_params(TINY / "checkpoint", resident="bf16"), tiny()
    layer, bytes_ = params.layers[0], stored.layers[0]
    assert same_bits(layer.attn.wq_a, quant.dequantize(bytes_.attn.wq_a, torch.bfloat16)) and layer.ffn.experts.w1.dtype == torch.bfloat16
    assert torch.equal(layer.ffn.experts.w1.float(), quant.dequantize(bytes_.ffn.experts.w1, torch.float32))
    assert params.layers[0].hc_attn.fn.dtype == torch.float32 and params.draft.inp.main_proj.dtype == torch.bfloat16
    engram = next(p.engram for p in params.layers if p.engram is not None)
    assert engram.embed.weight.dtype == torch.float8_e4m3fn  # rows are looked up in it, nothing multiplies it
    made = v41.init_params(stored.config, 7, resident="bf16")
    assert same_bits(made.layers[0].attn.wkv, quant.dequantize(v41.init_params(stored.config, 7).layers[0].attn.wkv, torch.bfloat16))


def test_a_weight_that_is_not_exact_in_bfloat16_keeps_its_codes_and_is_named():
    params = tiny()
    w = params.layers[1].attn.wkv
    scale = w.scale.view(torch.uint8).clone()
    for byte, exact in ((10, True), (9, False), (255, False)):
        scale[0, 0] = byte
        changed = replace(w, scale=scale.view(torch.float8_e8m0fnu))
        layers = (params.layers[0], replace(params.layers[1], attn=replace(params.layers[1].attn, wkv=changed)), *params.layers[2:])
        held, kept = as_values(replace(params, layers=layers))
        assert kept.codes == (() if exact else ("layers.1.attn.wkv",)) and isinstance(held.layers[1].attn.wkv, Fp8) is not exact
        assert kept.converted == as_values(params)[1].converted - (not exact)


def test_loading_warns_of_weights_that_keep_their_codes(monkeypatch):
    monkeypatch.setattr("v41.resident.LEAST", 255)
    with pytest.warns(UserWarning, match=r"weights keep their codes, with scales below 2\^-117: \['layers.0.attn.wq_a'"):
        v41.load_params(TINY / "checkpoint", resident="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        v41.load_params(TINY / "checkpoint")


def test_values_refuse_what_needs_the_bytes(tmp_path):
    params = as_values(tiny())[0]
    for call in (lambda: v41.save_params(params, tmp_path / "out"), lambda: weights_digest(params), lambda: tensor_digests(params)):
        with pytest.raises(ValueError, match='weights are kept as values or in a device\'s form.*load them with resident="bytes"'):
            call()
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"resident: 'fp8' is not one of \('bytes', 'bf16'\)"):
        v41.load_params(TINY / "checkpoint", resident="fp8")
