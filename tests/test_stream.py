# SPDX-License-Identifier: Apache-2.0
"""Streamed runs: the bytes of a run in memory, from the tensors that the tokens touch and no others, resumed after kills."""

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import v41
from tests.checkpoint_kit import TINY, make_folder, micro_folder, poke, small_json
from v41.checkpoint import open_folder, read_file_header
from v41.cli import cli
from v41.golden import make as making
from v41.golden.folder import open_golden
from v41.stream import Log, check_streamed, folder_source, make_part, make_streamed, prepare_run, recipe_source, stream_plan
from v41.stream.run import streamed

FAITHFUL = v41.Numerics()
LONG = [[0, *((i * 37 + 11) % 500 for i in range(80))], [0, *((i * 29 + 3) % 500 for i in range(40))]]  # leaves the window of 64
SHORT = [[0, 7, 300, 12, 45, 46, 47, 48, 9, 8]]  # leaves the micro model's window of 8
LAYERS = 3  # of the micro model


def in_memory(prompts, steps, out, numerics=FAITHFUL, checkpoint=TINY, recipe=None):
    return making.make(v41.load_params(checkpoint, numerics=numerics), prompts, steps, out, True, recipe, lambda done, total: None)


def same_files(a: Path, b: Path) -> None:
    """Every file byte for byte, the manifests but for `weights`."""
    assert sorted(f.name for f in a.iterdir()) == sorted(f.name for f in b.iterdir())
    for file in a.iterdir():
        if file.name != "manifest.json":
            assert file.read_bytes() == (b / file.name).read_bytes(), file.name
    left, right = (json.loads((folder / "manifest.json").read_text()) for folder in (a, b))
    assert {k for k in left if left[k] != right.get(k)} | (set(left) ^ set(right)) <= {"weights"}


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """A model of three narrow layers: a streamed run of half a second."""
    return micro_folder(tmp_path_factory.mktemp("micro") / "folder")


@pytest.fixture(scope="module")
def short(micro, tmp_path_factory):
    """A folder made in memory, and the same streamed."""
    path = tmp_path_factory.mktemp("short")
    in_memory(SHORT, 2, path / "memory", checkpoint=micro)
    make_streamed(prepare_run(micro, FAITHFUL), SHORT, 2, path / "streamed", True, None)
    return path


@pytest.mark.parametrize(
    ("numerics", "prompts", "steps", "small"),
    [
        (FAITHFUL, LONG, 1, False),
        (v41.Numerics("released"), LONG[:1], 2, True),
        (v41.Numerics("exact"), LONG, 2, True),
        (v41.Numerics("exact", dtype="float64"), LONG, 2, True),
    ],
    ids=["faithful", "released", "exact32", "exact64"],
)
def test_a_streamed_run_gives_the_files_of_a_run_in_memory(micro, tmp_path, numerics, prompts, steps, small):
    checkpoint = micro if small else TINY
    in_memory(prompts, steps, tmp_path / "memory", numerics, checkpoint)
    manifest = make_streamed(prepare_run(checkpoint, numerics), prompts, steps, tmp_path / "streamed", True, None)
    same_files(tmp_path / "memory", tmp_path / "streamed")
    assert manifest["weights"]["streamed"] and not (tmp_path / "streamed.records").exists()


def test_only_what_the_tokens_touch_is_read(short, micro):
    golden = open_golden(short / "streamed")
    read, config = golden.manifest["weights"]["read"], v41.Config.from_json(micro / "config.json")
    prefill, decode = golden.part("prefill"), golden.part("decode")
    taps = list(prefill.items()) + [(n.split(".", 1)[1], t) for n, t in decode.items()]
    routed = {(n.rsplit(".", 1)[0], e) for n, t in taps if n.endswith("route_experts") for e in t.flatten().tolist()}
    experts = {(n.split(".ffn.")[0], int(n.split(".")[4])) for n in read["whole"] if ".experts." in n}
    assert experts == routed and len(routed) < LAYERS * 16 + 4  # not simply all of them
    hashed = torch.cat([t.flatten(0, 1) for n, t in taps if n == "engram_hash_ids"])
    for table, layer in enumerate(config.engram_layer_ids):
        rows = {str(r) for r in hashed[:, table].flatten().tolist()}
        for kind in ("weight", "scale"):
            assert set(read["rows"][f"layers.{layer}.engram.embed.{kind}"]) == rows
    outputs = golden.part("outputs")
    drafted_from = outputs["spec.output_ids"][:, :, 0].flatten().tolist()
    ids = {*SHORT[0], *outputs["tokens"].flatten().tolist(), *drafted_from, config.dspark_noise_token_id}
    last = int(outputs["tokens"][0, -1])  # fed to the last draft only
    assert set(map(int, read["rows"]["embed.weight"])) == ids | {last}
    dense = {n for n in open_folder(micro).entries if ".experts." not in n and ".engram.embed." not in n and n != "embed.weight"}
    assert {n for n in read["whole"] if ".experts." not in n} == dense


