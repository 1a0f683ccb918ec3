# SPDX-License-Identifier: Apache-2.0
"""Kernels that work row by row equal their definitions, and wrong ones do not."""

import math

import pytest
import torch
from bounds import Near, U, check_equal, check_near, check_rows, strict, strict_but
from cases_rows import BF16, EDGES, F32, GATHERS, NORMS, POOLS, ROPES, WRITES, Norm, normal, wide_range
from mutate import mutated

from v41.backends.neuron.kernels import bands, embedding, rms_norm, rope, rounds, softmax_pool, write_rows
from v41.spec.numerics import Numerics
from v41.spec.ops import norm, place, pool, quant
from v41.spec.ops import rope as rotation

TRN2 = Numerics("trn2")


def norm_holds(kernel, case):
    x, weight, eps = case.args()
    got = kernel(strict, x, weight, eps)
    if case.dtype == F32:
        check_rows(got, norm.rms_norm(x, weight, eps), str(case))
    n, y = x.shape[-1], x.double()
    exact = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.double()
    # The sum's n roundings, the mean's two, eps and rsqrt count half; rsqrt and two products.
    check_near(got, Near(exact, exact.abs() * (n / 2 + 6) * U), str(case))


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_rms_norm_equals_its_definition_within_its_rounding(case):
    norm_holds(rms_norm.rms_norm, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("operand0=1.0 / n)", "operand0=1.0)"),
        ("op0=nl.add, operand0=eps", "op0=nl.add, operand0=1.0"),
        ("[[0, count], [1, n]]", "[[0, count * n], [1, 1]]"),
    ],
    ids=("no mean", "another eps", "one gain for all columns"),
)
def test_a_wrong_rms_norm_is_caught(old, new, tmp_path):
    with pytest.raises((AssertionError, ValueError)):
        norm_holds(mutated(rms_norm, old, new, tmp_path).rms_norm, Norm((6, 1280), F32))


def norm_keeps_rows_apart(kernel):
    """A row of NaN, as rows that are not real may hold, beside live ones."""
    x, weight, eps = Norm((6, 1280), F32).args()
    want = kernel(strict, x, weight, eps)
    x[2], x[4] = torch.nan, torch.inf
    got = kernel(strict, x, weight, eps)
    live = [0, 1, 3, 5]
    check_equal(got[live], want[live], "rows beside NaN")
    assert got[2].isnan().all()


def test_a_row_of_nan_leaves_the_rows_of_its_tile_alone():
    norm_keeps_rows_apart(rms_norm.rms_norm)


def test_an_rms_norm_that_mixes_rows_with_zero_weights_is_caught(monkeypatch):
    monkeypatch.setattr(rms_norm, "over_groups", mixing)
    norm_holds(rms_norm.rms_norm, Norm((6, 1280), F32))
    with pytest.raises(AssertionError, match="beside NaN"):
        norm_keeps_rows_apart(rms_norm.rms_norm)


def mixing(column, lanes, parts):
    return bands.summed(bands.same_group(lanes, parts, 1.0), column)


def rope_holds(module, tokens, heads, n, half, dtype):
    x = normal(1, tokens, heads, n).to(dtype)
    x = x[:, :, 0] if heads == 1 else x
    at = torch.randint(0, 1 << 20, (1, tokens), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    at[0, : min(tokens, len(EDGES))] = torch.tensor(EDGES[:tokens], dtype=torch.int32)
    f = rotation.frequencies(2 * half, 160000.0, None)
    angle = (at.float()[..., None] * f).double().reshape(*at.shape, *(1,) * (x.ndim - 3), half)
    a, b = x[..., n - 2 * half :].double().unflatten(-1, (-1, 2)).unbind(-1)
    for name, sign in (("rope", 1), ("rope_inverse", -1)):
        got = getattr(module, name)(strict, x, at, f)
        check_equal(got[..., : n - 2 * half], x[..., : n - 2 * half], f"{name} of the columns that stay")
        if dtype == F32:
            check_rows(got, getattr(rotation, name)(x, at, f), name)
        cos, sin = angle.cos(), sign * angle.sin()
        exact = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        # Sine and cosine as the kernel's page derives; two products and a sum.
        error = ((a.abs() + b.abs()) * (2.0**-21.5 + 2 * U)).repeat_interleave(2, -1)
        check_near(got[..., n - 2 * half :], Near(exact, error), f"{name} {tokens} x {heads} x {n}")


@pytest.mark.parametrize("case", ROPES, ids=str)
def test_rope_and_its_inverse_equal_their_definitions_up_to_the_last_position(case):
    rope_holds(rope, *case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("for c in (C1, C2, C3, C4, C5)", "for c in (C1, C2, C3, C4)"),
        ("C2 = math.floor((TURN - C1) * 2.0**10) / 2.0**10", "C2 = math.floor((TURN - C1) * 2.0**20) / 2.0**20"),
        ("op1=nl.subtract, operand1=low", "op1=nl.add, operand1=low"),
        ("[[1, tokens], [0, each]]", "[[0, tokens], [1, each]]"),
        ("op=nl.subtract if sign > 0 else nl.add", "op=nl.add if sign > 0 else nl.subtract"),
    ],
    ids=("a part of 2 pi missing", "a product that is not exact", "wrapped the wrong way", "positions by head", "conjugated"),
)
def test_a_wrong_rope_is_caught(old, new, tmp_path):
    with pytest.raises(Exception, match=r"outside|above|valid:|MEM-BOUNDS"):
        rope_holds(mutated(rope, old, new, tmp_path), 300, 3, 64, 32, F32)


