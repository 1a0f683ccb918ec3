# SPDX-License-Identifier: Apache-2.0
"""Ranks on one machine (docs/sharding.md 6 to 8): how they meet, how a run that cannot go on ends, what a rank reads, what it leaves."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from sharded_kit import SQUARE, big_config, first_difference, made, short_call, square_config
from torch import fx

import v41
from v41 import tree
from v41.backends.cpu import backend as cpu
from v41.backends.cpu.gloo import run_rank
from v41.backends.cpu.ranks import RankError, run_ranks
from v41.backends.sharded import Placed, Wire
from v41.checkpoint import read_header, read_tensor
from v41.cli import cli
from v41.golden import ranks as rank_golden
from v41.golden.compare import check
from v41.golden.folder import digest, open_golden
from v41.golden.make import compute
from v41.rank_params import load_rank
from v41.sharding.mesh import MESHES, grid
from v41.sharding.shard import as_bytes, read_bytes, shard_params
from v41.sharding.tables import TABLES, lean, pr71, tp
from v41.spec.numerics import Numerics

ROOT = Path(__file__).parents[1]
TINY = ROOT / "checkpoints" / "tiny"
PAIR = grid(1, 2)
slow = pytest.mark.slow


# Meeting


def test_sums_are_taken_in_the_order_of_the_ranks():
    values = [1.0, 2.0**24, -(2.0**24), 3.0]  # in fp32 the order decides: ((1 + 2^24) - 2^24) + 3 = 3

    def each(rank, ops):
        return ops.all_reduce(torch.tensor([values[rank]]), "experts")

    assert [v.tolist() for v in run_ranks(each, SQUARE, pr71).values] == [[3.0]] * 4


def test_groups_are_those_of_the_mesh_and_shares_lie_side_by_side():
    def each(rank, ops):
        x = torch.tensor([[float(rank)]])
        attention = ops.all_reduce(x, "o_groups")
        return attention, ops.all_gather(x, "head.vocab", -1), ops.first("head.vocab", 10, x.device), ops.first("o_groups", 10, x.device)

    for rank, (reduced, gathered, first, group) in enumerate(run_ranks(each, SQUARE, pr71).values):
        assert reduced.item() == (1.0 if rank < 2 else 5.0)
        assert gathered.tolist() == [[0.0, 1.0, 2.0, 3.0]]
        assert first.item() == 10 * rank and group.item() == 10 * (rank % 2) and first.dtype == torch.int32


def test_integer_sums_are_exact_and_twenty_runs_are_the_same():
    g = torch.Generator().manual_seed(0)
    whole = torch.randint(-1000, 1000, (8, 64), generator=g).float()
    noise = torch.randn(8, 64, generator=g)

    def each(rank, ops):
        return ops.all_reduce(whole[rank], "experts"), ops.all_reduce(noise[rank], "experts")

    first = None
    for _ in range(20):
        values = run_ranks(each, MESHES[8], pr71).values
        first = values[0] if first is None else first
        assert all(torch.equal(v[0], whole.sum(0)) and torch.equal(v[1], first[1]) for v in values)


def test_a_term_enters_a_joint_sum_once_whoever_holds_it():
    def each(rank, ops):
        return ops.sum_terms((torch.tensor([1.0]), torch.tensor([100.0])), ("experts moe_inter", "shared_inter"))

    # pr71: the shared expert is whole on each rank; tpxep: cut over the group of two, the experts over all four; tp: both over the group.
    assert [v.item() for v in run_ranks(each, SQUARE, pr71).values] == [104.0] * 4
    assert [v.item() for v in run_ranks(each, SQUARE, TABLES["tpxep"]).values] == [204.0] * 4
    assert [v.item() for v in run_ranks(each, SQUARE, tp).values] == [202.0] * 4


def test_the_place_of_a_rank_is_a_tensor_so_that_ranks_share_one_graph():
    refuse = Wire(lambda t, axes, axis: pytest.fail("no meeting"), lambda t, axes, axis: pytest.fail("no meeting"))
    traced = []
    for rank in range(2):

        def first(r, ids):
            return ids - Placed(pr71, MESHES[64], r, refuse).first("engram_rows", 2**20, ids.device)

        at = torch.tensor(rank + 17, dtype=torch.int32)
        graph = fx.symbolic_trace(first)
        assert graph(at, torch.tensor([2**24 + 1], dtype=torch.int32)).item() == 2**24 + 1 - (rank + 17) * 2**20
        traced.append(graph.code)
    assert traced[0] == traced[1]


def test_every_rank_computes_on_one_thread_without_gradients():
    def each(rank, ops):
        return torch.get_num_threads(), torch.is_grad_enabled()

    assert run_ranks(each, PAIR, tp).values == [(1, False)] * 2


# Ends


def fails(rank, ops):
    ops.all_reduce(torch.zeros(2), "o_groups")
    if rank == 1:
        raise ValueError("no such row")
    return ops.all_reduce(torch.zeros(2), "o_groups")


def another_shape(rank, ops):
    return ops.all_reduce(torch.zeros(2 + (rank == 2)), "experts")


def another_dtype(rank, ops):
    return ops.all_reduce(torch.zeros(2, dtype=torch.float64 if rank == 3 else torch.float32), "experts")


def another_axis(rank, ops):
    return ops.all_reduce(torch.zeros(2), "index_heads" if rank == 0 else "o_groups")


def another_order(rank, ops):
    first, second = ("experts", "o_groups") if rank != 3 else ("o_groups", "experts")
    return ops.all_reduce(ops.all_reduce(torch.zeros(2), first), second)


def returns_early(rank, ops):
    return None if rank == 2 else ops.all_reduce(torch.zeros(2), "experts")


def narrow(rank, ops):
    return ops.all_reduce(torch.zeros(2, dtype=torch.bfloat16), "experts")


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (fails, r"rank 1 failed after 1 collectives at tests/test_ranks.py:\d+: ValueError: no such row"),
        (another_shape, r"rank 2 comes to reduce of experts over replica x attn, float32 \[3\] .* rank 0 of its group to .* float32 \[2\]"),
        (another_dtype, r"rank 3 comes to reduce of experts over replica x attn, float64 \[2\]"),
        (another_axis, r"rank 0 comes to reduce of index_heads.*rank 1 .*o_groups|rank 1 comes to reduce of o_groups.*rank 0 .*index_heads"),
        (another_order, r"no rank can go on: rank 0 waits in reduce of experts .* rank 3 waits in reduce of o_groups"),
        (returns_early, r"no rank can go on: .*rank 3 waits in reduce of experts .*; returned: 2"),
        (narrow, r"rank 0 failed after 0 collectives .*partial sums in torch.bfloat16"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_run_that_cannot_go_on_names_the_rank_and_its_place(fn, text):
    start = time.monotonic()
    with pytest.raises(RankError, match=text):
        run_ranks(fn, SQUARE, pr71)
    assert time.monotonic() - start < 5


def test_a_rank_that_never_comes_ends_the_run():
    done = []

    def each(rank, ops):
        while rank == 1 and not done:
            time.sleep(0.01)
        return ops.all_reduce(torch.zeros(1), "o_groups")

    with pytest.raises(RankError, match=r"rank 1 has not come to its next collective for 0.2 s \(after 0 collectives at tests/test_ranks.py:\d+"):
        run_ranks(each, PAIR, tp, patience=0.2)
    done.append(True)


def test_a_failure_inside_the_model_names_its_line():
    params = made(square_config())

    def each(rank, ops):
        mine = shard_params(params, pr71, SQUARE, rank)
        if rank == 3:
            layer = mine.layers[1]
            mine = replace(mine, layers=(mine.layers[0], replace(layer, attn=replace(layer.attn, q_norm=layer.attn.q_norm[:-1])), mine.layers[2]))
        return v41.step(mine, v41.init_cache(mine, 1, 8), torch.tensor([[1, 2]]), ops=ops)

    with pytest.raises(RankError, match=r"rank 3 failed after \d+ collectives at ops/norm.py:\d+: RuntimeError"):
        run_ranks(each, SQUARE, pr71)


# Loading


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(a folder, its parameters) of a model whose sizes divide over 2 x 2."""
    params, path = made(square_config()), tmp_path_factory.mktemp("square")
    v41.save_params(params, path)
    (path / "config.json").write_text(json.dumps(square_json()), encoding="utf-8")
    return path, params


