# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules: exact laws by enumeration, draws by chi-square, uniforms by their known answers."""

import inspect
import itertools
from fractions import Fraction
from types import ModuleType

import pytest
import torch

from v41.spec.ops import accept, choose, draws

torch.set_num_threads(1)
F = Fraction
V, N = 3, 2


# Uniforms


def threefry(key, counter):
    """Threefry-2x32-20 on Python integers."""
    mask, rotations = 0xFFFFFFFF, (13, 15, 26, 6, 17, 29, 16, 24)
    keys = (*key, 0x1BD11BDA ^ key[0] ^ key[1])
    x, y = (counter[0] + key[0]) & mask, (counter[1] + key[1]) & mask
    for r in range(20):
        x = (x + y) & mask
        y = ((y << rotations[r % 8]) | (y >> (32 - rotations[r % 8]))) & mask ^ x
        if r % 4 == 3:
            n = r // 4 + 1
            x, y = (x + keys[n % 3]) & mask, (y + keys[(n + 1) % 3] + n) & mask
    return x, y


def signed(x):
    return x - (1 << 32) if x >> 31 else x


# Published known answers of the generator: key, counter, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("key, counter, want", KNOWN)
def test_the_generator_gives_its_published_answers(key, counter, want):
    words = [draws.split(torch.tensor([signed(w)], dtype=torch.int32)) for w in (*key, *counter)]
    got = draws.threefry(tuple(words[:2]), tuple(words[2:]))
    assert tuple((int(h) << 16) | int(low) for h, low in got) == want == threefry(key, counter)


def test_uniforms_are_the_upper_bits_of_their_own_counter_and_of_nothing_else():
    seeds, ids, positions = [0, 7, 7, 2**31 - 1], [0, 1, 2, 2**31 - 1], [0, 5, 5, 1 << 20]
    key = torch.tensor(list(zip(seeds, ids, strict=True)), dtype=torch.int32)
    for first in (draws.NEXT, draws.DRAFT):
        got = draws.uniforms(key, torch.tensor(positions, dtype=torch.int32), first, 6)
        want = [[(threefry((s, i), (p, first + lane))[0] >> 8) * 2.0**-24 for lane in range(6)] for s, i, p in zip(seeds, ids, positions, strict=True)]
        assert got.tolist() == want and got.dtype == torch.float32
        assert len({u for row in got.tolist() for u in row}) == 24, "two counters share a uniform"


def test_uniforms_fill_the_unit_interval_evenly():
    key = torch.stack((torch.full((500,), 3), torch.arange(500)), 1).to(torch.int32)
    u = draws.uniforms(key, torch.full((500,), 9, dtype=torch.int32), 0, 40).flatten()
    assert u.min() >= 0 and u.max() < 1
    cells = torch.histc(u, 50, 0, 1)
    assert float(((cells - 400) ** 2 / 400).sum()) < critical(49)


# The distribution that tokens are drawn from


def plain_distribution(logits, temperature, top_p):
    weights = [torch.tensor(x / temperature).double().exp().item() for x in logits]
    p = [w / sum(weights) for w in weights]
    kept, total = set(), 0.0
    for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        if total < top_p or not kept:
            kept.add(i)
        total += p[i]
    mass = sum(p[i] for i in kept)
    return [p[i] / mass if i in kept else 0.0 for i in range(len(p))]


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9), (2.0, 0.5), (0.3, 1e-6)])
def test_rows_are_softmax_with_temperature_on_the_smallest_set_of_best_tokens(temperature, top_p):
    logits = torch.tensor([[[0.5, -1.0, 2.0, 0.25, 1.5], [3.0, 1.0, 1.0, -2.0, 0.0]]])
    got = choose.chosen_from(logits, torch.tensor([temperature]), torch.tensor([top_p]))[0]
    for row, want in zip(got.tolist(), logits[0].tolist(), strict=True):
        want = plain_distribution(want, temperature, top_p)
        assert [x > 0 for x in row] == [x > 0 for x in want]
        assert max(abs(a - b) for a, b in zip(row, want, strict=True)) < 8 * 2.0**-24  # a softmax and two divisions in fp32


