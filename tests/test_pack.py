# SPDX-License-Identifier: Apache-2.0
"""Golden packs: the same bytes every time, readable without torch, a manifest that its schema holds, states that follow from stored rows."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pack_kit
import pytest
import recipe_numpy
import torch
from click.testing import CliRunner
from helpers import ROOT, raw

import v41
from v41.cli.golden import golden
from v41.conformance.blocks import teacher_forced
from v41.conformance.target import cpu
from v41.conformance.walk import every_stop, open_with_params, same_state, tensors_of
from v41.golden.pack import check_out, make_pack, open_pack
from v41.golden.pack_block_make import make_block_pack
from v41.golden.pack_noise import decode, encode
from v41.golden.pack_rows import rows_written, with_rows
from v41.golden.pack_scenarios import scenarios, token_at
from v41.spec.params import param_specs

PAGE = (ROOT / "docs" / "golden-pack.md").read_text(encoding="utf-8")
READER = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
SCHEMA = json.loads((ROOT / "v41" / "data" / "golden-pack.schema.json").read_text(encoding="utf-8"))
WITHOUT_TORCH = "import sys\nsys.modules['torch'] = sys.modules['v41'] = sys.modules['safetensors'] = None\n"


def reader() -> dict:
    """The functions of the documented reader."""
    space: dict = {"__name__": "reader"}
    exec(READER, space)
    return space


def manifest() -> dict:
    return pack_kit.opened().pack.manifest


# Reading


def test_the_documented_reader_reads_a_whole_pack_without_torch(tmp_path):
    assert READER.count("\n") <= 60  # as the formatter breaks it
    script = tmp_path / "reader.py"
    script.write_text(WITHOUT_TORCH + READER, encoding="utf-8")
    told = subprocess.run([sys.executable, "-I", str(script), str(pack_kit.folder())], capture_output=True, text=True, check=True).stdout
    listed = manifest()["tensors"]
    assert [line.split()[:2] for line in told.splitlines()] == [[n, str(len(t))] for n, t in listed.items()]


def test_the_documented_reader_gives_the_values_that_torch_gives():
    space, pack = reader(), pack_kit.opened().pack
    for scenario, entries in manifest()["tensors"].items():
        stored = tensors_of(pack_kit.opened(), scenario)
        found = space["read"](pack.path / f"{scenario}.safetensors", entries)
        for name, got in found.items():
            want = stored[name]
            want = want.double() * entries[name].get("scale", 1) if want.is_floating_point() else want
            assert got.shape == tuple(want.shape) and np.array_equal(got.astype(np.float64), want.double().numpy(), equal_nan=True), name
        if scenario == "decode":
            break


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e8m0", torch.float8_e8m0fnu)])
def test_the_documented_reader_decodes_every_byte_of_the_small_formats(name, dtype):
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    got = reader()[name](codes.numpy().tobytes())
    assert np.array_equal(got.astype(np.float64), codes.view(dtype).float().double().numpy(), equal_nan=True)


def test_the_documented_reader_refuses_a_changed_byte(tmp_path):
    shutil.copytree(pack_kit.folder(), tmp_path / "pack")
    file = tmp_path / "pack" / "prefill.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="sha256"):
        reader()["read"](file, manifest()["tensors"]["prefill"])


# The manifest


def test_manifests_hold_their_schema_and_every_field_of_it_is_needed(tmp_path):
    checker = jsonschema.Draft202012Validator(SCHEMA)
    checker.check_schema(SCHEMA)
    whole = manifest()
    assert not list(checker.iter_errors(whole))
    few = {n: e for n, e in whole["tensors"]["prefill"].items() if "route" in n}
    told = whole | {"tensors": {"prefill": few}, "weights": whole["weights"] | {"read": {"whole": {}, "rows": {}}}, "token_map": [0]}
    assert not list(checker.iter_errors(told))
    for field in SCHEMA["required"]:
        assert list(checker.iter_errors({k: v for k, v in told.items() if k != field})), field
    for wrong in ({"schema": 2}, {"smallest_gap": -1}, {"licence": "MIT"}, {"more": 1}, {"numerics": told["numerics"] | {"regime": "fp4"}}):
        assert list(checker.iter_errors(told | wrong)), wrong


def test_packs_that_are_not_whole_are_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match="not a golden pack"):
        open_pack(tmp_path)
    told = manifest()
    for change, reason in (
        ({"kind": "v41 golden"}, "no manifest of a golden pack"),
        ({"schema": 9}, "schema 9"),
        ({"gaps": None}, "gaps is a NoneType"),
        ({"scenarios": [{"name": "x"}]}, "start is missing"),
        ({"tensors": {}}, "lists no tensors"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(told | change), encoding="utf-8")
        with pytest.raises(ValueError, match=reason):
            open_pack(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(ValueError, match="missing, the manifest lists"):
        open_pack(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        check_out(tmp_path / "manifest.json")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds notes\.txt"):
        check_out(tmp_path)


def test_a_pack_says_what_it_exercises_and_by_what_gaps_its_choices_were_made():
    told = manifest()
    flags = {k: v for k, v in told["coverage"].items() if isinstance(v, bool)}
    assert flags and all(flags.values()), flags
    assert set(told["coverage"]["calls"]) == {"step", "draft", "take", "ranks"}
    assert told["smallest_gap"] == min(g["smallest"] for g in told["gaps"].values())
    assert set(told["gaps"]) == {"route_experts", "tokens", "topk_idxs"} and all(g["rows"] > 10 for g in told["gaps"].values())


def test_scenarios_reach_every_call_and_the_released_numerics_have_those_that_they_know():
    config = pack_kit.config()
    free = {type(c).__name__ for s in scenarios(config, v41.Numerics()) for c in s.calls}
    assert free == {"Step", "Draft", "Verify", "Rewind", "Take", "Restore", "Ranks"}
    assert [s.name for s in scenarios(config, v41.Numerics("released"))] == ["prefill", "window", "long", "decode", "restore"]
    ids = {token_at(config, s, b, p) for s in range(3) for b in range(2) for p in range(100)}
    assert min(ids) >= 3 and max(ids) < 190 and len(ids) > 100


# Bytes


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


MAKE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import pack_kit
from pathlib import Path
from v41.golden.pack import make_pack
assert torch.get_num_threads() == 2, torch.get_num_threads()
make_pack(pack_kit.params(), {"seed": pack_kit.SEED}, Path(sys.argv[2]), ("prefill",))
"""


