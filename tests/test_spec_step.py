# SPDX-License-Identifier: Apache-2.0
"""Draft, verify and commit: the same tokens and the same cache bits as plain decoding, whatever is accepted."""

import inspect
from dataclasses import replace
from types import ModuleType

import pytest
import spec_kit
import torch
from spec_kit import decode, difference, micro_config, one, prefill
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional

import v41
from v41 import tree
from v41.spec import draft as drafting
from v41.spec import verify
from v41.spec.backend import Backend
from v41.spec.ops import choose, draws

torch.set_num_threads(1)
G = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 60, (n,), generator=G).tolist() for n in (3, 8, 9, 14)]  # below, at and around the window of 8; odd and even groups
CAPACITY, PLAIN = 120, 50


@pytest.fixture(scope="module")
def params():
    return v41.init_params(micro_config(), 0)


@pytest.fixture(scope="module")
def plain(params):
    """(tokens, caches) of plain greedy decoding, and what it started from."""
    cache, logits = prefill(params, PROMPTS, CAPACITY)
    tokens, caches = decode(params, cache, logits, PLAIN)
    return tokens, caches, logits


def forced(state, cache, plain, accepted):
    """The state with drafts of which exactly accepted[b] agree with plain decoding."""
    tokens, caches, _ = plain
    drafts = state.drafts.clone()
    for b, n in enumerate(accepted):
        at = int(cache.length[b] - caches[0].length[b])
        assert int(state.token[b]) == int(tokens[b, at])
        right = tokens[b, at + 1 : at + 1 + state.depth]
        drafts[b] = torch.where(torch.arange(state.depth) < n, right, (right + 1) % 64)
    return replace(state, drafts=drafts, offered=torch.full_like(state.offered, state.depth))


def check_step(params, plain, before, cache, emitted, state, accepted):
    """A step from the cache `before` emitted what plain decoding does, and its cache is plain decoding's, bit for bit."""
    tokens, caches, _ = plain
    for b, n in enumerate(accepted):
        at = int(before.length[b] - caches[0].length[b])
        assert emitted.counts[b] == n + 1 and emitted.accepted[b] == n, f"sequence {b} accepted {emitted.accepted[b]}, not {n}"
        want = torch.full((state.depth + 1,), -1)
        want[: n + 1] = tokens[b, at + 1 : at + n + 2]
        assert torch.equal(emitted.tokens[b].long(), want) and state.token[b] == want[n]
        assert (name := difference(params, one(cache, b), one(caches[at + n + 1], b))) is None, f"sequence {b} differs in {name}"
    assert bool((cache.high - cache.length <= state.depth).all())


def run_forced(params, plain, depth, patterns, step=v41.spec_step):
    """Steps with these numbers of accepted drafts per sequence, each checked."""
    cache, logits = plain[1][0], plain[2]
    state = v41.init_spec(params, cache, logits, depth=depth)
    for accepted in patterns:
        before, state = cache, forced(state, cache, plain, accepted)
        emitted, state, cache = step(params, cache, state)
        check_step(params, plain, before, cache, emitted, state, accepted)


def rotated(depth, steps):
    """Every number of accepted drafts in every sequence, mixed in the batch: sequence b lags b behind, and one of them is drawn."""
    g = torch.Generator().manual_seed(depth)
    drawn = torch.randint(0, depth + 1, (steps,), generator=g).tolist()
    return [[(k + b) % (depth + 1) for b in range(3)] + [drawn[k]] for k in range(steps)]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_forced_acceptance_of_every_length_leaves_tokens_and_cache_bits_of_plain_decoding(params, plain, depth):
    run_forced(params, plain, depth, rotated(depth, {1: 6, 2: 7, 3: 8, 4: 9, 5: 10}[depth]))


@pytest.mark.slow
def test_200_steps_at_depth_5(params):
    cache, logits = prefill(params, PROMPTS, 1300)
    tokens, caches = decode(params, cache, logits, 1210)
    run_forced(params, (tokens, caches, logits), 5, rotated(5, 200))


