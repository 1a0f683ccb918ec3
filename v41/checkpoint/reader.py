# SPDX-License-Identifier: Apache-2.0
"""Reading tensors, and slices of them, of safetensors files and of folders in the released layout.

Bytes come by preadv straight into the tensor: a file larger than memory opens in the time of its header, and a slice reads its own bytes
only (a column slice: its whole rows, a band at a time).
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from v41.checkpoint.header import Entry, parse_json, read_header

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
BAND = 8 << 20  # bytes that a column slice reads at once


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fill(descriptor: int, path: Path, name: str, buffer: memoryview, offset: int) -> None:
    """Fills the buffer from the file; one call returns less than 2 GiB, so it loops."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise ValueError(f"{path}: {name}: the file ends at byte {offset + done}, the tensor needs {offset + len(buffer)}")
        done += count


def _target(name: str, entry: Entry, shape: tuple[int, ...], out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tensor to fill, given or new, and its bytes as a flat uint8 view."""
    if out is None:
        raw = torch.empty(prod(shape) * entry.torch_dtype.itemsize, dtype=torch.uint8)
        return raw.view(entry.torch_dtype).view(shape), raw
    if out.dtype != entry.torch_dtype or tuple(out.shape) != shape or not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(f"{name}: out is {out.dtype} {list(out.shape)}; expected contiguous {entry.torch_dtype} {list(shape)} on the CPU")
    return out, out.view(-1).view(torch.uint8)


def _span(name: str, what: str, size: int, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: {what} {start}..{stop} of {size}; expected 0 <= start <= stop <= {size}")


def _row_bytes(name: str, entry: Entry) -> int:
    if not entry.shape:
        raise ValueError(f"{name}: a scalar has no rows")
    return prod(entry.shape[1:]) * entry.torch_dtype.itemsize


def read_rows(path: str | Path, name: str, entry: Entry, start: int, stop: int, out: Tensor | None = None) -> Tensor:
    """Rows start .. stop - 1 of a tensor as its own dtype, [stop - start, ...], into `out` where it is given."""
    width = _row_bytes(name, entry)
    _span(name, "rows", entry.shape[0], start, stop)
    tensor, raw = _target(name, entry, (stop - start, *entry.shape[1:]), out)
    with _opened(Path(path)) as descriptor:
        _fill(descriptor, Path(path), name, raw.numpy().data, entry.start + start * width)
    return tensor


def read_tensor(path: str | Path, name: str, entry: Entry, out: Tensor | None = None) -> Tensor:
    """The whole tensor as its own dtype and shape, into `out` where it is given."""
    tensor, raw = _target(name, entry, entry.shape, out)
    with _opened(Path(path)) as descriptor:
        _fill(descriptor, Path(path), name, raw.numpy().data, entry.start)
    return tensor


def read_columns(path: str | Path, name: str, entry: Entry, start: int, stop: int, out: Tensor | None = None) -> Tensor:
    """Columns start .. stop - 1 of a matrix, [rows, stop - start]; reads whole rows, BAND bytes at a time."""
    if len(entry.shape) != 2:
        raise ValueError(f"{name}: columns of shape {list(entry.shape)}; expected a matrix")
    rows, columns = entry.shape
    _span(name, "columns", columns, start, stop)
    tensor, raw = _target(name, entry, (rows, stop - start), out)
    width, size = _row_bytes(name, entry), entry.torch_dtype.itemsize
    if tensor.numel() == 0:
        return tensor
    wanted, at_once = raw.view(rows, -1), max(1, BAND // width)
    band = torch.empty(min(rows, at_once), width, dtype=torch.uint8)
    with _opened(Path(path)) as descriptor:
        for first in range(0, rows, at_once):
            part = band[: min(at_once, rows - first)]
            _fill(descriptor, Path(path), name, part.view(-1).numpy().data, entry.start + first * width)
            wanted[first : first + len(part)] = part[:, start * size : stop * size]
    return tensor


def gather_rows(path: str | Path, name: str, entry: Entry, ids: Sequence[int], out: Tensor | None = None) -> Tensor:
    """The rows `ids` in this order, repeats allowed, [len(ids), ...]; each distinct row is read once."""
    width = _row_bytes(name, entry)
    bad = [number for number in ids if not 0 <= number < entry.shape[0]]
    if bad:
        raise ValueError(f"{name}: row {bad[0]} of {entry.shape[0]}")
    tensor, raw = _target(name, entry, (len(ids), *entry.shape[1:]), out)
    lines = raw.view(len(ids), width)
    places: dict[int, int] = {}
    with _opened(Path(path)) as descriptor:
        for place, number in sorted(enumerate(ids), key=lambda pair: (pair[1], pair[0])):  # ascending: read ahead works
            if places.setdefault(number, place) == place:
                _fill(descriptor, Path(path), name, lines[place].numpy().data, entry.start + number * width)
            else:
                lines[place] = lines[places[number]]
    return tensor


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder in the released layout: where every tensor lies. Holds no open file."""

    path: Path
    files: dict[str, str]  # tensor name -> shard
    entries: dict[str, Entry]

    @property
    def total_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def _at(self, name: str) -> tuple[Path, str, Entry]:
        if name not in self.entries:
            raise ValueError(f"{self.path}: no tensor {name} among {len(self.entries)}")
        return self.path / self.files[name], name, self.entries[name]

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """See `read_tensor`."""
        return read_tensor(*self._at(name), out)

    def rows(self, name: str, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """See `read_rows`."""
        return read_rows(*self._at(name), start, stop, out)

    def columns(self, name: str, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """See `read_columns`."""
        return read_columns(*self._at(name), start, stop, out)

    def gather(self, name: str, ids: Sequence[int], out: Tensor | None = None) -> Tensor:
        """See `gather_rows`."""
        return gather_rows(*self._at(name), ids, out)


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """weight_map and metadata.total_size (None where absent) of a folder's index."""
    file = path / INDEX
    if not file.is_file():
        raise ValueError(f"{path}: no {INDEX}; expected a folder in the released layout")
    index = parse_json(file, file.read_bytes())
    files = index.get("weight_map") if isinstance(index, dict) else None
    metadata = index.get("metadata", {}) if isinstance(index, dict) else None
    if not isinstance(files, dict) or not isinstance(metadata, dict):
        raise ValueError(f"{file}: expected an object with weight_map (tensor to shard) and metadata")
    for name, shard in files.items():
        if not isinstance(shard, str) or not SHARD.fullmatch(shard):
            raise ValueError(f"{file}: {name}: {shard!r} is not a shard name like model-00001-of-00002.safetensors")
    total = metadata.get("total_size")
    if total is not None and type(total) is not int:
        raise ValueError(f"{file}: metadata.total_size {total!r} is not an integer")
    return files, total


def open_folder(path: str | Path) -> Folder:
    """The tensors of a folder from its index and the headers of its shards; no payload is read.

    Raises ValueError where index and shards disagree: a missing or unlisted shard, a tensor that only one of them has or that two shards
    have, a total size that is not the sum of the tensors.
    """
    path = Path(path)
    files, total = read_index(path)
    shards = sorted(set(files.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    unlisted = sorted(file.name for file in path.iterdir() if SHARD.fullmatch(file.name) and file.name not in shards)
    if missing or unlisted:
        raise ValueError(f"{path}: shards missing: {missing or 'none'}; shards that the index does not list: {unlisted or 'none'}")
    entries: dict[str, Entry] = {}
    for shard in shards:
        header = read_header(path / shard)
        for name, entry in header.items():
            if files.get(name) != shard:
                raise ValueError(f"{path / shard}: {name}: the index has it in {files.get(name, 'no shard')}")
            entries[name] = entry
    absent = sorted(set(files) - set(entries))
    if absent:
        raise ValueError(f"{path}: {absent[0]} (and {len(absent) - 1} more): listed for {files[absent[0]]}, which does not have it")
    size = sum(entry.nbytes for entry in entries.values())
    if total is not None and total != size:
        raise ValueError(f"{path / INDEX}: metadata.total_size {total}, the shards hold {size} bytes")
    return Folder(path, files, entries)
