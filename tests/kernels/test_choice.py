# SPDX-License-Identifier: Apache-2.0
"""Kernels that choose tokens: uniforms and best tokens to the bit, draws and verdicts wherever they are decided; wrong ones are caught."""

from contextlib import suppress

import pytest
import torch
from bounds import Near, U, check_equal, check_near, strict
from cases_choice import DRAFTED, EDGE, GREEDY, SAMPLED, Choice, Drafts, draw_gap, edges, uniform
from mutate import mutated

from v41.backends.neuron.kernels import accept, choose, nucleus, uniforms, verdict, vocab
from v41.spec.ops import accept as rules
from v41.spec.ops import choose as choosing
from v41.spec.ops import draws
from v41.spec.ops.choose import Sample

WORDS = (0, 1, -1, 2**31 - 1, -(2**31), 0x13198A2E, -0x5BC0F7C, 65535, 65536)


def uniforms_hold(module):
    key = torch.tensor([[a, b] for a in WORDS for b in WORDS], dtype=torch.int32)
    at = torch.tensor([WORDS[i % len(WORDS)] for i in range(len(key))], dtype=torch.int32)
    for first, lanes, rows in ((0, 7, 81), (draws.DRAFT, 5, 3), (65533, 6, 2), (2**31 - 3, 3, 1)):
        check_equal(module.uniforms(strict, key[:rows], at[:rows], first, lanes), draws.uniforms(key[:rows], at[:rows], first, lanes), f"{first}")


def test_uniforms_equal_their_definition_in_every_bit():
    uniforms_hold(uniforms)
    key = torch.arange(260, dtype=torch.int32).view(130, 2)
    check_equal(uniforms.uniforms(strict, key, key[:, 0], 0, 1), draws.uniforms(key, key[:, 0], 0, 1), "130 sequences")
    assert uniforms.uniforms(strict, key[:0], key[:0, 0], 0, 4).shape == (0, 4)
    with pytest.raises(ValueError, match="2147483647 to 2147483648"):
        uniforms.uniforms(strict, key, key[:, 0], 2**31 - 1, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("op0=nl.greater_equal, operand0=CARRY", "op0=nl.greater, operand0=CARRY"),
        ("if r % 4 == 3:", "if r % 4 == 2:"),
        ("operand0=16 - bits % 16", "operand0=15 - bits % 16"),
        ("if bits < 16 else (again[:, 1:3], again[:, 0:2])", "if bits < 16 else (again[:, 0:2], again[:, 1:3])"),
        ("operand0=float(n))", "operand0=0.0)"),
    ],
    ids=("carry of 65536", "keys a round early", "rotated by one less", "halves not swapped", "no round number"),
)
def test_wrong_uniforms_are_caught(old, new, tmp_path):
    with pytest.raises(AssertionError, match="differ"):
        uniforms_hold(mutated(uniforms, old, new, tmp_path))


def greedy_holds(case):
    x = case.logits()
    check_equal(choose.choose(strict, x, None, 0), choosing.choose(x, None, 0), str(case))


@pytest.mark.parametrize("case", GREEDY, ids=str)
def test_the_best_token_is_the_definitions_and_the_lower_id_wins(case):
    greedy_holds(case)