def test_the_digests_are_those_of_the_tensors(short, micro):
    read, params = open_golden(short / "streamed").manifest["weights"]["read"], v41.load_params(micro)
    digests = v41.params_io.tensor_digests(params)
    assert all(digests[name] == value for name, value in read["whole"].items()) and len(read["whole"]) > 250
    assert open_golden(short / "memory").manifest["weights"]["read"]["whole"] == digests
    row = next(iter(read["rows"]["embed.weight"]))
    from v41.golden.folder import digest

    assert read["rows"]["embed.weight"][row] == digest(params.embed[int(row)])


def test_the_plan_bounds_what_each_unit_reads(micro):
    config, counts = v41.Config.from_json(micro / "config.json"), {}
    job = prepare_run(micro, FAITHFUL)
    seen = {"bytes": 0}

    def on_read(count):
        seen["bytes"] += count

    def on_unit(name):
        counts[name], seen["bytes"] = seen["bytes"], 0

    job = replace(job, source=replace(job.source, on_read=on_read), on_unit=on_unit)
    tokens, lengths = making.prompt_tensor(SHORT)
    making.compute(job.params, tokens, lengths, 1, True, run=streamed(job))
    plan = {u.name: u for u in stream_plan(config, len(SHORT[0]), 1)}
    assert set(counts) == {n for n in plan if not n.endswith("embed")}
    for name, count in counts.items():
        extra = plan[name.split(".")[0] + ".embed"].most if name.endswith("layer000") else 0  # the embedding rows before it
        assert plan[name].least <= count <= plan[name].most + extra, name
    assert any(plan[n].least < count < plan[n].most for n, count in counts.items())


# Killed and resumed


def killed_child(micro: Path, out: Path, wanted: int, delay: float) -> int:
    """Forks a run and kills it with SIGKILL `delay` seconds after `wanted` records are there; the number of records that it left."""
    child = os.fork()
    if child == 0:
        try:
            make_streamed(prepare_run(micro, FAITHFUL), SHORT, 2, out, True, None)
        finally:
            os._exit(0)
    records = out.with_name(out.name + ".records")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(records.glob("call*.safetensors"))) < wanted:
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the run ended before it was killed"
    return len(list(records.glob("call*.safetensors")))


def test_a_run_killed_at_any_point_goes_on_and_gives_the_same_bytes(short, micro, tmp_path):
    out, dice = tmp_path / "out", random.Random(5)
    left = [killed_child(micro, out, wanted, dice.uniform(0, 0.02)) for wanted in (0, dice.randrange(1, 4), dice.randrange(6, 10), 12)]
    assert left == sorted(left) and left[-1] >= 12 and not (out / "manifest.json").exists()
    units = []
    job = replace(prepare_run(micro, FAITHFUL), on_unit=units.append)
    reads = []
    job = replace(job, source=replace(job.source, on_read=reads.append))
    make_streamed(job, SHORT, 2, out, True, None)
    whole = sum(u.most for u in stream_plan(job.params.config, len(SHORT[0]), 2))
    assert len(units) == 3 * (LAYERS + 2) and 0 < sum(reads) < whole / 4, "units with a record were computed again"
    for file in (short / "streamed").iterdir():
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name
    assert not out.with_name("out.records").exists()


def test_records_of_another_run_and_damaged_ones_are_refused(micro, tmp_path):
    out, records = tmp_path / "out", tmp_path / "out.records"
    make_part(prepare_run(micro, FAITHFUL), SHORT, 0, out, True, None, (0, 2))
    assert sorted(f.name for f in records.iterdir()) == ["call00000.layer000.safetensors", "call00000.layer001.safetensors", "job.json"]
    others = ((LONG, 0, FAITHFUL, "prompt"), (SHORT, 1, FAITHFUL, "steps"), (SHORT, 0, v41.Numerics("exact"), "numerics"))
    for prompts, steps, numerics, what in others:
        with pytest.raises(ValueError, match=rf"records of another run \({what} differ\)"):
            make_streamed(prepare_run(micro, numerics), prompts, steps, out, True, None)
    file = records / "call00000.layer001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="layer001.safetensors: damaged"):
        make_streamed(prepare_run(micro, FAITHFUL), SHORT, 0, out, True, None)
    (records / "job.json").unlink()
    with pytest.raises(ValueError, match="it is no folder of records"):
        make_streamed(prepare_run(micro, FAITHFUL), SHORT, 0, out, True, None)


