# SPDX-License-Identifier: Apache-2.0
"""A captured step: one graph for all ranks, its collectives the planner's, and what a compiler would refuse is found in it."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from graph_kit import ALONE, LEAN, SINGLE, SQUARE, bucket_graph, small_config, without_memory
from helpers import ROOT
from sharded_kit import big_config
from torch._subclasses.fake_tensor import FakeTensorMode

import v41
from v41 import tree
from v41.backends.neuron import buckets, capture, graph_lint, graph_read, graph_report, ops
from v41.backends.neuron.calls import decode, encode
from v41.backends.neuron.packed import integers, packed, packed_map
from v41.backends.neuron.resident import resident
from v41.cli import cli
from v41.cli import graph as command
from v41.cli.checkpoint import named_config
from v41.sharding.bucket import Bucket, bucket_named
from v41.sharding.mesh import mesh64
from v41.sharding.placement import CHECKPOINT, Placement, placed
from v41.sharding.plan_collectives import collectives
from v41.sharding.planner import plan
from v41.sharding.tables import TABLES
from v41.spec import model
from v41.spec.backend import Backend
from v41.spec.ops.choose import Sample
from v41.spec.table import Fp4

torch.set_num_threads(1)
PREFILL = Bucket("prefill", 2)


@pytest.fixture(scope="module")
def found():
    """The speculative step of one of 64 ranks with everything that is read from it, and the hash of another rank's."""
    return graph_report.graphed(big_config(), Placement(LEAN, mesh64, CHECKPOINT), Bucket("decode", 3), 32, v41.Numerics(), (0, 37))


@pytest.fixture(scope="module")
def lean(found):
    """Its graph."""
    return found.captured


# A call as a node


def test_a_call_of_a_primitive_is_read_as_it_was_written():
    t = [torch.zeros(n) for n in (1, 2, 3, 4)]
    args = (t[0], Fp4(t[1], t[2]), None, 1.5, (1, 2), True, torch.bfloat16, v41.Numerics("exact", dtype="float64"))
    named = {"sample": Sample(t[3], t[0], t[1]), "eps": 1e-20}
    tensors, text = encode(args, named)
    got, by_name = decode(tensors, text)
    assert got == args and by_name == named and json.loads(text)
    with pytest.raises(TypeError, match="an argument of a primitive is a set"):
        encode(({1},), {})


@pytest.mark.parametrize("name", sorted(ops.DEFINITIONS))
def test_every_primitive_is_an_operator_of_its_name(name):
    assert str(getattr(torch.ops.v41, name).default) == f"v41.{name}.default"


def test_an_operator_gives_no_alias_of_its_arguments():
    x, found = torch.zeros(4), ops.own([torch.zeros(4).expand(2, 4), torch.ones(3)], [])
    assert all(t.is_contiguous() for t in found)
    assert ops.own([x, x], [x])[0].data_ptr() != x.data_ptr()
    twice = ops.own([x[:2], x[2:]], [])
    assert twice[0].untyped_storage().data_ptr() != twice[1].untyped_storage().data_ptr()


def test_the_tables_of_the_hash_come_back_from_the_kernels_constants():
    m = v41.init_params(small_config(), 0).engram_map
    made = packed_map(m)
    for i in range(len(m.multipliers)):
        got = integers(made.multipliers[i], made.primes[i], made.offsets[i])
        assert all(torch.equal(a, b) for a, b in zip(got, (m.multipliers[i], m.primes[i], m.offsets[i]), strict=True))
    assert all(t.dtype != torch.int64 for t in tree.leaves(made))


# The graph


def test_every_cache_is_written_in_place_and_the_model_says_how_often_each_kernel_runs(lean):
    assert not lean.fresh and Counter(lean.donated.values()) == {"write_rows": 7, "copy": 3}
    found = graph_read.kernels(lean)
    blocks = 1 + 1  # a layer and a draft stage
    assert found["hc_mixes"] == found["hc_post"] == 2 * blocks and found["sparse_attn"] == found["gate"] == found["partial_experts"] == blocks
    assert found["write_rows_"] == 7 and "write_rows" not in found
    assert found["hc_pre"] == 2 * blocks + 2  # and in front of both heads
    assert found["engram_hash"] == found["engram_rows"] == found["engram_gate"] == found["partial_index_scores"] == found["select"] == 1


