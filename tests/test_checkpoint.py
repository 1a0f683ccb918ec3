# SPDX-License-Identifier: Apache-2.0
"""Loading and saving parameters: strict both ways, value by value, and what is passed over."""

import gzip
import json
import os
import shutil
from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import v41
from tests.checkpoint_kit import ROOT, TINY, make_folder, micro_folder, poke, rewrite, script, small_json
from tests.oracle import files as oracle
from v41.checkpoint import INDEX, open_folder, read_file_header, reader, tensor_bytes
from v41.params_io import released_tensors, weights_digest
from v41.released import VISION, released_table
from v41.stand_in import stand_in_tokenizer
from v41.tokenizer import checked_token_map

EXPERT = "layers.0.ffn.experts.1.w2"
FUZZ = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("plain") / "folder", small_json())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """With a draft head and a vision part."""
    return make_folder(tmp_path_factory.mktemp("whole") / "folder", small_json(draft=True, vision=True))


def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


# What a folder must hold


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("norm.weight"), r"1 tensors missing \['norm.weight'\], 0 unknown"),
        (drop(EXPERT + ".scale"), r"1 tensors missing \['layers.0.ffn.experts.1.w2.scale'\]"),
        (put("layers.1.attn_norm.weight", torch.ones(64)), r"0 tensors missing \[\], 1 unknown \['layers.1.attn_norm.weight in model"),
        (put("layers.0.ffn.experts.2.w1.weight", torch.ones(4)), "1 unknown .'layers.0.ffn.experts.2.w1.weight in model"),
        (put("image_start", torch.ones(64)), "1 unknown .'image_start in model"),  # its config has no vision part
        (put("norm.weight", torch.ones(64)), r"model-0000\d-of-0000\d.safetensors: norm.weight is F32 \[64\], the table says BF16 \[64\]"),
        (put("norm.weight", torch.ones(32, dtype=torch.bfloat16)), r"norm.weight is BF16 \[32\], the table says BF16 \[64\]"),
        (put(EXPERT + ".weight", torch.ones((64, 32)).to(torch.float8_e4m3fn)), r"is F8_E4M3 \[64, 32\], the table says I8 \[64, 16\]"),
    ],
)
def test_a_folder_that_is_not_the_table_is_refused_with_tensor_and_file(plain, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        v41.load_params(rewrite(copy(plain, tmp_path), change))


def test_every_single_tensor_is_missed(plain, tmp_path):
    names = list(open_folder(plain).entries)
    assert len(names) == 45
    index = json.loads((plain / INDEX).read_text())
    for name in names:
        folder = open_folder(plain)
        del folder.entries[name]
        with pytest.raises(ValueError, match="1 tensors missing"):
            v41.params_io.check_folder(folder, v41.Config.from_json(plain / "config.json"))
    assert len(index["weight_map"]) == len(names)


def test_optional_parts_are_whole_or_absent(whole, tmp_path):
    config = v41.Config.from_json(whole / "config.json")
    drafts = [n for n in open_folder(whole).entries if n.startswith("mtp.")]
    images = [n for n in open_folder(whole).entries if n.startswith(("vision.", "aligner.", "image_"))]
    assert len(drafts) == 49 and len(images) == 3 + 4 + 3 + 8

    def check(without, draft):
        folder = open_folder(whole)
        for name in without:
            del folder.entries[name]
        v41.params_io.check_folder(folder, config, draft)

    for without, draft in (([], True), ([], False), (images, True), (drafts, False), (drafts + images, False)):
        check(without, draft)
    for without, draft in ((drafts, True), (drafts[:1], False), (drafts[1:], False), (images[1:], True)):
        with pytest.raises(ValueError, match=rf"{len(without)} tensors missing \['({'|'.join(without)})'"):
            check(without, draft)


def test_the_draft_head_is_neither_read_nor_needed_without_it(whole, tmp_path, monkeypatch):
    path, read = copy(whole, tmp_path), []
    original = reader._fill
    monkeypatch.setattr(reader, "_fill", lambda d, p, name, *rest: (read.append(name), original(d, p, name, *rest)))
    poke(path, "mtp.0.attn.wkv.weight", 0, 0x7F)  # NaN: would be refused if it were read
    params = v41.load_params(path, draft=False)
    assert params.draft is None and read and not any(n.startswith(("mtp.", "vision.", "aligner.", "image_")) for n in read)
    with pytest.raises(ValueError, match=r"model-.*safetensors: mtp.0.attn.wkv.weight: byte 0x7F at \[0, 0\] is NaN"):
        v41.load_params(path)


def test_the_read_plan_is_what_loading_reads(whole, monkeypatch):
    read = []
    original = reader._fill
    monkeypatch.setattr(reader, "_fill", lambda d, p, n, buffer, at: (read.append((p.name, at, len(buffer))), original(d, p, n, buffer, at)))
    for draft in (True, False):
        read.clear()
        plan = v41.read_plan(whole, draft=draft)
        v41.load_params(whole, draft=draft)
        assert sorted(read) == sorted((r.file, r.start, r.end - r.start) for r in plan.ranges) and plan.bytes == sum(n for *_, n in read)
        held = open_folder(whole).total_bytes
        assert plan.bytes + sum(p.bytes for p in plan.passed_over) == held and sum(plan.by_file().values()) == plan.bytes
        assert [p.what for p in plan.passed_over] == (["vision"] if draft else ["vision", "draft head"])


# Values


@pytest.mark.parametrize(
    ("name", "offset", "value"),
    [
        ("layers.0.attn.wq_a.scale", 1, 0xFF),
        (EXPERT + ".scale", 3, 0xFF),
        ("layers.0.attn.wq_a.weight", 70, 0x7F),
        ("layers.0.attn.wo_b.weight", 0, 0xFF),
    ],
)
def test_nan_codes_are_refused_with_tensor_and_file(plain, tmp_path, name, offset, value):
    path = copy(plain, tmp_path)
    file = poke(path, name, offset, value)
    with pytest.raises(ValueError) as error:
        v41.load_params(path)
    assert str(error.value).startswith(f"{file}: {name}: byte 0x{value:02X} at [")


def test_scale_byte_0_is_a_subnormal_power_of_two_and_kept(plain, tmp_path):
    path = copy(plain, tmp_path)
    poke(path, "layers.0.attn.wq_a.scale", 0, 0)
    params = v41.load_params(path, numerics=v41.Numerics("exact", dtype="float64"))
    scale = params.layers[0].attn.wq_a.scale
    assert int(scale.view(torch.uint8)[0, 0]) == 0
    from v41.spec.ops.quant import dequantize

    codes = params.layers[0].attn.wq_a.weight[:32, :32].double()
    assert torch.equal(dequantize(params.layers[0].attn.wq_a, torch.float64)[:32, :32], codes * 2.0**-127) and codes.any()


def test_every_stored_dtype_is_kept(whole):
    found = Counter(str(t.dtype) for _, t in released_tensors(v41.load_params(whole)))
    table = released_table(v41.Config.from_json(whole / "config.json"))
    want = Counter(str(item.dtype) for name, item in table.items() if not name.startswith(VISION))
    assert found == want and set(found) == {"torch." + d for d in ("bfloat16", "float32", "float8_e4m3fn", "float8_e8m0fnu", "int8")}


# Saving


def test_saving_keeps_every_byte_and_other_readers_take_it(tmp_path):
    params = v41.load_params(TINY)
    v41.save_params(params, tmp_path / "saved", shard_bytes=1_000_000)
    shutil.copyfile(TINY / "tokenizer.json", tmp_path / "saved" / "tokenizer.json")
    assert weights_digest(v41.load_params(tmp_path / "saved")) == weights_digest(params)
    shards = sorted((tmp_path / "saved").glob("model-*"))
    assert len(shards) > 5 and max(f.stat().st_size for f in shards) < 1_100_000
    theirs = {name: t for shard in shards for name, t in load_file(shard).items()}
    plain_reader = oracle.read_all(tmp_path / "saved")  # the standard library and numpy
    released = dict(released_tensors(params))
    assert set(theirs) == set(plain_reader) == set(released) and len(released) == 898
    for name, tensor in released.items():
        assert theirs[name].dtype == tensor.dtype and tensor_bytes(name, theirs[name]) == tensor_bytes(name, tensor), name
        assert plain_reader[name].codes.tobytes() == bytes(tensor_bytes(name, tensor)), name


def test_the_hub_library_reads_a_saved_folder_by_its_own_parser(whole):
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (it comes with tokenizers)")
    if not hasattr(hub, "get_local_safetensors_metadata"):
        pytest.skip("this huggingface_hub has no local parser")
    found = hub.get_local_safetensors_metadata(whole)
    folder = open_folder(whole)
    assert found.weight_map == folder.files
    for shard, header in found.files_metadata.items():
        for name, info in header.tensors.items():
            entry = folder.entries[name]
            start, end = info.data_offsets
            assert (info.dtype, tuple(info.shape), end - start) == (entry.dtype, entry.shape, entry.nbytes), (shard, name)


# The released list


def test_the_released_list_is_the_table_and_adds_up():
    text = gzip.decompress((ROOT / "checkpoints" / "manifest.json.gz").read_bytes())
    assert text == script("make_released").manifest_text()
    stored = json.loads(text)
    assert len(stored) == len({t["name"] for t in stored}) == 96_085
    counts, sizes = Counter(), Counter()
    for t in stored:
        width = {"BF16": 2, "F32": 4}.get(t["dtype"], 1)
        counts[t["dtype"]] += 1
        sizes[t["dtype"]] += prod(t["shape"]) * width
    assert counts == {"BF16": 520, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47_589, "I8": 47_232}
    assert sizes == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }
    assert sum(sizes.values()) == 510_286_023_000
    logical = sizes["BF16"] // 2 + sizes["F32"] // 4 + sizes["F8_E4M3"] + 2 * sizes["I8"]
    assert logical == 763_205_315_794