def test_a_record_holds_the_boundary_behind_its_layer(micro, tmp_path):
    make_part(prepare_run(micro, FAITHFUL), SHORT, 0, tmp_path / "out", True, None, (0, 2))
    params = v41.load_params(micro)
    cache = v41.init_cache(params, 1, len(SHORT[0]) + 1)
    boundary, cache = v41.embed(params, cache, torch.tensor(SHORT))
    boundary, cache = v41.layers(params, cache, boundary, 0, 2)
    file = tmp_path / "out.records" / "call00000.layer001.safetensors"
    entries = read_file_header(file).entries
    from v41.checkpoint import read_tensor

    handed = {"handed.topk_idxs": boundary.handed.topk_idxs, "state.window": cache.layers[1].window}
    for name, want in {"stream": boundary.stream, "pre": boundary.pre, **handed}.items():
        assert torch.equal(read_tensor(file, name, entries[name]), want), name


def test_layers_run_in_parts_and_the_whole_run_takes_their_records(short, micro, tmp_path):
    out = tmp_path / "out"

    def part(layers):
        return make_part(prepare_run(micro, FAITHFUL), SHORT, 2, out, True, None, layers)

    part((0, 1))
    with pytest.raises(ValueError, match="layer 2 needs the boundary behind layer 1; .* no record of layer 1: run 1:2 first"):
        part((2, 3))
    manifest = part((1, 2))
    assert manifest["run"]["layers"] == [1, 2] and {n.split(".")[1] for n in manifest["tensors"]["prefill"]} == {"1"}
    whole, piece = open_golden(short / "memory"), open_golden(out)
    for name, tensor in piece.part("prefill").items():
        assert torch.equal(tensor, whole.read("prefill", name)), name
    assert all(d.status == "equal" for d in check_streamed(piece, micro, 0.0))
    make_streamed(prepare_run(micro, FAITHFUL), SHORT, 2, out, True, None)
    for file in (short / "streamed").iterdir():
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name


# What golden check says


def first_read(golden, text):
    read = golden.manifest["weights"]["read"]
    return next(n for n in read["whole"] if text in n)


KINDS = ["layers.2.attn.wo_b.weight", "layers.1.ffn.experts", "mtp.0.ffn.experts", "head.weight", "layers.2.ffn.gate.bias"]


@pytest.mark.parametrize("text", KINDS)
def test_a_changed_byte_is_found_and_its_tensor_named(short, micro, tmp_path, text):
    path = shutil.copytree(micro, tmp_path / "changed")
    golden = open_golden(short / "streamed")
    name = first_read(golden, text)
    raw = open_folder(path).read(name).view(torch.uint8).flatten()
    poke(path, name, 9, int(raw[9]) ^ 1)
    found = check_streamed(golden, path, 0.0)
    wrong = [d.name for d in found if d.name.startswith("weights/")]
    assert f"weights/{name}" in wrong and found[0].status == "differs"
    if text == "head.weight":
        result = CliRunner().invoke(cli, ["golden", "check", str(short / "streamed"), str(path)])
        assert result.exit_code == 1 and wrong[0] in result.output


def test_a_changed_row_is_found_and_an_unread_one_is_not(short, micro, tmp_path):
    path, golden = shutil.copytree(micro, tmp_path / "changed"), open_golden(short / "streamed")
    name = "layers.0.engram.embed.weight"
    read = set(map(int, golden.manifest["weights"]["read"]["rows"][name]))
    rows, width = open_folder(path).entries[name].shape
    unread = next(r for r in range(rows) if r not in read)
    poke(path, name, unread * width, 0x11)
    assert all(d.status == "equal" for d in check_streamed(golden, path, 0.0))
    row = max(read)
    raw = open_folder(path).rows(name, row, row + 1).view(torch.uint8).flatten()
    poke(path, name, row * width, int(raw[0]) ^ 1)
    first = check_streamed(golden, path, 0.0)[0]
    assert (first.name, first.worst, first.numbers["rows"]) == (f"weights/{name}", [row], [row])


def test_a_run_in_memory_names_the_changed_tensor_too(short, micro, tmp_path):
    path = shutil.copytree(micro, tmp_path / "changed")
    raw = open_folder(path).read("norm.weight").view(torch.uint8).flatten()
    poke(path, "norm.weight", 1, int(raw[1]) ^ 1)
    result = CliRunner().invoke(cli, ["golden", "check", str(short / "memory"), str(path)])
    assert result.exit_code != 0 and "1 tensors differ: norm.weight" in str(result.exception)