def test_all_ranks_have_one_graph_and_another_step_has_another(found):
    assert found.hashes.keys() == {0, 37} and found.hashes[0] == found.hashes[37]
    graph = graph_read.graph_hash(planted(lambda t: t * 2))
    assert graph != graph_read.graph_hash(planted(lambda t: t * 3)) and graph not in found.hashes.values()
    assert graph == graph_read.graph_hash(planted(lambda t: t * 2))


SLOW = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (("lean", "decode3"), ("lean", "decode1"), ("tpxep", "decode3"), ("ep", "decode3"), ("lean", "decode3x2"), ("lean", "prefill70"))
]


@pytest.mark.parametrize("rules, bucket", [("pr71", "decode3"), ("lean", "prefill4"), *SLOW])
def test_collectives_of_the_graph_are_those_of_the_planner(rules, bucket):
    config, found = small_config(), bucket_named(bucket)
    planned = collectives(config, Placement(TABLES[rules], SQUARE, CHECKPOINT), found, 96)
    got = graph_read.collectives(bucket_graph(config, TABLES[rules], SQUARE, found, capacity=96), SQUARE)
    assert got == graph_read.planned(planned, SQUARE) and got


def test_nothing_is_refused_and_no_integer_has_64_bits(lean):
    assert [f for f in graph_lint.lint(lean) if f.severity == "refused"] == []
    assert graph_read.count_dtype(lean, torch.int64) == 0


def test_memory_alive_at_once_counts_what_is_read_later():
    def chain(cache, x):
        a = x + 1
        b = a * 2
        return {"out": (a[:1] + b.sum(),)}

    found = capture.capture(chain, {"cache": (), "x": torch.empty(256, device="meta")})
    assert graph_read.alive_bytes(found) == 2 * 1024 + 4


# What a compiler refuses


def planted(change):
    """Embedding and head of a model, in which the tap `logits` does something else."""

    def step(params, cache, rank, tokens, valid):
        found = replace(buckets.rank_backend(SINGLE, ALONE, rank), tap=lambda name, t: change(t) if name == "logits" else t)
        boundary, cache = model.embed(params, cache, tokens, valid, None, found)
        return {"out": model.head(params, boundary, "all", found), "cache": cache}

    return bucket_graph(small_config(), SINGLE, ALONE, PREFILL, step)


def branch(t):
    return t * 2 if t.sum() > 0 else t


@pytest.mark.parametrize(
    "change, func",
    [
        (lambda t: t * t.flatten()[0].item(), "_local_scalar_dense"),
        (lambda t: t + t[t > 0].sum(), "nonzero"),
        (branch, "_local_scalar_dense"),
    ],
)
def test_a_read_of_values_is_no_graph_and_its_line_is_named(change, func):
    with pytest.raises(capture.CaptureError, match=rf"^host read at tests/test_graph.py:\d+: aten.{func}.default needs the values of a tensor"):
        planted(change)


@pytest.mark.parametrize(
    "change, code, text",
    [
        (lambda t: t + t.to(torch.int64).sum(), "int64", "a 64-bit integer"),
        (lambda t: t + torch.tensor([3, 4], dtype=torch.int64)[:1].to(t.dtype) * t.to(torch.int32).sum(dtype=torch.int32), "NCC_ESFH001", "a 64-bit integer"),
        (lambda t: t + t.to(torch.int32).topk(2).values.sum(-1, keepdim=True), "NCC_EVRF013", "topk of integers"),
        (lambda t: t.to(torch.float8_e4m3fn).to(t.dtype), "NCC_EVRF051", "float8_e4m3fn outside a kernel"),
        (lambda t: t + t.to(torch.int32).scatter_reduce(2, t.to(torch.int32) * 0, t.to(torch.int32), "sum"), "NCC_EVRF016", "reduces integers"),
        (lambda t: t.double().to(t.dtype), "dtype", "float64 does not exist"),
        (lambda t: t + torch.rand_like(t), "random", "drawn on the host"),
        (lambda t: torch.ops._c10d_functional.broadcast(t, 0, "v41.attn"), "collective", "a graph has all_reduce"),
    ],
    ids=["sum", "constant", "topk", "fp8", "scatter", "double", "random", "broadcast"],
)
def test_an_operation_that_is_refused_is_found_with_its_code(change, code, text):
    found = [f for f in graph_lint.lint(planted(change)) if f.severity == "refused"]
    assert any(f.code == code and text in f.text for f in found), found


def inside(x, index):
    """A kernel whose argument begins inside its storage."""
    tensors, text = encode((x[1:], index, x[1:, :1]), {})
    return torch.ops.v41.write_rows.default(tensors, text)[0]


