# SPDX-License-Identifier: Apache-2.0
"""Every primitive of the Backend record against the NumPy oracle, on random inputs with edge cases.

`exact` in float64 is the formula itself: n terms may be summed in another order, so the bound is a few n * 2**-53 of the sum of their
sizes, about 1e-12. In `faithful` the oracle rounds where the model does, and what is left is fp32 against float64: a bfloat16 result may
lie on the other side of one midpoint, that is one step off. Ids, bytes and choices are equal.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch
from helpers import EXACT64, FAITHFUL, RELEASED, half_step, same_bits, steps_apart
from oracle import engram, files, formats
from oracle import ops as oracle
from torch import Tensor

from v41.backends.cpu import backend as cpu
from v41.spec.backend import Backend
from v41.spec.config import Yarn
from v41.spec.numerics import Numerics
from v41.spec.ops import index, rope
from v41.spec.ops.choose import Sample
from v41.spec.table import Fp4, Fp8, Fp8Rows

spec = Backend("spec")
U32, U64 = 2.0**-24, 2.0**-53
EPS = 1e-20
BOTH = pytest.mark.parametrize("numerics", [EXACT64, FAITHFUL], ids=lambda n: n.regime)
DEFINED: set[str] = set()


def defines(*names: str):
    """Marks a test as the one of these primitives."""
    DEFINED.update(names)
    return lambda test: test


def values(x: Tensor) -> np.ndarray:
    return x.double().numpy()


def random(*shape: int, numerics=EXACT64, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * scale).to(torch.bfloat16).to(numerics.act)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def rounding(numerics) -> dict:
    """The oracle's roundings of a regime."""
    return {"rnd": formats.bf16, "act": formats.a8} if numerics.rounds else {"rnd": oracle.same, "act": oracle.same}


def close(got: Tensor, want, sizes, terms: int) -> None:
    """Within the summation error of that many terms, plus the rounding of got's own dtype."""
    want = torch.as_tensor(np.asarray(want))
    unit = U64 if got.dtype == torch.float64 else U32
    bound = 4 * terms * unit * torch.as_tensor(np.asarray(sizes))
    if got.dtype == torch.bfloat16:
        bound = bound + half_step(want, 8)
    assert got.shape == want.shape and ((got.double() - want).abs() <= bound).all(), float((got.double() - want).abs().max())


def one_step(got: Tensor, want, share: float = 0.01) -> None:
    """Equal bfloat16 numbers but for few that lie one step beside."""
    want = torch.as_tensor(np.asarray(want))
    if got.dtype == torch.float64:
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12 * float(want.abs().max())), float((got - want).abs().max())
        return
    want = want.to(torch.bfloat16)
    assert steps_apart(got, want) <= 1 and float((got != want).float().mean()) <= share


