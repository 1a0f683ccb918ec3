# SPDX-License-Identifier: Apache-2.0
"""The hyper-connection kernels equal their definitions, and wrong ones do not."""

from functools import partial

import pytest
import torch
from bounds import Near, U, check_near, check_rows, strict
from cases_mixes import BF16, COMBINED, F32, MIXED, Stream
from mutate import mutated

from v41.backends.neuron.kernels import combine, hc_mixes, sinkhorn
from v41.backends.neuron.prepare import tiled
from v41.spec.numerics import Numerics
from v41.spec.ops import mix

KEYS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-20}


def combined_holds(module, case):
    h, x, (pre, post, comb) = case.stream(), case.x(), case.coefficients()
    got = module.hc_pre(strict, h, pre), module.hc_post(strict, x, h, post, comb)
    if case.dtype == F32:
        check_rows(got[0], mix.hc_pre(h, pre), f"hc_pre {case}")
        check_rows(got[1], mix.hc_post(x, h, post, comb), f"hc_post {case}")
    wide, y = h.double(), x.double()[..., None, :]
    terms = pre.double()[..., None] * wide, comb.double()[..., None] * wide[..., None, :]
    after = post.double()[..., None] * y
    # Exact products of three terms a coefficient, or rounded float32 ones; a sum of at most three times copies + 1 of them.
    error = (3 * case.copies + 5) * U
    check_near(got[0], Near(terms[0].sum(2), terms[0].abs().sum(2) * error), f"hc_pre {case}")
    check_near(got[1], Near(terms[1].sum(2) + after, (terms[1].abs().sum(2) + after.abs()) * error), f"hc_post {case}")


@pytest.mark.parametrize("case", COMBINED, ids=str)
def test_collapse_and_expand_equal_their_definitions_within_their_rounding(case):
    combined_holds(combine, case)


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("range(1 if dtype == nl.float32 else 3)", "range(1 if dtype == nl.float32 else 2)", Stream(6, 192, BF16)),
        ("accumulate=i > 0)", "accumulate=False)", Stream(6, 192, BF16)),
        ("offset=-j * chunks)", "offset=-j * chunks - 1)", Stream(7, 192, F32)),
        ("offset=-first", "offset=-first - 1", Stream(7, 192, F32)),
        (
            "count = min(most, n - start)\n        lanes = count * copies\n        coef = nl.ndarray((lanes + count",
            "count = most\n        lanes = count * copies\n        coef = nl.ndarray((lanes + count",
            Stream(27, 6, F32),
        ),
        ("src=post[start : start + count, :]", "src=post[0:count, :]", Stream(70, 192, F32)),
    ],
    ids=("two terms of a coefficient", "last term alone", "masks one lane on", "mask of x one lane on", "no tail", "post of the first block"),
)
def test_a_wrong_collapse_or_expand_is_caught(old, new, case, tmp_path):
    with pytest.raises(Exception, match=r"outside|above|LNC-|MEM-|HAZ-"):
        combined_holds(mutated(combine, old, new, tmp_path), case)


def mixes_hold(case):
    numerics = Numerics("trn2") if case.dtype == BF16 else Numerics("exact")
    h, (fn, scale, base) = case.stream(), case.weights()
    got = hc_mixes.hc_mixes(strict, h, fn, scale, base, **KEYS, numerics=numerics)
    want = mix.hc_mixes(h.double(), fn, scale, base, **KEYS, numerics=Numerics("exact", dtype="float64"))
    # The partial sums of these random products stay below four times the root of their squares' sum, and each of at most 128 + 160 steps
    # rounds one of them: sqrt(288) U four times over, doubled.
    flat = h.double().flatten(2)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + KEYS["norm_eps"])
    noise = 8 * 17 * U * ((flat.square() @ fn.double().square().T).sqrt() * inverse).amax(-1)
    size = scale.double().abs()
    # base and scale round the logit at its own size; a sigmoid has slope 1/4; a Sinkhorn step does not widen differences of logits.
    logit = [noise * s + 4 * U * (noise / (17 * U) * s + base.abs().max()) for s in size]
    names = ("pre", "post", "comb")
    errors = logit[0][..., None] / 4 + 4 * U, logit[1][..., None] / 2 + 8 * U, (4 * logit[2] + 6 * KEYS["iters"] * U)[..., None, None] * want[2] + U**2
    for name, a, b, e in zip(names, got, want, errors, strict=True):
        check_near(a, Near(b, e.expand(b.shape)), f"{name} {case}")
    if case.dtype == F32:
        for name, a, b in zip(names, got, mix.hc_mixes(h, fn, scale, base, **KEYS, numerics=numerics), strict=True):
            check_rows(a.flatten(2), b.flatten(2), f"{name} {case}")


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_mixes_equal_their_definition_within_its_rounding(case):
    mixes_hold(case)