def drawn_holds(case):
    """Draws and distributions, where the case decides them, which it must for two rows of three at least."""
    x, sample = case.logits(), case.sample()
    exact, gap = edges(x, sample.temperature, sample.top_p)
    got = choose.chosen_from(strict, x[:, None], sample.temperature, sample.top_p)[:, 0]
    sure = gap > EDGE
    assert sure.float().mean() >= 2 / 3, f"{case}: {sure}"
    assert torch.equal(got[sure] > 0, exact[sure].float() > 0), f"{case}: other tokens are kept"
    # The exponent: a difference, its product, the reciprocal of the temperature; then exp, a sum of 128 lanes, a reciprocal, a product.
    wide = (x.double() - x.double().amax(-1, keepdim=True)).clamp_min(-200) / sample.temperature.double().clamp_min(choosing.COLDEST)[:, None]
    size = torch.where(exact > 0, wide.abs(), 0)
    error = exact * (3 * size + 3 * (exact * size).sum(-1, keepdim=True) + 140) * U
    check_near(got[sure], Near(exact[sure], error[sure]), str(case))
    u = sample.uniforms[:, 1]
    told = sure & (draw_gap(exact, u) > EDGE)
    assert told.float().mean() >= 2 / 3
    check_equal(choose.choose(strict, x, sample, 1)[told], choosing.draw(exact, u.double())[told], f"{case}")
    check_equal(choosing.choose(x, sample, 1)[told], choosing.draw(exact, u.double())[told], f"definition {case}")


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_what_is_kept_and_drawn_is_the_definitions_where_it_is_decided(case):
    drawn_holds(case)


def flat_holds():
    """64 equal logits, where every sum is exact: edges of top_p and of uniforms are decided by < and >, and the lower ids stay."""
    x, heat = torch.zeros(5, 64), torch.full((5,), 0.5)
    top_p = torch.tensor([0.25, 17 / 64, 1 / 64, 0.0, 1.0])
    p = choosing.chosen_from(x[:, None], heat, top_p)[:, 0]
    got = choose.chosen_from(strict, x[:, None], heat, top_p)[:, 0]
    assert torch.equal(got > 0, p > 0) and (got > 0).sum(-1).tolist() == [16, 17, 1, 1, 64], "other tokens are kept"
    u = torch.tensor([0.25, 16 / 17, 0.0, 1 - 2.0**-24, 63 / 64])
    sample = Sample(heat, top_p, u[:, None])
    check_equal(choose.choose(strict, x, sample, 0), choosing.choose(x, sample, 0), "draws")


def close_holds():
    """Probabilities that differ in their last bits: the better ones are kept, not the lower ids."""
    x = -(torch.arange(64) % 4).float()[None] * 2.0**-24
    heat, top_p = torch.ones(1), torch.tensor([31.5 / 64])
    exact, gap = edges(x, heat, top_p)
    assert gap > EDGE and (exact[0] > 0).nonzero().flatten().tolist() == [i for i in range(64) if i % 4 < 2]
    assert torch.equal(choose.chosen_from(strict, x[None], heat, top_p)[0] > 0, exact > 0), "other tokens are kept"


def test_probabilities_that_differ_in_their_last_bits_keep_their_order():
    close_holds()


def test_edges_of_top_p_and_of_uniforms_fall_as_the_definition_says():
    flat_holds()


def test_a_temperature_of_zero_is_the_best_token_however_close_the_next_one_is():
    x = torch.tensor([[1e-20, 2e-20, 1e-20], [3.0, 3.0000002, 3.0000002], [-1e30, -1e30, -2e30]])
    sample = Sample(torch.zeros(3), torch.full((3,), 0.9), uniform(3, 1))
    check_equal(choose.choose(strict, x, sample, 0), choosing.choose(x, sample, 0), "draws")
    check_equal(
        choose.chosen_from(strict, x[:, None], torch.zeros(3), sample.top_p), choosing.chosen_from(x[:, None], torch.zeros(3), sample.top_p), "all on it"
    )


