# SPDX-License-Identifier: Apache-2.0
"""The model on ranks equals the model on one (docs/sharding.md 3), for every rules table, and what a wrong placement does is seen.

In `exact` float64 a sharded sum differs from the whole one by its order only: some hundred additions of 2**-53 each, through three layers
and a draft stage. 1e-11 of the largest value is five orders above what is seen and ten below what any of the mutants does.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sharded_kit import (
    SQUARE,
    big_config,
    first_difference,
    made,
    on_ranks,
    one_step,
    prefilled_state,
    short_call,
    square_config,
    unsharded,
    wide_config,
)

import v41
from v41 import tree
from v41.backends.cpu.ranks import RankError, run_ranks
from v41.backends.sharded import Wire, sharded
from v41.sharding.bucket import bucket_named
from v41.sharding.check import check
from v41.sharding.mesh import MESHES, grid, mesh64
from v41.sharding.placement import Placement
from v41.sharding.plan_collectives import collectives
from v41.sharding.rules import Rules
from v41.sharding.shard import shard_params
from v41.sharding.tables import TABLES, lean, pr71, tp
from v41.spec import verify
from v41.spec.backend import Backend
from v41.spec.cache import init_cache
from v41.spec.ops.choose import best_of
from v41.spec.params import EngramMap, build_params
from v41.spec.verify import SpecState

RELEASED_CONFIG = Path(v41.__file__).parent / "data" / "released_config.json"
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def square():
    """(parameters, what they give unsharded)."""
    params = made(square_config())
    return params, unsharded(params)


def assert_equal_everywhere(run, want, rules=None):
    """Every rank gives what the whole model gives, and all of them the same bits. Logits that are only chosen from may stay cut: each rank
    then has its own part of them."""
    cut = rules is not None and rules.choice == "candidates"
    values = [{n: t for n, t in v.items() if not (cut and n == "spec.logits")} for v in run.values]
    assert first_difference(values[0], {n: t for n, t in want.items() if not (cut and n == "spec.logits")}) is None
    for rank, value in enumerate(values):
        assert not [n for n, t in values[0].items() if not torch.equal(value[n].nan_to_num(), t.nan_to_num())], f"rank {rank}"


@pytest.mark.parametrize("name", [pytest.param(t, marks=slow) if t in ("fast", "single") else t for t in TABLES])  # fast is lean, single cuts nothing
def test_two_groups_of_two_ranks_equal_one_in_every_call_and_choice(square, name):
    params, want = square
    check(params.config, TABLES[name], SQUARE)
    assert_equal_everywhere(on_ranks(params, TABLES[name], SQUARE), want, TABLES[name])


def test_drawn_tokens_equal_those_of_one_rank(square):
    params, _ = square
    run = on_ranks(params, lean, SQUARE, lambda p, ops: short_call(p, ops, "block"))
    assert_equal_everywhere(run, short_call(params, v41.available_backends()["cpu"], "block"))


@pytest.mark.parametrize("name", ["tp", pytest.param("lean", marks=slow)])
def test_an_attention_group_of_8_equals_one_rank(name):
    params, rules, mesh = made(big_config()), TABLES[name], MESHES[8]
    check(params.config, rules, mesh)
    assert_equal_everywhere(on_ranks(params, rules, mesh, short_call), unsharded(params, short_call), rules)


@slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", TABLES)
def test_attention_groups_of_any_size_equal_one_rank_in_every_call(ranks, name):
    params, rules, mesh = made(wide_config()), TABLES[name], MESHES[ranks]
    check(params.config, rules, mesh)
    assert_equal_everywhere(on_ranks(params, rules, mesh), unsharded(params), rules)


@pytest.mark.parametrize("name", ["lean", *(pytest.param(t, marks=slow) for t in TABLES if t != "lean")])
def test_64_ranks_equal_one(name):
    params, rules = made(big_config()), TABLES[name]
    check(params.config, rules, mesh64)
    cache, state = prefilled_state(params)

    def call(p, ops):
        return one_step(p, cache, state, ops)

    assert_equal_everywhere(on_ranks(params, rules, mesh64, call), unsharded(params, call), rules)


@slow
@pytest.mark.parametrize("name", TABLES)
def test_64_ranks_equal_one_from_the_prompt_on(name):
    params, rules = made(big_config()), TABLES[name]
    assert_equal_everywhere(on_ranks(params, rules, mesh64, short_call), unsharded(params, short_call), rules)


# Rounding regimes, layer by layer


@pytest.mark.parametrize("name", ["pr71", "lean"])
def test_a_faithful_layer_on_the_whole_models_inputs_is_a_rounding_apart(name):
    params, rules = made(square_config(), v41.Numerics()), TABLES[name]
    tokens = torch.randint(0, 190, (2, 7))
    start, cache = v41.embed(params, v41.init_cache(params, 2, 16), tokens)
    boundaries, caches = [start], [cache]
    for number in range(params.config.num_hidden_layers):
        after, new = v41.layers(params, caches[-1], boundaries[-1], number, number + 1)
        boundaries.append(after)
        caches.append(new)
    local = [shard_params(params, rules, SQUARE, r) for r in range(SQUARE.size)]

    def each(rank, ops):
        got = [v41.layers(local[rank], caches[n], boundaries[n], n, n + 1, ops=ops)[0] for n in range(len(caches) - 1)]
        return [t for b in got for _, t in tree.paths(b)]

    run = run_ranks(each, SQUARE, rules)
    want = [t for b in boundaries[1:] for _, t in tree.paths(b)]
    for rank in range(SQUARE.size):
        assert all(torch.equal(a, b) for a, b in zip(run.values[rank], run.values[0], strict=True)), f"rank {rank}"
    for got, tensor in zip(run.values[0], want, strict=True):
        if not tensor.dtype.is_floating_point:
            assert torch.equal(got, tensor)
            continue
        # A sublayer's output in bfloat16: its own rounding (2**-9), and that of each of 2 experts and the shared one where partial sums
        # are not rounded one by one; the stream adds it to itself and rounds again. So five roundings of the largest element at most.
        bound = 5 * 2.0**-8 * float(tensor.abs().max())
        assert float((got.double() - tensor.double()).abs().max()) <= bound


# What a step does together


def meta(shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def stub_bodies():
    """Stand-ins for the primitives that make most of the work: only shapes count here."""

    def experts(x, weights, ids, w1, w2, w3, *, limit, numerics):
        return x.to(numerics.wide)

    def shared_expert(x, w1, w2, w3, *, limit, numerics):
        return x.to(numerics.wide)

    def linear(x, w, numerics):
        return x.new_empty((*x.shape[:-1], w.weight.shape[0]))

    def partial_linear(x, w, numerics):
        return x.new_empty((*x.shape[:-1], w.weight.shape[0]), dtype=numerics.wide)

    def hc_mixes(stream, fn, scale, base, *, iters, eps, norm_eps, numerics):
        pre = stream[..., 0].to(numerics.wide)
        return pre, pre, pre[..., None].expand(*pre.shape, pre.shape[-1])

    def sparse_attn(q, window, window_idxs, compressed, topk_idxs, attn_sink, scale, numerics):
        return q

    def rope(x, positions, f):
        return x

    moe = {"experts": experts, "shared_expert": shared_expert}
    rest = {"linear": linear, "partial_linear": partial_linear, "hc_mixes": hc_mixes, "sparse_attn": sparse_attn}
    return Backend("shapes", **moe, **rest, rope=rope, rope_inverse=rope), moe


def met_in_a_step(config, rules, mesh, capacity=8192):
    """(kind, mesh axes, bytes that a rank holds after it) of every collective of a greedy step with its drafts, on shapes alone."""

    def i32(*shape):
        return meta(shape, torch.int32)

    tables, columns, n = len(config.engram_layer_ids), config.engram_columns, config.dspark_block_size
    sizes = config.engram_max_ngram_size - 1
    factors, primes = meta((tables, sizes + 1), torch.int64), meta((tables, sizes, config.engram_n_heads), torch.int64)
    known = EngramMap(i32(config.vocab_size), factors, primes, meta((tables, columns), torch.int64))
    params = build_params(config, v41.Numerics(), lambda s: meta(rules.local_shape(s, mesh), s.dtype), known)
    cache = init_cache(config, params.numerics, 1, capacity, 8, True, torch.device("meta"))
    met = []

    def reduce(tensor, axes, axis):
        met.append(("reduce", axes, tensor.nbytes))
        return tensor.clone()

    def gather(tensor, axes, axis):
        met.append(("gather", axes, tensor.nbytes * mesh.ways(axes)))
        return tensor[None].expand(mesh.ways(axes), *tensor.shape)

    body, bodies = stub_bodies()
    ops = sharded(body, rules, mesh, torch.zeros((), dtype=torch.int32), Wire(reduce, gather), bodies)
    flag, one = meta((1,), torch.bool), meta((1,), torch.float32)
    state = SpecState(i32(1), i32(1, n), i32(1), None, i32(1), flag, i32(1), i32(1, 1), i32(1, 2), one, one, one, "greedy")
    with torch.no_grad():
        verify.spec_step(params, cache, state, ops)
    return met


def planned_and_met(config, name, mesh, capacity):
    """The planner's collectives of a decode step of 6 rows beside those that are made."""
    met = met_in_a_step(config, TABLES[name], mesh, capacity)
    planned = collectives(config, Placement(TABLES[name], mesh), bucket_named("decode6"), capacity)
    return planned, met