def test_a_pack_made_again_on_two_threads_has_the_same_bytes(tmp_path):
    make_pack(pack_kit.params(), {"seed": pack_kit.SEED}, tmp_path / "one", ("prefill",))
    environment = os.environ | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", MAKE, str(ROOT / "tests"), str(tmp_path / "two")], check=True, env=environment, cwd=ROOT)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_the_weights_are_those_that_numpy_makes_from_the_recipe():
    """One tensor of every stored dtype and role, by the page alone: the digests of the manifest."""
    told, kinds = manifest()["weights"], {torch.int8: "I8", torch.bfloat16: "BF16", torch.float32: "F32"}
    kinds |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}
    seen = set()
    for spec in param_specs(pack_kit.config()):
        name, shape = next(spec.released())
        role = (re.sub(r"\d+", "N", name), spec.dtype)
        if role in seen:
            continue
        seen.add(role)
        made = recipe_numpy.elements(name, kinds[spec.dtype], shape, told["recipe"]["seed"], np.arange(int(np.prod(shape))))
        assert hashlib.sha256(made.tobytes()).hexdigest() == told["read"]["whole"][name], name
    assert {d for _, d in seen} == set(kinds) and len(seen) > 60


# States and distances


def test_a_state_is_the_state_before_with_the_rows_of_the_call_put_in():
    ran = 0
    for stop in every_stop(pack_kit.opened()):
        if stop.op != "step":
            continue
        _, after = v41.step(pack_kit.opened().params, stop.before, stop.inputs["tokens"], valid=stop.inputs["valid"])
        rows = rows_written(stop.before, after, stop.inputs["tokens"].shape[1])
        assert all(torch.equal(raw(rows[n]), raw(stop.stored.want[n])) for n in rows)
        assert same_state(after, with_rows(stop.before, stop.inputs["valid"], rows)) is None
        broken = rows | {"rows.layers.1.window": rows["rows.layers.1.window"] + 1}
        assert same_state(after, with_rows(stop.before, stop.inputs["valid"], broken)) == "layers.1.window"
        ran += 1
    assert ran >= 8


