# SPDX-License-Identifier: Apache-2.0
"""The nl layer that returns new tiles, as far as kernels of others use it. Our own kernels use nisa only."""

import numpy as np

from v41.backends.neuron.sim import alu, pe, scalar, vector, vector2
from v41.backends.neuron.sim.alloc import ndarray
from v41.backends.neuron.sim.context import current
from v41.backends.neuron.sim.cost import vector_busy
from v41.backends.neuron.sim.dma import dma_copy, dma_transpose
from v41.backends.neuron.sim.dtypes import as_dtype
from v41.backends.neuron.sim.instr import Instr
from v41.backends.neuron.sim.memory import HBM, PSUM, SBUF
from v41.backends.neuron.sim.tensor import NkiTensor


def apply(op, x, y, dtype):
    """An operator called on tiles: a new SBUF tile of x's shape; binary operators do not broadcast, numbers are scalars."""
    if not isinstance(x, NkiTensor):
        current().report("OP-ARG", f"{x!r}: the first argument is a tile", f"nl.{op.name}", "x")
    dst = ndarray(x.shape, dtype or x.dtype)
    name = alu.canonical(op)
    if y is None and name in alu.ACTIVATIONS:
        if name == "copy":
            vector.tensor_copy(dst, x)
        else:
            scalar.activation(dst, op, x)
    elif y is None:
        vector.tensor_scalar(dst, x, op, None)
    elif isinstance(y, NkiTensor):
        vector.tensor_tensor(dst, x, y, op)
    else:
        vector.tensor_scalar(dst, x, op, y)
    return dst


class ReduceOp(alu.Op):
    """max, min and sum: an operator token that reduces trailing axes when called."""

    def __call__(self, x, axis, dtype=None, keepdims=False):
        return reduce(self.name, x, axis, dtype, keepdims)


def reduce(name, x, axis, dtype, keepdims):
    """A new tile with the trailing axes reduced."""
    axes = sorted(a % x.ndim for a in ((axis,) if isinstance(axis, int) else tuple(axis)))
    kept = [1 if d in axes else n for d, n in enumerate(x.shape)]
    shape = kept if keepdims else [n for d, n in enumerate(x.shape) if d not in axes]
    dst = ndarray(tuple(shape) if len(shape) > 1 else (*shape, 1), dtype or x.dtype)
    vector2.tensor_reduce(dst, alu.Op("add" if name == "sum" else name), x, tuple(axes))
    return dst


def mean(x, axis, dtype=None, keepdims=False):
    """Mean over trailing axes."""
    total = reduce("sum", x, axis, dtype or "float32", keepdims)
    dst = ndarray(total.shape, dtype or x.dtype)
    vector.tensor_scalar(dst, total, alu.Op("multiply"), total.size / x.size)
    return dst


def load(src, dtype=None):
    """A new SBUF tile with an HBM view's values."""
    shape = src.shape if src.ndim > 1 else (1, *src.shape)
    dst = ndarray(shape, as_dtype(dtype) if dtype else src.dtype)
    dma_copy(dst, src)
    return dst


def store(dst, value):
    """HBM = an SBUF tile."""
    ins = Instr("nl.store")
    ins.tensor("dst", dst, HBM)
    ins.tensor("value", value, (SBUF,))
    dma_copy(dst, value)


def load_transpose2d(src, dtype=None):
    """A new SBUF tile with a 2-D HBM view transposed."""
    dst = ndarray((src.shape[1], src.shape[0]), src.dtype)
    dma_transpose(dst, src)
    return dst if dtype is None or as_dtype(dtype) == src.dtype else apply(alu.Op("copy"), dst, None, dtype)


def broadcast_to(x, shape, dtype=None):
    """A new tile with size-1 dimensions repeated, the partition dimension included."""
    ins = Instr("nl.broadcast_to")
    tile = ins.tile("x", x)
    shape = tuple(shape)
    if tile.ndim != len(shape) or any(n not in (1, m) for n, m in zip(tile.shape, shape, strict=True)):
        ins.fail("MEM-SHAPE", f"{tile.shape} to {shape}", "x")
    dst = ndarray(shape, dtype or x.dtype)
    if dst.dtype == tile.dtype:
        ins.put_raw("dst", dst, np.broadcast_to(ins.raw("x", tile), shape))
    else:
        ins.put("dst", dst, np.broadcast_to(ins.f32("x", tile, rows=False), shape))
    ins.finish("vector", vector_busy(dst.size // dst.shape[0]))
    return dst


def expand_dims(x, axis):
    """A view with a new size-1 dimension."""
    return x.expand_dim(axis)


def transpose(x, dtype=None):
    """A new PSUM tile with partitions and free elements swapped."""
    dst = ndarray((x.size // x.shape[0], x.shape[0]), dtype or x.dtype, PSUM)
    pe.nc_transpose(dst, x)
    return dst


def matmul(x, y, transpose_x=False):
    """A new PSUM tile x.T @ y; transpose_x=True only."""
    if not transpose_x:
        current().report("OP-SUBSET", "transpose_x=False is not simulated", "nl.matmul", "transpose_x")
    dst = ndarray((x.size // x.shape[0], y.size // y.shape[0]), "float32", PSUM)
    pe.nc_matmul(dst, x, y)
    return dst


def gather_flattened(data, indices, axis=0, dtype=None):
    """nc_n_gather into a new tile."""
    from v41.backends.neuron.sim.index import nc_n_gather

    dst = ndarray(indices.shape, dtype or data.dtype)
    nc_n_gather(dst, data, indices)
    return dst


def where(condition, x, y, dtype=None):
    """A new tile: x where condition is not 0, else y (both tiles)."""
    dst = ndarray(x.shape, dtype or x.dtype)
    vector.tensor_copy(dst, y)
    vector2.tensor_copy_predicated(dst, x, condition)
    return dst
