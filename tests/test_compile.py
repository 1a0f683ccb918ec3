# SPDX-License-Identifier: Apache-2.0
"""A compiled step is the step: the same bits on the CPU over every edge without compiling again, the same tokens through the kernels."""

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from graph_kit import ALONE, EIGHT, LEAN, SINGLE, SQUARE, bucket_graph, first_unequal, rank_of, small_config
from helpers import ROOT
from sharded_kit import shard_params
from torch.nn import functional
from torch.utils import _pytree

import v41
from v41 import tree
from v41.backends.cpu.ranks import RankError
from v41.backends.neuron import check, device, ops, options
from v41.backends.neuron.buckets import empty_state
from v41.backends.neuron.compile import same_numbers
from v41.backends.neuron.lockstep import definitions, primitive, run_lockstep
from v41.backends.neuron.packed import packed
from v41.sharding.bucket import Bucket
from v41.spec import verify
from v41.spec.backend import Backend

torch.set_num_threads(1)
logging.getLogger("torch.__trace").propagate = False  # a record of every graph in every log of a test
CAPACITY = 40
SPEC = Backend("spec")
PROMPT = torch.tensor([[5, 17, 170, 199, 3]])


@pytest.fixture(scope="module", params=["exact", pytest.param("faithful", marks=pytest.mark.slow)])
def params(request):
    """One expert of two, so that the graph is small: compiling takes 10 ms a node."""
    few = {"n_routed_experts": 2, "num_experts_per_tok": 1, "dspark_n_routed_experts": 2, "dspark_num_experts_per_tok": 1}
    config = replace(small_config(), **few)
    return v41.init_params(config, 0, numerics=v41.Numerics(request.param))


@pytest.fixture(scope="module")
def step(params):
    return v41.compile(params, bucket="decode3", capacity=CAPACITY)


def started(params, tokens=PROMPT, batch=1, capacity=CAPACITY):
    """A cache and the first state on it."""
    cache = v41.init_cache(params, batch, capacity)
    out, cache = v41.step(params, cache, tokens, logits="last")
    _, cache = v41.draft(params, cache, out.hidden, None)
    return cache, v41.init_spec(params, cache, out.logits[:, -1], stops=[-1] * 4)


def forced(params, cache, state, n):
    """The state with n drafts that will be accepted and others that, but for a chance hit, will not: whatever the head says, all are offered."""
    tokens, token = [], state.token
    for _ in range(n if int(cache.length) < CAPACITY else 0):
        out, cache = v41.step(params, cache, token[:, None])
        token = out.logits[:, -1].argmax(-1).to(torch.int32)
        tokens.append(token)
        if int(cache.length) >= CAPACITY:
            break
    tokens += [(token + 1) % params.config.vocab_size] * (state.depth - len(tokens))
    return replace(state, drafts=torch.stack(tokens, 1), offered=torch.full_like(state.offered, state.depth))


@pytest.mark.capture
def test_64_steps_over_every_edge_are_the_specs_bit_for_bit_without_compiling_again(params, step):
    """Rings wrap at 16 positions, groups are odd and even, sequences start a step at capacity - 1 and end at capacity; every number of drafts is accepted."""
    seen, lengths, compiled, done = set(), set(), False, 0
    prompts = iter([PROMPT, PROMPT[:, :4], PROMPT[:, 1:], PROMPT[:, :1], PROMPT[:, 2:], PROMPT[:, :3]])
    while done < 64:
        cache, state = started(params, next(prompts))
        edge = done == 0  # the first sequence stops at capacity - 1 on its way
        while bool(state.alive) and int(cache.length) < CAPACITY and done < 64:
            n, left = done % (state.depth + 1), CAPACITY - 2 - int(cache.length)
            state = forced(params, cache, state, max(min(n, left), 0) if edge else n)
            want = verify.spec_step(params, cache, state, SPEC)
            with torch.compiler.set_stance("fail_on_recompile" if compiled else "default"):
                emitted, state, cache = step(cache, state)
            assert (name := first_unequal((emitted, state, cache), want)) is None, f"step {done} from {int(cache.length)} differs in {name}"
            seen.add(int(emitted.accepted))
            compiled, done = True, done + 1
            lengths.add(int(cache.length))
    assert seen == {0, 1, 2} and {CAPACITY - 1, CAPACITY} <= lengths and max(lengths) == CAPACITY