def test_temperature_0_puts_all_on_the_best_token_and_the_lower_id():
    got = choose.chosen_from(torch.tensor([[[1.0, 3.0, 3.0]], [[2.0, 0.0, 1.0]]]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.5]))
    assert got.tolist() == [[[0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]]


def test_top_p_1_keeps_the_whole_tail():
    logits = torch.cat((torch.zeros(200_000), torch.full((10,), -14.0)))[None, None]
    got = choose.chosen_from(logits, torch.ones(1), torch.ones(1))
    assert bool((got > 0).all()), "the running sum reaches 1 before the last token"


# Exact laws: all drafts, uniforms integrated over the pieces on which a rule is constant


def row(*parts):
    return tuple(F(x, sum(parts)) for x in parts)


def trees(kind):
    """(p, q): the target's and the drafter's next-token distribution after every prefix of up to N tokens."""
    ps = itertools.cycle([row(4, 3, 1), row(1, 1, 6), row(5, 0, 3), row(0, 6, 2), row(1, 5, 2), row(2, 2, 4), row(3, 3, 2)])
    qs = itertools.cycle([row(1, 2, 5), row(3, 4, 1), row(2, 3, 3), row(6, 1, 1)])
    prefixes = [x for n in range(N + 1) for x in itertools.product(range(V), repeat=n)]
    p = {x: next(ps) for x in prefixes}
    if kind == "good":
        return p, dict(p)
    if kind == "greedy":
        return p, {x: tuple(F(int(i == 1)) for i in range(V)) for x in prefixes}
    return p, {x: next(qs) for x in prefixes}


def positive(values):
    return [max(v, F(0)) for v in values]


def thresholds(p, q, drafts, rule):
    """Points between which a rule is constant: of each acceptance uniform, and of the next token's; by formulas of their own."""
    weights, cuts = [F(1)], [set() for _ in range(N)]
    for i, d in enumerate(drafts):
        at = drafts[:i]
        cuts[i].add(min(p[at][d] / q[at][d], F(1)))
        weights.append(min(weights[-1] * p[at][d] / q[at][d], F(1)))
    for i in range(1, N + 1):
        cuts[i - 1].add(weights[i])
        if i < N:
            rest = sum(positive(weights[i] * a - b for a, b in zip(p[drafts[:i]], q[drafts[:i]], strict=True)))
            cuts[i - 1] |= {rest / (rest + 1 - weights[i])} if rest + 1 > weights[i] else set()
    last = set()
    for n in range(N + 1):
        scale = weights[n] if rule == "block" else F(1)
        rest = positive(scale * a - b for a, b in zip(p[drafts[:n]], q[drafts[:n]], strict=True))
        for values in (rest, p[drafts[:n]]):
            last |= {sum(values[:k]) / sum(values) for k in range(1, V)} if sum(values) else set()
    return cuts, last


def pieces(cuts):
    """(midpoint, length) of the intervals between the cuts and quarters."""
    points = sorted({F(k, 4) for k in range(5)} | {c for c in cuts if 0 < c < 1})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(points)]


def outcomes(module, rule, p, q, offer):
    """{emitted tokens: probability}, exactly, with the rule of a module run on every draft and every piece."""
    cases, chance = [], []
    for drafts in itertools.product(range(V), repeat=N):
        drawn = q[()][drafts[0]] * q[drafts[:1]][drafts[1]]
        if not drawn:
            continue
        cuts, last = thresholds(p, q, drafts, rule)
        for combination in itertools.product(pieces(cuts[0]), pieces(cuts[1]), pieces(last)):
            cases.append((drafts, [float(m) for m, _ in combination]))
            chance.append(drawn * combination[0][1] * combination[1][1] * combination[2][1])
    drafts = torch.tensor([d for d, _ in cases], dtype=torch.int32)
    u = torch.tensor([x for _, x in cases])
    rows = torch.tensor([[[float(x) for x in p[d[:i]]] for i in range(N + 1)] for d, _ in cases])
    drawn = torch.tensor([[[float(x) for x in q[d[:i]]] for i in range(N)] for d, _ in cases])
    offered = torch.tensor([offer(d) for d, _ in cases], dtype=torch.int32)
    function = getattr(module, f"accept_{rule}")
    accepted, token = function(rows, drawn, drafts, offered, u[:, :N], u[:, N])
    found = {}
    for (d, _), n, t, c in zip(cases, accepted.tolist(), token.tolist(), chance, strict=True):
        found[(*d[:n], t)] = found.get((*d[:n], t), F(0)) + c
    return found


def law(found, p):
    """Law of the first N + 1 tokens when what is emitted is continued with the target's own draws."""
    total = {}
    for emitted, c in found.items():
        for rest in itertools.product(range(V), repeat=N + 1 - len(emitted)):
            x, chance = emitted + rest, c
            for i in range(len(emitted), N + 1):
                chance *= p[x[:i]][x[i]]
            total[x] = total.get(x, F(0)) + chance
    return {x: c for x, c in total.items() if c}


def target(p):
    return {x: c for x in itertools.product(range(V), repeat=N + 1) if (c := p[()][x[0]] * p[x[:1]][x[1]] * p[x[:2]][x[2]])}