def test_the_drafts_of_the_head_itself_give_plain_decoding_on_the_golden_checkpoint():
    params = v41.load_params(spec_kit.GOLDEN)
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 500, (n,), generator=g).tolist() for n in (70, 11)]
    cache, logits = prefill(params, prompts, 120)
    tokens, caches = decode(params, cache, logits, 4)
    state = v41.init_spec(params, cache, logits)
    got = [[int(t)] for t in state.token]
    for _ in range(3):
        emitted, state, cache = v41.spec_step(params, cache, state)
        for b in range(2):
            got[b] += emitted.tokens[b, : emitted.counts[b]].tolist()
    for b in range(2):
        n = min(len(got[b]), 5)
        assert got[b][:n] == tokens[b, :n].tolist()
        at = int(cache.length[b]) - len(prompts[b])
        if at <= 4:
            assert difference(params, one(cache, b), one(caches[at], b)) is None


# Where sequences end


def test_a_stop_token_at_every_place_of_a_block_cuts_tokens_and_cache_there(params, plain):
    tokens = plain[0][2]
    caches = [tree.map(lambda t: t[2:3].expand(7, *t.shape[1:]).contiguous(), c) for c in plain[1][:8]]
    logits = plain[2][2:3].expand(7, -1)
    stops = torch.tensor([[t] for t in tokens[1:7].tolist()] + [[-1]])
    want = [next(i for i, t in enumerate(tokens[1:7].tolist()) if t == s) + 1 for s in tokens[1:7].tolist()] + [6]
    assert len(set(want)) == 6, "the plain continuation repeats a token: choose another prompt"
    state = v41.init_spec(params, caches[0], logits, stops=stops)
    state = replace(state, drafts=tokens[1:6].expand(7, -1).contiguous(), offered=torch.full_like(state.offered, 5))
    emitted, state, cache = v41.spec_step(params, caches[0], state)
    assert emitted.counts.tolist() == want and state.alive.tolist() == [False] * 6 + [True]
    for b, n in enumerate(want):
        assert emitted.tokens[b].tolist() == tokens[1 : n + 1].tolist() + [-1] * (6 - n)
        assert state.token[b] == tokens[n] and difference(params, one(cache, b), one(caches[n], b)) is None
    emitted, after, later = v41.spec_step(params, cache, state)
    assert emitted.counts.tolist()[:6] == [0] * 6 and emitted.tokens[:6].tolist() == [[-1] * 6] * 6 and emitted.counts[6] > 0
    assert torch.equal(after.token[:6], state.token[:6]) and torch.equal(after.budget[:6], state.budget[:6])
    assert all(difference(params, one(later, b), one(cache, b)) is None for b in range(6))
    assert torch.equal(later.high[:6], cache.high[:6])


def test_a_first_token_that_stops_leaves_the_sequence_idle(params, plain):
    tokens, caches, logits = plain
    state = v41.init_spec(params, caches[0], logits, stops=[int(tokens[1, 0])], budget=torch.tensor([5, 5, 0, 5]))
    assert state.alive.tolist() == [bool(tokens[b, 0] != tokens[1, 0]) and b != 2 for b in range(4)]


def test_the_budget_and_the_capacity_end_a_block_early(params, plain):
    tokens, caches, logits = plain
    state = forced(v41.init_spec(params, caches[0], logits, budget=torch.tensor([1, 3, 6, 20])), caches[0], plain, [5] * 4)
    emitted, state, cache = v41.spec_step(params, caches[0], state)
    assert emitted.counts.tolist() == [1, 3, 6, 6] and state.budget.tolist() == [0, 0, 0, 14] and state.alive.tolist() == [False] * 3 + [True]
    assert all(difference(params, one(cache, b), one(caches[n], b)) is None for b, n in enumerate((1, 3, 6, 6)))
    small, logits = prefill(params, PROMPTS[2:], 16)  # prompts of 9 and 14
    state = forced(v41.init_spec(params, small, logits), small, (tokens[2:], [small], None), [5, 5])
    emitted, state, small = v41.spec_step(params, small, state)
    assert emitted.counts.tolist() == [6, 2] and small.length.tolist() == [15, 16]
    with pytest.raises(ValueError, match="cache: sequence 1 holds 16 positions, its capacity"):
        v41.spec_step(params, small, state)
    emitted, state, small = v41.spec_step(params, small, replace(state, alive=torch.tensor([True, False])))
    assert emitted.counts.tolist() == [1, 0] and small.length.tolist() == [16, 16]


