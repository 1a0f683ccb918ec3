# SPDX-License-Identifier: Apache-2.0
"""The regime `trn2` (docs/numerics.md 6): each line of its table against numpy, and that nothing else differs from `faithful`."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers import FAITHFUL, same_bits, tiny
from oracle import formats
from oracle import ops as oracle
from test_definitions import bf16, fp4, fp8, one_step, random, values

import v41
from v41.spec.backend import Backend
from v41.spec.ops import partial as parted

TRN2 = v41.Numerics("trn2")
LIMIT = 240.0
spec = Backend("spec")
a8 = partial(formats.a8, limit=LIMIT)


def bits(want: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(formats.bf16_codes(want).view(np.int16)).view(torch.bfloat16)


def test_activations_take_a_scale_for_codes_up_to_240():
    x = torch.cat([bf16(20, 64).float() * s for s in (1e-6, 1.0, 1e4)]).to(torch.bfloat16)
    x[0], x[1, ::2], x[2, ::2], x[3, ::2] = 0, 240.0, 241.0, 448.0
    got = spec.act_round(x, TRN2)
    assert same_bits(got, bits(a8(values(x))))
    assert not same_bits(got, spec.act_round(x, FAITHFUL)) and same_bits(got[:2], spec.act_round(x[:2], FAITHFUL))
    codes = formats.a8_codes(values(x), LIMIT)[0]
    assert np.abs(formats.e4m3_values(codes)).max() <= LIMIT


def test_compressed_rows_multiply_where_others_divide():
    x = (bf16(4000, 16).float() * torch.tensor([1e-4, 1.0, 37.0, 900.0]).repeat(1000)[:, None]).to(torch.bfloat16)
    got = spec.kv_round(x, TRN2)
    groups = values(x).astype(np.float32)
    largest = np.maximum(np.abs(groups).max(-1), np.float32(6 * 2.0**-9))
    scale = formats.e4m3_values(formats.e4m3_codes(np.minimum(largest * np.float32(1 / 6), np.float32(LIMIT)).astype(np.float64)))
    scaled = groups * (np.float32(1) / scale.astype(np.float32))[:, None]
    codes = formats.e2m1_codes(np.clip(scaled, -6, 6).astype(np.float64))
    assert same_bits(got, bits(formats.e2m1_values(codes) * scale[:, None]))
    assert not same_bits(got, spec.kv_round(x, FAITHFUL))


def test_linear_rounds_its_input_to_240():
    (w, dense), x = fp8(70, 96), random(5, 96, numerics=TRN2)
    one_step(spec.linear(x, w, TRN2), a8(values(x)) @ dense.T)


def test_index_scores_round_dots_and_sum_only():
    iq, ik, iw = random(2, 3, 4, 32, numerics=TRN2), random(2, 11, 32, numerics=TRN2), random(2, 3, 4, numerics=TRN2)
    dots = np.maximum(formats.bf16(np.einsum("bshd,btd->bsht", values(iq), values(ik))), 0)
    want = np.einsum("bsht,bsh->bst", dots, values(iw))
    one_step(spec.index_scores(iq, ik, iw, TRN2), want)
    shares = [parted.index_scores(iq[:, :, h : h + 2], ik, iw[:, :, h : h + 2], TRN2) for h in (0, 2)]
    assert same_bits(sum(shares).to(torch.bfloat16), spec.index_scores(iq, ik, iw, TRN2))


def test_attention_is_one_run():
    b, s, heads, d, w, k = 2, 5, 3, 16, 80, 70
    q, window, rows = random(b, s, heads, d, numerics=TRN2), random(b, 90, d, numerics=TRN2), random(b, 50, d, numerics=TRN2)
    listed, chosen = torch.randint(-1, 90, (b, s, w), dtype=torch.int32), torch.randint(-1, 50, (b, s, k), dtype=torch.int32)
    listed[:, 1], chosen[:, 1] = -1, -1
    sink = torch.tensor([0.3, 30.0, -30.0])
    got = spec.sparse_attn(q, window, listed, rows, chosen, sink, 2.0, TRN2)
    want = np.zeros(tuple(q.shape))
    for i, j in np.ndindex(b, s):
        both = values(torch.cat((window[i], rows[i])))
        slots = [*listed[i, j].tolist(), *[n if n < 0 else n + 90 for n in chosen[i, j].tolist()]]
        want[i, j] = oracle.attend_in_runs(values(q[i, j]), both, values(sink), slots, 2.0, formats.bf16, run=w + k)
    one_step(got, want)
    assert not same_bits(got, spec.sparse_attn(q, window, listed, rows, chosen, sink, 2.0, FAITHFUL))


@pytest.mark.parametrize("ways", [2, 4])
def test_experts_are_not_rounded_so_that_whole_and_cut_ones_agree(ways):
    w1, w2, w3 = fp4(4, 128, 64)[0], fp4(4, 64, 128)[0], fp4(4, 128, 64)[0]
    x = torch.randint(-3, 4, (6, 64)).to(torch.bfloat16)
    ids = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0], [2, 0], [0, 2]], dtype=torch.int32)
    weights = torch.rand(6, 2)
    got = spec.experts(x, weights, ids, w1, w2, w3, limit=10.0, numerics=TRN2)
    assert got.dtype == torch.float32
    size = 128 // ways
    total = torch.zeros_like(got)
    for a in range(0, 128, size):
        inner, halves, blocks = slice(a, a + size), slice(a // 2, (a + size) // 2), slice(a // 32, (a + size) // 32)
        c1, c3 = (type(w)(w.weight[:, inner], w.scale[:, inner]) for w in (w1, w3))
        c2 = type(w2)(w2.weight[..., halves], w2.scale[..., blocks])
        total += parted.experts(x, weights, ids, c1, c2, c3, limit=10.0, numerics=TRN2)
    # 128 products of each expert in another order, in fp32: 2 experts, and sums of their sizes stay below 64 times the largest.
    assert float((got - total).abs().max()) <= 2 * 128 * 2.0**-24 * 64 * float(got.abs().max())
    rounded = spec.experts(x, weights, ids, w1, w2, w3, limit=10.0, numerics=FAITHFUL)
    assert not torch.equal(got, rounded)


def test_a_bfloat16_tensor_stands_for_a_quantized_weight_in_every_regime():
    (w, dense), x = fp8(64, 96), random(3, 96, numerics=TRN2)
    (w1, d1), (w2, d2), (w3, d3) = fp4(2, 32, 64), fp4(2, 64, 32), fp4(2, 32, 64)
    kept = [torch.from_numpy(np.stack(d)).to(torch.bfloat16) for d in (d1, d2, d3)]
    ids, weights, rows = torch.tensor([[0], [1], [0]], dtype=torch.int32), torch.rand(3, 1), random(3, 64, numerics=TRN2)
    for numerics in (FAITHFUL, TRN2, v41.Numerics("released")):
        assert same_bits(spec.linear(x, torch.from_numpy(dense).to(torch.bfloat16), numerics), spec.linear(x, w, numerics))
        whole = spec.experts(rows, weights, ids, w1, w2, w3, limit=10.0, numerics=numerics)
        assert torch.equal(spec.experts(rows, weights, ids, kept[0], kept[1], kept[2], limit=10.0, numerics=numerics), whole)


def test_the_tiny_model_differs_from_faithful_by_rounding_and_not_by_how_calls_are_cut():
    params, tokens = tiny(TRN2), torch.arange(3, 43)[None] * 7 % 400
    cache = v41.init_cache(params, 1, 64)
    whole, _ = v41.step(params, cache, tokens)
    first, later = v41.step(params, cache, tokens[:, :17])
    second, _ = v41.step(params, later, tokens[:, 17:])
    assert torch.equal(torch.cat((first.logits, second.logits), 1), whole.logits)
    exact, _ = v41.step(tiny(v41.Numerics("exact")), v41.init_cache(tiny(v41.Numerics("exact")), 1, 64), tokens)
    faithful, _ = v41.step(tiny(), v41.init_cache(tiny(), 1, 64), tokens)
    noise = float((faithful.logits - exact.logits).norm())
    assert not torch.equal(whole.logits, faithful.logits)
    assert float((whole.logits - exact.logits).norm()) < 2 * noise  # fp8 scales lose up to a bit, and no more