def twice(x, index):
    """Two writes to one buffer."""
    torch.ops.v41.write_rows_.default(x, index, x[:, :1] * 2)
    torch.ops.v41.write_rows_.default(x, index, x[:, :1] * 3)
    return x[:, :1] + 1


@pytest.mark.parametrize(
    "change, severity, code, text",
    [
        (inside, "doubtful", "copy", "begins 8 elements into its storage"),
        (lambda x, i: x.view(torch.int32), "doubtful", "bits", "bits of one dtype"),
        (lambda x, i: x.erf(), "doubtful", "lowering", "aten.erf.default was not seen to be lowered"),
        (lambda x, i: x.topk(1, dim=1).values, "refused", "topk", "another dim than the last"),
        (twice, "refused", "cache", "2 writes to one buffer"),
        (lambda x, i: x + i.to(torch.float8_e4m3fn).view(torch.uint8), "refused", "NCC_EVRF051", "outside a kernel"),
    ],
    ids=["copy", "bits", "lowering", "topk", "writes", "bytes"],
)
def test_what_is_doubtful_or_spoils_a_graph_is_found_on_a_few_nodes(change, severity, code, text):
    trees = {"x": torch.empty(2, 4, 2, device="meta"), "index": torch.empty(1, 1, dtype=torch.int32, device="meta")}
    found = graph_lint.lint(capture.capture(lambda x, index: {"out": (change(x, index),)}, trees))
    assert any(f.severity == severity and f.code == code and text in f.text for f in found), found
    clean = graph_lint.lint(capture.capture(lambda x, index: {"out": (x * 2,)}, trees))
    assert clean == []


def test_an_8_bit_float_that_is_an_argument_is_doubtful():
    found = graph_lint.lint(capture.capture(lambda w: {"out": ()}, {"w": torch.empty(4, dtype=torch.float8_e4m3fn, device="meta")}))
    assert [(f.severity, f.code, f.node) for f in found] == [("doubtful", "NCC_EVRF051", "w")]


def test_the_same_graph_without_a_planted_operation_is_clean():
    assert [f for f in graph_lint.lint(planted(lambda t: t * 2)) if f.severity == "refused"] == []


def test_a_cache_that_is_not_donated_is_found_with_the_reason():
    trees = without_memory(small_config(), SINGLE, ALONE, PREFILL, capacity=600)
    for change, why in (
        (lambda o: replace(o, write_rows=Backend("spec").write_rows), "it is computed anew, not written by write_rows"),
        (lambda o: replace(o, write_rows=lambda b, i, r: o.write_rows(b * 1, i, r)), "its rows are written to mul"),
    ):
        found = capture.capture(lambda change=change, **t: graph_of(change, t), trees)
        refused = [f for f in graph_lint.lint(found) if f.severity == "refused"]
        assert "cache" in {f.code for f in refused} and any(why in f.text for f in refused), refused


def graph_of(change, trees):
    rank = trees.pop("rank")
    out, cache = model.step(trees["params"], trees["cache"], trees["tokens"], trees["valid"], None, "all", change(buckets.rank_backend(SINGLE, ALONE, rank)))
    return {"out": out, "cache": cache}


def test_a_reader_of_the_old_rows_behind_the_write_keeps_a_cache_from_being_donated():
    def late(params, cache, x):
        index = torch.zeros((1, 1), dtype=torch.int32)
        new = ops.backend.write_rows(cache[0], index, x)
        return {"cache": (new,), "out": (cache[0].sum() + new.sum(),)}

    def early(params, cache, x):
        before = cache[0].sum()
        new = ops.backend.write_rows(cache[0], torch.zeros((1, 1), dtype=torch.int32), x)
        return {"cache": (new,), "out": (before + new.sum(),)}

    trees = {"params": (), "cache": (torch.empty(1, 4, 2, device="meta"),), "x": torch.empty(1, 1, 2, device="meta")}
    assert capture.capture(early, trees).donated == {"cache.0": "write_rows"}
    found = capture.capture(late, trees)
    assert not found.donated and "reads the old rows after they are written" in found.fresh["cache.0"]


