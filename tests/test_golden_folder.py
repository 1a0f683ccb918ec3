# SPDX-License-Identifier: Apache-2.0
"""Golden folders: two runs are byte-identical, a check recomputes, a diff names the first cause, a corrupt folder is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from v41.checkpoint import read_header, read_tensor, write_file
from v41.cli import cli
from v41.golden import folder, metrics

TINY = Path(__file__).parent.parent / "checkpoints" / "tiny"
IDS = " ".join(str(i) for i in (0, *range(40, 83)))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def make(out: Path, *more: str) -> Result:
    return run("golden", "make", TINY, "--ids", IDS, "--steps", 2, "--taps", "--out", out, *more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("golden") / "a"
    assert make(out).exit_code == 0
    return out


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def change(path: Path, part: str, name: str, edit: object) -> None:
    """Rewrites one tensor of a folder, and its digest."""
    file = path / f"{part}.safetensors"
    tensors = {n: read_tensor(file, n, e) for n, e in read_header(file).items()}
    tensors[name] = edit(tensors[name].clone())
    write_file(file, tensors)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tensors"][part] = folder.describe(tensors)
    folder.write_json(path / "manifest.json", manifest)


@pytest.mark.parametrize("regime", [(), ("--regime", "released"), ("--regime", "exact", "--dtype", "float64")])
def test_two_runs_are_byte_identical(regime: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("a", "b"):
        result = run("golden", "make", TINY, "--ids", "0 7 9 44 3", "--steps", 1, "--taps", "--out", tmp_path / name, *regime)
        assert result.exit_code == 0, result.output
    files = sorted(f.name for f in (tmp_path / "a").iterdir())
    assert files == ["caches.safetensors", "decode.safetensors", "manifest.json", "outputs.safetensors", "prefill.safetensors"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_folder_names_no_path_and_no_date(made: Path) -> None:
    text = (made / "manifest.json").read_text()
    assert str(made.parent) not in text and str(TINY) not in text and "202" not in json.dumps(json.loads(text)["run"])


def test_a_check_recomputes_from_the_recipe_and_from_the_checkpoint(made: Path) -> None:
    for more in ((), (TINY,)):
        result = run("golden", "check", made, *more, "--json")
        assert result.exit_code == 0, result.output
        counts = json.loads(result.output)["counts"]
        assert counts["equal"] > 250 and sum(counts.values()) == counts["equal"]


def test_a_check_names_the_first_tensor_of_a_changed_run(copy: Path) -> None:
    """A changed row of layer 3 is found before what was changed later, and with its layer, position and size."""

    def bump(t: torch.Tensor) -> torch.Tensor:
        t[0, 5, 1, 17] += 1
        return t

    for name in ("layers.5.ffn_out", "layers.3.h_out"):
        change(copy, "prefill", name, bump if name.endswith("h_out") else lambda t: t * 2)
    change(copy, "outputs", "tokens", lambda t: t.flip(1))
    first = json.loads(run("golden", "check", copy, "--json").output)["first"]
    assert first["name"] == "prefill/layers.3.h_out" and first["worst"] == [0, 5, 1, 17]
    assert first["numbers"]["max_abs"] > 0.4 and first["numbers"]["ulps"]["more"] <= 1


def test_a_diff_tells_regimes_apart_and_itself_not(made: Path, tmp_path: Path) -> None:
    assert run("golden", "diff", made, made).exit_code == 0
    assert make(tmp_path / "exact", "--regime", "exact").exit_code == 0
    result = run("golden", "diff", tmp_path / "exact", made)
    assert result.exit_code == 1 and "first that differs: prefill/" in result.output and "numerics" in result.output


def test_lists_of_another_width_are_compared_by_what_they_list(made: Path, copy: Path) -> None:
    change(copy, "prefill", "layers.5.topk_idxs", lambda t: torch.nn.functional.pad(t, (0, 3), value=-1))
    change(copy, "prefill", "layers.5.index_score", lambda t: torch.nn.functional.pad(t, (0, 5), value=-float("inf")))
    change(copy, "prefill", "layers.5.candidates", lambda t: torch.nn.functional.pad(t, (0, 5)))
    assert run("golden", "diff", copy, made).exit_code == 0
    change(copy, "prefill", "layers.5.candidates", lambda t: torch.nn.functional.pad(t, (0, 1), value=True))
    assert run("golden", "diff", copy, made).exit_code == 1


def test_a_flipped_choice_is_reported_as_a_set_with_its_margin(made: Path, copy: Path) -> None:
    def other(t: torch.Tensor) -> torch.Tensor:
        """The last query takes row 0 instead of the first that it took, or row 1 where it has row 0."""
        row = t[0, -1]
        row[0] = next(i for i in range(int(row[0]) + 1, 99) if i not in row.tolist())
        t[0, -1] = row.sort().values
        return t

    change(copy, "prefill", "layers.5.topk_idxs", other)
    found = json.loads(run("golden", "diff", copy, made, "--json").output)["first"]
    assert found["name"] == "prefill/layers.5.topk_idxs" and found["kind"] == "set"
    assert found["numbers"]["rows_that_differ"] == 1 and len(found["numbers"]["margins"]) == 1
    assert len(found["numbers"]["only_in_got"]) == len(found["numbers"]["only_in_want"]) == 1


def test_a_non_finite_value_comes_first(copy: Path, made: Path) -> None:
    change(copy, "prefill", "layers.1.h_out", lambda t: t * 2)
    change(copy, "prefill", "layers.6.h_out", lambda t: t.index_fill(1, torch.tensor([3]), float("nan")))
    first = json.loads(run("golden", "diff", copy, made, "--json").output)["first"]
    assert first["name"] == "prefill/layers.6.h_out" and first["status"] == "non-finite"


def test_a_tolerance_lets_floats_pass_but_no_id(copy: Path, made: Path) -> None:
    change(copy, "outputs", "logits", lambda t: t * (1 + 1e-6))
    assert run("golden", "diff", copy, made, "--tolerance", "1e-5").exit_code == 0
    assert run("golden", "diff", copy, made).exit_code == 1
    change(copy, "outputs", "tokens", lambda t: t + 1)
    assert run("golden", "diff", copy, made, "--tolerance", "1e-5").exit_code == 1


def garble(path: Path) -> None:
    data = bytearray((path / "decode.safetensors").read_bytes())
    data[-3] ^= 255
    (path / "decode.safetensors").write_bytes(data)


CORRUPT = {
    "no folder": (lambda p: shutil.rmtree(p), "manifest.json"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "not a golden folder"),
    "no JSON": (lambda p: (p / "manifest.json").write_text("{"), "not JSON"),
    "foreign": (lambda p: (p / "manifest.json").write_text('{"kind": "other"}'), "no manifest of a golden folder"),
    "another schema": (lambda p: edit_manifest(p, schema=99), "schema 99; this version reads 1"),
    "no tensors": (lambda p: edit_manifest(p, tensors={}), "lists no tensors"),
    "a part missing": (lambda p: (p / "decode.safetensors").unlink(), "decode.safetensors: missing"),
    "a part cut short": (lambda p: (p / "decode.safetensors").write_bytes((p / "decode.safetensors").read_bytes()[:-9]), "decode.safetensors"),
    "no numerics": (lambda p: drop(p, "numerics"), "numerics is missing, not a dict"),
    "no run": (lambda p: drop(p, "run"), "run is missing, not a dict"),
    "no weights": (lambda p: drop(p, "weights"), "weights is missing, not a dict"),
    "a recipe without a seed": (lambda p: edit_manifest(p, weights={"sha256": "", "recipe": {}}), "seed is missing, not a int"),
    "a list of tensors": (lambda p: edit_manifest(p, tensors={"outputs": [1]}), "tensors.outputs is no list of a golden folder's tensors"),
    "other bytes": (garble, "has other bytes than the manifest's sha256 says"),
}


def edit_manifest(path: Path, **values: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    folder.write_json(path / "manifest.json", manifest | values)


def drop(path: Path, key: str) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest[key]
    folder.write_json(path / "manifest.json", manifest)


def test_a_refused_run_leaves_the_folder_that_was_there(copy: Path) -> None:
    before = {f.name: f.read_bytes() for f in copy.iterdir()}
    for bad in (("--ids", "0 5", "--steps", 200000), ("--ids", "0 999"), ("--regime", "released", "--ids", "0 5 9", "--ids", "0 1")):
        result = run("golden", "make", TINY, *bad, "--out", copy)
        assert isinstance(result.exception, ValueError)
        assert {f.name: f.read_bytes() for f in copy.iterdir()} == before


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_folder_is_refused_with_file_and_reason(name: str, copy: Path, made: Path) -> None:
    spoil, message = CORRUPT[name]
    spoil(copy)
    result = run("golden", "diff", copy, made)
    assert isinstance(result.exception, ValueError) and message in str(result.exception)


def test_a_value_error_of_a_command_is_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from v41.cli import main

    monkeypatch.setattr("sys.argv", ["v41", "golden", "check", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "not a golden folder" in capsys.readouterr().err


def test_other_weights_are_not_checked_against(made: Path) -> None:
    result = run("golden", "check", made, Path(__file__).parent / "golden/tiny/checkpoint")
    assert isinstance(result.exception, ValueError) and "made with other weights" in str(result.exception)


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = make(tmp_path)
    assert isinstance(result.exception, ValueError) and "notes.txt" in str(result.exception)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_prompts_of_different_length_share_a_batch(tmp_path: Path) -> None:
    """The shorter one of a batch gives the tokens and logits that it gives alone."""
    assert run("golden", "make", TINY, "--ids", "0 5 9 17", "--ids", "0 5", "--steps", 2, "--out", tmp_path / "two").exit_code == 0
    assert run("golden", "make", TINY, "--ids", "0 5", "--steps", 2, "--out", tmp_path / "one").exit_code == 0
    two, one = (folder.open_golden(tmp_path / n).part("outputs") for n in ("two", "one"))
    assert two["prompt"][1].tolist() == [0, 5, -1, -1]
    for name in ("logits", "tokens", "spec.logits", "spec.output_ids", "spec.confidence"):
        assert torch.equal(two[name][1], one[name][0]), name


def test_metrics_count_ulps_across_zero_and_agreement() -> None:
    a, b = torch.tensor([1.0, 0.0, -0.0, 1e-45]), torch.tensor([1.0, -0.0, 0.0, -1e-45])
    assert metrics.ulps(a, b).tolist() == [0, 0, 0, 2]
    assert not metrics.same_bits(a, b) and metrics.same_bits(a, a.clone())
    logits = torch.arange(40.0)[None]
    assert metrics.agreement(logits, logits)["top5"] == 1.0 and metrics.agreement(logits, -logits)["top20"] == 0.0