def square_json():
    """The published form of the square config: its own fields put into the file of the config that it was made from."""
    config = square_config()
    published = config.to_dict()
    text = published["text_config"]
    for key in text:
        if hasattr(config, key) and key != "rope_scaling":
            value = getattr(config, key)
            text[key] = list(value) if isinstance(value, tuple) else value
    return published


@pytest.mark.parametrize("name", ["pr71", "lean", "tp"])
def test_a_rank_reads_its_slices_and_no_other_byte(saved, name):
    path, params = saved
    rules = TABLES[name]
    for rank in range(SQUARE.size):
        loaded = load_rank(path, rules, SQUARE, rank, token_map=params.engram_map.token_map)
        want = shard_params(params, rules, SQUARE, rank)
        for (place, got), (_, tensor) in zip(tree.paths(loaded.params), tree.paths(want), strict=True):
            assert got.dtype == tensor.dtype and torch.equal(as_bytes(got), as_bytes(tensor)), place
        assert loaded.held == read_bytes(params.config, rules, SQUARE, rank)
        assert loaded.held <= loaded.read < sum(t.nbytes for t in tree.leaves(replace(params, engram_map=None)))
        if name == "pr71":  # wo_b is the only matrix of which it holds columns
            assert loaded.read - loaded.held == sum(t.weight.nbytes + t.scale.nbytes for t in (p.attn.wo_b for p in (*want.layers, *want.draft.stages)))