def test_a_rank_that_is_a_constant_is_found():
    def step(rank):
        def fixed(params, cache, rank_unused, tokens, valid):
            found = buckets.rank_backend(LEAN, SQUARE, torch.full((), rank, dtype=torch.int32))
            boundary, cache = model.embed(params, cache, tokens, valid, None, found)
            return {"out": boundary.stream}

        return lambda params, cache, rank, tokens, valid: fixed(params, cache, rank, tokens, valid)

    graphs = [bucket_graph(small_config(), LEAN, SQUARE, PREFILL, step(r)) for r in (0, 3)]
    assert graph_read.graph_hash(graphs[0]) != graph_read.graph_hash(graphs[1])
    assert [f.code for f in graph_lint.lint(graphs[0]) if f.severity == "refused"] == ["rank"]


def test_a_run_on_fake_tensors_reads_nothing_on_the_host():
    config, mode = small_config(), FakeTensorMode()
    given = capture.fake(mode, without_memory(config, LEAN, SQUARE, Bucket("decode", 3)))
    with mode:
        found = buckets.function_of(Bucket("decode", 3), LEAN, SQUARE)(**given)
    assert found["emitted"].tokens.shape == (1, 3)


# The report

KEYS = {"graphs", "graph_hash", "host_reads", "refused_ops", "int64_tensors", "collectives", "bytes_per_rank", "step_seconds"}


@pytest.fixture(scope="module")
def report(found):
    return graph_report.as_dict(found)


def test_a_report_says_what_was_asked(report):
    assert report.keys() >= KEYS and report["graphs"] == 1 and report["host_reads"] == 0 and report["refused_ops"] == [] and report["int64_tensors"] == 0
    assert all(c.keys() >= {"axis", "ranks", "count", "bytes"} for c in report["collectives"]) and report["collectives_match_plan"]
    assert report["bytes_per_rank"]["total"] > 0 and report["step_seconds"]["floor"]["total"] > 0 and report["step_seconds"]["estimate"]["total"] > 0
    assert len(set(report["graph_hash_by_rank"].values())) == 1 and report["wrong"] == [] and report["measured_on_a_device"] is False
    assert report["primitives"]["rms_norm"]["nodes"] > 5 and set(report["without_kernel"]) <= set(report["primitives"])
    assert 0 < report["instructions"]["total"] < report["instructions"]["limit"]
    assert json.loads(json.dumps(report)) == report


def test_a_report_that_differs_from_the_plan_is_wrong(found):
    assert found.wrong == []
    other = replace(found, plan=replace(found.plan, collectives=found.plan.collectives[1:]))
    assert len(other.wrong) == 1 and "in the graph, 0 planned" in other.wrong[0]
    assert "ranks 0, 1 have different graphs" in replace(found, hashes={0: "a", 1: "b"}).wrong