@pytest.mark.parametrize(
    ("target", "module", "name", "old", "new", "check"),
    [
        (
            choose,
            vocab,
            "best_tokens",
            "op0=nl.minimum, operand0=float(last * lanes)",
            "op0=nl.minimum, operand0=float(last * lanes - 1)",
            lambda: greedy_holds(GREEDY[0]),
        ),
        (
            choose,
            vocab,
            "best_tokens",
            "lane = searched(turned_over(best[:, 0, :]",
            "lane = searched(turned_over(best[:, 1, :]",
            lambda: greedy_holds(GREEDY[3]),
        ),
        (choose, vocab, "best_tokens", "[r * lanes : (r + 1) * lanes, :]", "[0:lanes, :]", lambda: greedy_holds(GREEDY[3])),
        (choose, vocab, "earlier", "cmp_op=nl.greater,", "cmp_op=nl.greater_equal,", lambda: drawn_holds(SAMPLED[1])),
        (choose, nucleus, "kept", "op=nl.add, engine=nisa.engine.gpsimd", "op=nl.subtract, engine=nisa.engine.gpsimd", flat_holds),
        (choose, nucleus, "kept", "range(BITS - 1, -1, -1)", "range(BITS - 1, 2, -1)", close_holds),
        (choose, nucleus, "kept", "operand0=over, op1=nl.less,", "operand0=over, op1=nl.less_equal,", flat_holds),
        (choose, nucleus, "kept", "op0=nl.greater_equal, operand0=1.0, op1", "op0=nl.greater, operand0=1.0, op1", lambda: drawn_holds(SAMPLED[1])),
        (choose, nucleus, "drawn", "op0=nl.greater, operand0=goal", "op0=nl.greater_equal, operand0=goal", flat_holds),
        (choose, nucleus, "drawn", "op1=nl.logical_and", "op1=nl.logical_or", lambda: drawn_holds(SAMPLED[1])),
    ],
    ids=(
        "row after the last",
        "lane of another value",
        "first row again",
        "own lane counted",
        "threshold one too low",
        "three bits not searched",
        "edge of top_p kept",
        "a top_p of 1 cuts",
        "edge of a uniform",
        "tokens of no probability",
    ),
)
def test_a_wrong_choice_is_caught(target, module, name, old, new, check, tmp_path, monkeypatch):
    monkeypatch.setattr(target, name, getattr(mutated(module, old, new, tmp_path), name))
    with pytest.raises(Exception, match=r"differ|kept|outside|NUM-|OP-OOB"):
        check()


def accept_greedy_holds(case, seed=0):
    x = Choice(case.b * (case.n + 1), case.vocab, "ties").logits().view(case.b, case.n + 1, -1)
    best = choosing.greedy(x.flatten(0, 1)).view(case.b, -1)
    other = torch.randint(0, case.vocab, (case.b, case.n), generator=torch.Generator().manual_seed(seed), dtype=torch.int64).to(torch.int32)
    drafts = torch.where(uniform(case.b, case.n, seed=seed) < 0.8, best[:, :-1], other)
    offered = case.args()[3]
    for name, a, b in zip(("accepted", "token"), accept.accept_greedy(strict, x, drafts, offered), rules.accept_greedy(x, drafts, offered), strict=True):
        check_equal(a, b, f"{name} {case}")


@pytest.mark.parametrize("case", DRAFTED, ids=str)
def test_greedy_acceptance_equals_its_definition(case):
    accept_greedy_holds(case)


def poisoned(p, q, offered):
    """Rows behind the offer are NaN: nothing may depend on them."""
    behind = torch.arange(q.shape[1]) >= offered[:, None]
    return torch.cat((p[:, :1], torch.where(behind[..., None], torch.nan, p[:, 1:])), 1), torch.where(behind[..., None], torch.nan, q)


def decided(rule, p, q, drafts, offered, u, u_next):
    """(verdict in float64, sequences in which no comparison is close)."""
    wide = [t.double() for t in (p, q, u, u_next)]
    run = getattr(rules, rule)

    def with_u(factor):
        return run(wide[0], wide[1], drafts, offered, wide[2] * factor, wide[3])

    want = with_u(1.0)
    # The same count with every uniform a little smaller and larger; the draw further from an edge than its sums are rounded.
    steady = (with_u(1 - EDGE)[0] == want[0]) & (with_u(1 + EDGE)[0] == want[0])
    gap = [torch.zeros(p.shape[0], dtype=torch.int32)] * 2
    for i, sign in enumerate((-1, 1)):
        gap[i] = run(wide[0], wide[1], drafts, offered, wide[2], (wide[3] + sign * EDGE).clamp(0, 1 - 2.0**-24))[1]
    return want, steady & (gap[0] == want[1]) & (gap[1] == want[1])