def test_rules_that_do_not_fit_are_refused_before_anything_is_read():
    with pytest.raises(ValueError, match="does not divide|cut a block"):
        load_rank(TINY, lean, MESHES[8], 0)


# Golden outputs of ranks


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    out = tmp_path_factory.mktemp("golden") / "ranks"
    made = rank_golden.make(TINY, pr71, PAIR, Numerics(), [[0, 5, 6, 7, 8]], 1, out, True, None)
    return out, made


def test_what_ranks_bring_makes_what_all_have(golden):
    out, made = golden
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["order"] == made["order"] and list(manifest["ranks"]) == ["rank00", "rank01"]
    whole = open_golden(out / "whole")
    brought = [{n: read_tensor(f, n, e) for n, e in read_header(f).items()} for f in (out / r / "brought.safetensors" for r in manifest["ranks"])]
    assert all(b.keys() == set(manifest["order"]) == manifest["combine"].keys() for b in brought)
    for layer in range(8):
        name = f"prefill.layers.{layer}.attn_out.o_groups"
        assert manifest["combine"][name] == {"rule": "sum", "dtype": "float32", "axis": "o_groups", "mesh_axes": ["attn"]}
        total = (brought[0][name] + brought[1][name]).to(torch.bfloat16)
        assert torch.equal(total, whole.read("prefill", f"layers.{layer}.attn_out"))
        assert not torch.equal(brought[0][name].to(torch.bfloat16), total)
    name = "step0.logits.head.vocab"
    assert manifest["combine"][name] == {"rule": "concat", "dim": -1, "axis": "head.vocab", "mesh_axes": ["attn"]}
    logits = torch.cat([b[name] for b in brought], -1)[..., :512]
    assert torch.equal(logits, whole.read("decode", "step0.logits"))


def test_what_all_ranks_have_is_a_golden_folder_of_the_whole_model(golden):
    differences = check(open_golden(golden[0] / "whole"), TINY, 1e-2)
    assert len(differences) > 150 and {d.status for d in differences} <= {"equal", "close"}


def test_the_command_makes_a_folder_of_ranks(tmp_path):
    arguments = ["golden", "make", str(TINY), "--ids", "0,5,6", "--steps", "0", "--out", str(tmp_path / "out")]
    made = CliRunner().invoke(cli, [*arguments, "--ranks", "2", "--rules", "tp", "--json"])
    assert made.exit_code == 0, made.output
    told = json.loads(made.output)
    assert told["ranks"] == 2 and told["rules"] == "tp" and told["bytes_held"]["most"] < 8_863_954 and told["collectives"] > 20
    for bad in (["--ranks", "3"], ["--ranks", "2", "--stream"], ["--ranks", "2", "--rules", "none"], ["--ranks", "8", "--rules", "lean"]):
        assert isinstance(CliRunner().invoke(cli, [*arguments, *bad]).exception, ValueError), bad