# Rings


def test_a_ring_that_lacks_rows_offers_nothing_until_it_holds_a_window_and_then_joins_on(params, plain):
    tokens, caches, logits = plain
    cache, _ = prefill(params, PROMPTS, CAPACITY, rings=False)
    cache = replace(cache, draft=tuple(torch.full_like(r, torch.nan) for r in cache.draft))  # what a foreign ring may hold
    state = v41.init_spec(params, cache, logits)
    for k in range(8):
        assert state.offered.tolist() == [0] * 4 and cache.draft_length.tolist() == [0] * 4
        emitted, state, cache = v41.spec_step(params, cache, state)
        assert emitted.tokens[:, 0].tolist() == tokens[:, k + 1].tolist() and emitted.counts.tolist() == [1] * 4
    assert cache.draft_length.tolist() == cache.length.tolist() and bool((state.offered == 5).all())
    want = v41.init_spec(params, caches[8], caches_logits(params, tokens, caches, 8))
    assert torch.equal(state.drafts, want.drafts)
    assert all(difference(params, one(cache, b), one(caches[8], b)) is None for b in range(4))
    run_on(params, plain, cache, state)


def caches_logits(params, tokens, caches, at):
    """Logits of the newest position of a plain cache."""
    return v41.step(params, caches[at - 1], tokens[:, at - 1 : at])[0].logits[:, 0]


def run_on(params, plain, cache, state):
    """One forced step from here, checked."""
    accepted = [2, 0, 5, 3]
    state = forced(state, cache, plain, accepted)
    emitted, new, after = v41.spec_step(params, cache, state)
    check_step(params, plain, cache, after, emitted, new, accepted)


def test_a_ring_under_repair_forgets_what_is_rewound(params, plain):
    cache, logits = prefill(params, PROMPTS, CAPACITY, rings=False)
    state = v41.init_spec(params, cache, logits)
    for _ in range(4):
        _, state, cache = v41.spec_step(params, cache, state)
    back = v41.rewind(cache, cache.length - 3)
    state = v41.init_spec(params, back, caches_logits(params, plain[0], plain[1], 1))
    for k in range(8):
        assert bool((back.draft_length < back.length).all()), f"a ring of {k} rows joins on"
        _, state, back = v41.spec_step(params, back, state)
    assert back.draft_length.tolist() == back.length.tolist()
    assert all(difference(params, one(back, b), one(plain[1][9], b)) is None for b in range(4))


# Sampling


def test_draft_distributions_include_markov_bias_temperature_and_top_p(params, plain):
    _, caches, logits = plain
    heat, most = torch.tensor([0.7, 1.0, 0.0, 1.3]), torch.tensor([0.9, 1.0, 1.0, 0.5])
    state = v41.init_spec(params, caches[0], logits, rule="token", temperature=heat, top_p=most, seed=3)
    check_q(params, caches[0], state, heat, most)


def check_q(params, cache, state, heat, most):
    """q against the logits that the draft head gives for the same drawn tokens, bias by bias."""
    u = draws.uniforms(state.key, cache.length, draws.DRAFT, 5)
    hidden = torch.zeros(4, 1, len(params.config.dspark_target_layer_ids) * 64, dtype=torch.bfloat16)
    drafted, _ = v41.draft(params, cache, hidden, state.token, valid=torch.zeros(4, dtype=torch.int32), sample=v41.Sample(heat, most, u))
    assert torch.equal(drafted.tokens, state.drafts)
    for b in range(4):
        for i in range(5):
            row = drafted.logits[b, i]
            want = functional.one_hot(row.argmax(), 64).float() if heat[b] == 0 else choose.distribution(row[None], heat[b : b + 1], most[b : b + 1])[0]
            assert torch.equal(state.q[b, i], want), f"q of draft {i} of sequence {b}"