def as_counts(planned):
    return sum((Counter({(c.kind, c.axes): c.number}) for c in planned), Counter())


@slow
@pytest.mark.parametrize(("name", "world", "group"), [("pr71", 59, 51), ("lean", 47, 58)])
def test_a_step_of_the_released_model_meets_as_often_as_planned(name, world, group):
    planned, met = planned_and_met(v41.Config.from_json(RELEASED_CONFIG), name, mesh64, 8192)
    assert Counter(axes for _, axes, _ in met) == {("replica", "attn"): world, ("attn",): group}
    assert Counter((k, a) for k, a, _ in met) == as_counts(planned)
    # Bytes: the planner leaves out the row of each buffer that no one reads, of 8 index reductions.
    mine, theirs = sum(b for _, _, b in met), sum(c.number * c.bytes for c in planned)
    assert abs(mine - theirs) <= 1e-3 * theirs


@pytest.mark.parametrize("name", TABLES)
def test_a_step_meets_as_often_as_planned_by_every_table(square, name):
    planned, met = planned_and_met(square[0].config, name, SQUARE, 32)
    assert Counter((k, a) for k, a, _ in met) == as_counts(planned)


@pytest.mark.parametrize("name", ["pr71", "tp", "ep", "tpxep", "lean"])
def test_every_layer_reduces_its_experts_once(square, name):
    params, _ = square
    met = met_in_a_step(params.config, TABLES[name], SQUARE, 32)
    moe = 4 * 6 * params.config.hidden_size  # fp32 sums of six rows
    layers = params.config.num_hidden_layers
    expected = layers * (2 if name != "ep" else 1)  # with attention's, which ep does not cut
    assert sum(kind == "reduce" and size == moe for kind, _, size in met) == expected