OFFERS = {"all": lambda d: N, "one": lambda d: 1, "none": lambda d: 0, "by the first draft": lambda d: 2 if d[0] == 1 else 1}


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("kind", ["good", "bad", "greedy"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_is_emitted_has_exactly_the_law_of_the_target(rule, kind, offer):
    p, q = trees(kind)
    assert law(outcomes(accept, rule, p, q, OFFERS[offer]), p) == target(p)


def test_offering_by_the_draft_itself_would_change_the_law():
    """Why the number of drafts offered may depend on earlier drafts only."""
    p, q = trees("bad")
    assert law(outcomes(accept, "token", p, q, lambda d: 0 if d[0] == 1 else 2), p) != target(p)


def expected_length(found):
    return sum(len(x) * c for x, c in found.items())


def test_a_block_is_never_shorter_in_expectation_than_token_by_token():
    p, q = trees("bad")
    token, block = (expected_length(outcomes(accept, rule, p, q, OFFERS["all"])) for rule in ("token", "block"))
    assert block > token
    p, q = trees("good")
    assert expected_length(outcomes(accept, "block", p, q, OFFERS["all"])) == expected_length(outcomes(accept, "token", p, q, OFFERS["all"])) == N + 1


def mutant(module, old, new):
    """The module with a piece of its source replaced."""
    source = inspect.getsource(module)
    assert source.count(old) >= 1, f"{old!r} is not in {module.__name__}"
    made = ModuleType(module.__name__ + "_mutant")
    exec(compile(source.replace(old, new), made.__name__, "exec"), made.__dict__)
    return made


MUTANTS = [
    ("token", "> u * chances(q, drafts)", "> 0.5 * chances(q, drafts)"),  # decided without the uniform
    ("token", "chances(p[:, :-1], drafts) > u * chances(q, drafts)", "drafts == p[:, :-1].argmax(-1)"),  # greedy only
    ("token", "chances(p[:, :-1], drafts)", "chances(p[:, 1:], drafts)"),  # the row after the right one
    ("token", "row_at(p, accepted)", "row_at(p, (accepted + 1).clamp_max(p.shape[1] - 1))"),
    ("token", ".clamp_min(0)\n    bonus", ".abs()\n    bonus"),  # residual not clamped
    ("token", "torch.where(bonus[:, None], target, rest)", "target"),  # rejected, then drawn from p
    ("token", "torch.where(bonus[:, None], target, rest)", "rest"),  # the bonus drawn from p - q
    ("token", "leading(passed & in_offer(offered, drafts))", "leading(passed)"),  # accepts what was not offered
    ("token", "passed.cumprod(-1, dtype=torch.int32).sum(-1", "passed.int().sum(-1"),  # goes on behind a rejection
    ("block", ".clamp_max(1)", ""),
    ("block", "total = rest + 1 - weights[i]", "total = rest + 1"),
    ("block", "torch.where(offered == i, weights[i], share)", "share"),
    ("block", "(weights[i][:, None] * p[:, i] - q[:, i])", "(p[:, i] - q[:, i])"),
    ("block", ".gather(1, accepted[:, None].long())[:, 0]\n    return", "[:, 0]\n    return"),  # the residual of the first row's weight
]


@pytest.mark.parametrize("rule, old, new", MUTANTS)
def test_the_law_catches_a_mutant(rule, old, new):
    p, q = trees("bad")
    made = mutant(accept, old, new)
    assert any(law(outcomes(made, rule, p, q, OFFERS[offer]), p) != target(p) for offer in ("all", "one"))


# Greedy, and the edges of comparisons


def test_greedy_takes_the_targets_best_token_with_every_number_of_matches():
    best = torch.tensor([[3, 1, 4, 1]])
    logits = torch.nn.functional.one_hot(best, 6).float().expand(4, -1, -1)
    drafts = torch.tensor([[0, 1, 4], [3, 0, 4], [3, 1, 0], [3, 1, 4]], dtype=torch.int32)
    accepted, token = accept.accept_greedy(logits, drafts, torch.full((4,), 3, dtype=torch.int32))
    assert accepted.tolist() == [0, 1, 2, 3] and token.tolist() == [3, 1, 4, 1]
    accepted, token = accept.accept_greedy(logits, drafts, torch.tensor([3, 0, 1, 2], dtype=torch.int32))
    assert accepted.tolist() == [0, 0, 1, 2] and token.tolist() == [3, 3, 1, 4]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_sampled_rule_on_one_hot_rows_is_the_greedy_rule(rule):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 4, 5, generator=g)
    drafts = torch.where(torch.rand(64, 3, generator=g) < 0.7, logits.argmax(-1)[:, :3], 0).to(torch.int32)
    offered = torch.randint(0, 4, (64,), generator=g).to(torch.int32)
    hot = torch.nn.functional.one_hot(logits.argmax(-1), 5).float()
    q = torch.nn.functional.one_hot(drafts.long(), 5).float()
    u = torch.rand(64, 4, generator=g)
    got = getattr(accept, f"accept_{rule}")(hot, q, drafts, offered, u[:, :3], u[:, 3])
    want = accept.accept_greedy(logits, drafts, offered)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_token_of_probability_0_is_never_accepted_nor_drawn_at_the_lowest_uniform(rule):
    p = torch.tensor([[[0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]])
    q = torch.tensor([[[1.0, 0.0, 0.0]]])
    zero = torch.zeros(1, 1)
    accepted, token = getattr(accept, f"accept_{rule}")(p, q, torch.tensor([[0]], dtype=torch.int32), torch.ones(1, dtype=torch.int32), zero, zero[:, 0])
    assert accepted.tolist() == [0] and token.tolist() == [1]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_was_not_offered_may_hold_nan(rule):
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5], [torch.nan, torch.nan]]])
    q = torch.tensor([[[0.5, 0.5], [torch.nan, torch.nan]]])
    function, drafts = getattr(accept, f"accept_{rule}"), torch.tensor([[1, 0]], dtype=torch.int32)
    for offered, want in ((0, (0, 0)), (1, (1, 0))):
        accepted, token = function(p, q, drafts, torch.tensor([offered], dtype=torch.int32), torch.full((1, 2), 0.5), torch.full((1,), 0.125))
        assert (accepted.item(), token.item()) == want