def test_a_sequence_draws_the_same_tokens_alone_and_in_a_batch(params, plain):
    _, caches, logits = plain
    kinds = {"rule": "block", "temperature": 1.1, "top_p": 0.95, "seed": 9}

    def run(rows, steps=3):
        cache = tree.map(lambda t: t[rows], caches[0])
        state = v41.init_spec(params, cache, logits[rows], sequence=torch.tensor(rows), **kinds)
        found = [[int(t)] for t in state.token]
        for _ in range(steps):
            emitted, state, cache = v41.spec_step(params, cache, state)
            for k in range(len(rows)):
                found[k] += emitted.tokens[k, : emitted.counts[k]].tolist()
        return found

    batch = run([0, 1, 2, 3])
    assert run([2]) == [batch[2]] and run([3, 0]) == [batch[3], batch[0]]


def test_depth_0_is_plain_decoding_and_needs_no_draft_head(params, plain):
    tokens, caches, logits = plain
    bare = replace(params, draft=None)
    cache = replace(caches[0], draft=(), draft_length=torch.zeros_like(caches[0].length))
    state = v41.init_spec(bare, cache, logits, depth=0)
    for k in range(2):
        emitted, state, cache = v41.spec_step(bare, cache, state)
        assert emitted.tokens.tolist() == tokens[:, k + 1 : k + 2].tolist()
    with pytest.raises(ValueError, match=r"depth: 1 leaves 0..0 \(params have no draft head\)"):
        v41.init_spec(bare, cache, logits, depth=1)


HEAT, TOP_P = torch.tensor([2.5]), torch.tensor([0.9])


def statistic(params, cache, token, rule, module=verify, count=700, rounds=2):
    """(chi-square of the first token emitted after `token` over count sequences of each of some seeds against the target, cells - 1)."""
    ops, cells = v41.available_backends()["cpu"], torch.zeros(64)
    many = tree.map(lambda t: t.expand(count, *t.shape[1:]).contiguous(), cache)
    for seed in range(rounds):
        state = v41.init_spec(params, many, torch.zeros(count, 64), rule=rule, temperature=HEAT.expand(count), top_p=TOP_P.expand(count), seed=seed, depth=1)
        state = module.propose(params, many, replace(state, token=token.expand(count).contiguous()), ops)
        cells += torch.bincount(module.spec_step(params, many, state, ops)[0].tokens[:, 0].long(), minlength=64)
    out, _ = v41.step(params, cache, token[:, None])
    want = choose.distribution(out.logits[:, 0], HEAT, TOP_P)[0] * count * rounds
    live = want > 0
    if bool(cells[~live].any()):
        return float("inf"), 0
    return float(((cells - want)[live] ** 2 / want[live]).sum()), int(live.sum()) - 1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_a_step_emits_follows_the_target(params, plain, rule):
    value, df = statistic(params, one(plain[1][0], 2), plain[0][2:3, 0], rule)
    assert df >= 5 and value < critical(df)


def critical(df):
    """The chi-square value that is exceeded once in 10,000 (Wilson and Hilferty; 3.719 is the normal quantile)."""
    return df * (1 - 2 / (9 * df) + 3.719 * (2 / (9 * df)) ** 0.5) ** 3