# Wrong placements


def prefilled(params, ops):
    cache = v41.init_cache(params, 2, 32)
    out, cache, taps = v41.record(params, cache, torch.tensor([[5, 17, 170, 199], [88, 2, 13, 199]]), ops=ops)
    drafted, _, more = v41.record_draft(params, cache, out.hidden, out.logits[:, -1].argmax(-1), ops=ops)
    return taps | {f"draft.{n}": t for n, t in more.items()} | {"drafts": drafted.tokens, "draft logits": drafted.logits}


@pytest.fixture(scope="module")
def prefill(square):
    return square[0], prefilled(square[0], v41.available_backends()["cpu"])


def sinks_of_rank_0(params):
    def change(rank, local, ops):
        layers = tuple(
            replace(p, attn=replace(p.attn, attn_sink=q.attn.attn_sink[: p.attn.attn_sink.shape[0]])) for p, q in zip(local.layers, params.layers, strict=True)
        )
        return replace(local, layers=layers), ops

    return change


def with_ops(**bodies):
    """bodies: name -> fn(the right body) -> a wrong one."""

    def change(params):
        return lambda rank, local, ops: (local, replace(ops, **{n: b(getattr(ops, n)) for n, b in bodies.items()}))

    return change


def off_by_one(right):
    def first(axis, size, device):
        return right(axis, size, device) + (axis == "experts")

    return first


def padding_kept(right):
    def recut(tensor, axis, to, size):
        return right(tensor, axis, to, 2 * size)

    return recut


def added_on_every_rank(right):
    def sum_terms(terms, axes):
        return right((terms[0] + terms[1], torch.zeros_like(terms[1])), axes)

    return sum_terms


def narrow(right):
    def all_reduce(tensor, axis):
        return right(tensor.bfloat16().to(tensor.dtype), axis)

    return all_reduce


def twice(right):
    def all_reduce(tensor, axis):
        return right(right(tensor, axis), axis)

    return all_reduce


