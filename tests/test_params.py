# SPDX-License-Identifier: Apache-2.0
"""The parameter table is the released one, and loading and saving keep to it."""

import gzip
import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import OPS, ROOT, TINY, config, golden, published, raw, released_config, same_bits, tiny, unchecked
from safetensors.torch import load_file

import v41
from v41 import tree
from v41.checkpoint import open_folder, write_folder
from v41.engram_map import engram_map
from v41.spec.ops.ngram import engram_hash
from v41.spec.params import param_specs

DTYPES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "int8": "I8"}
VISION = ("vision.", "aligner.", "image_")


def table(c: v41.Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Released name -> (dtype, shape) of every tensor."""
    found = [(n, DTYPES[str(s.dtype).removeprefix("torch.")], shape) for s in param_specs(c) for n, shape in s.released()]
    assert len({n for n, _, _ in found}) == len(found)
    return {n: (dtype, shape) for n, dtype, shape in found}


@pytest.fixture(scope="module")
def released() -> dict[str, tuple[str, tuple[int, ...]]]:
    return table(released_config())


# The table


def test_the_table_has_the_released_names_dtypes_and_bytes(released):
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
    total = sum(sizes[dtype] * torch.Size(shape).numel() for dtype, shape in released.values())
    assert len(released) == 95_819 and total == 509_315_486_040
    counts = Counter(dtype for dtype, _ in released.values())
    assert counts == {"BF16": 520 - 266, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47_589, "I8": 47_232}  # 266: the vision part
    with gzip.open(ROOT / "checkpoints" / "manifest.json.gz", "rt") as f:
        stored = {e["name"]: (e["dtype"], tuple(e["shape"])) for e in json.load(f)}
    assert {n: e for n, e in stored.items() if not n.startswith(VISION)} == released


def test_layers_have_the_released_number_of_tensors(released):
    counts = Counter(".".join(n.split(".")[:2]) for n in released if n.startswith(("layers.", "mtp.")))
    want = {f"layers.{i}": 2334 for i in range(40)} | {f"layers.{i}": 2337 for i in (24, 28, 32, 36)}
    want |= {"layers.1": 2340, "layers.2": 2342, "layers.8": 2342, "layers.14": 2348, "layers.20": 2341}
    assert counts == want | {"mtp.0": 801, "mtp.1": 798, "mtp.2": 802}


def test_the_table_of_the_tiny_model_is_its_index():
    index = json.loads((TINY / "checkpoint" / "model.safetensors.index.json").read_text())["weight_map"]
    entries = open_folder(TINY / "checkpoint").entries
    assert set(table(config())) == set(index)
    assert {n: (DTYPES[str(e.torch_dtype).removeprefix("torch.")], tuple(e.shape)) for n, e in entries.items()} == table(config())


# Engram constants


def test_engram_constants_are_the_released_ones():
    m = engram_map(released_config(), torch.zeros(129_280, dtype=torch.int32))
    stored = load_file(OPS / "engram_hash.safetensors")
    for name in ("primes", "offsets", "multipliers"):
        assert torch.equal(getattr(m, name), stored[name])
    assert m.primes.sum((1, 2)).tolist() == [384_006_168, 384_016_682] == list(released_config().engram_num_embeddings)
    assert m.offsets[:, [8, 16, 23]].tolist() == [[128_000_880, 256_002_934, 368_005_705], [128_004_290, 256_009_984, 368_015_793]]
    assert m.multipliers[0].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert len(set(m.primes.flatten().tolist())) == 48


def test_engram_rows_of_a_short_text_are_the_published_check_vectors():
    m = engram_map(released_config(), torch.zeros(129_280, dtype=torch.int32))
    ids = torch.tensor([[[10, 2, 2, 2], [50, 40, 30, 20]]], dtype=torch.int32)  # 10 20 30 40 50: positions 0 and 4, newest first
    known = torch.tensor([[[True, False, False, False], [True] * 4]])
    pad = torch.tensor(2, dtype=torch.int32)
    rows = [engram_hash(ids, known, pad, m.multipliers[i], m.primes[i], m.offsets[i])[0] for i in range(2)]
    assert rows[0][0, :8].tolist() == [9400104, 24924096, 42335591, 53627767, 70568887, 92216816, 111040993, 114349277]
    assert rows[0][0, 16:].tolist() == [261350200, 277988921, 301030767, 312551990, 330899850, 342421405, 356727647, 382122658]
    assert rows[0][1, :8].tolist() == [5457301, 26470289, 42926785, 62582378, 68079542, 85915763, 102834638, 114358063]
    assert rows[1][1, 16:].tolist() == [259419700, 284922264, 302986529, 306158514, 323132060, 342210866, 353939203, 380580960]


def test_the_tiny_engram_map_is_the_stored_one():
    m, stored = tiny().engram_map, golden("engram_map")
    for name in ("token_map", "primes", "offsets", "multipliers"):
        assert torch.equal(getattr(m, name).long(), stored[name].long())
    assert int(m.token_map[config().engram_pad_token_id]) == int(stored["pad_id_compressed"])


def test_an_engram_table_of_another_size_is_refused():
    with pytest.raises(ValueError, match="primes of Engram layer 1 add up to 138, engram_num_embeddings says 139"):
        v41.init_params(v41.Config.from_dict(published(engram_num_embeddings=[139])), 0)
    with pytest.raises(ValueError, match="token_map: ids 0..50 leave 0..49"):
        v41.init_params(v41.Config.from_dict(published()), 0, torch.arange(64) % 51)


# Files


def test_saved_parameters_load_again_bit_for_bit(tmp_path):
    params = tiny()
    v41.save_params(params, tmp_path, shard_bytes=2_000_000)
    shutil.copy(TINY / "checkpoint" / "tokenizer.json", tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again = v41.load_params(tmp_path)
    pairs = list(zip(tree.paths(params), tree.paths(again), strict=True))
    assert len(pairs) > 300
    for (name, a), (other, b) in pairs:
        assert name == other and same_bits(a, b), name
    assert again.config == params.config
    before, after = (open_folder(p) for p in (TINY / "checkpoint", tmp_path))
    for name in before.entries:
        assert torch.equal(raw(before.read(name)), raw(after.read(name))), name


SMALL = {k: None for k in published()["text_config"] if k.startswith(("engram_", "dspark_"))}
SMALL |= {"num_nextn_predict_layers": None, "num_hidden_layers": 3, "compress_ratios": [0, 2, 1], "index_source_layer_ids": [1, 2]}


@pytest.fixture(scope="module")
def small() -> v41.Params:
    return v41.init_params(v41.Config.from_dict(published(**SMALL)), 9)


def nan_scale(x: torch.Tensor) -> torch.Tensor:
    bytes_ = x.view(torch.uint8).clone()
    bytes_[1, 0] = 0xFF
    return bytes_.view(x.dtype)


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            "layers.1.attn.compressor.wgate.weight",
            lambda x: None,
            r"missing \['layers.1.attn.compressor.wgate.weight'\]|wgate.weight is missing",
        ),
        ("layers.0.attn.wkv.weight", lambda x: x.float(), r"layers\.0\.attn\.wkv\.weight is F32"),
        ("norm.weight", lambda x: x[:-1], r"norm\.weight is BF16 \[63\]"),
        ("layers.2.ffn.experts.3.w2.scale", nan_scale, r"layers\.2\.ffn\.experts\.3\.w2\.scale: byte 0xFF at \[1, 0\]"),
    ],
)
def test_a_folder_with_a_wrong_tensor_is_refused_by_its_name(small, tmp_path, name, change, message):
    v41.save_params(small, tmp_path)
    assert v41.load_params(tmp_path).config == small.config
    folder = open_folder(tmp_path)
    tensors = {n: folder.read(n) for n in folder.entries}
    tensors[name] = change(tensors[name])
    for path in tmp_path.glob("model*"):
        path.unlink()
    write_folder(tmp_path, ((n, t.contiguous()) for n, t in tensors.items() if t is not None), 10**9)
    with pytest.raises(ValueError, match=message):
        v41.load_params(tmp_path)


def test_an_unknown_tensor_and_a_truncated_shard_are_refused(small, tmp_path):
    v41.save_params(small, tmp_path)
    shard = next(tmp_path.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=shard.name):
        v41.load_params(tmp_path)
    shard.write_bytes(content)
    folder = open_folder(tmp_path)
    tensors = {n: folder.read(n) for n in folder.entries} | {"layers.0.attn.hc_head": torch.zeros(2)}
    for path in tmp_path.glob("model*"):
        path.unlink()
    write_folder(tmp_path, iter(tensors.items()), 10**9)
    with pytest.raises(ValueError, match="hc_head"):
        v41.load_params(tmp_path)


def test_parameters_without_their_draft_head_are_loaded_but_not_saved(tmp_path):
    with unchecked():  # the whole of it was loaded with its shapes checked
        params = v41.load_params(TINY / "checkpoint", draft=False)
    assert params.draft is None
    for (name, a), (_, b) in zip(tree.paths(params), tree.paths(replace(tiny(), draft=None)), strict=True):
        assert same_bits(a, b), name
    with pytest.raises(ValueError, match="draft=False"):
        v41.save_params(params, tmp_path)


def test_the_recipe_gives_the_same_bytes_for_a_seed_and_others_for_another():
    c = v41.Config.from_dict(published())
    with unchecked():
        a, b, other = (tree.leaves(v41.init_params(c, seed)) for seed in (3, 3, 4))
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    differing = sum(not torch.equal(raw(x), raw(y)) for x, y in zip(a, other, strict=True))
    assert differing > len(a) / 2
    assert all(torch.isfinite(x.float()).all() for x in a if x.is_floating_point())
