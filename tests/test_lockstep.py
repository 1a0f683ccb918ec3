# SPDX-License-Identifier: Apache-2.0
"""All ranks by one captured graph give what ranks in threads give, bit for bit, and a rank that cannot go on is named."""

from dataclasses import replace

import pytest
import torch
from graph_kit import EIGHT, LEAN, copied, first_unequal, rank_of, small_config, step_function
from sharded_kit import TOKENS, prefilled_state, shard_params, square_config

import v41
from v41.backends.cpu.ranks import RankError, run_ranks
from v41.backends.neuron import buckets
from v41.backends.neuron.capture import capture
from v41.backends.neuron.lockstep import definitions, run_lockstep
from v41.backends.neuron.packed import packed
from v41.backends.neuron.wires import REDUCE
from v41.sharding.bucket import Bucket
from v41.sharding.mesh import grid
from v41.spec import model, verify
from v41.spec.backend import Backend

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def params():
    return v41.init_params(replace(square_config(), dspark_block_size=2), 0)


@pytest.fixture(scope="module")
def local(params):
    return [shard_params(params, LEAN, EIGHT, r) for r in range(EIGHT.size)]


def threads(call):
    """call(rank, backend) on eight ranks with the spec's own bodies."""
    return run_ranks(call, EIGHT, LEAN, ops=Backend("spec"), bodies={}).values


def arguments(local, cache, more):
    """One entry a rank, with caches of its own."""
    return [{"params": packed(p), "cache": copied(cache), "rank": rank_of(r)} | copied_all(more) for r, p in enumerate(local)]


def copied_all(trees):
    return {n: copied(t) for n, t in trees.items()}


def check(got, want):
    """Every result of every rank."""
    for r, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (name := first_unequal(tuple(g.values()), tuple(w))) is None, f"rank {r} differs in {name}"


@pytest.fixture(scope="module")
def decoding(params, local):
    """(graph of a speculative step, what it starts from, what threads give)."""
    cache, state = prefilled_state(params)
    given = arguments(local, cache, {"state": state})
    graph = capture(buckets.function_of(Bucket("decode", state.depth + 1), LEAN, EIGHT), given[0])
    return graph, cache, state, threads(lambda r, o: verify.spec_step(local[r], cache, state, o))


def test_a_speculative_step_is_that_of_ranks_in_threads_caches_included(decoding, local):
    graph, cache, state, want = decoding
    given = arguments(local, cache, {"state": state})
    got = run_lockstep(graph, given, EIGHT)
    check(got, want)
    assert all(g["cache"].layers[0].window is a["cache"].layers[0].window for g, a in zip(got, given, strict=True)), "caches are changed in place"
    assert set(graph.donated.values()) == {"write_rows", "copy"} and not graph.fresh


@pytest.mark.slow
def test_the_next_step_from_there_is_too(decoding, local):
    graph, cache, state, _ = decoding
    got = run_lockstep(graph, arguments(local, cache, {"state": state}), EIGHT)
    after, next_cache = got[0]["state"], got[0]["cache"]
    state = replace(after, stops=state.stops)
    want = threads(lambda r, o: verify.spec_step(local[r], copied(next_cache), state, o))
    check(run_lockstep(graph, arguments(local, next_cache, {"state": state}), EIGHT), want)


def test_a_prefill_of_unequal_lengths_and_a_decode_step_are_those_of_ranks_in_threads():
    params = v41.init_params(small_config(), 0)
    local = [shard_params(params, LEAN, EIGHT, r) for r in range(EIGHT.size)]
    valid = torch.tensor([6, 3], dtype=torch.int32)
    tokens = TOKENS[:, :6].to(torch.int32)
    cache = v41.init_cache(params, 2, 32)
    given = arguments(local, cache, {"tokens": tokens, "valid": valid})
    graph = capture(buckets.function_of(Bucket("prefill", 6, 2), LEAN, EIGHT), given[0])
    want = threads(lambda r, o: verify.prefill_step(local[r], cache, tokens, valid, o))
    got = run_lockstep(graph, given, EIGHT)
    check(got, want)
    held, one, row = got[0]["cache"], torch.ones(2, dtype=torch.int32), TOKENS[:, 6:7].to(torch.int32)
    given = arguments(local, held, {"tokens": row, "valid": one})
    graph = capture(step_function(LEAN, EIGHT), given[0])
    want = threads(lambda r, o: model.step(local[r], copied(held), row, one, None, "all", o))
    check(run_lockstep(graph, given, EIGHT), want)


def test_a_missing_collective_is_seen_in_the_results(decoding, local):
    graph, cache, state, want = decoding
    node = next(n for n in graph.graph.graph.nodes if n.target is REDUCE)
    users = list(node.users)
    try:
        for user in users:
            user.replace_input_with(node, node.args[0])
        with pytest.raises(AssertionError, match="rank 0 differs in"):
            check(run_lockstep(graph, arguments(local, cache, {"state": state}), EIGHT), want)
    finally:
        for user in users:
            user.replace_input_with(node.args[0], node)


def test_a_rank_with_other_arguments_is_named(decoding, local):
    graph, cache, state, _ = decoding
    given = arguments(local, cache, {"state": state})
    given[5]["cache"] = copied(v41.init_cache(local[5], 1, 40))
    with pytest.raises(RankError, match=r"rank 5 input cache.layers.0.compressed: torch.bfloat16 \[1, 21, 32\], captured torch.bfloat16 \[1, 17, 32\]"):
        run_lockstep(graph, given, EIGHT)
    with pytest.raises(RankError, match="arguments of 7 ranks for a mesh of 8"):
        run_lockstep(graph, given[:7], EIGHT)
    del given[5]["state"]
    with pytest.raises(RankError, match="rank 5 has .* inputs, the graph .*; first difference state.alive"):
        run_lockstep(graph, given, EIGHT)


def calls_on(rank, name, change):
    """Bodies of which that of `name` does something else on the first call of one rank."""
    seen = []

    def bodies(wanted):
        if wanted != name:
            return definitions(wanted)

        def body(*args, **named):
            seen.append(0)
            return change(definitions(wanted)(*args, **named)) if len(seen) == rank + 1 else definitions(wanted)(*args, **named)

        return body

    return bodies


def test_a_rank_that_fails_is_named_with_its_node(decoding, local):
    graph, cache, state, _ = decoding

    def fail(value):
        raise ZeroDivisionError("no rows")

    with pytest.raises(RankError, match=r"rank 3 failed in sparse_attn \(v41.sparse_attn.default\): ZeroDivisionError: no rows"):
        run_lockstep(graph, arguments(local, cache, {"state": state}), EIGHT, calls_on(3, "sparse_attn", fail))


def test_ranks_that_disagree_at_a_collective_are_named_and_nothing_hangs(decoding, local):
    graph, cache, state, _ = decoding
    with pytest.raises(RankError, match=r"^rank 3 brings torch.float32 \[1, 2, 64\] to all_reduce\w*, rank 2 of its group torch.float32 \[1, 3, 64\]$"):
        run_lockstep(graph, arguments(local, cache, {"state": state}), EIGHT, calls_on(3, "partial_linear", lambda t: t[:, :2]))
    with pytest.raises(RankError, match=r"^all_gather_into_tensor\w*: a gather of 2 ranks, the groups over attn have 4$"):
        run_lockstep(graph, arguments(local, cache, {"state": state}), grid(2, 4))