def forgotten(right):
    def all_reduce(tensor, axis):
        return tensor if axis == "o_groups" else right(tensor, axis)

    return all_reduce


def lookups_of_all(right):
    def lookups(found, axes):
        return right(tuple(f * (1 + (a == "engram_rows")) for f, a in zip(found, axes, strict=True)), axes)

    return lookups


WRONG = {
    "sinks not sharded": (sinks_of_rank_0, pr71),
    "experts off by one": (with_ops(first=off_by_one), pr71),
    "padding gathered into logits": (with_ops(recut=padding_kept), pr71),
    "the shared expert added on every rank": (with_ops(sum_terms=added_on_every_rank), pr71),
    "partial sums in bfloat16": (with_ops(all_reduce=narrow), pr71),
    "attention reduced twice": (with_ops(all_reduce=twice), pr71),
    "a reduction left out": (with_ops(all_reduce=forgotten), pr71),
    "Engram rows counted twice": (with_ops(lookups=lookups_of_all), lean),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_placement_is_seen(prefill, name):
    params, want = prefill
    change, rules = WRONG[name]
    run = on_ranks(params, rules, SQUARE, prefilled, change(params))
    assert first_difference(run.values[0], want) is not None


def test_the_right_placement_is_not_seen(prefill):
    params, want = prefill
    for rules in (pr71, lean):
        assert first_difference(on_ranks(params, rules, SQUARE, prefilled).values[0], want) is None


@pytest.mark.parametrize("axis", ["o_groups", "index_heads", "vocab", "experts", "moe_inter", "shared_inter", "engram_rows"])
def test_a_rule_that_the_backend_does_not_know_is_seen(prefill, axis):
    """Parameters cut by a rule that the collectives lack."""
    params, want = prefill
    rules = lean if axis in ("moe_inter", "shared_inter") else pr71
    lacking = Rules("lacking", dict(rules.axes) | {axis: None}, rules.padding, rules.merged, rules.choice)
    try:
        run = on_ranks(params, rules, SQUARE, prefilled, placed=lacking)
    except RankError:
        return  # shapes or ids that do not fit
    assert first_difference(run.values[0], want) is not None


def test_a_rule_that_is_removed_is_named():
    rules = Rules("torn", {k: v for k, v in tp.axes.items() if k != "index_heads"}, tp.padding)
    with pytest.raises(ValueError, match="axes without a rule .*index_heads"):
        check(square_config(), rules, SQUARE)


# Choices of cut logits


def elected(shares, vocab, mask=True):
    """The best tokens by exchange, where rank r has the share r of logits."""
    mesh = grid(1, len(shares))

    def each(rank, ops):
        first = ops.first("head.vocab", shares[rank].shape[-1], torch.device("cpu"))
        return ops.elect(*best_of(shares[rank], first, vocab if mask else 2**30), shares[rank].new_zeros((*shares[rank].shape[:-1], 0)), "head.vocab")[0]

    values = run_ranks(each, mesh, tp).values
    assert all(torch.equal(v, values[0]) for v in values)
    return values[0]


def padded_shares(logits, ranks, width):
    whole = torch.cat((logits, torch.zeros(*logits.shape[:-1], ranks * width - logits.shape[-1], dtype=logits.dtype)), -1)
    return list(whole.split(width, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_tokens_of_shares_are_those_of_the_whole_and_padding_never_wins(dtype):
    logits = -torch.rand(3, 5, 37, dtype=dtype) - 1  # padding, which scores 0, would win
    logits[0, 0], logits[1, 1, 7] = -2.0, -torch.inf
    logits[2, 2, 20] = logits[2, 2, 30] = -0.5  # a tie over two ranks
    shares = padded_shares(logits, 4, 16)
    assert torch.equal(elected(shares, 37), logits.argmax(-1).int())
    assert not torch.equal(elected(shares, 37, mask=False), logits.argmax(-1).int())


def test_ids_beyond_2_to_the_24_survive_the_exchange():
    def each(rank, ops):
        score, token = torch.tensor([float(rank)]), torch.tensor([2**24 + 1 + rank], dtype=torch.int32)
        return ops.elect(score, token, torch.full((1, 3), rank, dtype=torch.bfloat16), "head.vocab")

    token, row = run_ranks(each, grid(1, 2), tp).values[0]
    assert token.tolist() == [2**24 + 2] and row.tolist() == [[1.0, 1.0, 1.0]]
