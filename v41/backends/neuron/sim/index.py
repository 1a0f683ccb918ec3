# SPDX-License-Identifier: Apache-2.0
"""Searching on VectorE (max8, find, replace) and the GpSimd library: iota, affine_select, gathers, compaction, top-k."""

import numpy as np

from v41.backends.neuron.sim import alu
from v41.backends.neuron.sim.cost import gpsimd_busy, vector_busy
from v41.backends.neuron.sim.instr import NUMBERS, Instr
from v41.backends.neuron.sim.memory import SBUF
from v41.backends.neuron.sim.vector import operator

EIGHT, MOST = 8, 16384
GROUP = 16
equal = alu.Op("equal")


def _searched(ins, role, t):
    """float32 values of a tile that max8 and the index instructions search."""
    n = t.size // t.shape[0]
    if not EIGHT <= n <= MOST:
        ins.fail("MEM-RANGE", f"{n} elements per partition; {EIGHT} to {MOST}", role)
    if t.ndim > 3:
        ins.fail("MEM-DIMS", f"{t.ndim}-D; at most 3-D", role)
    return _no_nan(ins, role, ins.f32(role, t))


def _no_nan(ins, role, values):
    if np.isnan(values).any():
        ins.fail("NUM-NAN8", "NaN", role)
    return values


def _eight(ins, role, t, data):
    if t.shape[0] != data.shape[0] or t.size != EIGHT * t.shape[0]:
        ins.fail("MEM-SHAPE", f"{t.shape}: ({data.shape[0]}, {EIGHT})", role)