def exponents(*shape: int) -> Tensor:
    """Scales from 2**-9 to 2**2."""
    return torch.randint(118, 130, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def fp8(rows: int, columns: int) -> tuple[Fp8, np.ndarray]:
    """A quantized weight with ragged tiles, and its values."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
    w = Fp8(codes.view(torch.float8_e4m3fn), exponents(-(-rows // 32), -(-columns // 32)))
    return w, files.tile_values(codes.numpy(), w.scale.view(torch.uint8).numpy())


def fp4(stack: int, rows: int, columns: int) -> tuple[Fp4, list[np.ndarray]]:
    """Stacked expert weights, and their values."""
    w = Fp4(torch.randint(-128, 128, (stack, rows, columns // 2), dtype=torch.int8), exponents(stack, rows, columns // 32))
    return w, [files.packed_values(c.numpy(), s.view(torch.uint8).numpy()) for c, s in zip(w.weight, w.scale, strict=True)]


# Products


@BOTH
@defines("linear", "partial_linear")
def test_linear_quantizes_its_input_and_sums_exact_products(numerics):
    (w, dense), x = fp8(70, 96), random(3, 2, 96, numerics=numerics)
    x[0] *= 1e-3
    x[1, 1] = 0
    act = rounding(numerics)["act"]
    rows = values(x).reshape(-1, 96)
    want = np.array([oracle.linear(r, dense, act) for r in rows]).reshape(3, 2, 70)
    sizes = (np.abs(act(rows)) @ np.abs(dense).T).reshape(3, 2, 70)
    close(spec.linear(x, w, numerics), want, sizes, 96)
    partial = spec.partial_linear(x, w, numerics)
    close(partial, want, sizes, 96)
    assert partial.dtype == numerics.wide and same_bits(partial.to(x.dtype), spec.linear(x, w, numerics))


@BOTH
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
@defines("plain_linear", "wide_linear")
def test_plain_and_wide_linears_are_matrix_products_that_do_not_quantize(numerics, rows):
    x, w = random(rows, 1, 40, numerics=numerics), bf16(9, 40)
    want, sizes = values(x) @ values(w).T, np.abs(values(x)) @ np.abs(values(w)).T
    close(spec.plain_linear(x, w, numerics), want, sizes, 40)
    for weight in (w, w.float()):
        got = spec.wide_linear(x, weight, numerics)
        assert got.dtype == numerics.wide
        close(got, want, sizes, 40)


@BOTH
@defines("grouped_linear")
def test_grouped_linear_gives_each_group_of_heads_its_own_slice(numerics):
    (w, dense), x = fp8(4 * 8, 2 * 16), random(2, 3, 8, 16, numerics=numerics)
    want = np.array([[oracle.grouped_linear(heads, dense) for heads in b] for b in values(x)])
    sizes = np.array([[oracle.grouped_linear(np.abs(heads), np.abs(dense)) for heads in b] for b in values(x)])
    close(spec.grouped_linear(x, w, 4, numerics), want, sizes, 32)


@BOTH
@defines("rms_norm")
def test_rms_norm_divides_by_the_root_mean_square_even_of_tiny_rows(numerics):
    x, w = random(6, 48, numerics=numerics), bf16(48)
    x[1], x[2], x[3] = x[1] * 1e-5, 0, x[3] * 1e5
    want = oracle.rms_norm(values(x), values(w), EPS)
    got = spec.rms_norm(x, w, EPS)
    close(got, want, np.abs(want), 48)
    assert (got[2] == 0).all() and abs(values(got / w.to(got.dtype))[1].std() - 1) < 0.4
    assert not np.allclose(want[1], oracle.rms_norm(values(x), values(w), 1e-6)[1], rtol=0.5)  # the row tells one eps from another


# Rotation


@BOTH
@pytest.mark.parametrize("yarn", [None, Yarn(16.0, 32.0, 1.0, 65536)])
@defines("rope", "rope_inverse")
def test_rotation_turns_adjacent_pairs_of_the_last_dims_at_any_position(numerics, yarn):
    f = rope.frequencies(16, 160000.0, yarn)
    stored = oracle.rope_frequencies(16, 160000.0, yarn.original_max_position_embeddings if yarn else 0, 16.0, 32, 1)
    # Each of six steps may round another way, and the power is a float32 function of its library.
    assert np.abs(f.numpy() / stored - 1).max() <= 16 * U32
    at = torch.tensor([[0, 1, 127, 128], [65535, 65536, 1000000, 5]], dtype=torch.int32)
    x = random(2, 4, 3, 24, numerics=numerics)
    for op, sign in ((spec.rope, 1.0), (spec.rope_inverse, -1.0)):
        angles = [[oracle.rope_angles(int(p), f.numpy()) for p in row] for row in at]
        want = np.array([[oracle.rotate(values(x[b, s]), angles[b][s], sign) for s in range(4)] for b in range(2)])
        got = op(x, at, f)
        close(got, want, np.abs(values(x)).max() * 2, 2)
        assert same_bits(got[..., :8].contiguous(), x[..., :8].contiguous())
    half = torch.cat((x[..., 8::2], x[..., 9::2]), -1)
    assert not torch.equal(spec.rope(x, at, f)[..., 8:], spec.rope(torch.cat((x[..., :8], half), -1), at, f)[..., 8:])


# Roundings


@defines("act_round", "index_round", "kv_round")
@pytest.mark.parametrize("op, want", [("act_round", formats.a8), ("index_round", formats.f4e), ("kv_round", formats.f4s)])
def test_round_trips_equal_their_definition_bit_for_bit(op, want):
    x = torch.cat([bf16(40, 64).float() * s for s in (1e-6, 1e-3, 1.0, 37.0, 1e4)]).to(torch.bfloat16)
    x[0], x[1], x[2, ::2] = 0, -0.0, 448.0
    x[3] = torch.linspace(-6, 6, 64)  # every tie of the small formats
    x[4, 5], x[5] = 3e38, 1e-38
    got = getattr(spec, op)(x, Numerics())
    assert same_bits(got, torch.from_numpy(formats.bf16_codes(want(values(x))).view(np.int16)).view(torch.bfloat16))
    finite = got[got.float().isfinite().all(-1)]
    assert same_bits(getattr(spec, op)(finite, Numerics()), finite) or op == "kv_round"  # with power-of-two scales once is enough


# Attention


@BOTH
@defines("sparse_attn")
def test_attention_is_a_softmax_over_two_lists_with_a_sink(numerics):
    b, s, heads, d, w, k = 2, 5, 3, 16, 80, 40
    q, window, rows = random(b, s, heads, d, numerics=numerics), random(b, 90, d, numerics=numerics), random(b, 50, d, numerics=numerics)
    listed, chosen = torch.randint(-1, 90, (b, s, w), dtype=torch.int32), torch.randint(-1, 50, (b, s, k), dtype=torch.int32)
    listed[:, 1], chosen[:, 1] = -1, -1  # no slot at all
    listed[0, 2], chosen[0, 2, 1:] = -1, -1  # one slot at most, behind a run without any
    chosen[1, 3] = -1
    sink = torch.tensor([0.3, 30.0, -30.0])
    got = spec.sparse_attn(q, window, listed, rows, chosen, sink, 0.25, numerics)
    want = np.zeros(tuple(q.shape))
    for i, j in np.ndindex(b, s):
        both = values(torch.cat((window[i], rows[i])))
        slots = [*listed[i, j].tolist(), *[n if n < 0 else n + 90 for n in chosen[i, j].tolist()]]
        if numerics.rounds:
            want[i, j] = oracle.attend_in_runs(values(q[i, j]), both, values(sink), slots, 0.25, formats.bf16)
        else:
            want[i, j] = oracle.attend_list(values(q[i, j]), both, values(sink), slots, 0.25)
    one_step(got, want)
    assert (got[:, 1] == 0).all() and float(got[0, 0, 1].abs().max()) < 1e-6  # a large sink takes everything
    far = spec.sparse_attn(q, window, listed, rows, chosen, torch.full((3,), -1e4), 0.25, numerics)
    assert torch.isfinite(far).all() and not torch.equal(far[:, 0, 0], got[:, 0, 0])


# Indexer


@BOTH
@defines("index_scores")
def test_index_scores_apply_relu_before_the_head_weights(numerics):
    iq, ik, iw = random(2, 3, 4, 32, numerics=numerics), random(2, 11, 32, numerics=numerics), random(2, 3, 4, numerics=numerics)
    iq[:, 1] = -ik[:, :1, None, :].expand(-1, -1, 4, -1)[:, 0]  # the first key is against every head: exactly 0
    got = spec.index_scores(iq, ik, iw, numerics)
    rnd = rounding(numerics)["rnd"]
    want = np.array([[oracle.index_scores(values(iq[b, s]), values(ik[b]), values(iw[b, s]), rnd) for s in range(3)] for b in range(2)])
    one_step(got, want, 0.1)
    assert (got[:, 1, 0] == 0).all()


def scores_with_ties(numerics, rows: int = 37) -> tuple[Tensor, Tensor]:
    """Scores of few different values, masked, and the visible counts: none, one, some, all."""
    visible = torch.tensor([[0, 1, 9, 20, rows], [8, 16, 17, 36, 2]], dtype=torch.int32)
    scores = torch.randint(-3, 4, (2, 5, rows)).to(numerics.act)
    return index.mask_rows(scores, visible), visible


@BOTH
@pytest.mark.parametrize("k", [1, 8, 50])
@defines("select")
def test_selection_takes_the_best_visible_rows_lower_index_first_in_a_tie(numerics, k):
    scores, visible = scores_with_ties(numerics)
    got = spec.select(scores, visible, k, numerics)
    for b, s in np.ndindex(2, 5):
        want = oracle.select(values(scores[b, s, : visible[b, s]]), k)
        # Rows that are not visible fill the places that visible ones leave, and are told by their number.
        assert got[b, s].tolist() == want + [-1] * (got.shape[-1] - len(want))
    released = spec.select(scores, visible, k, RELEASED)
    picked = scores.gather(-1, released.clamp_min(0).long()).sort(-1).values
    assert torch.equal(picked[released[..., 0] >= 0], scores.gather(-1, got.clamp_min(0).long()).sort(-1).values[released[..., 0] >= 0])


@BOTH
@pytest.mark.parametrize("blocks, size", [(1, 8), (3, 8), (4, 5), (9, 8)])
@defines("candidate_blocks")
def test_candidate_blocks_are_the_best_ones_with_the_newest_always_among_them(numerics, blocks, size):
    scores, visible = scores_with_ties(numerics)
    got = spec.candidate_blocks(scores, visible, blocks, size, numerics)
    rows = index.candidate_rows(got, scores.shape[-1], size)
    for b, s in np.ndindex(2, 5):
        count = int(visible[b, s])
        assert rows[b, s].tolist() == oracle.candidate_rows(values(scores[b, s]), count, blocks, size).tolist()
        kept = got[b, s][got[b, s] >= 0].tolist()
        assert kept == sorted(kept) and (count == 0 or (count - 1) // size in kept)


@defines("seen_rows")
def test_seen_rows_are_leading_ones_with_every_visible_row_among_them():
    keys = bf16(2, 38, 4)
    for counts in ([[0, 0], [0, 0]], [[3, 1], [9, 0]], [[37, 1], [2, 2]]):
        visible = torch.tensor(counts, dtype=torch.int32)
        for ops in (spec, cpu):
            got = ops.seen_rows(keys, visible)
            assert got.shape[1] >= int(visible.max()) and same_bits(got.contiguous(), keys[:, : got.shape[1]].contiguous())


# Compressor and hyper-connections


@BOTH
@defines("softmax_pool")
def test_pooling_is_a_softmax_over_tokens_in_each_channel(numerics):
    kv, score = torch.randn(2, 3, 4, 8, dtype=numerics.wide), torch.randn(2, 3, 4, 8, dtype=numerics.wide) * 5
    score[0, 0] = 0
    got = spec.softmax_pool(kv, score, numerics.act)
    assert got.dtype == numerics.act
    want = np.array([[oracle.pool(values(kv[b, g]), values(score[b, g])) for g in range(3)] for b in range(2)])
    close(got, want, np.abs(values(kv)).sum(2), 20)


@BOTH
@defines("hc_mixes", "hc_pre", "hc_post")
def test_hyper_connections_mix_collapse_and_expand_by_the_formulas(numerics):
    stream, y = random(2, 3, 4, 16, numerics=numerics), random(2, 3, 16, numerics=numerics)
    fn, scale, base = torch.randn(24, 64), torch.randn(3), torch.randn(24)
    options = {"iters": 20, "eps": 1e-6, "norm_eps": EPS, "numerics": numerics}
    pre, post, comb = spec.hc_mixes(stream, fn, scale, base, **options)
    unit = U64 if numerics.dtype == "float64" else U32
    for b, s in np.ndindex(2, 3):
        want = oracle.mixes(values(stream[b, s]), values(fn), values(scale), values(base), 20, 1e-6, EPS)
        largest = np.abs(values(fn)).sum(-1).max() * np.abs(values(scale)).max() * np.abs(values(stream[b, s])).max()
        for got, part in zip((pre, post, comb), want, strict=True):
            # 64 terms under an exponential, then 40 steps of 5 roundings.
            assert np.abs(values(got[b, s]) - part).max() <= 4 * (64 * largest + 200) * unit
    collapsed, expanded = spec.hc_pre(stream, pre), spec.hc_post(y, stream, post, comb)
    h, c, p, q = values(stream), values(comb), values(pre), values(post)
    close(collapsed, np.array([[oracle.collapse(h[b, s], p[b, s]) for s in range(3)] for b in range(2)]), np.abs(h).sum(2) * 2, 5)
    want = np.array([[oracle.expand(values(y)[b, s], h[b, s], q[b, s], c[b, s]) for s in range(3)] for b in range(2)])
    sizes = np.array([[oracle.expand(np.abs(values(y))[b, s], np.abs(h[b, s]), q[b, s], c[b, s]) for s in range(3)] for b in range(2)])
    close(expanded, want, sizes, 6)


# Mixture of experts


@BOTH
@pytest.mark.parametrize("function", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("k, normalize", [(1, True), (3, True), (3, False)])
@defines("gate")
def test_routing_chooses_by_biased_scores_and_weighs_by_unbiased_ones(numerics, function, k, normalize):
    x, weight, bias = random(7, 32, numerics=numerics), bf16(9, 32), torch.randn(9)
    x[1], x[2] = 0, x[2] * 100  # a tie of all, and scores in the tails
    weight[4], bias[4] = weight[2], bias[2]  # a tie
    got, ids = spec.gate(x, weight, bias, k=k, function=function, normalize=normalize, route_scale=1.5, numerics=numerics)
    unit = U64 if numerics.dtype == "float64" else U32
    for row in range(7):
        experts, weights = oracle.route(values(x[row]), values(weight), values(bias), k, function, 1.5, normalize)
        assert ids[row].tolist() == experts
        largest = min(float((np.abs(values(weight)) @ np.abs(values(x[row]))).max()), 88.0)
        assert (np.abs(values(got[row]) - weights) <= 4 * (32 * largest + 40) * unit * weights + 2.0**-126).all()


@BOTH
@pytest.mark.parametrize("limit", [10.0, 0.0])
@defines("experts", "shared_expert")
def test_experts_clamp_weigh_and_add_up_in_order(numerics, limit):
    (w1, d1), (w2, d2), (w3, d3) = fp4(4, 32, 64), fp4(4, 64, 32), fp4(4, 32, 64)
    x = torch.randint(-3, 4, (6, 64)).to(numerics.act)  # integers, so that the first sums are exact in any order
    ids = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0], [2, 0], [0, 2]], dtype=torch.int32)  # nobody asks for expert 3
    weights = torch.rand(6, 2, dtype=numerics.wide)
    parts, cut = rounding(numerics), limit or np.inf
    want = np.zeros((6, 64))
    for row in range(6):
        for e, weight in sorted(zip(ids[row].tolist(), values(weights[row]), strict=True)):
            want[row] += oracle.expert(values(x[row]), d1[e], d2[e], d3[e], cut, weight, **parts)
    largest = float(np.abs(want).max())
    for ops in (spec, cpu):
        got = ops.experts(x, weights, ids, w1, w2, w3, limit=limit, numerics=numerics)
        # The bound of one bfloat16 rounding of each expert; in float64 of the sums.
        assert np.abs(values(got) - want).max() <= largest * (2 * 2.0**-9 if numerics.rounds else 1e-12)
    assert torch.equal(ops.experts(x, weights, ids, w1, w2, w3, limit=limit, numerics=numerics), got)
    (s1, e1), (s2, e2), (s3, e3) = fp8(32, 64), fp8(64, 32), fp8(32, 64)
    got = spec.shared_expert(x, s1, s2, s3, limit=limit, numerics=numerics)
    one_step(got, [oracle.expert(row, e1, e2, e3, cut, 1.0, **parts) for row in values(x)], 0.02)


# Engram


@defines("engram_hash")
def test_engram_rows_are_those_of_python_integers():
    layers, vocab = 2, 407
    primes = engram.primes(layers, 120, 4, 2)
    ids = torch.randint(0, vocab, (2, 9), dtype=torch.int32)
    ids[0, 3] = vocab - 1
    alive = torch.ones(2, 9, dtype=torch.bool)
    alive[1, 4] = False
    at = torch.arange(9)[:, None] - torch.arange(4)
    pad = torch.tensor(5, dtype=torch.int32)
    for layer in range(layers):
        factors, offsets = engram.multipliers(layer + 1, vocab, 4), engram.offsets(primes[layer])
        table = [torch.tensor(t) for t in (factors, primes[layer], offsets)]
        known = alive[:, at.clamp_min(0)] & (at >= 0)
        got = spec.engram_hash(ids[:, at.clamp_min(0)], known, pad, *table)
        for b in range(2):
            words = [i if ok else None for i, ok in zip(ids[b].tolist(), alive[b].tolist(), strict=True)]
            assert got[b].tolist() == [engram.hash_rows(words, p, factors, primes[layer], 5) for p in range(9)]


@BOTH
@defines("engram_rows", "engram_gate")
def test_engram_rows_and_gates_follow_the_formulas(numerics):
    codes = torch.randint(0, 0x7F, (20, 32), dtype=torch.uint8)
    table = Fp8Rows(codes.view(torch.float8_e4m3fn), exponents(20, 1))
    ids = torch.randint(0, 20, (2, 3, 4), dtype=torch.int32)
    dense = files.row_values(codes.numpy(), table.scale.view(torch.uint8).numpy())
    assert np.array_equal(values(spec.engram_rows(table, ids, numerics)), dense[ids.numpy()].reshape(2, 3, -1))
    stream, kv, qw, kw = random(2, 3, 4, 16, numerics=numerics), random(2, 3, 80, numerics=numerics), bf16(4, 16), bf16(4, 16)
    stream[0, 0], kv[0, 1], kv[1, 0, :64] = 0, 0, stream[1, 0].flatten() * -1  # dot products of 0, and negative ones
    mask = torch.tensor([[True, True, False], [True, False, True]])
    for alive in (None, mask):
        got = spec.engram_gate(stream, kv, qw, kw, alive, eps=EPS, numerics=numerics)
        dead = np.zeros((2, 3), bool) if alive is None else ~alive.numpy()
        h, k, q, w = (values(t) for t in (stream, kv, qw, kw))
        want = np.array([[engram.add(h[b, s], k[b, s], q, w, EPS, dead[b, s]) for s in range(3)] for b in range(2)])
        # 16 terms with a root of a dot product that may cancel: the float32 error of the gate is at most 2**-12 where it is tiny.
        gate_error = 2.0**-12 if numerics.rounds else 1e-8
        bound = np.abs(values(kv))[..., None, 64:] * gate_error + (values(half_step(torch.from_numpy(want), 8)) if numerics.rounds else 1e-12)
        assert (np.abs(values(got) - want) <= bound).all()
        near = np.abs(values(got) - want) <= (values(half_step(torch.from_numpy(want), 8)) * 1.01 if numerics.rounds else 1e-12)
        assert near.mean() > 0.97


# Places and choices


@BOTH
@defines("embedding", "write_rows")
def test_embedding_gathers_and_writes_go_to_their_rows_and_nowhere_else(numerics):
    table, ids = bf16(11, 8), torch.tensor([[0, 10], [3, 3]], dtype=torch.int32)
    got = spec.embedding(ids, table, numerics.act)
    assert got.dtype == numerics.act and np.array_equal(values(got), values(table)[ids.numpy()])
    buffer, rows = random(2, 6, 8, numerics=numerics), random(2, 3, 8, numerics=numerics)
    before, target = buffer.clone(), torch.tensor([[4, 0, 5], [5, 5, 2]], dtype=torch.int32)  # 5 is the sink
    rows = torch.where((target < 5)[..., None], rows, 0)
    got = spec.write_rows(buffer, target, rows)
    want = values(before).copy()
    for b, s in np.ndindex(2, 3):
        want[b, target[b, s]] = values(rows[b, s])
    assert np.array_equal(values(got), want) and torch.equal(buffer, before)


def nucleus(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """Token by token from the best down, until the probability reaches top_p."""
    p, kept, total = oracle.softmax(logits / temperature), np.zeros(len(logits)), 0.0
    for token in oracle.top_k(p, len(p)):
        if total >= top_p and total > 0:
            break
        kept[token], total = p[token], total + p[token]
    return kept / kept.sum()


@defines("choose", "chosen_from")
def test_choices_are_the_best_token_or_drawn_from_the_nucleus():
    logits = torch.randn(5, 9, dtype=torch.float64) * 2
    logits[0, 3] = logits[0, 6] = 9.0  # a tie
    assert spec.choose(logits, None, 0).tolist() == [oracle.greedy(row) for row in values(logits)]
    temperature, top_p = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0]), torch.tensor([1.0, 1.0, 0.5, 0.9, 0.0])
    shares = spec.chosen_from(logits[:, None], temperature, top_p)[:, 0]
    for u in (0.0, 0.3, 0.77, 1 - 2.0**-24):
        got = spec.choose(logits, Sample(temperature, top_p, torch.tensor([[0.9, u]] * 5)), 1)
        for row in range(5):
            best = oracle.greedy(values(logits[row]))
            want = nucleus(values(logits[row]), float(temperature[row]), float(top_p[row])) if temperature[row] > 0 else np.eye(9)[best]
            assert np.abs(values(shares[row]) - want).max() <= 1e-12
            drawn = next(t for t in range(9) if (want[t] > 0 and want[: t + 1].sum() > u) or t == 8)
            assert got[row] == (drawn if temperature[row] > 0 else best)


# The record itself


@defines("tap", "all_reduce", "all_gather", "sum_terms", "lookups", "first", "recut", "choice_cut", "elect")
def test_taps_and_collectives_are_the_identity_where_nothing_is_sharded():
    x, token = torch.randn(2, 3), torch.tensor([4, 5], dtype=torch.int32)
    assert spec.tap("name", x) is x and spec.all_reduce(x, "heads") is x and spec.all_gather(x, "vocab", -1) is x
    assert spec.recut(x, "head.vocab", "", 3) is x and spec.choice_cut("head.vocab") == ""
    assert spec.lookups((x, token[:, None].float()), ("vocab", "vocab"))[0] is x
    assert spec.elect(x[:, 0], token, x, "head.vocab") == (token, x)
    offset = spec.first("experts", 8, x.device)
    assert offset.dtype == torch.int32 and offset.shape == () and int(offset) == 0
    assert torch.equal(spec.sum_terms((x, x * 2, x * 4), ("a", "b c", "d")), x + x * 2 + x * 4)


# Acceptance of drafts and its uniforms have their own page and their own tests.
ELSEWHERE = {"uniforms", "accept_greedy", "accept_token", "accept_block"}  # tests/test_accept.py


def test_every_primitive_has_a_definition_test():
    names = {f.name for f in fields(Backend)[1:]}
    assert names - DEFINED == ELSEWHERE and not DEFINED - names


def test_a_primitive_with_other_arguments_is_refused():
    """Names of positional arguments are free; their number and the keyword-only names are the contract."""
    for wrong in (lambda stream: stream, lambda stream, pre, more: stream):
        with pytest.raises(TypeError, match="mine.hc_pre.* cannot be called like the spec's hc_pre"):
            Backend("mine", hc_pre=wrong)
    with pytest.raises(TypeError, match="cannot be called like the spec's gate"):
        Backend("mine", gate=lambda x, weight, bias, *, k: x)
    Backend("mine", hc_pre=lambda stream, weights: stream)