def test_ranks_that_differ_in_a_result_are_refused():
    a, b = {"prefill": {"x": torch.tensor([0.0])}}, {"prefill": {"x": torch.tensor([-0.0])}}
    assert rank_golden.same_on_all([a, a]) == 1
    with pytest.raises(ValueError, match="prefill/x: ranks 0 and 1 differ"):
        rank_golden.same_on_all([a, b])


def test_a_folder_with_other_files_is_not_written_to(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds notes.txt"):
        rank_golden.make(TINY, pr71, PAIR, Numerics(), [[1]], 0, tmp_path, True, None)


# Processes


def forked(ranks, fn):
    """What fn(rank) gives in each of so many gloo processes, or the text of its exception. They are forks: torch is there already."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def process(rank, file):
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
        try:
            results.put((rank, fn(rank)))
        except Exception as e:
            results.put((rank, str(e)))
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as place:
        processes = [context.Process(target=process, args=(r, f"{place}/store")) for r in range(ranks)]
        for p in processes:
            p.start()
        found = dict(results.get(timeout=60) for _ in processes)
        for p in processes:
            p.join(60)
    return [found[r] for r in range(ranks)]


def digests(tensors):
    return {n: digest(t.clone(memory_format=torch.contiguous_format)) for n, t in tensors.items()}


@pytest.mark.parametrize(("mesh", "name"), [(PAIR, "lean"), (SQUARE, "pr71"), *(pytest.param(SQUARE, t, marks=slow) for t in ("lean", "tp", "ep"))])
def test_gloo_processes_give_the_bits_of_threads(mesh, name):
    params, rules = made(square_config()), TABLES[name]
    local = [shard_params(params, rules, mesh, r) for r in range(mesh.size)]
    threads = run_ranks(lambda r, ops: short_call(local[r], ops), mesh, rules)

    def process(rank):
        found, meetings = run_rank(lambda r, ops: short_call(local[r], ops), mesh, rules)
        return digests(found), len(meetings)

    for rank, told in enumerate(forked(mesh.size, process)):
        assert told == (digests(threads.values[rank]), len(threads.meetings[rank]))
    want = short_call(params, cpu)
    want = {n: t for n, t in want.items() if n != "spec.logits"}
    assert first_difference({n: t for n, t in threads.values[0].items() if n != "spec.logits"}, want) is None


def test_gloo_processes_that_disagree_end_with_rank_and_collective():
    def process(rank):
        return run_rank(lambda r, ops: ops.all_reduce(torch.zeros(2 + r), "o_groups"), PAIR, tp)

    a, b = forked(2, process)
    assert "rank 0 comes to collective 0, reduce of o_groups over attn, float32 [2]; ranks [1] of its group" in a
    assert "rank 1 comes to collective 0, reduce of o_groups over attn, float32 [3]; ranks [0] of its group" in b


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@slow
def test_the_command_for_torchrun_tells_tokens_and_bytes():
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "v41.cli.gloo", str(TINY), "--rules", "pr71", "--ids", "0,5,6,7,8", "--steps", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=os.environ | common | {"RANK": str(r), "LOCAL_RANK": str(r)}, **pipes) for r in range(2)]
    ends = [p.communicate(timeout=240) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], ends[0][1][-2000:]
    told = json.loads(ends[0][0].splitlines()[-1])
    tokens, lengths = rank_golden.prompt_tensor([[0, 5, 6, 7, 8]])
    assert told["alike"] and told["tokens"] == compute(v41.load_params(TINY), tokens, lengths, 1, False)["outputs"]["tokens"].tolist()
    assert told["bytes_held"] == read_bytes(v41.Config.from_json(TINY / "config.json"), pr71, PAIR, 0)


def test_64_ranks_of_the_big_model_hold_an_expert_each():
    config = big_config()
    params = made(config)
    mine = shard_params(params, pr71, MESHES[64], 5)
    assert mine.layers[0].ffn.experts.w1.weight.shape[0] == 1
    assert torch.equal(mine.layers[0].ffn.experts.w1.weight[0], params.layers[0].ffn.experts.w1.weight[5])