FEW, MANY, TAIL = Stream(5, 64, F32), Stream(70, 64, F32), Stream(7, 96, F32)


@pytest.mark.parametrize(
    ("module", "name", "old", "new", "case"),
    [
        (hc_mixes, "projected", "for t in range(tiles // pack * pack, tiles):", "for t in range(tiles, tiles):", Stream(7, 224, F32)),
        (hc_mixes, "projected", "operand0=1.0 / true_size", "operand0=1.0 / (true_size + 32)", TAIL),
        (hc_mixes, "projected", "command = nisa.reduce_cmd.reduce if c else", "command = nisa.reduce_cmd.reset_reduce if c else", Stream(128, 1600, F32)),
        (sinkhorn, "few", "for i in range(iters):\n        if i > 0:\n            row", "for i in range(iters - 1):\n        if i > 0:\n            row", FEW),
        (sinkhorn, "few", "operand0=eps)\n    row", "operand0=0.0)\n    row", Stream(5, 64, F32, spread=30.0)),
        (sinkhorn, "many", "nisa.memset(dst=square, value=eps)", "nisa.memset(dst=square, value=0.0)", Stream(70, 64, F32, spread=30.0)),
        (
            sinkhorn,
            "many",
            "data=by_column, axis=3)\n        divided(inner, sums.expand_dim(2).broadcast(2, copies)",
            "data=by_column, axis=3)\n        divided(inner, sums.expand_dim(3).broadcast(3, copies)",
            MANY,
        ),
    ],
    ids=("tile tail", "mean of the padding", "sum begun again", "an iteration less", "no eps in few", "no eps in many", "columns by row"),
)
def test_wrong_mixes_are_caught(module, name, old, new, case, tmp_path, monkeypatch):
    wrong = mutated(module, old, new, tmp_path)
    monkeypatch.setattr(hc_mixes, name, getattr(wrong, name))
    with pytest.raises(AssertionError, match=r"outside|above"):
        mixes_hold(case)


def test_no_tokens_give_nothing():
    h, x = torch.empty(1, 0, 4, 64, dtype=BF16), torch.empty(1, 0, 64, dtype=BF16)
    one = torch.empty(1, 0, 4)
    assert combine.hc_pre(strict, h, one).shape == (1, 0, 64) and combine.hc_post(strict, x, h, one, torch.empty(1, 0, 4, 4)).shape == h.shape
    mixes = hc_mixes.hc_mixes(strict, h, *Stream(1, 64, BF16).weights(), **KEYS, numerics=Numerics("trn2"))
    assert [t.shape for t in mixes] == [(1, 0, 4), (1, 0, 4), (1, 0, 4, 4)]


def test_what_the_kernels_do_not_take_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match="4 copies of 64 torch.float64"):
        combine.hc_pre(strict, torch.ones(1, 1, 4, 64, dtype=torch.float64), torch.ones(1, 1, 4))
    with pytest.raises(ValueError, match="float64"):
        hc_mixes.hc_mixes(strict, torch.ones(1, 1, 4, 64), *Stream(1, 64, F32).weights(), **KEYS, numerics=Numerics("exact", dtype="float64"))


def test_a_stream_that_is_part_of_another_tensor_is_read_where_it_lies():
    case = Stream(3, 64, BF16)
    h, (pre, _, _) = case.stream(), case.coefficients()
    inside = torch.cat((torch.full_like(h, torch.nan), h), 1)[:, 3:]
    assert torch.equal(combine.hc_pre(strict, inside, pre), combine.hc_pre(strict, h, pre))


def test_fn_in_tiles_gives_the_same_here_and_in_the_definition():
    case, numerics = Stream(6, 72, BF16), Numerics("trn2")
    h, (fn, scale, base) = case.stream(), case.weights()
    for body in (mix.hc_mixes, partial(hc_mixes.hc_mixes, strict)):
        for a, b in zip(body(h, tiled(fn), scale, base, **KEYS, numerics=numerics), body(h, fn, scale, base, **KEYS, numerics=numerics), strict=True):
            assert torch.equal(a, b)
