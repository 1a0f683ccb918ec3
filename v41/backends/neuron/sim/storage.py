# SPDX-License-Identifier: Apache-2.0
"""One allocation: its bytes, which of them were written, and who touched which part when."""

from dataclasses import dataclass

import numpy as np

LIMIT = 128  # entries of an access history before the oldest are merged


@dataclass(frozen=True)
class Region:
    """A bounding box: rows (partitions, or rows of an HBM tensor) by bytes within the row."""

    row0: int
    row1: int
    byte0: int
    byte1: int

    def overlaps(self, other):
        """Whether the boxes share a byte."""
        return self.row0 < other.row1 and other.row0 < self.row1 and self.byte0 < other.byte1 and other.byte0 < self.byte1

    def covers(self, other):
        """Whether the other box lies inside this one."""
        return self.row0 <= other.row0 and self.row1 >= other.row1 and self.byte0 <= other.byte0 and self.byte1 >= other.byte1

    def union(self, other):
        """The smallest box around both."""
        return Region(
            min(self.row0, other.row0),
            max(self.row1, other.row1),
            min(self.byte0, other.byte0),
            max(self.byte1, other.byte1),
        )


@dataclass(frozen=True)
class Access:
    """One read or write: the box, when it finished on each clock, by which program and between which barriers."""

    region: Region
    clock: tuple
    program: int
    epoch: int
    pattern: tuple


class Storage:
    """Bytes of one tensor. `pitch` is bytes per partition (on chip) or per row (HBM).

    `state` is "empty", "partial" (see `mask`, one byte per byte) or "full".
    """

    def __init__(self, buffer, kind, shape, size, data=None, name=""):
        self.buffer, self.kind, self.name, self.shape = buffer, kind, name, tuple(shape)
        count = 1
        for n in shape:
            count *= n
        self.nbytes = count * size
        row = count // shape[0] if buffer in ("sbuf", "psum") else shape[-1]
        self.pitch = row * size
        self.borrowed = data is not None
        self.data = data if self.borrowed else np.empty(self.nbytes, np.uint8)
        self.state = "full" if self.borrowed else "empty"
        self.mask = None
        self.lease = None
        self.partition0 = 0
        self.mutated = False
        self.writes, self.reads = [], []
        self.owner = None
        self.epoch = 0
        self.matmul = np.zeros(self.nbytes, bool) if buffer == "psum" else None

    def own(self):
        """Copy bytes that belong to the caller before the first write to them."""
        if self.borrowed:
            self.data = self.data.copy()
            self.borrowed = False

    def mark(self, cells, everything):
        """Record a write; `cells(mask)` is the written part of a mask."""
        if self.state == "full":
            return
        if everything:
            self.state, self.mask = "full", None
            return
        self._open()
        cells(self.mask)[...] = True

    def mark_where(self, cells, chosen):
        """Record a write of the chosen elements of a part."""
        if self.state != "full":
            self._open()
            cells(self.mask)[chosen] = True

    def _open(self):
        if self.mask is None:
            self.mask = np.zeros(self.nbytes, bool)
            self.state = "partial"

    def written(self, cells):
        """Whether every byte of the part was written."""
        if self.state == "full":
            return True
        return self.state == "partial" and bool(cells(self.mask).all())

    def complete(self):
        """Whether every byte of the tensor was written."""
        if self.state == "partial" and self.mask.all():
            self.state, self.mask = "full", None
        return self.state == "full"

    def remember(self, history, access):
        """Append to a history, dropping entries that the new one covers and merging the oldest when it grows long."""
        kept = [a for a in history if not (a.program == access.program and access.region.covers(a.region))]
        if len(kept) >= LIMIT:
            kept = _merge(kept)
        kept.append(access)
        history[:] = kept


def _merge(history):
    half = len(history) // 2
    oldest, rest = history[:half], history[half:]
    merged = []
    for program in sorted({a.program for a in oldest}):
        mine = [a for a in oldest if a.program == program]
        region = mine[0].region
        for a in mine[1:]:
            region = region.union(a.region)
        clock = tuple(max(values) for values in zip(*(a.clock for a in mine), strict=True))
        pattern = mine[0].pattern if len({a.pattern[:2] for a in mine}) == 1 else ()
        merged.append(Access(region, clock, program, max(a.epoch for a in mine), pattern))
    return merged + rest
