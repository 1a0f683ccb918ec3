# SPDX-License-Identifier: Apache-2.0
"""`v41 inspect`: the published totals from a hollow folder of true size, what is missing, digests, and the probe with planted bytes."""

import json
import os
import shutil
import time
from collections import Counter

import pytest
import torch
from click.testing import CliRunner

import v41
from tests.checkpoint_kit import TINY, make_folder, micro_folder, poke, poke_open, rewrite, script, small_json
from v41.checkpoint import INDEX, open_folder
from v41.cli import cli
from v41.inspect_digest import compare_digests, folder_digests, tensor_digest
from v41.inspect_probe import FP4, FP8, HASHES, RELEASED, Verdict, greedy_tokens, hash_rows, probe, stored_bytes
from v41.params_io import tensor_digests
from v41.stream import folder_source, prepare_run

# The published components: tensors, bytes, parameters.
PUBLISHED = {
    "token embedding": (1, 1_323_827_200, 661_913_600),
    "head, final norm": (2, 1_323_837_440, 661_918_720),
    "backbone attention": (520, 5_069_721_600, 5_064_696_320),
    "compressors": (11, 36_704_256, 18_352_128),
    "indexers": (32, 45_130_752, 43_516_416),
    "block norms": (80, 819_200, 409_600),
    "router gates": (120, 157_409_280, 78_673_920),
    "routed experts": (92_160, 288_777_830_400, 543_581_798_400),
    "shared experts": (240, 1_416_960_000, 1_415_577_600),
    "hyper-connections": (240, 157_295_040, 39_323_760),
    "engram tables": (4, 202_758_032_400, 196_613_849_600),
    "engram resident": (8, 315_043_840, 314_654_720),
    "vision tower": (259, 823_685_120, 411_842_560),
    "aligner, image delimiters": (7, 146_851_840, 73_425_920),
    "draft routed experts": (2_304, 7_219_445_760, 13_589_544_960),
    "draft attention": (39, 380_229_120, 379_852_224),
    "draft shared experts": (18, 106_272_000, 106_168_320),
    "draft gates, mixes, norms": (33, 15_793_800, 4_946_850),
    "draft heads": (7, 211_133_952, 144_850_176),
}
PER_LAYER = {0: 2334, 1: 2340, 2: 2342, 14: 2348, 20: 2341, 24: 2337, 39: 2334}


def run(*arguments):
    result = CliRunner().invoke(cli, ["inspect", *map(str, arguments)])
    refused = result.exception is not None and not isinstance(result.exception, SystemExit)
    return result.exit_code, str(result.exception) if refused else result.output


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """48 shards of the released sizes whose payloads are holes."""
    path = tmp_path_factory.mktemp("released") / "folder"
    try:
        script("make_released").make(path)
    except OSError as error:
        pytest.skip(f"this filesystem has no sparse files of 100 GB: {error}")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def opened(released):
    return open_folder(released)


@pytest.fixture(scope="module")
def report(released):
    start = time.process_time()
    found = v41.inspect_folder(released)
    assert time.process_time() - start < 20, "headers of 96,085 tensors take about 5 s of one core"
    return found


@pytest.fixture
def small(tmp_path):
    return make_folder(tmp_path / "small", small_json(draft=True, vision=True))


# The released sizes


def test_a_folder_of_released_size_takes_little_disk_and_adds_up(released, report):
    files = [f.stat() for f in released.iterdir()]
    assert sum(f.st_size for f in files) > 510_286_023_000 and sum(512 * f.st_blocks for f in files) < 100e6
    assert {name: (c.tensors, c.bytes, c.parameters) for name, c in report.components.items()} == PUBLISHED
    assert (report.total.tensors, report.total.bytes, report.total.parameters) == (96_085, 510_286_023_000, 763_205_315_794)
    assert len(report.shards) == 48 and report.shards["model-00047-of-00048.safetensors"].tensors == 6
    assert report.complete and [(p.what, p.tensors, p.bytes) for p in report.passed_over] == [("vision", 266, 823_685_120 + 146_851_840)]