def test_the_parts_of_a_turn_have_the_bits_that_make_their_products_exact():
    parts = ((rope.C1, 2), (rope.C2, 10), (rope.C3, 16), (rope.C4, 22))
    assert all(c * 2**place == int(c * 2**place) < 2**6 for c, place in parts)
    assert sum(c for c, _ in parts) + rope.C5 == 2 * math.pi and 0 < rope.C5 < 2.0**-23
    assert (rope.POSITIONS / rope.TURN) * 1.0001 < 2**18


def test_sine_and_cosine_are_within_their_bound_at_many_angles():
    """Angles whose reduction is hardest: beside multiples of pi / 2 from one turn to 2^20."""
    k = torch.cat((torch.arange(0, 64), torch.randint(0, 667544, (4032,), generator=torch.Generator().manual_seed(3)))).double()
    angle = torch.cat(((k * math.pi / 2).float(), torch.nextafter((k * math.pi / 2).float(), torch.tensor(1e9)))).clamp(0, 1048575)
    # Position 1 makes the frequency the angle; a pair (1, 0) turns into its cosine and sine.
    f = angle.reshape(-1, 64)
    rows = torch.zeros(1, 1, 128)
    rows[..., 0::2] = 1
    for i in range(0, f.shape[0], 16):
        got = rope.rope(strict, rows, torch.ones(1, 1, dtype=torch.int32), f[i])
        exact = torch.stack((f[i].double().cos(), f[i].double().sin()), -1).flatten()
        assert (got[0, 0].double() - exact).abs().max() <= 2.0**-21.5


def trip_holds(module):
    for shape in ((1, 6, 32, 128), (1, 3, 512), (2, 130, 64), (1, 32)):
        for seed in (0, 5):
            x = wide_range(*shape, seed=seed)
            check_equal(module.index_round(strict, x, TRN2), quant.index_round(x, TRN2), f"index_round {shape}")
            check_equal(module.kv_round(strict, x, TRN2), quant.kv_round(x, TRN2), f"kv_round {shape}")


def test_the_fp4_round_trips_equal_their_definitions_in_every_byte():
    trip_holds(rounds)