def test_distances_keep_one_part_in_sixteen_of_what_is_not_tiny():
    far = torch.randn(4, 3, 50, dtype=torch.float64) * torch.tensor([1e-3, 1e-4, 1e-5, 0.0], dtype=torch.float64)[:, None, None]
    codes, scale = encode(far)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == far.shape
    least = float(far.abs().max()) * 2.0**-14  # 128..256 down to the smallest normal code, 2^-6
    error = (decode(codes, scale) - far).abs()
    assert (error <= far.abs() / 16 + least / 8).all() and (decode(codes, scale)[3] == 0).all()
    assert encode(torch.zeros(3, dtype=torch.float64))[1] == 0.0


def test_stored_tensors_lie_as_far_from_exact_arithmetic_as_their_roundings_say():
    """attn_in is a bfloat16 norm of float32 sums: half a step, at most 2^-9 of each value; with round trips in between, some per cent."""
    stored = pack_kit.stop("decode.c0").stored
    for name in ("layers.0.attn_in", "layers.3.attn_in"):
        ratio = stored.far[name + "#exact"].norm() / stored.want[name].double().norm()
        assert 2.0**-11 < ratio < 2.0**-9 and name + "#trips" not in stored.far
    trips, exact = (stored.far["layers.0.ffn_out" + s].norm() for s in ("#trips", "#exact"))
    assert trips < exact / 2 and 0.005 < exact / stored.want["layers.0.ffn_out"].double().norm() < 0.2


# One layer, and the command


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_pack_of_one_layer_is_what_the_layer_computes(tmp_path, number):
    told = make_block_pack(pack_kit.config(), v41.Numerics(), number, 3, 5, tmp_path / "pack")
    assert not list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(told))
    opened = open_with_params(tmp_path / "pack", None)
    (stop,) = every_stop(opened)
    assert {f.status for f in teacher_forced(cpu(), opened, stop)} == {"equal"}
    assert len(stop.stored.want) > 9 and f"layers.{number}.h_out" in stop.stored.want
    experts = set(stop.stored.want[f"layers.{number}.route_experts"].unique().tolist())
    assert set(told["run"]["experts"]) == experts and f"layers.{number}.ffn.experts.{min(experts)}.w1.weight" in told["weights"]["read"]["whole"]


def test_a_pack_of_one_layer_refuses_layers_and_numerics_that_it_has_not(tmp_path):
    with pytest.raises(ValueError, match="block: 4 is no layer of a model with 4"):
        make_block_pack(pack_kit.config(), v41.Numerics(), 4, 2, 0, tmp_path / "a")
    with pytest.raises(ValueError, match="one prefill from empty"):
        make_block_pack(pack_kit.config(), v41.Numerics("released"), 0, 2, 0, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_the_command_writes_a_folder_a_regime_and_refuses_what_makes_no_sense(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    v41.save_params(pack_kit.params(), checkpoint)
    run = CliRunner().invoke(golden, ["pack", "--out", str(tmp_path / "x")])
    assert run.exit_code == 2 and "give CHECKPOINT" in run.output
    run = CliRunner().invoke(
        golden, ["pack", "--config", "tiny", "--block", "1", "--rows", "2", "--regime", "faithful", "--out", str(tmp_path / "b"), "--json"]
    )
    assert run.exit_code == 0 and json.loads(run.output)["packs"]["faithful"]["tensors"] > 20
    assert open_pack(tmp_path / "b" / "faithful").manifest["run"]["block"] == 1
    with pytest.raises(ValueError, match="tokenizer"):
        CliRunner().invoke(golden, ["pack", str(checkpoint), "--out", str(tmp_path / "y")], catch_exceptions=False)


COMMITTED = sorted((ROOT / "tests" / "packs").glob("*/manifest.json"))


def test_the_committed_packs_are_small_and_hold_what_the_schema_says():
    assert [p.parent.name for p in COMMITTED] == ["exact-float32", "faithful", "released", "trn2"]
    size = sum(f.stat().st_size for f in (ROOT / "tests" / "packs").rglob("*") if f.is_file())
    assert size < 10_000_000
    for file in COMMITTED:
        told = json.loads(file.read_text(encoding="utf-8"))
        assert not list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(told)) and told["weights"]["recipe"] == {"seed": 41}
        open_pack(file.parent)