def test_layer_roles_follow_the_plan_and_the_tensors(opened, report):
    lines, names = report.layers, set(opened.entries)
    assert Counter(line.role for line in lines) == {"window": 2, "full": 4, "reindex": 4, "reuse": 30}
    for line in lines:
        indexer = f"layers.{line.layer}.attn.indexer."
        by_tensors = "full" if indexer + "wk.weight" in names else "reindex" if indexer + "wq_b.weight" in names else "reuse"
        assert line.role == ("window" if line.ratio == 0 else by_tensors)
        assert line.engram == (f"layers.{line.layer}.engram.q_weight" in names)
    assert {i: lines[i].count.tensors for i in PER_LAYER} == PER_LAYER
    assert [line.layer for line in lines if line.candidates == "makes"] == [20] and lines[24].candidates == "reads"


def test_engram_rows_come_out_of_the_shard_of_101_gb(released, opened):
    name = "layers.1.engram.embed.weight"
    assert (released / opened.files[name]).stat().st_size > 101e9
    source = folder_source(opened)
    rows = torch.tensor([384_006_167, 0, 123_456_789])
    found = source.gather(name, rows)
    assert found.shape == (3, 256) and not found.view(torch.uint8).any()
    poke_open(opened, name, 123_456_789 * 256, bytes(range(64)) * 4)
    assert opened.gather(name, [123_456_789]).view(torch.uint8)[0].tolist() == list(range(64)) * 4
    with pytest.raises(ValueError, match="row 384006168 of 384006168"):
        source.gather(name, rows + 1)


# What is wrong with a folder