def sampled_holds(case):
    p, q, drafts, offered, u, u_next = case.args()
    for rule in ("accept_token", "accept_block"):
        want, sure = decided(rule, p, q, drafts, offered, u, u_next)
        assert sure.float().mean() >= 2 / 3, f"{case}: {sure}"
        got = getattr(accept, rule)(strict, *poisoned(p, q, offered), drafts, offered, u, u_next)
        told = getattr(rules, rule)(p, q, drafts, offered, u, u_next)
        for name, a, b, c in zip(("accepted", "token"), got, want, told, strict=True):
            check_equal(a[sure], b[sure], f"{rule} {name} {case}")
            check_equal(c[sure], b[sure], f"definition {rule} {name} {case}")


@pytest.mark.parametrize("case", DRAFTED, ids=str)
def test_sampled_acceptance_is_the_definitions_where_it_is_decided(case):
    sampled_holds(case)


def dyadic_holds():
    """Probabilities that are powers of two: every ratio, sum and product is exact, so that edges are decided by > and <."""
    row = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0, 0.0, 0.0])
    p = torch.stack((row, row.flip(0), row.roll(1), row)).expand(6, -1, -1).contiguous()
    q = torch.stack((row.roll(1), row.flip(0), row.roll(2))).expand(6, -1, -1).contiguous()
    q = torch.where(q == 0, 2.0**-20, q)
    drafts = torch.tensor([[1, 7, 2], [1, 7, 2], [1, 6, 3], [2, 7, 2], [5, 7, 2], [1, 7, 4]], dtype=torch.int32)
    u = torch.tensor([[0.5, 0.0, 0.5], [0.25, 0.75, 0.0], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.49, 1 - 2.0**-24, 0.25]])
    u_next = torch.tensor([0.0, 0.5, 0.25, 0.75, 1 - 2.0**-24, 0.5])
    for rule in ("accept_token", "accept_block"):
        for some in (3, 2, 1, 0):
            args = (p, q, drafts, torch.full((6,), some, dtype=torch.int32), u, u_next)
            for name, a, b in zip(("accepted", "token"), getattr(accept, rule)(strict, *args), getattr(rules, rule)(*args), strict=True):
                check_equal(a, b, f"{rule} {name}, {some} offered")


def test_edges_of_acceptance_fall_as_the_definition_says():
    dyadic_holds()


def test_where_p_is_q_nothing_is_left_and_p_stands():
    p, _, drafts, offered, u, u_next = Drafts(4, 3, 64).args()
    q = p[:, :3].contiguous()
    for rule in ("accept_token", "accept_block"):
        got, want = getattr(accept, rule)(strict, p, q, drafts, offered, u, u_next), getattr(rules, rule)(p, q, drafts, offered, u, u_next)
        check_equal(got[0], want[0], rule)
        check_equal(got[0], offered, "all offered stand")


def test_without_drafts_the_token_is_drawn_from_the_only_row():
    p, u = uniform(3, 1, 40, seed=1), uniform(3, seed=2)
    none = torch.empty(3, 0)
    got = accept.accept_token(strict, p, p[:, :0], none.int(), torch.zeros(3, dtype=torch.int32), none, u)
    check_equal(got[0], torch.zeros(3, dtype=torch.int32), "accepted")
    check_equal(got[1], choosing.draw(p[:, 0], u), "token")
    x = Choice(3, 40).logits()[:, None]
    check_equal(accept.accept_greedy(strict, x, none.int(), torch.zeros(3, dtype=torch.int32))[1], choosing.greedy(x[:, 0]), "greedy")