def test_bytes_that_change_during_a_run_are_an_error():
    log = Log({"a": "x"}, {"t": {"3": "y"}})
    log.add(Log({"a": "x", "b": "z"}, {"t": {"3": "y", "4": "w"}}))
    with pytest.raises(ValueError, match="a: sha256 q, before in this run x: the checkpoint changed"):
        log.add(Log({"a": "q"}))
    with pytest.raises(ValueError, match="t row 4: sha256 v"):
        log.add(Log(rows={"t": {"4": "v"}}))


def test_nan_codes_are_refused_with_the_file_when_they_are_reached(micro, tmp_path):
    path = make_folder(tmp_path / "small", small_json())
    file = poke(path, "layers.0.attn.wq_a.scale", 0, 0xFF)
    job = prepare_run(path, FAITHFUL)
    with pytest.raises(ValueError) as error:
        make_streamed(job, [[1, 2, 3]], 0, tmp_path / "out", True, None)
    assert str(error.value).startswith(f"{file}: layers.0.attn.wq_a.scale: byte 0xFF at [0, 0]")


def test_nan_codes_in_rows_are_refused_with_their_row(tmp_path):
    path = micro_folder(tmp_path / "micro")
    name, source = "layers.0.engram.embed.weight", folder_source(open_folder(path))
    poke(path, name, 17 * open_folder(path).entries[name].shape[1] + 3, 0x7F)
    assert source.gather(name, torch.tensor([16, 18])).shape[0] == 2
    with pytest.raises(ValueError, match=rf"model-.*: {name} row 17: byte 0x7F at \[3\] is NaN"):
        source.gather(name, torch.tensor([16, 17]))


def test_records_of_another_checkpoint_are_refused(micro, tmp_path):
    path = shutil.copytree(micro, tmp_path / "other")
    make_part(prepare_run(path, FAITHFUL), SHORT, 0, tmp_path / "out", True, None, (0, 1))
    raw = open_folder(path).read("norm.weight").view(torch.uint8).flatten()
    poke(path, "norm.weight", 0, int(raw[0]) ^ 1)
    with pytest.raises(ValueError, match=r"records of another run \(norm_sha256 differ\)"):
        make_streamed(prepare_run(path, FAITHFUL), SHORT, 0, tmp_path / "out", True, None)


# Sources


def test_the_recipe_is_a_source_like_a_folder_of_it(micro, tmp_path):
    path = make_folder(tmp_path / "small", small_json(draft=True), seed=9)
    folder = folder_source(open_folder(path))
    made = recipe_source(v41.Config.from_json(path / "config.json"), 9)
    ids = torch.tensor([[5, 0], [63, 5]])
    for source in (folder, made):
        for name in open_folder(path).entries:
            source.read(name)
        source.gather("embed.weight", ids)
        assert torch.equal(source.read_as("head.weight", torch.float32), folder.read("head.weight").float())
    assert folder.log == made.log and set(made.log.rows["embed.weight"]) == {"0", "5", "63"}
    assert torch.equal(folder.gather("embed.weight", ids).view(torch.int16), folder.read("embed.weight")[ids.flatten()].view(torch.int16))


def test_a_model_without_draft_engram_and_index_streams(micro, tmp_path):
    path = make_folder(tmp_path / "small", small_json())
    in_memory([[1, 2, 3], [4]], 2, tmp_path / "memory", checkpoint=path)
    make_streamed(prepare_run(path, FAITHFUL), [[1, 2, 3], [4]], 2, tmp_path / "streamed", True, None)
    same_files(tmp_path / "memory", tmp_path / "streamed")


# The command


def test_the_command_streams_checks_and_refuses(short, micro, tmp_path):
    def run(*arguments):
        return CliRunner().invoke(cli, ["golden", *arguments])

    ids, out = ["--ids", ",".join(map(str, SHORT[0])), "--steps", "2", "--taps"], str(tmp_path / "out")
    made = run("make", str(micro), *ids, "--out", out, "--stream", "--json")
    assert made.exit_code == 0 and json.loads(made.stdout)["tensors"] > 100
    for file in (short / "streamed").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    assert run("check", out, str(micro)).exit_code == 0
    assert run("diff", out, str(short / "memory")).exit_code == 0
    for arguments, message in (
        (["--layers", "0:2"], "--layers: only with --stream"),
        (["--stream", "--layers", "2:2"], "expected a:b with 0 <= a < b <= 3"),
        (["--stream", "--layers", "0:4"], "expected a:b"),
        (["--stream", "--layers", "-1:2"], "expected a:b"),
    ):
        refused = run("make", str(micro), *ids, "--out", out, *arguments)
        assert refused.exit_code == 1 and message in str(refused.exception)