def test_a_whole_folder_is_complete_and_one_without_its_draft_only_when_asked(small):
    assert run(small)[0] == 0
    code, text = run(small, "--json")
    told = json.loads(text)["report"]
    assert code == 0 and told["complete"] and told["components"]["vision tower"]["tensors"] == 11
    rewrite(small, lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")])
    code, text = run(small)
    assert code == 1 and "missing: mtp.0.hc_attn_fn" in text and "missing: and 29 more" in text and "not complete" in text
    assert run(small, "--no-draft")[0] == 0


def test_missing_unknown_and_wrong_tensors_are_named(small):
    def change(tensors):
        del tensors["norm.weight"]
        tensors["layers.0.extra"] = torch.zeros(2)
        tensors["head.weight"] = tensors["head.weight"].float()

    rewrite(small, change)
    code, text = run(small, "--json")
    found = json.loads(text)["report"]["findings"]
    assert code == 1 and found["missing"] == ["norm.weight"] and found["unknown"] == ["layers.0.extra"]
    assert found["wrong"] == [["head.weight", "F32 [64, 64], the table says BF16 [64, 64]"]]
    assert "wrong: head.weight: F32" in run(small)[1]


def test_a_partial_download_is_reported_not_refused(small):
    shards = sorted(small.glob("model-*"))
    gone = shards[1].name
    held = sum(1 for shard in open_folder(small).files.values() if shard == gone)
    shards[1].unlink()
    os.truncate(shards[2], shards[2].stat().st_size - 1)
    report = v41.inspect_folder(small)
    assert any(p.endswith(f"{gone}: missing, {held} tensors are listed for it") for p in report.problems)
    assert any("truncated" in p and shards[2].name in p for p in report.problems)
    assert not report.complete and held > 0 and report.total.tensors > 0 and len(report.findings.missing) >= held
    assert run(small)[0] == 1


def test_a_folder_that_is_none_is_exit_2(tmp_path):
    for path, message in ((tmp_path / "nothing", "cannot read"), (tmp_path, "cannot read")):
        code, text = run(path)
        assert code == 1 and message in text  # raised as ValueError: main() prints it and exits 2
    shutil.copyfile(TINY / "config.json", tmp_path / "config.json")
    assert f"no {INDEX}" in run(tmp_path)[1]


# Digests


def test_digests_are_written_compared_and_name_what_differs(small, tmp_path):
    stored = tmp_path / "list.json"
    assert run(small, "--digest", stored) == (0, run(small)[1] + f"{stored}: written\n")
    assert run(small, "--digest", stored)[0] == 0
    name = "layers.0.ffn.experts.1.w3.weight"
    raw = open_folder(small).read(name).view(torch.uint8).flatten()
    poke(small, name, 5, int(raw[5]) ^ 2)
    code, text = run(small, "--digest", stored)
    assert code == 1 and f"{name}: sha256" in text and f"1 tensors differ from {stored}" in text
    code, text = run(small, "--digest", stored, "--json")
    assert code == 1 and [line.split(":")[0] for line in json.loads(text)["digest"]["differ"]] == [name]
    stored.write_text("{}")
    assert "no list of digests" in run(small, "--digest", stored)[1]


def test_digests_are_those_of_the_bytes_in_bands_too(monkeypatch):
    folder, want = open_folder(TINY), tensor_digests(v41.load_params(TINY))
    found = folder_digests(folder)["tensors"]
    assert {n: t["sha256"] for n, t in found.items()} == want
    monkeypatch.setattr("v41.inspect_digest.BAND", 1000)
    assert all(tensor_digest(folder, n) == want[n] for n in ("embed.weight", "layers.3.attn.wq_a.scale", "norm.weight"))


def test_lists_of_other_tensors_differ():
    a = {"tensors": {"x": {"dtype": "F32", "shape": [2], "sha256": "1"}, "y": {"dtype": "F32", "shape": [2], "sha256": "1"}}}
    b = {"tensors": {"x": {"dtype": "BF16", "shape": [2], "sha256": "1"}, "z": {"dtype": "F32", "shape": [2], "sha256": "1"}}}
    lines = ["y: only in the stored list", "z: not in the stored list", "x: dtype F32 in the stored list, BF16 here"]
    assert compare_digests(a, b) == lines
    assert compare_digests(a, a) == []


# The probe


def test_the_probe_passes_on_planted_bytes_and_fails_without(released, opened):
    assert [v.status for v in stored_bytes(opened)] == ["fail"] * 4
    for name, code, scale, _ in (FP8, FP4):
        poke_open(opened, name + ".weight", 0, bytes.fromhex(code))
        poke_open(opened, name + ".scale", 0, bytes([scale]))
    assert [v.status for v in probe(released, False)] == ["pass"] * 14 + ["not run"]
    poke_open(opened, FP4[0] + ".weight", 3, bytes([0x4A ^ 0x80]))
    assert [v.status for v in stored_bytes(opened)] == ["pass", "pass", "fail", "fail"]


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("fail", 1), ("not run", 1)])
def test_a_check_that_was_not_run_is_no_pass(small, monkeypatch, status, code):
    verdicts = [Verdict("a", "pass", "1", "1"), Verdict("b", status, "2", "")]
    monkeypatch.setattr("v41.cli.inspect.probe", lambda directory, run, show: verdicts)
    found, text = run(small, "--probe", "--json")
    assert found == code and [v["status"] for v in json.loads(text)["probe"]] == ["pass", status]
    assert run(small)[0] == 0 and status in run(small, "--probe")[1]


def test_the_probe_belongs_to_the_released_config():
    with pytest.raises(ValueError, match="is not the released config"):
        probe(TINY, False)


def test_hash_rows_depend_on_every_id():
    config = v41.Config.from_json(RELEASED)
    want = [int(n) for n in HASHES[1].split()]
    assert hash_rows(config, 0, (10, 20, 30, 40, 50)) == want
    assert hash_rows(config, 0, (10, 99, 30, 40, 50))[:16] == want[:16] and hash_rows(config, 0, (10, 99, 30, 40, 50))[16:] != want[16:]
    assert hash_rows(config, 0, (10, 20, 30, 41, 50)) != want


def test_the_probes_greedy_tokens_are_those_of_a_run_in_memory(tmp_path):
    path = micro_folder(tmp_path / "micro")
    params = v41.load_params(path)
    prompt, cache = [42] * 11, v41.init_cache(params, 1, 20)
    out, cache = v41.step(params, cache, torch.tensor([prompt]))
    first = out.logits[:, -1].argmax(-1)
    out, cache = v41.step(params, cache, first[:, None])
    want = [int(first), int(out.logits[:, -1].argmax(-1))]
    assert greedy_tokens(prepare_run(path, v41.Numerics(), draft=False), prompt, 2) == want
