# SPDX-License-Identifier: Apache-2.0
"""Writing safetensors files and folders in the released layout: equal tensors give equal bytes, and no half-written file has its name."""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from v41.checkpoint.header import HEADER_LIMIT, NAMES
from v41.checkpoint.reader import INDEX, SHARD

PART = ".part"


def tensor_bytes(name: str, tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; ValueError for a dtype that the format does not name."""
    if tensor.dtype not in NAMES:
        raise ValueError(f"{name}: dtype {tensor.dtype} cannot be stored; known: {', '.join(map(str, NAMES))}")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Header of tensors in the given order, padded with spaces to a multiple of 8."""
    records: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name}: dtype {tensor.dtype} cannot be stored; known: {', '.join(map(str, NAMES))}")
        end = position + tensor.numel() * tensor.dtype.itemsize
        records[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(records, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"header of {len(text)} bytes for {len(tensors)} tensors; the format allows {HEADER_LIMIT}")
    return struct.pack("<Q", len(text)) + text


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Widest dtypes first, then by name: every tensor is aligned, and the order of `tensors` does not matter."""
    if "__metadata__" in tensors:
        raise ValueError(f"{path}: __metadata__ is not a tensor name")
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header = _header(ordered, metadata)
    with open(path, "wb") as file:
        file.write(header)
        for name, tensor in ordered.items():
            file.write(tensor_bytes(name, tensor))


def write_file(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """One safetensors file; written beside `path` under another name, then renamed."""
    path = Path(path)
    part = path.with_name(path.name + PART)
    try:
        _write(part, tensors, metadata or {})
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_parts(path: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, parts: list[Path]) -> tuple[dict[str, int], int]:
    """Writes shards as they fill, each to a name of its own, appended to `parts`; the shard number of each tensor, and the bytes of all."""
    numbers: dict[str, int] = {}
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        parts.append(path / f"{len(parts) + 1:05d}{PART}")
        _write(parts[-1], held, {"format": "pt"})
        held.clear()

    for name, tensor in tensors:
        if name in numbers:
            raise ValueError(f"{path}: {name} is given twice")
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if held and size + nbytes > shard_bytes:
            flush()
            size = 0
        held[name], numbers[name] = tensor, len(parts) + 1
        size, total = size + nbytes, total + nbytes
    if not held:
        raise ValueError(f"{path}: no tensors to write")
    flush()
    return numbers, total


def write_folder(path: str | Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = 5_000_000_000) -> None:
    """Tensors, in the given order, as shards of up to `shard_bytes` payload bytes and an index; one shard is held in memory at a time.

    A larger tensor gets a shard of its own. Shards that are there from before under names that this call does not write are a ValueError.
    The index is removed first and written last, so that a folder that was being replaced is refused by `open_folder`, not mixed.
    """
    path = Path(path)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes {shard_bytes}; expected at least 1")
    path.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    try:
        numbers, total = _write_parts(path, tensors, shard_bytes, parts)
        shards = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
        stale = sorted(file.name for file in path.iterdir() if SHARD.fullmatch(file.name) and file.name not in shards)
        if stale:
            raise ValueError(f"{path}: holds {stale[0]} of another checkpoint; remove its {len(stale)} shards or choose another folder")
        (path / INDEX).unlink(missing_ok=True)
        for part, shard in zip(parts, shards, strict=True):
            os.replace(part, path / shard)
        weight_map = {name: shards[number - 1] for name, number in sorted(numbers.items())}
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, ensure_ascii=False)
        parts.append(path / (INDEX + PART))
        parts[-1].write_text(index + "\n", encoding="utf-8")
        os.replace(parts[-1], path / INDEX)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