def every_value():
    """All bfloat16 up to 3 * 2^126, shuffled into rows: above that 4 * 2^126 would be infinity, here as in the definition."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    values = values[values.float().abs() <= 3 * 2.0**126]
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(7))
    return values[order][: values.numel() // 512 * 512].view(-1, 512), values[: values.numel() // 512 * 512].view(-1, 512)


def test_every_bfloat16_takes_the_round_trips_of_its_definition():
    for x in every_value():
        check_equal(rounds.index_round(strict, x, TRN2), quant.index_round(x, TRN2), "index_round")
        check_equal(rounds.kv_round(strict, x, TRN2), quant.kv_round(x, TRN2), "kv_round")


def halves():
    """Rows that meet every tie and end of e2m1 at many scales: multiples of 1/8 up to 6 with their negatives, a 6 in every group."""
    steps = torch.arange(-48, 49).float() / 8
    row = torch.cat((steps, torch.tensor([-0.0, 1e-3, -1e-3]))).reshape(-1)
    groups = torch.cat([torch.cat((torch.tensor([6.0]), part, torch.zeros(15 - len(part)))) for part in row.split(15)])
    groups = torch.cat((groups, torch.zeros(-len(groups) % 32)))
    return torch.stack([groups * 2.0**e for e in (-60, -9, -3, 0, 5, 30)]).to(BF16)


def ties_hold(module):
    x = halves()
    check_equal(module.index_round(strict, x, TRN2), quant.index_round(x, TRN2), "ties of index rows")
    check_equal(module.kv_round(strict, x, TRN2), quant.kv_round(x, TRN2), "ties of compressed rows")
    top = torch.full((2, 32), 3 * 2.0**126, dtype=BF16)  # above it 4 * 2^126 is infinity, here as in the definition
    top[1] = -torch.finfo(BF16).tiny
    check_equal(module.index_round(strict, top, TRN2), quant.index_round(top, TRN2), "extremes")
    huge = torch.tensor([1440.0, 1439.0, 1e4, -1e30] * 8).to(BF16)[None]
    check_equal(module.kv_round(strict, huge, TRN2), quant.kv_round(huge, TRN2), "scales at 240")


def test_ties_signs_of_zero_and_extremes_of_e2m1_are_exact():
    ties_hold(rounds)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("op=nl.bitwise_or)\n    return signed.view", "op=nl.bitwise_and)\n    return signed.view"),
        ("operand0=1.0, op1=nl.multiply, operand1=1.5 * 2.0**22", "operand0=1.0, op1=nl.multiply, operand1=1.5 * 2.0**21"),
        ("op0=nl.maximum, operand0=1.0, op1", "op0=nl.maximum, operand0=0.5, op1"),
        ("op0=nl.minimum, operand0=limit", "op0=nl.minimum, operand0=limit - 16.0"),
        ("INDEX_BLOCK, KV_BLOCK = 32, 16", "INDEX_BLOCK, KV_BLOCK = 16, 16"),
    ],
    ids=("sign lost", "one bit too many", "steps of a quarter", "another limit", "groups of 16"),
)
def test_a_wrong_round_trip_is_caught(old, new, tmp_path):
    wrong = mutated(rounds, old, new, tmp_path)
    with pytest.raises(AssertionError, match="differ"):
        ties_hold(wrong)
        trip_holds(wrong)


def pool_holds(kernel, b, g, ratio, d, dtype):
    kv, score = normal(b, g, ratio, d), normal(b, g, ratio, d, seed=1) * 6
    score[:, 0, :, : d // 2] = 3.0
    got = kernel(strict, kv, score, dtype)
    if dtype == F32:
        check_rows(got, pool.softmax_pool(kv, score, dtype), "softmax_pool")
    weight = score.double().softmax(2)
    size = (weight * kv.double().abs()).sum(2)
    spread = (score.amax(2) - score.amin(2)).double()
    # exp's argument carries the difference's rounding; exp, sum, reciprocal, two products and the sum.
    check_near(got, Near((weight * kv.double()).sum(2), size * (2 * spread + 2 * ratio + 8) * U), f"softmax_pool {got.shape}")


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_softmax_pool_equals_its_definition_within_its_rounding(case):
    pool_holds(softmax_pool.softmax_pool, *case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(first * ratio + i) * d", "(first * ratio + ratio - 1) * d"),
        ("op=nl.add, data=s.permute((0, 2, 1)), axis=2)\n    nisa.reciprocal", "op=nl.maximum, data=s.permute((0, 2, 1)), axis=2)\n    nisa.reciprocal"),
    ],
    ids=("the last token twice", "no sum"),
)
def test_a_wrong_pool_is_caught(old, new, tmp_path):
    with pytest.raises(AssertionError):
        pool_holds(mutated(softmax_pool, old, new, tmp_path).softmax_pool, 1, 3, 2, 128, BF16)


def gather_holds(kernel, n, rows, dim, dtype):
    table = normal(rows, dim).to(BF16)
    ids = torch.randint(-3, rows + 3, (1, n), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    check_equal(kernel(strict, ids, table, dtype), place.embedding(ids, table, dtype), "embedding")


@pytest.mark.parametrize("case", GATHERS, ids=str)
def test_embedding_equals_its_definition(case):
    gather_holds(embedding.embedding, *case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nisa.memset(dst=t, value=0.0)", "nisa.memset(dst=t, value=1.0)"),
        ("rows = min(P, start + mine - first)", "rows = min(P, start + mine - first) - first // P"),
    ],
    ids=("not zeros", "tail off by one"),
)
def test_a_wrong_embedding_is_caught(old, new, tmp_path):
    with pytest.raises(Exception, match=r"differ|INIT-OUTPUT"):
        gather_holds(mutated(embedding, old, new, tmp_path).embedding, 270, 50, 16, BF16)


def write_holds(kernel, run, b, t, d, s, dtype, given):
    generator = torch.Generator().manual_seed(4)
    buffer, rows = normal(b, t, d).to(dtype), normal(b, s, d, seed=1).to(given)
    buffer[:, -1] = torch.nan  # a sink that was poisoned
    index = torch.stack([torch.randperm(t - 1, generator=generator)[:s] for _ in range(b)]).to(torch.int32)
    if s > 2:
        index[:, 1] = index[:, s - 1] = t - 1
        rows[:, 1] = rows[:, s - 1] = 0
    check_equal(kernel(run, buffer, index, rows), place.write_rows(buffer, index, rows), f"write_rows {buffer.shape}")


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_write_rows_equals_its_definition_and_writes_the_sink_once_a_tile(case):
    # Later tiles and sequences write into the buffer that earlier ones wrote.
    several = case[0] > 1 or case[3] > 128
    write_holds(write_rows.write_rows, strict_but("PLACE-MUTATED2") if several else strict, *case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("offset=b * t * d, ", "offset=0, "),
        ("-count, -1, 1.0", "-count, 0, 1.0"),
        ("-count, -1, 1.0", "-count, -1, 0.0"),
        ("oob_mode=nisa.oob_mode.skip", "oob_mode=nisa.oob_mode.error"),
    ],
    ids=("all to the first sequence", "the sink left out", "the sink twice", "no row skipped"),
)
def test_a_wrong_write_is_caught(old, new, tmp_path):
    with pytest.raises(Exception, match=r"differ|HAZ-SCATTER|OP-OOB"):
        write_holds(mutated(write_rows, old, new, tmp_path).write_rows, strict_but("PLACE-MUTATED2"), 3, 20, 24, 5, F32, F32)


def test_calls_without_rows_start_no_kernel():
    def never(*args):
        raise AssertionError("a kernel was started")

    none = torch.zeros(1, 0, 32)
    at, weight = torch.zeros(1, 0, dtype=torch.int32), torch.ones(32, dtype=BF16)
    assert rms_norm.rms_norm(never, none, weight, 1e-20).shape == (1, 0, 32)
    assert rope.rope(never, none, at, torch.ones(4)).shape == rope.rope_inverse(never, none, at, torch.ones(4)).shape == (1, 0, 32)
    assert rounds.index_round(never, none.to(BF16), TRN2).shape == rounds.kv_round(never, none.to(BF16), TRN2).shape == (1, 0, 32)
    assert softmax_pool.softmax_pool(never, torch.zeros(1, 0, 2, 8), torch.zeros(1, 0, 2, 8), BF16).shape == (1, 0, 8)
    assert embedding.embedding(never, at, torch.ones(3, 8, dtype=BF16), F32).shape == (1, 0, 8)
    assert write_rows.write_rows(never, torch.ones(1, 3, 8), at, torch.zeros(1, 0, 8)).shape == (1, 3, 8)


def test_what_the_kernels_do_not_compute_is_refused_by_name():
    wide = torch.zeros(1, 2, 32, dtype=torch.float64)
    at = torch.zeros(1, 2, dtype=torch.int32)
    for name, call in (
        ("rms_norm", lambda: rms_norm.rms_norm(strict, wide, torch.ones(32, dtype=BF16), 1e-20)),
        ("rope", lambda: rope.rope(strict, wide, at, torch.ones(4))),
        ("rope_inverse", lambda: rope.rope_inverse(strict, torch.zeros(1, 2, 131, 8192), at, torch.ones(4))),
        ("index_round", lambda: rounds.index_round(strict, wide.float(), TRN2)),
        ("kv_round", lambda: rounds.kv_round(strict, wide.to(BF16), Numerics("faithful"))),
        ("kv_round", lambda: rounds.kv_round(strict, torch.zeros(1, 24, dtype=BF16), TRN2)),
        ("softmax_pool", lambda: softmax_pool.softmax_pool(strict, wide[None], wide[None], BF16)),
        ("embedding", lambda: embedding.embedding(strict, at, torch.ones(3, 8, dtype=BF16), torch.float64)),
        ("write_rows", lambda: write_rows.write_rows(strict, torch.empty(1, 1 << 22, 1), at, torch.zeros(1, 2, 1))),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            call()
