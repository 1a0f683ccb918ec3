# SPDX-License-Identifier: Apache-2.0
"""Rows addressed by an index tile: row p of a vector-indexed view starts at index[p] * stride."""

from dataclasses import dataclass

import numpy as np

from v41.backends.neuron.sim.memory import PARTITIONS, SBUF
from v41.backends.neuron.sim.tensor import NkiTensor


@dataclass(frozen=True)
class Rows:
    """flat: element numbers (rows, elements per row); valid: rows whose index is in range; index: the values."""

    flat: np.ndarray
    valid: np.ndarray
    index: np.ndarray


def rows_of(ins, role, t, skip, transposed=False):
    """The rows of a view with a vector offset; OP-OOB unless skip."""
    tile = ins.tensor(f"{role}.vector_offset", t.index.source, (SBUF,), "PLACE-GATHER")
    ins.dtype(f"{role}.vector_offset", tile, ("uint32", "int32"), "TYPE-INDEX")
    if tile.dtype == "int32":
        ins.fail("TYPE-INDEX32", "vector_offset tile is int32", role)
    if transposed:
        index = ins.raw(f"{role}.vector_offset", tile).T.reshape(-1)[: t.shape[0]].astype(np.int64)
    else:
        if tile.shape != (t.shape[0], 1) or t.shape[0] > PARTITIONS:
            ins.fail("OP-DMA", f"index tile {tile.shape} for {t.shape[0]} rows; must be (rows <= 128, 1)", role)
        index = ins.raw(f"{role}.vector_offset", tile).reshape(-1).astype(np.int64)
    inner = np.zeros((1,), np.int64)
    for n, s in zip(t.shape[1:], t.strides[1:], strict=True):
        inner = (inner[:, None] + np.arange(n) * s).reshape(-1)
    flat = t.offset + index[:, None] * t.index.stride + inner
    count = t.storage.nbytes // t.itemsize
    valid = (index >= 0) & (index < t.index.bound) & (flat.min(axis=1) >= 0) & (flat.max(axis=1) < count)
    if not valid.all() and not skip:
        bad = int(index[~valid][0])
        ins.fail("OP-OOB", f"index {bad} of {t.index.bound} rows", role)
    return Rows(flat, valid, index)


def _box(t, flat):
    """What the rows lie in; it keeps the index, by which accesses of rows of one size are known to be alike."""
    low, high = int(flat.min()), int(flat.max())
    return NkiTensor(t.storage, t.dtype, (high - low + 1,), (1,), low, t.index)


def gather(ins, role, t, rows):
    """Container values of the valid rows, shaped (valid rows, elements per row)."""
    flat = rows.flat[rows.valid]
    if flat.size == 0:
        return np.zeros(flat.shape, t.codes().dtype if t.index is None else _typed(t).dtype)
    storage = t.storage
    if storage.state != "full":
        mask = storage.mask
        if mask is None or not mask.reshape(-1, t.itemsize)[flat].all():
            ins.fail("INIT-POISON", f"a gathered row of {t!r} has bytes that were never written", role)
    ins.read.append((role, _box(t, flat)))
    return _typed(t)[flat]


def _typed(t):
    from v41.backends.neuron.sim.dtypes import SPECS

    return t.storage.data.view(SPECS[t.dtype].container)


def scatter(ins, role, t, rows, codes, unique=False):
    """Write container values (rows, elements per row) to the valid rows."""
    chosen = rows.index[rows.valid]
    if len(np.unique(chosen)) != len(chosen):
        rule = "OP-DMA" if unique else "HAZ-SCATTER"
        ins.fail(rule, "one row is written twice by one instruction", role)
    if chosen.size == 0:
        return
    for r in np.flatnonzero(rows.valid):
        start = t.offset + int(rows.index[r]) * t.index.stride
        row = NkiTensor(t.storage, t.dtype, t.shape[1:], t.strides[1:], start, None, t.name)
        ins.write(role, row, codes[r])
    ins.written.append((role, _box(t, rows.flat[rows.valid])))