def test_a_cache_is_changed_in_place_and_the_one_given_back_is_the_one_given(params, step):
    cache, state = started(params)
    before, places = tree.map(torch.clone, cache), [t.data_ptr() for t in tree.leaves(cache)]
    _, _, after = step(cache, state)
    assert [t.data_ptr() for t in tree.leaves(after)] == places
    assert first_unequal(cache, before) is not None and first_unequal(cache, after) is None


def test_arguments_that_are_not_the_buckets_are_named_before_anything_is_written(params, step):
    cache, state = started(params)
    held = tree.map(torch.clone, cache)
    wrong = started(params, capacity=24)[0]
    with pytest.raises(ValueError, match=r"cache.layers.0.compressed: torch.float32 \[1, 13, 32\], compiled for torch.float32 \[1, 21, 32\]|bfloat16 \[1, 13"):
        step(wrong, state)
    with pytest.raises(ValueError, match="state.drafts: torch.int32 \\[1, 1\\], compiled for torch.int32 \\[1, 2\\]"):
        step(cache, replace(state, drafts=state.drafts[:, :1], offered=state.offered * 0))
    with pytest.raises(ValueError, match="state: 200 at sequence 0, row 0 is not a token id"):
        step(cache, replace(state, token=torch.tensor([200], dtype=torch.int32)))
    with pytest.raises(ValueError, match="state.stops: torch.int32 \\[1, 5\\], compiled for"):
        step(cache, replace(state, stops=torch.full((1, 5), -1, dtype=torch.int32)))
    with pytest.raises(ValueError, match="cache.capacity: 41, compiled for 40"):
        step(started(params, capacity=41)[0], state)
    with pytest.raises(ValueError, match="cache: a NoneType, not Cache"):
        step(None, state)
    with pytest.raises(ValueError, match="state.rule: 'block', compiled for 'greedy'"):
        same_numbers(step.compiled.captured, {"state": replace(state, rule="block")})
    assert first_unequal(cache, held) is None


@pytest.mark.slow
@pytest.mark.capture
def test_a_prompt_that_is_shorter_than_its_bucket_is_padded_and_its_caches_are_the_specs(params):
    step = v41.compile(params, bucket="prefill4x2", capacity=CAPACITY)
    for rows, valid in ((3, None), (3, [3, 1]), (4, [2, 4]), (1, None)):
        tokens, counts = torch.tensor([[5, 17, 170, 199], [3, 88, 2, 13]])[:, :rows], torch.tensor(valid or [rows] * 2, dtype=torch.int32)
        cache, want = v41.init_cache(params, 2, CAPACITY), v41.init_cache(params, 2, CAPACITY)
        for _ in range(2):
            token, cache = step(cache, tokens, valid)
            wanted, want = verify.prefill_step(params, want, tokens.to(torch.int32), counts, SPEC)
            assert torch.equal(token, wanted) and first_unequal(cache, want) is None
    with pytest.raises(ValueError, match=r"tokens: \[2, 5\], bucket prefill4x2 takes \[2, 1..4\]"):
        step(v41.init_cache(params, 2, CAPACITY), torch.ones((2, 5), dtype=torch.int32))


def test_what_does_not_fit_is_named(params):
    for given, text in (
        ({"bucket": "decode4"}, "bucket decode4: 3 drafts a step, the model makes 2"),
        ({"bucket": "decode"}, "bucket 'decode'"),
        ({"backend": "tpu"}, "backend: 'tpu' is not one of"),
        ({"capacity": 1, "bucket": "decode3"}, "capacity 1"),
        ({"rules": "leaner"}, "rules 'leaner'"),
        ({"rank": 1}, "rank 1"),
        ({"rule": "nope"}, "rule: 'nope' is not one of"),
        ({"slack": -1}, "slack: -1 is below 0"),
        ({"capacity": 40.5}, "capacity: a float, not int"),
        ({"rules": 3}, "rules: a int, not Rules"),
        ({"bucket": 3}, "bucket: a int, not Bucket"),
        ({"mesh": 4}, "mesh: a int, not Mesh"),
        ({"rules": "lean", "mesh": SQUARE}, r"params.embed: \[200, 64\], rank 0 of lean holds \[50, 64\]"),
    ):
        with pytest.raises(ValueError, match=text):
            v41.compile(params, **{"capacity": CAPACITY, "bucket": "decode3"} | given)
    with pytest.raises(ValueError, match="one prefill from empty"):
        v41.compile(replace(params, numerics=v41.Numerics("released")), bucket="decode3", capacity=CAPACITY)