def test_the_command_prints_json_and_tables_and_compares_two_reports(report, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "named_config", lambda name: small_config())
    line = ["graph", "--ranks", "2", "--bucket", "decode3", "--capacity", "32", "--regime", "faithful", "--hash-rank", "1"]
    run = CliRunner().invoke(cli, [*line, "--json"])
    assert run.exit_code == 0, run.output
    got = json.loads(run.stdout)
    assert got.keys() == report.keys() and list(got["graph_hash_by_rank"]) == ["1"]
    paths = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"]
    for path, value in zip(paths, (got, got | {"capture": {}}, report), strict=True):
        path.write_text(json.dumps(value))
    same = CliRunner().invoke(cli, ["graph", "--diff", str(paths[0]), str(paths[1])])
    assert same.exit_code == 0 and "no difference" in same.output
    differs = CliRunner().invoke(cli, ["graph", "--json", "--diff", str(paths[0]), str(paths[2])])
    assert differs.exit_code == 1 and {"ranks", "graph_hash"} <= {d["path"] for d in json.loads(differs.stdout)}
    monkeypatch.setattr(command, "graphed", lambda *a: (_ for _ in ()).throw(capture.CaptureError("host read at x.py:1: y")))
    refused = CliRunner().invoke(cli, [*line, "--json"])
    assert refused.exit_code == 1 and json.loads(refused.stdout)["host_reads"] == 1 and json.loads(refused.stdout).keys() >= KEYS


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--bucket", "prefill"], "bucket 'prefill'"),
        (["--bucket", "decode7"], "bucket decode7: 6 drafts a step, the model makes 5"),
        (["--ranks", "12"], "ranks 12"),
        (["--ranks", "0"], "ranks 0: at least 1"),
        (["--hash-rank", "64"], "rank 64"),
        (["--capacity", "2000000"], "capacity 2000000: between the 6 rows of decode6 and 1048576"),
        (["--rules", "leaner"], "rules 'leaner'"),
        (["--config", "nowhere.json"], "config: cannot read nowhere.json"),
        (["--regime", "released"], "regime 'released' with index_keys"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    run = CliRunner().invoke(cli, ["graph", *arguments])
    assert run.exit_code != 0 and isinstance(run.exception, ValueError) and text in str(run.exception)


@pytest.mark.parametrize("text", [b"[1,", b"\xff\xfe", b"[1, 2]", b"{}", b""])
def test_a_file_that_is_no_report_is_named_and_not_compared(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_bytes(text)
    run = CliRunner().invoke(cli, ["graph", "--diff", str(path), str(path)])
    assert isinstance(run.exception, ValueError) and str(run.exception).startswith(f"diff: {path} is no")


def test_a_number_below_zero_of_mib_is_a_usage_error():
    assert CliRunner().invoke(cli, ["graph", "--profile-mib", "-1"]).exit_code == 2


def held_bytes(params, part):
    """Bytes of the leaves whose path holds a word."""
    return sum(t.nbytes for n, t in tree.paths(params, "params") if part in n)


def test_prepared_experts_hold_the_scales_of_w1_and_w3_three_times_more_than_planned_and_the_rest_is_as_planned():
    """A lane reads a scale byte of its own and four lanes share a block of 32 columns: docs/neuron-graph.md 9."""
    placement = placed("lean", 64)
    stored = buckets.local_params(named_config("released"), v41.Numerics("trn2"), placement.rules, placement.mesh)
    held = packed(resident(stored, "fp4"))
    scales = held_bytes(stored, ".ffn.experts.w1.scale") + held_bytes(stored, ".ffn.experts.w3.scale")
    heads, token_map = held_bytes(held, ".ffn.experts.w1.scale"), held_bytes(held, "params.engram_map.")
    planned = plan(named_config("released"), placement, Bucket("decode", 6), 8192).bytes_per_rank["weights"]
    assert held_bytes(held, "params.") == planned + 3 * scales + heads + token_map
    assert 3 * scales / 2**20 == pytest.approx(518.9, abs=0.1) and (heads + token_map) / 2**20 < 1


# At full size


@pytest.mark.slow
def test_a_config_of_a_folder_on_one_rank_is_a_graph_too():
    run = CliRunner().invoke(cli, ["graph", "--config", str(ROOT / "checkpoints/tiny/config.json"), "--rules", "single", "--ranks", "1", "--json"])
    assert run.exit_code == 0 and json.loads(run.stdout).keys() >= KEYS


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["decode6", "decode1", "decode6x8", "prefill512", "prefill4096"])
def test_the_released_step_on_64_ranks_is_one_graph_as_planned(bucket):
    run = CliRunner().invoke(cli, ["graph", "--bucket", bucket, "--json"])
    assert run.exit_code == 0, run.output[-2000:]
    found = json.loads(run.stdout)
    assert found["graphs"] == 1 and found["host_reads"] == 0 and found["int64_tensors"] == 0 and found["refused_ops"] == []
    assert found["collectives_match_plan"] and found["caches"]["not_donated"] == 0 and len(set(found["graph_hash_by_rank"].values())) == 1
    assert found["capture"]["seconds"] < 600 and found["capture"]["peak_gib"] < 12


@pytest.mark.slow
@pytest.mark.capture
def test_torch_compile_sees_the_released_step_as_one_graph():
    placement, bucket, graphs = placed("lean", 64), Bucket("decode", 6), []
    params = buckets.local_params(named_config("released"), v41.Numerics("trn2"), placement.rules, placement.mesh)
    given = buckets.arguments(packed(resident(params, "fp4")), bucket, 8192)
    found = capture.capture(buckets.function_of(bucket, placement.rules, placement.mesh), given)

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    leaves = [t for _, t in capture.named(capture.fake(mode, given))]
    step = torch.compile(found.graph.forward, backend=count, fullgraph=True, dynamic=False)
    with mode, torch.no_grad():
        tokens = step(*leaves)[0]
    assert len(graphs) == 1 and tokens.shape == (1, 6)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
def test_rules_that_draw_are_graphs_too(rule):
    bucket = Bucket("decode", 3)
    given = buckets.arguments(packed(buckets.local_params(small_config(), v41.Numerics(), LEAN, SQUARE)), bucket, 32, rule)
    found = capture.capture(buckets.function_of(bucket, LEAN, SQUARE), given)
    assert not found.fresh and [f for f in graph_lint.lint(found) if f.severity == "refused"] == []
    assert {f"accept_{rule}", "uniforms", "chosen_from"} <= graph_read.kernels(found).keys()