# Fuzzing: 2,000 cases and the 300 of test_io; `-m slow` runs twenty times as many


def loads_right_or_says_why(path, digest):
    """A ValueError with a text, or the parameters that the undamaged folder has."""
    try:
        params = v41.load_params(path)
    except ValueError as error:
        assert len(str(error)) > 10
        return
    assert weights_digest(params) == digest


damages = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 5)), min_size=1, max_size=3)


def damaged(data: bytes, cuts) -> bytes:
    """Bytes replaced, inserted or removed at places modulo the length."""
    data = bytearray(data)
    for place, new, removed in cuts:
        place %= max(1, len(data))
        data[place : place + removed] = new
    return bytes(data)


def digits(data: bytes, cuts) -> bytes:
    """Digits changed to other digits: text that still parses, with other numbers."""
    data, places = bytearray(data), [i for i, b in enumerate(data) if 48 <= b <= 57]
    for place, new, removed in cuts:
        data[places[place % len(places)]] = 48 + (removed + len(new)) % 10
    return bytes(data)


@pytest.fixture(scope="module")
def victim(plain, tmp_path_factory):
    path = tmp_path_factory.mktemp("victim") / "folder"
    shutil.copytree(plain, path)
    return path, weights_digest(v41.load_params(path)), open_folder(path)