def test_the_backend_of_the_device_says_what_is_missing(params, capsys):
    assert device.missing() == ("torch_neuronx", "nki", "neuronxcc")
    with pytest.raises(ValueError, match="backend 'neuron': torch_neuronx, nki, neuronxcc not installed; 'neuron-sim' runs"):
        v41.compile(params, backend="neuron", bucket="decode3", capacity=CAPACITY)
    assert check.main() == 2 and capsys.readouterr().out.startswith("not installed: torch_neuronx, nki, neuronxcc.")


# Through the kernels


def kernel_config():
    """The smallest sizes that the kernels take."""
    return replace(small_config(), n_routed_experts=8, dspark_n_routed_experts=8)


def prompt(params, rows=PROMPT, room=6):
    """Arguments of a prefill of `room` rows on one rank."""
    tokens, valid = functional.pad(rows.to(torch.int32), (0, room - rows.shape[1])), torch.tensor([rows.shape[1]], dtype=torch.int32)
    return {"params": packed(params), "cache": v41.init_cache(params, 1, 32), "rank": rank_of(0), "tokens": tokens, "valid": valid}


@pytest.mark.parametrize("model", ["small", pytest.param("tiny", marks=pytest.mark.slow)])
def test_the_kernels_give_the_definitions_tokens_and_their_numbers_to_1e_5_in_exact_float32(model):
    """Prompt rows, then two speculative steps, every cache included."""
    assert ops.without_kernel() == ()
    exact = v41.Numerics("exact")
    params = v41.load_params(ROOT / "checkpoints" / "tiny", numerics=exact) if model == "tiny" else v41.init_params(kernel_config(), 0, numerics=exact)
    depth = params.config.dspark_block_size
    graph = bucket_graph(params.config, SINGLE, ALONE, Bucket("prefill", 6), regime="exact")
    (got,), (want,) = (run_lockstep(graph, [prompt(params)], ALONE, b) for b in (ops.body_of, definitions))
    assert torch.equal(got["token"], want["token"])
    close(got["cache"], want["cache"])
    state = empty_state(params.config, params.numerics, 1, depth, torch.device("cpu"))
    state = replace(state, token=want["token"], alive=torch.tensor([True]), budget=torch.tensor([9], dtype=torch.int32))
    graph = bucket_graph(params.config, SINGLE, ALONE, Bucket("decode", depth + 1), regime="exact")
    given = [{"params": packed(params), "cache": r["cache"], "rank": rank_of(0), "state": state} for r in (got, want)]
    for _ in range(2):
        (got,), (want,) = run_lockstep(graph, given[:1], ALONE, ops.body_of), run_lockstep(graph, given[1:], ALONE)
        assert first_unequal(got["emitted"], want["emitted"]) is None and int(want["emitted"].counts) > 0
        assert torch.equal(got["state"].drafts, want["state"].drafts) and torch.equal(got["state"].token, want["state"].token)
        close(got["cache"], want["cache"])
        given = [g | {"cache": r["cache"], "state": r["state"]} for g, r in zip(given, (got, want), strict=True)]


def close(got, want, bound=1e-5):
    """Every float within `bound` of the largest of its tensor, every integer equal."""
    for (name, a), (_, b) in zip(tree.paths(got), tree.paths(want), strict=True):
        assert near(a, b, bound), name


def near(a, b, bound):
    if not b.dtype.is_floating_point:
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    same = torch.equal(a[~b.isfinite()], b[~b.isfinite()])
    return same and bool(((a - b).abs()[b.isfinite()] <= bound * b[b.isfinite()].abs().max().clamp_min(1e-30)).all()) if b.numel() else True


def compared(seen, bound):
    """Bodies that run the kernel on the definition's own arguments, compare, and go on with the definition's result."""

    def bodies(name):
        def body(*args, **named):
            want, got = definitions(name)(*args, **named), ops.body_of(name)(*args, **named)
            for i, (a, b) in enumerate(zip(ops.listed(got), ops.listed(want), strict=True)):
                assert a.shape == b.shape and a.dtype == b.dtype and near(a, b, bound), f"{name}, call {seen[name]}, result {i}"
            seen[name] += 1
            return want

        return body

    return bodies


