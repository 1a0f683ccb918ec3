# SPDX-License-Identifier: Apache-2.0
"""The view methods of NkiTensor as functions: same storage, new pattern, documented constraints checked."""

import math

from v41.backends.neuron.sim import layout
from v41.backends.neuron.sim.context import fail
from v41.backends.neuron.sim.dtypes import SPECS

MAX_DIMS = 5


def _refuse(op, detail, rule="MEM-VIEW"):
    fail(rule, detail, op)


def _dim(t, dim, op, extra=0):
    n = t.ndim + extra
    if not isinstance(dim, int) or not -n <= dim < n:
        _refuse(op, f"dimension {dim!r} of a {t.ndim}-D tensor {t.shape}")
    return dim % n


def _free(t, dim, op):
    if dim == 0 and (t.on_chip or (t.index and t.index.kind == "vector")):
        _refuse(op, f"dim 0 of {t!r} is the partition dimension and is fixed")


def _make(t, op, shape, strides, offset=None, index=None):
    if len(shape) > MAX_DIMS:
        _refuse(op, f"{len(shape)}-D view; at most {MAX_DIMS}-D", "MEM-DIMS")
    return t.with_(shape, strides, offset, None, index)


def _bounds(t, op, start, stop, step, n):
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in (start, stop, step)):
        _refuse(op, f"slice {start!r}:{stop!r}:{step!r} is not made of plain ints", "OP-ARG")
    if step < 1 or not 0 <= start < stop <= n:
        _refuse(op, f"slice {start}:{stop}:{step} of a dimension of size {n} in {t!r}", "MEM-BOUNDS")
    return -(-(stop - start) // step)


def _item(t, key, n):
    """(start, count, step, drop) of one index."""
    if hasattr(key, "size") and hasattr(key, "start"):
        return key.start, _bounds(t, "nl.ds", key.start, key.start + key.size, 1, n), 1, False
    if isinstance(key, slice):
        start = 0 if key.start is None else key.start
        stop = n if key.stop is None else key.stop
        start = start + n if isinstance(start, int) and start < 0 else start
        stop = stop + n if isinstance(stop, int) and stop < 0 else stop
        step = 1 if key.step is None else key.step
        return start, _bounds(t, "[]", start, stop, step, n), step, False
    if isinstance(key, int) and not isinstance(key, bool):
        if not -n <= key < n:
            _refuse("[]", f"index {key} of a dimension of size {n} in {t!r}", "MEM-BOUNDS")
        return key % n, 1, 1, True
    return _refuse("[]", f"index {key!r}: ints, slices, Ellipsis and nl.ds only", "OP-ARG")


def _expand(t, key):
    keys = list(key) if isinstance(key, tuple) else [key]
    if sum(k is Ellipsis for k in keys) > 1:
        _refuse("[]", "two Ellipsis in one index", "OP-ARG")
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (t.ndim - len(keys) + 1)
    if len(keys) > t.ndim:
        _refuse("[]", f"{len(keys)} indices for a {t.ndim}-D tensor", "MEM-BOUNDS")
    return keys + [slice(None)] * (t.ndim - len(keys))


def getitem(t, key):
    """t[key]; an int on the partition dimension of an on-chip tensor keeps it with size 1."""
    shape, strides, offset = [], [], t.offset
    for d, k in enumerate(_expand(t, key)):
        start, count, step, drop = _item(t, k, t.shape[d])
        if t.index and t.index.kind == "vector" and d == 0 and (count != t.shape[0] or step != 1):
            _refuse("[]", "the gathered dimension of an indirect view cannot be sliced")
        offset += start * t.strides[d]
        if not drop or (d == 0 and t.on_chip):
            shape.append(count)
            strides.append(t.strides[d] * step)
    while len(shape) < (2 if t.on_chip else 1):
        shape.append(1)
        strides.append(1)
    return _make(t, "[]", shape, strides, offset)


def slice_dim(t, dim, start, end, step):
    """One dimension from start to end."""
    dim = _dim(t, dim, "slice")
    return getitem(t, (slice(None),) * dim + (slice(start, end, step),))


def select(t, dim, index):
    """Static: an int. Dynamic: a (1, 1) uint32 tile or a register; the dimension is dropped."""
    dim = _dim(t, dim, "select")
    if isinstance(index, int):
        return getitem(t, (slice(None),) * dim + (index,))
    if t.index is not None:
        _refuse("select", "a second run-time offset on one view")
    _free(t, dim, "select")
    shape, strides = list(t.shape), list(t.strides)
    bound, stride = shape.pop(dim), strides.pop(dim)
    while len(shape) < (2 if t.on_chip else 1):
        shape.append(1)
        strides.append(1)
    return _make(t, "select", shape, strides, None, _index("scalar", index, stride, bound))


def _index(kind, source, stride, bound):
    from v41.backends.neuron.sim.tensor import Index

    return Index(kind, source, stride, bound)


def vector_select(t, dim, vector_offset):
    """Rows of an HBM tensor by a (P, 1) tile; dim 0 gets P rows."""
    if t.on_chip:
        _refuse("vector_select", f"the base {t!r} is not in HBM", "PLACE-GATHER")
    if dim != 0 or t.index is not None:
        _refuse("vector_select", "needs dim 0 and a view without a run-time offset")
    shape = (vector_offset.shape[0],) + t.shape[1:]
    return _make(t, "vector_select", shape, t.strides, None, _index("vector", vector_offset, t.strides[0], t.shape[0]))


def permute(t, dims):
    """Dimensions in another order."""
    if sorted(dims) != list(range(t.ndim)):
        _refuse("permute", f"{tuple(dims)} is no permutation of {t.ndim} dimensions")
    if dims[0] != 0:
        _free(t, 0, "permute")
    return _make(t, "permute", [t.shape[d] for d in dims], [t.strides[d] for d in dims])


def broadcast(t, dim, size):
    """Stride 0 on a size-1 dimension."""
    dim = _dim(t, dim, "broadcast")
    _free(t, dim, "broadcast")
    if t.shape[dim] != 1:
        _refuse("broadcast", f"dimension {dim} of {t!r} has size {t.shape[dim]}, not 1")
    shape, strides = list(t.shape), list(t.strides)
    shape[dim], strides[dim] = size, 0
    return _make(t, "broadcast", shape, strides)


def expand_dim(t, dim):
    """A new size-1 dimension in front of `dim`."""
    dim = _dim(t, dim, "expand_dim", 1)
    _free(t, dim, "expand_dim")
    return _make(t, "expand_dim", t.shape[:dim] + (1,) + t.shape[dim:], t.strides[:dim] + (1,) + t.strides[dim:])


def squeeze_dim(t, dim):
    """Without a size-1 dimension."""
    dim = _dim(t, dim, "squeeze_dim")
    _free(t, dim, "squeeze_dim")
    if t.shape[dim] != 1 or (t.on_chip and t.ndim <= 2):
        _refuse("squeeze_dim", f"dimension {dim} of {t!r}")
    return _make(t, "squeeze_dim", t.shape[:dim] + t.shape[dim + 1 :], t.strides[:dim] + t.strides[dim + 1 :])


def reshape_dim(t, dim, shape):
    """Dimension `dim` split into `shape` (one -1 allowed)."""
    dim = _dim(t, dim, "reshape_dim")
    full = layout.infer(shape, t.shape[dim])
    if full is None:
        _refuse("reshape_dim", f"{tuple(shape)} does not split {t.shape[dim]}")
    if len(full) > 1:
        _free(t, dim, "reshape_dim")
    inner = tuple(s * t.strides[dim] for s in layout.row_major(full))
    return _make(t, "reshape_dim", t.shape[:dim] + full + t.shape[dim + 1 :], t.strides[:dim] + inner + t.strides[dim + 1 :])


def flatten_dims(t, start_dim, end_dim):
    """Dimensions start..end merged; they must continue each other in memory."""
    first, last = _dim(t, start_dim, "flatten_dims"), _dim(t, end_dim, "flatten_dims")
    if last > first:
        _free(t, first, "flatten_dims")
    shape, strides = t.shape[first : last + 1], t.strides[first : last + 1]
    total = math.prod(shape)
    new = layout.reshaped(shape, strides, (total,))
    if first > last or new is None:
        _refuse("flatten_dims", f"dimensions {first}..{last} of {t!r} are not contiguous (strides {t.strides})")
    return _make(t, "flatten_dims", t.shape[:first] + (total,) + t.shape[last + 1 :], t.strides[:first] + new + t.strides[last + 1 :])


def reshape(t, shape):
    """Another shape over the same elements."""
    full = layout.infer(tuple(shape), t.size)
    if full is None:
        _refuse("reshape", f"{t.shape} has {t.size} elements, {tuple(shape)} does not")
    fixed = 1 if t.on_chip or (t.index and t.index.kind == "vector") else 0
    if fixed and full[0] != t.shape[0]:
        _refuse("reshape", f"{t.shape} to {full}: dim 0 is the partition dimension and is fixed")
    strides = layout.reshaped(t.shape[fixed:], t.strides[fixed:], full[fixed:])
    if strides is None:
        _refuse("reshape", f"strides {t.strides} of {t.shape} cannot become {full} without a copy")
    return _make(t, "reshape", full, t.strides[:fixed] + strides)


def rearrange(t, src_pattern, dst_pattern, fixed_sizes=None):
    """einops by tuples: src names split dimensions, dst names order and merge them."""
    sizes, names = dict(fixed_sizes or {}), []
    if len(src_pattern) != t.ndim:
        _refuse("rearrange", f"{len(src_pattern)} source names for a {t.ndim}-D tensor")
    for dim, group in reversed(list(enumerate(src_pattern))):
        group = (group,) if isinstance(group, str) else tuple(group)
        if len(group) > 1:
            t = reshape_dim(t, dim, tuple(sizes.get(name, -1) for name in group))
        names[:0] = group
    flat = [n for group in dst_pattern for n in ((group,) if isinstance(group, str) else group)]
    if sorted(flat) != sorted(names):
        _refuse("rearrange", f"names {flat} are not the names {names}")
    t = permute(t, [names.index(n) for n in flat])
    for dim, group in enumerate(dst_pattern):
        if not isinstance(group, str) and len(group) > 1:
            t = flatten_dims(t, dim, dim + len(group) - 1)
    return t


def view(t, dtype):
    """The bytes as another dtype."""
    old, new = t.itemsize, SPECS[dtype].size
    if t.index is not None:
        _refuse("view", "not after a run-time offset")
    scaled = [s * old for s in t.strides[:-1]] + [t.offset * old, t.shape[-1] * old]
    if t.shape[-1] > 1 and t.strides[-1] != 1:
        _refuse("view", f"the last dimension of {t!r} has stride {t.strides[-1]}, not 1")
    if any(v % new for v, n in zip(scaled, t.shape[:-1] + (2, 2), strict=True) if n > 1):
        _refuse("view", f"{t!r} at offset {t.offset} does not align to {dtype}")
    strides = tuple(s * old // new for s in t.strides[:-1]) + (1,)
    return t.with_(t.shape[:-1] + (scaled[-1] // new,), strides, scaled[-2] // new, dtype)


def _offset_index(t, given, indirect_dim, dtype):
    """Index of ap's scalar_offset or vector_offset: scaled by the elements after `indirect_dim`."""
    kinds = [k for k, v in given.items() if v is not None]
    if not kinds:
        return None
    dim = _dim(t, indirect_dim, "ap")
    if len(kinds) > 1 or t.index is not None:
        _refuse("ap", "one run-time offset per view")
    if kinds[0] == "vector" and (t.on_chip or dim != 0):
        _refuse("ap", "vector_offset needs an HBM base and indirect_dim=0", "PLACE-GATHER")
    if SPECS[dtype].size != t.itemsize:
        _refuse("ap", "a run-time offset with a dtype of another size: its unit is not documented")
    stride = math.prod(t.shape[dim + 1 :])
    if stride != t.strides[dim] and t.shape[dim] > 1:
        _refuse("ap", f"dimension {dim} of {t!r} has stride {t.strides[dim]}, its inner sizes multiply to {stride}: ambiguous")
    return _index(kinds[0], given[kinds[0]], stride, t.shape[dim])


def ap(t, pattern, offset, given, indirect_dim, dtype):
    """Explicit pattern; bounds are checked here unless a run-time offset moves it."""
    size = SPECS[dtype].size
    base = t.offset * t.itemsize
    if base % size:
        _refuse("ap", f"offset of {base} bytes does not align to {dtype}")
    pairs = [tuple(pair) for pair in pattern]
    if not pairs or len(pairs) > MAX_DIMS or any(n < 1 for _, n in pairs):
        _refuse("ap", f"pattern {pattern}: 1 to {MAX_DIMS} pairs of [stride, count >= 1]", "MEM-DIMS")
    shape, strides = tuple(n for _, n in pairs), tuple(s for s, _ in pairs)
    result = t.with_(shape, strides, base // size + (offset or 0), dtype, _offset_index(t, given, indirect_dim, dtype))
    if result.index is None:
        check_inside(result, "ap")
    return result


def check_inside(t, op):
    """MEM-BOUNDS unless the pattern stays in its storage and, on chip, within each partition."""
    low, high = layout.extent(t.shape, t.strides)
    size = t.itemsize
    if t.offset + low < 0 or (t.offset + high + 1) * size > t.storage.nbytes:
        _refuse(op, f"elements {t.offset + low}..{t.offset + high} of {t.storage.nbytes // size}", "MEM-BOUNDS")
    if t.on_chip:
        low, high = layout.extent(t.shape[1:], t.strides[1:])
        row = t.storage.pitch // size
        if t.offset % row + low < 0 or t.offset % row + high >= row:
            _refuse(op, f"the free pattern leaves the partition ({row} elements)", "MEM-BOUNDS")
        if t.shape[0] > 1 and t.strides[0] % row:
            _refuse(op, f"partition stride {t.strides[0]} is no multiple of the {row} elements per partition", "MEM-BOUNDS")