def test_confidence_shortens_the_offer_and_nothing_else(params, plain):
    _, caches, logits = plain
    full = v41.init_spec(params, caches[0], logits)
    hidden = torch.zeros(4, 1, len(params.config.dspark_target_layer_ids) * 64, dtype=torch.bfloat16)
    told = v41.draft(params, caches[0], hidden, full.token, valid=torch.zeros(4, dtype=torch.int32))[0].confidence.double().sigmoid()
    floor = told[:, :3].prod(-1).float() * 0.999  # lets three pass, and the fourth where it is nearly sure
    state = v41.init_spec(params, caches[0], logits, floor=floor)
    want = [sum(1 for i in range(5) if float(told[b, : i + 1].prod()) >= float(floor[b])) for b in range(4)]
    assert state.offered.tolist() == want and set(want) <= {3, 4, 5}
    assert torch.equal(state.drafts, full.drafts)
    assert v41.init_spec(params, caches[0], logits, floor=1.0).offered.tolist() == [0] * 4


# Mutants


def mutant(module, old, new):
    """The module with a piece of its source replaced."""
    source = inspect.getsource(module)
    assert old in source, f"{old!r} is not in {module.__name__}"
    made = ModuleType(module.__name__)
    made.__dict__["__name__"] = module.__name__
    exec(compile(source.replace(old, new), made.__name__, "exec"), made.__dict__)
    return made


