# SPDX-License-Identifier: Apache-2.0
"""Where tensors come from, and a log of what was read: the digest of every tensor, or of every row where only rows were read."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from v41 import recipe
from v41.checkpoint import Folder, check_values, tensor_bytes
from v41.released import released_table
from v41.spec.config import Config

BAND = 64 << 20  # bytes of a tensor that are converted together


@dataclass(frozen=True)
class Log:
    """SHA-256 by tensor name: of tensors read whole, and of single rows of those that are read in rows."""

    whole: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, other: "Log") -> None:
        """Takes another log in; ValueError where the same bytes now have another digest."""
        for name, digest in other.whole.items():
            _same(name, self.whole.setdefault(name, digest), digest)
        for name, rows in other.rows.items():
            known = self.rows.setdefault(name, {})
            for row, digest in rows.items():
                _same(f"{name} row {row}", known.setdefault(row, digest), digest)

    def as_dict(self) -> dict[str, Any]:
        """For manifests: sorted by name, rows by number."""
        rows = {name: {row: digests[row] for row in sorted(digests, key=int)} for name, digests in sorted(self.rows.items())}
        return {"whole": dict(sorted(self.whole.items())), "rows": rows}


def _same(what: str, before: str, now: str) -> None:
    if before != now:
        raise ValueError(f"{what}: sha256 {now[:16]}, before in this run {before[:16]}: the checkpoint changed while it was read")


@dataclass(frozen=True)
class Source:
    """Tensors by released name, whole or some of their rows; `on_read` hears the bytes of every read, `log` keeps the digests."""

    read_tensor: Callable[[str], Tensor]
    gather_rows: Callable[[str, Sequence[int]], Tensor]
    read_band: Callable[[str, int, int], Tensor]
    shape: Callable[[str], tuple[int, ...]]
    log: Log = field(default_factory=Log)
    on_read: Callable[[int], None] = lambda count: None

    def read(self, name: str) -> Tensor:
        """The whole tensor in its stored dtype."""
        tensor = self.read_tensor(name)
        self._note(name, hashlib.sha256(tensor_bytes(name, tensor)).hexdigest(), tensor.nbytes)
        return tensor

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole matrix converted to `dtype`; only a band of it is held in its stored dtype."""
        shape, digest, count = self.shape(name), hashlib.sha256(), 0
        out, rows = torch.empty(shape, dtype=dtype), max(1, BAND // (4 * shape[1]))
        for first in range(0, shape[0], rows):
            band = self.read_band(name, first, min(first + rows, shape[0]))
            digest.update(tensor_bytes(name, band))
            out[first : first + rows] = band
            count += band.nbytes
            self.on_read(band.nbytes)
        self._note(name, digest.hexdigest(), 0)
        return out

    def gather(self, name: str, ids: Tensor) -> Tensor:
        """The rows `ids`, flattened, [len, ...]; each distinct row is read once."""
        distinct, place = ids.flatten().unique(return_inverse=True)
        rows = self.gather_rows(name, distinct.tolist())
        digests = {str(i): hashlib.sha256(tensor_bytes(name, row)).hexdigest() for i, row in zip(distinct.tolist(), rows, strict=True)}
        self.log.add(Log(rows={name: digests}))
        self.on_read(rows.nbytes)
        width = rows.shape[1] * rows.element_size()
        return rows.view(torch.uint8).view(-1, width)[place].view(rows.dtype)

    def _note(self, name: str, digest: str, count: int) -> None:
        self.log.add(Log({name: digest}))
        if count:
            self.on_read(count)


def folder_source(folder: Folder) -> Source:
    """A checkpoint folder; values that no tensor may have are refused with file and tensor."""

    def checked(name: str, tensor: Tensor, what: str = "") -> Tensor:
        check_values(f"{folder.path / folder.files[name]}: {name}{what}", tensor)
        return tensor

    def gather(name: str, ids: Sequence[int]) -> Tensor:
        rows = folder.gather(name, ids)
        for i, row in zip(ids, rows, strict=True):
            checked(name, row, f" row {i}")
        return rows

    def band(name: str, start: int, stop: int) -> Tensor:
        return checked(name, folder.rows(name, start, stop), f" rows {start}..{stop - 1}")

    return Source(lambda name: checked(name, folder.read(name)), gather, band, lambda name: folder.entries[name].shape)


def recipe_source(config: Config, seed: int) -> Source:
    """The same by the weight recipe: no file at all, and of a table only the rows that are asked for."""
    table = released_table(config)

    def rows(name: str, first: int, last: int) -> Tensor:
        return recipe.generate(name, table[name].dtype, table[name].shape, seed, slice(first, last))

    def gather(name: str, ids: Sequence[int]) -> Tensor:
        found = [rows(name, i, i + 1).view(torch.uint8) for i in ids]
        return torch.cat(found).view(table[name].dtype)

    return Source(lambda name: rows(name, 0, table[name].shape[0]), gather, rows, lambda name: table[name].shape)