@pytest.mark.parametrize(
    ("module", "names", "old", "new", "check"),
    [
        (verdict, ("leading",), "broadcast(2, n), op=nl.less)", "broadcast(2, n), op=nl.less_equal)", lambda: accept_greedy_holds(DRAFTED[1])),
        (verdict, ("leading",), "data2=passed[:, :, i - 1], op=nl.multiply", "data2=passed[:, :, i], op=nl.multiply", lambda: accept_greedy_holds(DRAFTED[5])),
        (verdict, ("token_verdict",), "op=nl.greater)", "op=nl.greater_equal)", dyadic_holds),
        (verdict, ("chances",), "offset=first * vocab", "offset=0", lambda: sampled_holds(DRAFTED[1])),
        (verdict, ("block_verdict",), "op0=nl.multiply, op1=nl.minimum", "op0=nl.minimum, op1=nl.multiply", lambda: sampled_holds(DRAFTED[1])),
        (verdict, ("block_verdict",), "for k in range(1, n):", "for k in range(2, n):", lambda: sampled_holds(Drafts(20, 3, 40, 0.5, 50))),
        (verdict, ("block_verdict",), "op0=nl.less_equal, operand0=offer", "op0=nl.less, operand0=offer", lambda: sampled_holds(DRAFTED[1])),
        (verdict, ("block_verdict",), "nisa.tensor_copy_predicated(dst=share, src=weights", "nisa.tensor_copy_predicated(dst=total, src=weights", dyadic_holds),
        (accept, ("picked",), "op0=nl.minimum, operand0=float(last)", "op0=nl.minimum, operand0=float(last - 1)", lambda: sampled_holds(DRAFTED[1])),
        (accept, ("after",), "op=nl.greater_equal)", "op=nl.greater)", lambda: sampled_holds(DRAFTED[1])),
    ],
    ids=(
        "one behind the offer",
        "not only leading ones",
        "an edge passes",
        "first sequence again",
        "ratios not accumulated",
        "a remainder left out",
        "last offered not accepted",
        "last offered like the others",
        "row before the last",
        "no bonus",
    ),
)
def test_a_wrong_acceptance_is_caught(module, names, old, new, check, tmp_path, monkeypatch):
    wrong = mutated(module, old, new, tmp_path)
    for name in names:
        monkeypatch.setattr(accept, name, getattr(wrong, name))
    with pytest.raises(Exception, match=r"differ|NaN|MEM-|PY-"):
        check()


def test_no_rows_give_no_tokens():
    none = torch.empty(0, 40)
    assert choose.choose(strict, none, None, 0).shape == (0,) and choose.chosen_from(strict, none[None], none[:1, 0], none[:1, 0]).shape == (1, 0, 40)
    empty = torch.empty(0, 3, dtype=torch.int32)
    assert [t.shape for t in accept.accept_greedy(strict, torch.empty(0, 4, 40), empty, empty[:, 0])] == [(0,), (0,)]
    with suppress(IndexError):
        assert [t.shape for t in accept.accept_token(strict, torch.empty(0, 4, 40), torch.empty(0, 3, 40), empty, empty[:, 0], empty.float(), none[:, 0])] == [
            (0,),
            (0,),
        ]


def test_what_the_kernels_do_not_take_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match="float64"):
        choose.choose(strict, torch.ones(1, 40, dtype=torch.float64), None, 0)
    with pytest.raises(ValueError, match="2097153"):
        choose.choose(strict, torch.ones(1, 1).expand(1, 2097153), None, 0)
    ints = torch.zeros(1, 128, dtype=torch.int32)
    with pytest.raises(ValueError, match="128 drafts"):
        accept.accept_token(strict, torch.ones(1, 129, 8), torch.ones(1, 128, 8), ints, ints[:, 0], ints.float(), ints[:, 0].float())


@pytest.mark.slow
def test_draws_over_the_whole_vocabulary_are_the_definitions_where_they_are_decided():
    """Tokens of small probability lie close together: fewer rows are decided, and the noise that is left out is that of float32 sums alone."""
    x, sample = Choice(6, 129280).logits() * 2, Choice(6, 129280).sample()
    exact, gap = edges(x, sample.temperature, sample.top_p)
    told = (gap > 2.0**-21) & (draw_gap(exact, sample.uniforms[:, 1]) > 2.0**-20)
    assert told.sum() >= 3
    check_equal(choose.choose(strict, x, sample, 1)[told], choosing.draw(exact, sample.uniforms[:, 1].double())[told], "drawn")