def fuzz_config(victim, cuts, change):
    """A config says nothing about bytes: where it is taken, the folder must be exactly its table."""
    path, folder = victim[0], victim[2]
    original = (path / "config.json").read_bytes()
    try:
        (path / "config.json").write_bytes(change(original, cuts))
        config = v41.Config.from_json(path / "config.json")
        v41.params_io.check_folder(folder, config)
        assert {n: (i.dtype, i.shape) for n, i in released_table(config).items()} == {n: (e.torch_dtype, e.shape) for n, e in folder.entries.items()}
    except ValueError as error:
        assert len(str(error)) > 10
    finally:
        (path / "config.json").write_bytes(original)


def fuzz_index_or_header(victim, cuts, change, header):
    path, digest, _ = victim
    file = sorted(path.glob("model-*"))[0] if header else path / INDEX
    original = file.read_bytes()
    end = min(e.start for e in read_file_header(file).entries.values()) if header else len(original)
    begin = 8 if header else 0
    try:
        file.write_bytes(original[:begin] + change(original[begin:end], cuts) + original[end:])
        loads_right_or_says_why(path, digest)
    finally:
        file.write_bytes(original)


@FUZZ
@given(cuts=damages, change=st.sampled_from([damaged, digits]))
def test_a_damaged_config_loads_right_or_says_why(victim, cuts, change):
    fuzz_config(victim, cuts, change)


@FUZZ
@given(cuts=damages, change=st.sampled_from([damaged, digits]), header=st.booleans())
def test_a_damaged_index_or_header_loads_right_or_says_why(victim, cuts, change, header):
    fuzz_index_or_header(victim, cuts, change, header)


@pytest.mark.slow
@settings(FUZZ, max_examples=20_000, derandomize=False)
@given(cuts=damages, change=st.sampled_from([damaged, digits]), which=st.sampled_from(["config", "index", "header"]))
def test_many_damaged_folders_load_right_or_say_why(victim, cuts, change, which):
    if which == "config":
        fuzz_config(victim, cuts, change)
    else:
        fuzz_index_or_header(victim, cuts, change, which == "header")


def test_a_hanging_or_crashing_read_would_be_seen(victim):
    """The control of the fuzzing: damage that only a check of values, or of bytes, can see is seen."""
    path, _, _ = victim
    original = (path / INDEX).read_bytes()
    file = poke(path, "norm.weight", 0, 0x3F)
    before = weights_digest(v41.load_params(path))
    poke(path, "norm.weight", 0, 0x40)
    assert weights_digest(v41.load_params(path)) != before and os.path.exists(file) and (path / INDEX).read_bytes() == original


def test_the_stand_in_tokenizer_gives_the_token_map_of_a_model_without_one(tmp_path):
    for vocab, compressed in ((100, 7), (512, 407), (64, 64)):
        (tmp_path / "tokenizer.json").write_text(json.dumps(stand_in_tokenizer(vocab, compressed)))
        assert checked_token_map(tmp_path / "tokenizer.json", vocab, compressed).tolist() == [i % compressed for i in range(vocab)]
    for vocab, compressed in ((5, 0), (3, 4), (2**21, 1)):
        with pytest.raises(ValueError, match=f"stand-in tokenizer: {vocab} ids on {compressed}"):
            stand_in_tokenizer(vocab, compressed)


def test_a_token_map_can_be_given_instead_of_a_tokenizer(tmp_path):
    path = micro_folder(tmp_path / "micro")
    with_file = v41.load_params(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer"):
        v41.load_params(path)
    given = v41.load_params(path, token_map=with_file.engram_map.token_map)
    assert all(torch.equal(getattr(given.engram_map, f), getattr(with_file.engram_map, f)) for f in ("token_map", "primes", "multipliers", "offsets"))
    with pytest.raises(ValueError, match=r"token_map: shape \(3,\), not \(512,\)"):
        v41.load_params(path, token_map=torch.tensor([1, 2, 3]))