# Draws with the real uniforms


def critical(df):
    """The chi-square value that is exceeded once in 10,000 (Wilson and Hilferty; 3.719 is the normal quantile)."""
    return df * (1 - 2 / (9 * df) + 3.719 * (2 / (9 * df)) ** 0.5) ** 3


def statistic(module, rule, good, count=20_000, size=6):
    """Chi-square of the first two of N + 1 tokens over `count` sequences of one seed, against the target."""
    g = torch.Generator().manual_seed(5)
    p0, p1 = torch.randn(size, generator=g).softmax(-1), torch.randn(size, size, generator=g).softmax(-1)
    q0, q1 = (p0, p1) if good else (torch.randn(size, generator=g).softmax(-1), torch.randn(size, size, generator=g).softmax(-1))
    key = torch.stack((torch.full((count,), 11), torch.arange(count)), 1).to(torch.int32)
    at = torch.full((count,), 4, dtype=torch.int32)
    u, ud = draws.uniforms(key, at, 0, 3), draws.uniforms(key, at, draws.DRAFT, 2)
    first = choose.draw(q0.expand(count, -1), ud[:, 0])
    drafts = torch.stack((first, choose.draw(q1[first], ud[:, 1])), 1)
    p = torch.stack((p0.expand(count, -1), p1[drafts[:, 0]], p1[drafts[:, 1]]), 1)
    q = torch.stack((q0.expand(count, -1), q1[drafts[:, 0]]), 1)
    offered = torch.full((count,), 2, dtype=torch.int32)
    accepted, token = getattr(module, f"accept_{rule}")(p, q, drafts, offered, u[:, 1:], u[:, 0])
    one = torch.where(accepted == 0, token, drafts[:, 0])
    later = choose.draw(p1[one], draws.uniforms(key, at + 1 + accepted, 0, 1)[:, 0])  # the next step, where this one gave a single token
    two = torch.where(accepted == 0, later, torch.where(accepted == 1, token, drafts[:, 1]))
    cells = torch.bincount(one.long() * size + two.long(), minlength=size * size).double()
    want = (p0[:, None] * p1).flatten().double() * count
    return float(((cells - want) ** 2 / want).sum()), accepted.double().mean().item()


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_20_000_draws_follow_the_target(rule, good):
    value, accepted = statistic(accept, rule, good)
    assert value < critical(35)
    assert accepted == 2 if good else 0.5 < accepted < 1.9


def test_greedy_acceptance_and_shared_uniforms_fail_the_same_statistic(monkeypatch):
    greedy = mutant(accept, "chances(p[:, :-1], drafts) > u * chances(q, drafts)", "drafts == p[:, :-1].argmax(-1)")
    assert statistic(greedy, "token", False)[0] > 10 * critical(35)
    shared = mutant(draws, "(key[:, 0], key[:, 1], position)", "(key[:, 0], key[:, 0], position)")
    monkeypatch.setattr(draws, "uniforms", shared.uniforms)
    assert statistic(accept, "token", False)[0] > 10 * critical(35)
