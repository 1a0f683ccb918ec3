# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files, checked strictly."""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

HEADER_LIMIT = 100_000_000  # bytes: the limit of the format
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FIELDS = frozenset(("dtype", "shape", "data_offsets"))
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: dtype as the format names it, shape, and its bytes start .. end - 1 counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """What a file says about itself: tensors by name in the order of their bytes, and its metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(path: str | Path) -> dict[str, Entry]:
    """Tensors of a safetensors file by name, in the order of their bytes; only the header is read.

    Raises ValueError, with the file, the tensor and the numbers, for a truncated file, a header longer than the file or the format
    allows, text that is not one JSON object, duplicate names, unknown dtypes, shapes that do not fill their bytes, and for offsets that
    leave gaps, overlap or do not end where the file does.
    """
    return read_file_header(path).entries


def read_file_header(path: str | Path) -> Header:
    """As `read_header`, with the metadata."""
    text, payload, size = _header_text(path)
    found = _json_object(path, text)
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ is not an object of strings")
    entries = [(name, _entry(path, name, record, payload)) for name, record in found.items()]
    entries.sort(key=lambda item: (item[1].start, item[1].end))
    _check_layout(path, entries, payload, size)
    return Header(dict(entries), metadata)


def _header_text(path: str | Path) -> tuple[bytes, int, int]:
    """The header's bytes, where the payload starts, and the size of the file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        start = os.pread(descriptor, 8, 0)
        if len(start) < 8:
            raise ValueError(f"{path}: {size} bytes; a safetensors file starts with 8 bytes of header length")
        (length,) = struct.unpack("<Q", start)
        if length > HEADER_LIMIT:
            raise ValueError(f"{path}: header of {length} bytes; the format allows {HEADER_LIMIT}")
        if length > size - 8:
            raise ValueError(f"{path}: header of {length} bytes in a file of {size}; truncated, or not a safetensors file")
        text = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    if len(text) != length:
        raise ValueError(f"{path}: {len(text)} of {length} header bytes could be read")
    return text, 8 + length, size


def unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json's object_pairs_hook: a key that occurs twice is a ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def parse_json(path: str | Path, text: bytes) -> object:
    """JSON text of a file, strictly: UTF-8, no duplicate keys, no NaN or Infinity; ValueError with the file otherwise."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON as expected: {error}") from None


def _json_object(path: str | Path, text: bytes) -> dict[str, object]:
    if not text.startswith(b"{"):
        raise ValueError(f"{path}: the header starts with {text[:1]!r}; expected an object")
    found = parse_json(path, text)
    assert isinstance(found, dict), "text that starts with a brace is an object"
    return found


def _integers(value: object, limit: int) -> tuple[int, ...] | None:
    """A JSON list of integers 0 .. limit as a tuple, or None."""
    if not isinstance(value, list):
        return None
    for item in value:  # a loop: a released folder has 400,000 of these numbers
        if type(item) is not int or not 0 <= item <= limit:
            return None
    return tuple(value)


def _entry(path: str | Path, name: str, record: object, payload: int) -> Entry:
    if not isinstance(record, dict) or record.keys() != FIELDS:
        raise ValueError(f"{path}: {name}: {_short(record)}; expected dtype, shape and data_offsets and nothing else")
    dtype, shape = record["dtype"], _integers(record["shape"], 1 << 62)
    offsets = _integers(record["data_offsets"], 1 << 62)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{path}: {name}: unknown dtype {_short(dtype)}; known: {', '.join(DTYPES)}")
    if shape is None:
        raise ValueError(f"{path}: {name}: shape {_short(record['shape'])} is not a list of sizes")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path}: {name}: data_offsets {_short(record['data_offsets'])}; expected [start, end], 0 <= start <= end")
    expected = prod(shape) * DTYPES[dtype].itemsize
    if expected != offsets[1] - offsets[0]:
        raise ValueError(f"{path}: {name}: {dtype} {list(shape)} needs {expected} bytes, its offsets hold {offsets[1] - offsets[0]}")
    return Entry(dtype, shape, payload + offsets[0], payload + offsets[1])


def _check_layout(path: str | Path, entries: list[tuple[str, Entry]], payload: int, size: int) -> None:
    for name, start, position in _steps(entries, payload):
        if start != position:
            kind = "overlaps the tensor before it" if start < position else "leaves a gap"
            raise ValueError(f"{path}: {name}: starts at byte {start - payload} of the payload, expected {position - payload}: {kind}")
    end = entries[-1][1].end if entries else payload
    if end != size:
        kind = "truncated" if end > size else "bytes behind the last tensor"
        last = entries[-1][0] if entries else "no tensor"
        raise ValueError(f"{path}: {last}: the payload ends at byte {end}, the file at {size}: {kind}")


def _steps(entries: list[tuple[str, Entry]], position: int) -> Iterator[tuple[str, int, int]]:
    """(name, its start, the end of the tensor before it)."""
    for name, entry in entries:
        yield name, entry.start, position
        position = entry.end


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