def max8(dst, src, name=None):
    """The 8 largest per partition, descending; equal values are repeated."""
    ins = Instr("nisa.max8")
    dst, src = ins.tile("dst", dst), ins.tile("src", src)
    _eight(ins, "dst", dst, src)
    values = _searched(ins, "src", src)
    top = np.partition(values, values.shape[1] - EIGHT, axis=1)[:, -EIGHT:]
    ins.put("dst", dst, np.sort(top, axis=1)[:, ::-1])
    ins.finish("vector", vector_busy(src.size // src.shape[0]))


def _positions(data, vals, order):
    """(P, 8) positions: the k-th slot (in `order`) that asks for a value takes its k-th place in data; -1 when absent."""
    found = np.full(vals.shape, -1, np.int64)
    for p in range(data.shape[0]):
        taken = {}
        for i in order:
            places = taken.get(vals[p, i])
            if places is None:
                places = taken[vals[p, i]] = list(np.flatnonzero(data[p] == vals[p, i])[:EIGHT])
            if places:
                found[p, i] = places.pop(0)
    return found


def _put_index(ins, role, t, found):
    ins.dtype(role, t, ("uint16", "uint32"), "TYPE-INDEX")
    absent = np.iinfo(t.dtype).max
    ins.put_raw(role, t, np.where(found < 0, absent, found).astype(t.dtype))


def nc_find_index8(dst, data, vals, name=None):
    """Position of each of 8 values; repeated values take successive positions ascending; absent: all ones."""
    ins = Instr("nisa.nc_find_index8")
    dst, data, vals = ins.tile("dst", dst), ins.tile("data", data), ins.tile("vals", vals)
    _eight(ins, "dst", dst, data)
    _eight(ins, "vals", vals, data)
    found = _positions(_searched(ins, "data", data), _no_nan(ins, "vals", ins.f32("vals", vals)), range(EIGHT))
    _put_index(ins, "dst", dst, found)
    ins.finish("vector", vector_busy(data.size // data.shape[0]))


def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None):
    """dst = data with one place per value set to imm; values are taken 7..0, so repeats pair descending in dst_idx."""
    ins = Instr("nisa.nc_match_replace8")
    dst, data, vals = ins.tile("dst", dst), ins.tile("data", data), ins.tile("vals", vals)
    ins.match(("dst", dst), ("data", data))
    _eight(ins, "vals", vals, data)
    if not isinstance(imm, NUMBERS):
        ins.fail("OP-ARG", f"{imm!r} is no number", "imm")
    values = _searched(ins, "data", data)
    found = _positions(values, _no_nan(ins, "vals", ins.f32("vals", vals)), range(EIGHT - 1, -1, -1))
    result = values.copy()
    rows, slots = np.nonzero(found >= 0)
    result[rows, found[rows, slots]] = imm
    ins.put_raw("dst", dst, ins.cast("dst", result, dst.dtype))
    if dst_idx is not None:
        index = ins.tile("dst_idx", dst_idx)
        _eight(ins, "dst_idx", index, data)
        _put_index(ins, "dst_idx", index, found)
    ins.finish("vector", vector_busy(data.size // data.shape[0]))


def _affine(ins, pattern, offset, multiplier, t):
    pairs = [tuple(p) for p in pattern]
    if not 1 <= len(pairs) <= 4 or any(not isinstance(v, (int, np.integer)) for p in pairs for v in p):
        ins.fail("OP-ARG", f"pattern {pattern}: 1 to 4 pairs of [step, count]", "pattern")
    value = np.zeros((1,), np.int64)
    for step, count in pairs:
        value = (value[:, None] + np.arange(count) * step).reshape(-1)
    if value.size != t.size // t.shape[0]:
        ins.fail("MEM-SHAPE", f"pattern {pattern} has {value.size} values, {t.shape} has {t.size // t.shape[0]}", "pattern")
    value = offset + np.arange(t.shape[0])[:, None] * multiplier + value
    if np.abs(value).max() >= 1 << 31:
        ins.fail("OP-ARG", f"affine value {np.abs(value).max()} exceeds int32", "pattern")
    return value


def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    """offset + partition * channel_multiplier + sum(i * step), in int32, cast to dst's dtype."""
    ins = Instr("nisa.iota")
    dst = ins.tile("dst", dst, (SBUF,))
    value = _affine(ins, pattern, offset, channel_multiplier, dst)
    if dst.dtype in ("int32", "uint32"):
        ins.put_raw("dst", dst, value.astype(np.int64).astype(dst.dtype))
    else:
        if np.abs(value).max() >= 1 << 24:
            ins.fail("NUM-INT24", f"value {np.abs(value).max()} becomes {dst.dtype}", "dst")
        ins.put("dst", dst, value.astype(np.float32))
    ins.finish("gpsimd", gpsimd_busy(dst.size // dst.shape[0]))


def affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=equal, offset=0, name=None):
    """on_true where cmp(offset + p * channel_multiplier + sum(i * step), 0), else the float32 on_false_value."""
    ins = Instr("nisa.affine_select")
    dst, tile = ins.tile("dst", dst, (SBUF,)), ins.tile("on_true_tile", on_true_tile, (SBUF,))
    ins.match(("dst", dst), ("on_true_tile", tile))
    compare = {n: getattr(np, n) for n in alu.COMPARES}[operator(ins, "cmp_op", cmp_op, alu.COMPARES)]
    keep = compare(_affine(ins, pattern, offset, channel_multiplier, dst), 0)
    if not isinstance(on_false_value, NUMBERS):
        ins.fail("OP-ARG", f"{on_false_value!r} is no number", "on_false_value")
    if dst.dtype == tile.dtype:
        other = ins.cast("on_false_value", np.array([on_false_value], np.float32), dst.dtype)
        ins.put_raw("dst", dst, np.where(keep, ins.raw("on_true_tile", tile).reshape(keep.shape), other))
    else:
        ins.put("dst", dst, np.where(keep, ins.f32("on_true_tile", tile), np.float32(on_false_value)))
    ins.finish("gpsimd", gpsimd_busy(dst.size // dst.shape[0]))


def _library(ins, dst, *sources):
    """HAZ-OVERLAP: a GpSimd library instruction in pieces, so dst must not overlap a source."""
    for role, t in sources:
        if t.storage is dst[1].storage and t.region().overlaps(dst[1].region()):
            ins.fail("HAZ-OVERLAP", f"{dst[0]} overlaps {role}", dst[0])


def nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None):
    """On partitions 0, 16, ..., 112: indices of nonzero elements + index_offset, padding, then the count."""
    ins = Instr("nisa.nonzero_with_count")
    dst, src = ins.tile("dst", dst, (SBUF,)), ins.tile("src", src, (SBUF,))
    ins.dtype("src", src, ("float32", "int32"))
    ins.dtype("dst", dst, ("int32",))
    n = src.size // src.shape[0]
    if dst.shape[0] != src.shape[0] or dst.size // dst.shape[0] != n + 1:
        ins.fail("MEM-SHAPE", f"dst {dst.shape} for src {src.shape}: one element more per partition", "dst")
    _library(ins, ("dst", dst), ("src", src))
    for p in range(0, src.shape[0], GROUP):
        hits = np.flatnonzero(ins.raw("src", src[p : p + 1]).reshape(-1) != 0)
        row = np.full(n + 1, padding_val, np.int32)
        row[: len(hits)] = hits + index_offset
        row[n] = len(hits)
        ins.write("dst", dst[p : p + 1], row)
    ins.written.append(("dst", dst))
    ins.finish("gpsimd", gpsimd_busy(n))


def topk(val_dst, idx_dst, src, n, name=None):
    """The K largest of each 16-partition list, ascending, with uint32 indices; element e sits at partition e % 16, column e // 16.

    Every partition of a group gets the group's result. Ties are not documented: here the later index counts as larger.
    """
    ins = Instr("nisa.topk")
    val_dst, idx_dst, src = (ins.tile(r, t, (SBUF,)) for r, t in (("val_dst", val_dst), ("idx_dst", idx_dst), ("src", src)))
    ins.dtype("src", src, ("bfloat16",))
    ins.dtype("val_dst", val_dst, ("bfloat16",))
    ins.dtype("idx_dst", idx_dst, ("uint32",), "TYPE-INDEX")
    ins.match(("val_dst", val_dst), ("idx_dst", idx_dst))
    rows, k = src.shape[0], val_dst.size // val_dst.shape[0]
    if rows % GROUP or val_dst.shape[0] != rows:
        ins.fail("MEM-SHAPE", f"src {src.shape}, val_dst {val_dst.shape}: partitions in groups of 16", "src")
    columns = src.size // rows
    if not isinstance(n, int) or not EIGHT <= n < 65536 or not 1 <= k <= min(n, 32767) or columns * GROUP < n:
        ins.fail("MEM-RANGE", f"n={n}, K={k}, {columns} columns", "n")
    _library(ins, ("val_dst", val_dst), ("src", src))
    values = _no_nan(ins, "src", ins.f32("src", src))
    best = np.empty((rows, k), np.float32)
    index = np.empty((rows, k), np.uint32)
    for g in range(0, rows, GROUP):
        flat = values[g : g + GROUP].T.reshape(-1)[:n]
        order = np.argsort(flat, kind="stable")[n - k :]
        best[g : g + GROUP], index[g : g + GROUP] = flat[order], order
    ins.put("val_dst", val_dst, best)
    ins.put_raw("idx_dst", idx_dst, index)
    ins.finish("gpsimd", gpsimd_busy(4 * n + k))


def nc_n_gather(dst, data, indices, name=None):
    """dst[p, j] = data[p].flat[indices[p, j]]; uint32 indices in range."""
    ins = Instr("nisa.nc_n_gather")
    dst, data, indices = (ins.tile(r, t, (SBUF,)) for r, t in (("dst", dst), ("data", data), ("indices", indices)))
    ins.dtype("indices", indices, ("uint32",), "TYPE-INDEX")
    ins.same_dtype(("data", data), ("dst", dst))
    ins.match(("dst", dst), ("indices", indices))
    if data.shape[0] != dst.shape[0]:
        ins.fail("MEM-SHAPE", f"data {data.shape}, dst {dst.shape}: partitions differ", "data")
    _library(ins, ("dst", dst), ("data", data), ("indices", indices))
    index = ins.raw("indices", indices).reshape(dst.shape[0], -1)
    n = data.size // data.shape[0]
    if index.max() >= n:
        ins.fail("OP-OOB", f"index {index.max()} of {n} elements", "indices")
    values = ins.raw("data", data).reshape(data.shape[0], -1)
    ins.put_raw("dst", dst, np.take_along_axis(values, index.astype(np.int64), axis=1))
    ins.finish("gpsimd", gpsimd_busy(dst.size // dst.shape[0]))


def local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None):
    """Per 16-partition group: its uint16 indices, partition first, each pick num_elem_per_idx elements, for all 16."""
    ins = Instr("nisa.local_gather")
    dst, src, index = (ins.tile(r, t, (SBUF,)) for r, t in (("dst", dst), ("src_buffer", src_buffer), ("index", index)))
    ins.dtype("index", index, ("uint16",), "TYPE-INDEX")
    ins.same_dtype(("src_buffer", src), ("dst", dst))
    rows, w = src.shape[0], num_elem_per_idx
    count = GROUP * (index.size // index.shape[0])
    valid = count if num_valid_indices is None else num_valid_indices
    if rows % GROUP or index.shape[0] != rows or dst.shape[0] != rows:
        ins.fail("MEM-SHAPE", f"dst {dst.shape}, src {src.shape}, index {index.shape}: groups of 16", "index")
    if w not in (1, 2, 4, 8, 16, 32) or count > 4096 or not 1 <= valid <= count:
        ins.fail("MEM-RANGE", f"num_elem_per_idx {w}, {count} indices, {valid} valid", "num_elem_per_idx")
    if valid * w != dst.size // rows:
        ins.fail("MEM-SHAPE", f"{valid} indices of {w} into {dst.size // rows} elements per partition", "dst")
    _library(ins, ("dst", dst), ("src_buffer", src), ("index", index))
    values, wanted = ins.raw("src_buffer", src).reshape(rows, -1), ins.raw("index", index).reshape(rows, -1)
    result = np.empty((rows, valid * w), values.dtype)
    for g in range(0, rows, GROUP):
        first = wanted[g : g + GROUP].T.reshape(-1)[:valid].astype(np.int64)
        columns = (first[:, None] + np.arange(w)).reshape(-1)
        if columns.max() >= values.shape[1]:
            ins.fail("OP-OOB", f"index {first.max()} + {w} elements of {values.shape[1]}", "index")
        result[g : g + GROUP] = values[g : g + GROUP, columns]
    ins.put_raw("dst", dst, result)
    ins.finish("gpsimd", gpsimd_busy(valid * w))