def each_compared(bucket, given):
    """Every node of a bucket's graph by its kernel and its definition on the definition's inputs, in trn2; the results.

    Bound: one rounding to bfloat16 of the largest value, 2^-8; ids and choices exactly.
    """
    seen, graph = Counter(), bucket_graph(kernel_config(), SINGLE, ALONE, bucket, regime="trn2")
    (found,) = run_lockstep(graph, [given], ALONE, compared(seen, 2.0**-8))
    nodes = Counter(n.replace("write_rows_", "write_rows") for n in map(primitive, graph.graph.graph.nodes) if n)
    assert seen == nodes, "each kernel as often as the graph has it"
    return graph, found


def test_every_kernel_of_a_prefill_and_of_a_decode_step_is_its_definition_in_trn2_on_the_definitions_inputs():
    params = v41.init_params(kernel_config(), 0, numerics=v41.Numerics("trn2"))
    graph, filled = each_compared(Bucket("prefill", 6), prompt(params))
    state = empty_state(params.config, params.numerics, 1, 2, torch.device("cpu"))
    state = replace(state, token=filled["token"], alive=torch.tensor([True]), budget=torch.tensor([9], dtype=torch.int32), offered=torch.full((1,), 2).int())
    _, stepped = each_compared(Bucket("decode", 3), {"params": packed(params), "cache": filled["cache"], "rank": rank_of(0), "state": state})
    assert int(stepped["emitted"].counts) > 0
    with pytest.raises(RankError, match="softmax_pool differs"):
        run_lockstep(graph, [prompt(params)], ALONE, broken("softmax_pool"))


def broken(name):
    """Definitions, of which one is compared with a kernel that is off by 2 %."""

    def bodies(wanted):
        def body(*args, **named):
            want = definitions(wanted)(*args, **named)
            assert wanted != name or near(ops.body_of(name)(*args, **named) * 1.02, want, 2.0**-8), f"{name} differs"
            return want

        return body

    return bodies


def test_eight_ranks_through_their_kernels_give_the_definitions_tokens_and_caches():
    params = v41.init_params(kernel_config(), 0, numerics=v41.Numerics("exact"))
    graph = bucket_graph(params.config, LEAN, EIGHT, Bucket("prefill", 2), regime="exact")
    local = [packed(shard_params(params, LEAN, EIGHT, r)) for r in range(8)]
    given = [[prompt(params, PROMPT[:, :2], 2) | {"params": p, "rank": rank_of(r)} for r, p in enumerate(local)] for _ in range(2)]
    got, want = run_lockstep(graph, given[0], EIGHT, ops.body_of), run_lockstep(graph, given[1], EIGHT)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g["token"], w["token"])
        close(g["cache"], w["cache"])


@pytest.mark.capture
def test_a_step_compiled_for_the_simulator_runs_its_kernels():
    params = v41.init_params(replace(kernel_config(), num_nextn_predict_layers=0), 0, numerics=v41.Numerics("exact"))
    step = v41.compile(params, bucket="prefill2", capacity=32, backend="neuron-sim")
    token, cache = step(v41.init_cache(params, 1, 32), PROMPT[:, :1])
    want, wanted = verify.prefill_step(params, v41.init_cache(params, 1, 32), PROMPT[:, :1], torch.ones(1, dtype=torch.int32), SPEC)
    assert torch.equal(token, want)
    close(cache, wanted)


# Options


def test_an_edited_kernel_source_changes_the_cache_folder(tmp_path, monkeypatch):
    before = options.source_digest()
    place = tmp_path / "neuron"
    for name in options.KERNEL_SOURCES:
        source = options.HERE / name
        for path in source.rglob("*.py") if source.is_dir() else [source]:
            copy = place / path.relative_to(options.HERE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(options, "HERE", place)
    digest = options.source_digest.__wrapped__
    assert digest() == before
    helper = place / "kernels" / "tiles.py"
    helper.write_bytes(helper.read_bytes() + b"\n")
    assert digest() != before
    found = options.environment("cache")
    assert found["TORCH_NEURONX_NEFF_CACHE_DIR"].startswith("cache/") and found["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert all(s.why for s in options.ENVIRONMENT) and len({s.name for s in options.ENVIRONMENT}) == len(options.ENVIRONMENT)


def test_states_and_results_are_pytrees_for_torch(params):
    cache, state = started(params)
    for value in (cache, state):
        assert len(_pytree.tree_leaves(value)) == len(tree.leaves(value))
