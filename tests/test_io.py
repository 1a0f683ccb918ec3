# SPDX-License-Identifier: Apache-2.0
"""Reading and writing checkpoint files: every released dtype, slices, files larger than memory, and every way in which a file can lie."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from v41.checkpoint import (
    DTYPES,
    INDEX,
    Entry,
    check_values,
    gather_rows,
    open_folder,
    read_columns,
    read_file_header,
    read_header,
    read_rows,
    read_tensor,
    reader,
    tensor_bytes,
    write_file,
    write_folder,
)

TINY = Path(__file__).parent / "golden" / "tiny" / "checkpoint"


def one_of_each() -> dict[str, torch.Tensor]:
    """A [6, 5] matrix of every dtype, with bytes that count up (for BOOL: 0 and 1), an empty one and a scalar."""
    tensors = {}
    for name, dtype in DTYPES.items():
        count = 30 * dtype.itemsize
        raw = (torch.arange(count) % (2 if dtype == torch.bool else 251)).to(torch.uint8)
        tensors[f"matrix.{name}"] = raw.view(dtype).view(6, 5)
    return tensors | {"empty": torch.empty(0, 3), "scalar": torch.tensor(7, dtype=torch.int64)}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    equal = left.dtype == right.dtype and left.shape == right.shape
    return equal and bytes(tensor_bytes("left", left)) == bytes(tensor_bytes("right", right))


def raw_file(path: Path, header: object, payload: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + payload)
    return path


def record(start: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


# Files


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    tensors = one_of_each()
    write_file(tmp_path / "a.safetensors", tensors, {"note": "x"})
    header = read_file_header(tmp_path / "a.safetensors")
    assert set(header.entries) == set(tensors) and header.metadata == {"note": "x"}
    for name, tensor in tensors.items():
        assert same(read_tensor(tmp_path / "a.safetensors", name, header.entries[name]), tensor), name


def test_the_safetensors_package_reads_what_we_write_and_we_what_it_writes(tmp_path):
    tensors = one_of_each()
    write_file(tmp_path / "ours.safetensors", tensors)
    save_file(tensors, tmp_path / "theirs.safetensors")
    loaded, entries = load_file(tmp_path / "ours.safetensors"), read_header(tmp_path / "theirs.safetensors")
    assert set(loaded) == set(tensors) == set(entries)
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
        assert same(read_tensor(tmp_path / "theirs.safetensors", name, entries[name]), tensor), name


def test_the_order_of_the_tensors_does_not_change_the_file(tmp_path):
    tensors = one_of_each()
    write_file(tmp_path / "a", tensors, {"x": "1", "y": "2"})
    write_file(tmp_path / "b", dict(reversed(tensors.items())), {"y": "2", "x": "1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    starts = [entry.start % entry.torch_dtype.itemsize for entry in read_header(tmp_path / "a").values()]
    assert not any(starts), "a tensor is not aligned"


def test_slices_equal_the_slices_of_the_whole(tmp_path, monkeypatch):
    path, tensors = tmp_path / "a", one_of_each()
    write_file(path, tensors)
    for band in (1, 8 << 20):
        monkeypatch.setattr(reader, "BAND", band)
        for name, entry in read_header(path).items():
            tensor = tensors[name]
            if not name.startswith("matrix"):
                continue
            wanted = torch.tensor([5, 0, 5, 2])
            whole = tensor.contiguous().view(torch.uint8).view(6, 5, -1)
            for first, last in ((0, 6), (2, 5), (3, 3)):
                assert same(read_rows(path, name, entry, first, last), whole[first:last].reshape(-1).view(tensor.dtype).view(-1, 5))
            for first, last in ((0, 5), (1, 3), (4, 4)):
                part = whole[:, first:last].reshape(-1).view(tensor.dtype).view(6, -1) if last > first else tensor[:, first:last]
                assert same(read_columns(path, name, entry, first, last), part)
            assert same(gather_rows(path, name, entry, wanted.tolist()), whole[wanted].reshape(-1).view(tensor.dtype).view(4, 5))


def test_a_given_tensor_is_filled_and_a_wrong_one_refused(tmp_path):
    path, tensors = tmp_path / "a", one_of_each()
    write_file(path, tensors)
    entry = read_header(path)["matrix.BF16"]
    out = torch.zeros(2, 5, dtype=torch.bfloat16)
    assert read_rows(path, "matrix.BF16", entry, 1, 3, out) is out and same(out, tensors["matrix.BF16"][1:3])
    for wrong in (torch.zeros(2, 5), torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(5, 2, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match=r"matrix.BF16: out is .* expected contiguous torch.bfloat16 \[2, 5\]"):
            read_rows(path, "matrix.BF16", entry, 1, 3, wrong)


def test_rows_and_columns_outside_the_tensor_are_refused(tmp_path):
    path = tmp_path / "a"
    write_file(path, one_of_each())
    entries = read_header(path)
    for read, first, last in ((read_rows, -1, 2), (read_rows, 3, 7), (read_rows, 3, 2), (read_columns, 0, 6), (read_columns, -1, 2)):
        with pytest.raises(ValueError, match=rf"matrix.I8: (rows|columns) {first}\.\.{last} of [65]"):
            read(path, "matrix.I8", entries["matrix.I8"], first, last)
    for ids in ([6], [-1], [0, 1, 6]):
        with pytest.raises(ValueError, match=r"row (6|-1) of 6"):
            gather_rows(path, "matrix.I8", entries["matrix.I8"], ids)
    with pytest.raises(ValueError, match="scalar"):
        read_rows(path, "scalar", entries["scalar"], 0, 0)
    with pytest.raises(ValueError, match="expected a matrix"):
        read_columns(path, "scalar", entries["scalar"], 0, 0)


def test_a_file_of_more_than_100_gb_opens_and_gives_slices(tmp_path):
    path, rows, width = tmp_path / "model-00047-of-00048.safetensors", 384_006_168, 256
    size = rows * width
    text = json.dumps({"weight": record(0, size, "F8_E4M3", [rows, width]), "scale": record(size, size + 8 * rows, "F8_E8M0", [rows, 8])})
    payload = 8 + len(text)
    raw_file(path, text.encode())
    try:
        os.truncate(path, payload + size + 8 * rows)
    except OSError as error:
        pytest.skip(f"this filesystem has no sparse file of {size} bytes: {error}")
    middle, last = 123_456_789, bytes(range(8))
    with open(path, "r+b") as file:
        file.seek(payload + middle * width)
        file.write(bytes(range(64)) * 4)
        file.seek(payload + size + 8 * (rows - 1))
        file.write(last)
    assert path.stat().st_size > 100e9
    entries = read_header(path)
    found = read_rows(path, "weight", entries["weight"], middle - 1, middle + 2).view(torch.uint8)
    assert found[1].tolist() == list(range(64)) * 4 and not found[0].any() and not found[2].any()
    assert read_rows(path, "scale", entries["scale"], rows - 1, rows).view(torch.uint8).flatten().tolist() == list(last)
    picked = gather_rows(path, "weight", entries["weight"], [rows - 1, middle, 0, middle]).view(torch.uint8)
    assert picked.any(-1).tolist() == [False, True, False, True] and picked[1].equal(picked[3])


# Headers that lie

GOOD = {"a": record(0, 4), "b": record(4, 12, "F32", [2])}


@pytest.mark.parametrize(
    ("header", "payload", "length", "message"),
    [
        (b"", b"", 10, "header of 10 bytes in a file of 8"),
        (GOOD, bytes(12), 10**9, "header of 1000000000 bytes; the format allows 100000000"),
        (GOOD, bytes(12), 2**64 - 1, "header of 18446744073709551615 bytes"),
        (GOOD, b"", 99_999_999, "header of 99999999 bytes in a file of"),
        (GOOD, bytes(11), None, "b: the payload ends at byte .*, the file at .*: truncated"),
        (GOOD, bytes(13), None, "b: the payload ends at byte .*, the file at .*: bytes behind"),
        ({}, b"x", None, "no tensor: .* bytes behind"),
        ({"a": record(0, 4), "b": record(3, 12)}, bytes(12), None, "b: starts at byte 3 of the payload, expected 4: overlaps"),
        ({"a": record(0, 4), "b": record(5, 12)}, bytes(12), None, "b: starts at byte 5 of the payload, expected 4: leaves a gap"),
        ({"a": record(1, 4)}, bytes(4), None, "a: starts at byte 1 of the payload, expected 0: leaves a gap"),
        ({"a": record(0, 4), "b": record(0, 4)}, bytes(4), None, "b: starts at byte 0 of the payload, expected 4: overlaps"),
        ({"a": record(4, 0, shape=[0])}, bytes(4), None, r"a: data_offsets \[4, 0\]"),
        ({"a": record(0, 4) | {"data_offsets": [-4, 0]}}, bytes(4), None, r"a: data_offsets \[-4, 0\]"),
        ({"a": record(0, 4) | {"data_offsets": [0, 4, 8]}}, bytes(4), None, r"a: data_offsets \[0, 4, 8\]"),
        ({"a": record(0, 4) | {"data_offsets": [0, 4.0]}}, bytes(4), None, r"a: data_offsets \[0, 4.0\]"),
        ({"a": record(0, 4) | {"data_offsets": [False, 4]}}, bytes(4), None, r"a: data_offsets \[False, 4\]"),
        ({"a": record(0, 4, "F8_E5M2")}, bytes(4), None, "a: unknown dtype 'F8_E5M2'"),
        ({"a": record(0, 4) | {"dtype": ["U8"]}}, bytes(4), None, r"a: unknown dtype \['U8'\]"),
        ({"a": record(0, 4, "F32", [2])}, bytes(4), None, r"a: F32 \[2\] needs 8 bytes, its offsets hold 4"),
        ({"a": record(0, 4, "U8", [3])}, bytes(4), None, r"a: U8 \[3\] needs 3 bytes, its offsets hold 4"),
        ({"a": record(0, 4, "U8", [-2, -2])}, bytes(4), None, r"a: shape \[-2, -2\]"),
        ({"a": record(0, 4, "U8", [2**61, 2**61])}, bytes(4), None, "a: U8 .* needs"),
        ({"a": record(0, 4) | {"shape": 4}}, bytes(4), None, "a: shape 4"),
        ({"a": record(0, 4) | {"extra": 1}}, bytes(4), None, "a: .* nothing else"),
        ({"a": 5}, bytes(4), None, "a: 5; expected dtype"),
        ({"__metadata__": {"x": 1}}, b"", None, "__metadata__ is not an object of strings"),
        ([GOOD], bytes(12), None, "starts with"),
        (b" {}", b"", None, "starts with"),
        (b"{", b"", None, "not JSON"),
        (b'{"a": NaN}', b"", None, "NaN is not JSON"),
        (b'{"\xff": 1}', b"", None, "not JSON.*utf-8"),
        (b'{"a":' * 100000, b"", None, "not JSON"),
        (
            b'{"a":' + json.dumps(record(0, 4)).encode() + b',"a":' + json.dumps(record(0, 4)).encode() + b"}",
            bytes(4),
            None,
            "duplicate key 'a'",
        ),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4), None, "duplicate key 'dtype'"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', bytes(4), None, "not JSON"),
    ],
)
def test_a_header_that_lies_is_refused_with_its_reason(tmp_path, header, payload, length, message):
    path = raw_file(tmp_path / "lie.safetensors", header, payload, length)
    with pytest.raises(ValueError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_the_header_that_the_lies_are_made_from_is_good(tmp_path):
    assert list(read_header(raw_file(tmp_path / "good", GOOD, bytes(12)))) == ["a", "b"]


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_header_length_is_refused(tmp_path, size):
    (tmp_path / "short").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=f"{size} bytes; a safetensors file starts"):
        read_header(tmp_path / "short")


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error_not_zeros(tmp_path):
    write_file(tmp_path / "a", {"x": torch.ones(4)})
    entry = read_header(tmp_path / "a")["x"]
    os.truncate(tmp_path / "a", entry.end - 1)
    with pytest.raises(ValueError, match=f"x: the file ends at byte {entry.end - 1}, the tensor needs {entry.end}"):
        read_tensor(tmp_path / "a", "x", entry)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6), st.integers(0, 6)), min_size=1, max_size=4),
    end=st.none() | st.integers(0, 400),
    length=st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 400),
)
def test_a_damaged_file_is_read_right_or_refused_with_a_value_error(tmp_path, cuts, end, length):
    """Bytes replaced, inserted, removed, cut short, another header length: a ValueError and nothing else, or entries that fit the file."""
    write_file(tmp_path / "good", {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int8), "c": torch.zeros(())}, {"k": "v"})
    data = bytearray((tmp_path / "good").read_bytes())
    for place, new, removed in cuts:
        data[place : place + removed] = new
    if length is not None:
        data[:8] = struct.pack("<Q", length)
    (tmp_path / "bad").write_bytes(data[:end])
    try:
        entries = read_header(tmp_path / "bad")
    except ValueError as error:
        assert str(tmp_path / "bad") in str(error)
        return
    for name, entry in entries.items():
        assert isinstance(entry, Entry) and 8 <= entry.start <= entry.end <= len(data[:end])
        assert read_tensor(tmp_path / "bad", name, entry).shape == entry.shape


# Folders


def some(count: int = 6) -> list[tuple[str, torch.Tensor]]:
    return [(f"layers.{number}.w", torch.full((4, 4), number, dtype=torch.float32)) for number in range(count)]


def test_the_golden_folder_opens_and_equals_the_safetensors_package():
    folder = open_folder(TINY)
    loaded = load_file(TINY / "model-00001-of-00002.safetensors") | load_file(TINY / "model-00002-of-00002.safetensors")
    assert len(folder.entries) == 898 and folder.total_bytes == 9_101_862 and set(loaded) == set(folder.entries)
    for name, tensor in loaded.items():
        assert same(folder.read(name), tensor), name
        check_values(name, tensor)


def test_a_folder_comes_back_and_twice_is_byte_identical(tmp_path):
    tensors = some()
    for place in ("a", "b"):
        write_folder(tmp_path / place, tensors, 130)
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert names == [*(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)), INDEX]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 * 64 and index["weight_map"]["layers.2.w"] == "model-00002-of-00003.safetensors"
    folder = open_folder(tmp_path / "a")
    assert all(same(folder.read(name), tensor) for name, tensor in tensors)
    assert same(folder.rows("layers.3.w", 1, 3), tensors[3][1][1:3]) and same(folder.columns("layers.3.w", 1, 3), tensors[3][1][:, 1:3])
    assert same(folder.gather("layers.3.w", [3, 3]), tensors[3][1][[3, 3]])
    with pytest.raises(ValueError, match="no tensor layers.9.w among 6"):
        folder.read("layers.9.w")


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
    write_folder(tmp_path, [("a", torch.ones(2)), ("b", torch.ones(100)), ("c", torch.ones(2))], 16)
    assert open_folder(tmp_path).files == {f: f"model-0000{n}-of-00003.safetensors" for n, f in enumerate("abc", 1)}


def test_writing_again_replaces_and_never_mixes(tmp_path):
    write_folder(tmp_path, some(6), 130)
    write_folder(tmp_path, [(name, tensor + 1) for name, tensor in some(6)], 130)
    assert float(open_folder(tmp_path).read("layers.5.w")[0, 0]) == 6
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds model-00001-of-00003.safetensors of another checkpoint; remove its 3 shards"):
        write_folder(tmp_path, some(6), 65)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    def broken():
        yield from some(3)
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        write_folder(tmp_path, broken(), 65)
    with pytest.raises(ValueError, match="x: dtype torch.complex64"):
        write_file(tmp_path / "a", {"x": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="x is given twice"):
        write_folder(tmp_path, [("x", torch.ones(1)), ("x", torch.ones(1))], 65)
    with pytest.raises(ValueError, match="no tensors to write"):
        write_folder(tmp_path, [], 65)
    with pytest.raises(ValueError, match="shard_bytes 0"):
        write_folder(tmp_path, some(1), 0)
    assert list(tmp_path.iterdir()) == []


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def drop_tensor(index):
    del index["weight_map"]["layers.2.w"]


def add_tensor(index):
    index["weight_map"]["layers.7.w"] = "model-00002-of-00003.safetensors"


def move_tensor(index):
    index["weight_map"]["layers.2.w"] = "model-00001-of-00003.safetensors"


def lie_about_size(index):
    index["metadata"]["total_size"] += 1


def size_as_text(index):
    index["metadata"]["total_size"] = "384"


def point_outside(index):
    index["weight_map"]["layers.2.w"] = "../model-00001-of-00003.safetensors"


def drop_map(index):
    del index["weight_map"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_tensor, "model-00002-of-00003.safetensors: layers.2.w: the index has it in no shard"),
        (add_tensor, r"layers.7.w \(and 0 more\): listed for model-00002-of-00003.safetensors, which does not have it"),
        (move_tensor, "layers.2.w: the index has it in model-00001-of-00003"),
        (lie_about_size, "metadata.total_size 385, the shards hold 384 bytes"),
        (size_as_text, "total_size '384' is not an integer"),
        (point_outside, r"layers.2.w: '\.\./model.* is not a shard name"),
        (drop_map, "expected an object with weight_map"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path, change, message):
    write_folder(tmp_path, some(), 130)
    edit_index(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        open_folder(tmp_path)


def test_missing_unlisted_and_doubled_shards_are_refused(tmp_path):
    write_folder(tmp_path, some(), 130)
    second = tmp_path / "model-00002-of-00003.safetensors"
    second.rename(tmp_path / "away")
    with pytest.raises(ValueError, match="shards missing: .*model-00002-of-00003.safetensors"):
        open_folder(tmp_path)
    (tmp_path / "away").rename(second)
    write_file(tmp_path / "model-00001-of-00009.safetensors", dict(some(1)))
    with pytest.raises(ValueError, match="does not list: .*model-00001-of-00009.safetensors"):
        open_folder(tmp_path)
    (tmp_path / "model-00001-of-00009.safetensors").unlink()
    write_file(second, dict(some(4)[1:]))  # layers.1.w is now in two shards
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors: layers.1.w: the index has it in model-00001-of-00003.safetensors"):
        open_folder(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match="no model.safetensors.index.json"):
        open_folder(tmp_path)


def test_a_name_twice_in_the_index_is_refused(tmp_path):
    write_folder(tmp_path, some(1), 130)
    shard = "model-00001-of-00001.safetensors"
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"layers.0.w": "{shard}", "layers.0.w": "{shard}"}}}}')
    with pytest.raises(ValueError, match="duplicate key 'layers.0.w'"):
        open_folder(tmp_path)


# Values


@pytest.mark.parametrize(("dtype", "code"), [(torch.float8_e8m0fnu, 255), (torch.float8_e4m3fn, 0x7F), (torch.float8_e4m3fn, 0xFF)])
def test_nan_codes_are_refused_with_their_index(dtype, code):
    raw = torch.zeros(3, 4, dtype=torch.uint8)
    raw[1, 2] = code
    with pytest.raises(ValueError, match=rf"layers.0.x: byte 0x{code:02X} at \[1, 2\] is NaN"):
        check_values("layers.0.x", raw.view(dtype))


def test_every_other_code_passes():
    codes = torch.arange(256, dtype=torch.uint8)
    check_values("scale", codes[codes != 255].view(torch.float8_e8m0fnu))
    check_values("weight", codes[(codes & 127) != 127].view(torch.float8_e4m3fn))
    check_values("packed", codes.view(torch.int8))