MUTANTS = {
    "bonus appended twice": ("torch.minimum(accepted, cut) + 1, 0)", "torch.minimum(accepted, cut) + 2, 0).clamp_max(state.depth + 1)"),
    "accept count one too low": ("accepted, token = accept(", "accepted, token = (lambda v: ((v[0] - 1).clamp_min(0), v[1]))(accept)("),
    "rings filled with rejected rows": (
        "fill_rings(params, replace(cache, draft_length=before.length), hidden, counts, ops)",
        "fill_rings(params, replace(cache, draft_length=before.length), hidden, torch.full_like(counts, hidden.shape[1]), ops)",
    ),
    "rings filled with the last row only": (", hidden, counts, ops)", ", hidden[:, :1], counts.clamp_max(1), ops)"),
    "nothing rewound": ("caches.rewind(ran, cache.length + emitted.counts)", "ran"),
    "rewound one too far": ("caches.rewind(ran, cache.length + emitted.counts)", "caches.rewind(ran, cache.length + emitted.counts - 1)"),
    "history not rewound": (
        "caches.rewind(ran, cache.length + emitted.counts)",
        "replace(caches.rewind(ran, cache.length + emitted.counts), history=torch.roll(ran.history, 1, 1))",
    ),
    "pending token not run": (
        "torch.cat((state.token[:, None], state.drafts), 1)\n    valid",
        "torch.cat((state.drafts, state.token[:, None]), 1)\n    valid",
    ),
    "pending token is the first emitted": ("tokens[lead, (counts - 1)", "tokens[lead, 0 * (counts - 1)"),
    "one draft too few offered": ("valid = torch.where(running, offered + 1, 0)", "valid = torch.where(running, offered, 0)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_forced_steps_catch_a_mutant(params, plain, name):
    made, ops = mutant(verify, *MUTANTS[name]), v41.available_backends()["cpu"]
    run = lambda p, c, s: made.spec_step(p, c, s, ops)  # noqa: E731
    with pytest.raises((AssertionError, TypeError)):
        run_forced(params, plain, 5, [[5, 0, 2, 4], [1, 5, 0, 3]], run)


def test_q_without_the_markov_bias_is_caught(params, plain):
    _, caches, logits = plain
    heat, most = torch.tensor([1.0, 0.7, 1.0, 1.3]), torch.ones(4)
    state = v41.init_spec(params, caches[0], logits, rule="token", temperature=heat, top_p=most)
    without = mutant(drafting, "tokens.append(token)", "tokens.append(token)\n        logits[i] = base[:, i]")
    made = mutant(verify, "from v41.spec import draft as drafting", "")
    made.drafting = without
    state = made.propose(params, caches[0], state, v41.available_backends()["cpu"])
    with pytest.raises(AssertionError, match="q of draft"):
        check_q(params, caches[0], state, heat, most)


# Shapes and the host


def light_config():
    """One layer with every kind of state and one draft stage, few experts: capture time is what counts."""
    return replace(
        micro_config(),
        num_hidden_layers=1,
        compress_ratios=(2, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=-1,
        engram_layer_ids=(0,),
        dspark_target_layer_ids=(0,),
        hc_sinkhorn_iters=1,
        n_routed_experts=2,
        num_experts_per_tok=1,
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
        dspark_block_size=2,
    )


def started(config, rule):
    """Params, cache and a first state in regime exact, whose products trace into fewer nodes."""
    params = v41.init_params(config, 0, numerics=v41.Numerics("exact"))
    cache, logits = prefill(params, PROMPTS[1:3], 400)
    return params, cache, v41.init_spec(params, cache, logits, rule=rule, temperature=0.0 if rule == "greedy" else 1.2)


def stand_ins():
    """The spec with the primitives that make most nodes replaced: that they are captured is another test's matter."""

    def linear(x, w, numerics):
        return x @ w.weight.to(x.dtype).T

    def experts(x, weights, ids, w1, w2, w3, *, limit, numerics):
        return x * weights.sum(-1, keepdim=True)

    def shared_expert(x, w1, w2, w3, *, limit, numerics):
        return x

    def rope(x, positions, f):
        return x

    def rms_norm(x, weight, eps):
        return functional.normalize(x, dim=-1)

    def wide_linear(x, w, numerics):
        return x @ w.to(x.dtype).T

    def hc_mixes(stream, fn, scale, base, *, iters, eps, norm_eps, numerics):
        pre = torch.ones_like(stream[..., 0])
        return pre, pre, torch.eye(stream.shape[2]).expand(*stream.shape[:3], -1)

    def hc_post(x, stream, post, comb):
        return stream + x[..., None, :]

    def uniforms(key, position, first, lanes):
        lane = torch.arange(lanes) + first
        return torch.remainder(position[:, None] * 0.618 + key[:, 1:] * 0.273 + lane * 0.411, 1.0)

    replaced = {
        "linear": linear,
        "wide_linear": wide_linear,
        "hc_post": hc_post,
        "experts": experts,
        "shared_expert": shared_expert,
        "rope": rope,
        "rope_inverse": rope,
        "uniforms": uniforms,
    }
    return Backend("stand-ins", hc_mixes=hc_mixes, rms_norm=rms_norm, **replaced)


@pytest.mark.parametrize("rule", ["block", *(pytest.param(r, marks=pytest.mark.slow) for r in ("greedy", "token"))])
def test_a_run_on_fake_tensors_reads_nothing_on_the_host(rule):
    params, cache, state = started(light_config(), rule)
    ops = replace(stand_ins(), uniforms=draws.uniforms)
    with FakeTensorMode() as mode:
        fake = [tree.map(mode.from_tensor, x) for x in (params, cache, state)]
        emitted, after, later = verify.spec_step(*fake, ops)
        with pytest.raises(DataDependentOutputException):
            bool(emitted.counts.sum())
    assert emitted.tokens.shape == (2, 3) and after.drafts.shape == (2, 2)
    assert [t.shape for t in tree.leaves(later)] == [t.shape for t in tree.leaves(cache)]


@pytest.mark.capture
def test_one_graph_serves_64_steps_at_different_positions_and_acceptances():
    params, cache, state = started(light_config(), "block")
    ops, graphs = stand_ins(), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(verify.spec_step, fullgraph=True, dynamic=False, backend=count)
    seen, wanted_cache, wanted = set(), cache, state
    with torch.no_grad():
        for k in range(64):
            emitted, state, cache = step(params, cache, state, ops)
            seen |= set(emitted.counts.tolist())
            if k < 6:
                want, wanted, wanted_cache = verify.spec_step(params, wanted_cache, wanted, ops)
                assert torch.equal(emitted.tokens, want.tokens) and torch.equal(cache.length, wanted_cache.length)
    assert len(graphs) == 1 and seen == {1, 2, 3}
    assert not [n for n in graphs[0].graph.nodes if n.op == "call_method" and n.target in ("item", "tolist", "nonzero", "unique")]


@pytest.mark.slow
@pytest.mark.capture
@pytest.mark.parametrize("rule", ["greedy", "token", "block"])
def test_the_spec_with_all_its_primitives_is_one_graph_without_host_reads(rule):
    params = v41.init_params(micro_config(), 0)
    cache, logits = prefill(params, PROMPTS[1:3], 100)
    state, graphs = v41.init_spec(params, cache, logits, rule=rule, temperature=0.0 if rule == "greedy" else 1.2), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(verify.spec_step, fullgraph=True, dynamic=False, backend=count)
    with torch.no_grad():
        for _ in range(4):
            with FakeTensorMode() as mode:
                verify.spec_step(*(tree.map(mode.from_tensor, x) for x in (params, cache, state)), Backend("spec"))
            want = verify.spec_step(params, cache, state, Backend("spec"))
            got = step(params, cache, state, Backend("spec"))
            assert all(torch.equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(tree.leaves(x), tree.leaves(y), strict=True))
            _, state, cache = got
    assert len(graphs) == 1


# Bad input


def test_regimes_that_take_one_row_at_a_time_are_refused_with_the_reason(params, plain):
    for numerics in (v41.Numerics("released"), v41.Numerics(index_keys="reference")):
        other = replace(params, numerics=numerics)
        cache = replace(plain[1][0], numerics=numerics)
        with pytest.raises(ValueError, match=f"regime '{numerics.regime}' with index_keys 'reference' has no speculation: .*cannot run a row per draft"):
            v41.init_spec(other, cache, plain[2])


def test_bad_arguments_are_named(params, plain):
    cache, logits = plain[1][0], plain[2]
    for arguments, text in (
        ({"rule": "typical"}, "rule: 'typical' is not one of"),
        ({"depth": 6}, r"depth: 6 leaves 0..5 \(dspark_block_size is 5\)"),
        ({"temperature": 0.5}, "temperature: .* with rule 'greedy'"),
        ({"rule": "token", "temperature": torch.tensor([1.0, -1.0, 1.0, 1.0])}, "temperature: -1.0 at sequence 1 leaves"),
        ({"rule": "token", "top_p": float("nan")}, "top_p: nan at sequence 0"),
        ({"top_p": 0.0}, "top_p: 0.0 at sequence 0"),
        ({"seed": -1}, "seed: -1 at sequence 0"),
        ({"stops": [64]}, "stops: 64 at sequence 0"),
        ({"budget": torch.tensor([1, 2])}, r"budget: shape \[2\], not \[4\]"),
        ({"budget": 1.5}, "budget: dtype torch.float32, not integers"),
    ):
        with pytest.raises(ValueError, match=text):
            v41.init_spec(params, cache, logits, **arguments)
    with pytest.raises(ValueError, match=r"logits: shape \[4, 1, 64\], not \[4, 64\]"):
        v41.init_spec(params, cache, logits[:, None])
    narrow = v41.init_cache(params, 1, 30, slack=3)
    with pytest.raises(ValueError, match="depth: 5 drafts may have to be rewound, the cache's slack is 3"):
        v41.init_spec(params, narrow, logits[:1], budget=0)
    with pytest.raises(ValueError, match="cache: sequence 0 holds no position"):
        v41.init_spec(params, v41.init_cache(params, 1, 30), logits[:1])
    state = v41.init_spec(params, cache, logits)
    bad = state.drafts.clone()
    bad[1, 2] = 64
    with pytest.raises(ValueError, match="state: 64 at sequence 1, row 3 is not a token id"):
        v41.spec_step(params, cache, replace(state, drafts=bad))
    v41.spec_step(params, cache, replace(state, drafts=bad, offered=torch.tensor([5, 2, 5, 5], dtype=torch.int32)))
    with pytest.raises(ValueError, match="state.offered: 6 at sequence 0 leaves 0..5"):
        v41.spec_step(params, cache, replace(state, offered=torch.full((4,), 6, dtype=torch.int32)))
