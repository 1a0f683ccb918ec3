# SPDX-License-Identifier: Apache-2.0
"""Allocation of tiles and HBM tensors inside a kernel."""

import math

import numpy as np

from v41.backends.neuron.sim import layout
from v41.backends.neuron.sim.context import current
from v41.backends.neuron.sim.cores import shared_allocation
from v41.backends.neuron.sim.dtypes import GEN4_PACKED, as_dtype, from_float32, size_of
from v41.backends.neuron.sim.memory import ON_CHIP, PARTITIONS, SBUF, SHARED_HBM, MemoryRegion
from v41.backends.neuron.sim.storage import Storage
from v41.backends.neuron.sim.tensor import NkiTensor
from v41.backends.neuron.sim.vector import memset


def _shape(program, shape, op):
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not shape or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 for n in shape):
        program.report("OP-ARG", f"shape {shape}: positive ints", op, "shape")
    if len(shape) > 5:
        program.report("MEM-DIMS", f"{len(shape)}-D; at most 5-D", op, "shape")
    return tuple(int(n) for n in shape)


def _dtype(program, dtype, op):
    if dtype in GEN4_PACKED:
        program.report("OP-GEN4", f"{dtype} needs gen4", op, "dtype")
    try:
        return as_dtype(dtype)
    except ValueError as error:
        return program.report("TYPE-DTYPE", str(error), op, "dtype")


def ndarray(shape, dtype, buffer=SBUF, name="", address=None):
    """An uninitialized tensor. On chip: at most 128 partitions, room is held while the tensor is referenced."""
    op, program = "nl.ndarray", current()
    shape, dtype, buffer = _shape(program, shape, op), _dtype(program, dtype, op), MemoryRegion(buffer)
    size = size_of(dtype)
    if buffer in ON_CHIP:
        if shape[0] > PARTITIONS:
            program.report("MEM-PARTITIONS", f"{shape}: {shape[0]} partitions", op, "shape")
        storage = Storage(buffer, "tile", shape, size, name=name)
        storage.lease = program.lease(buffer.value, storage.pitch)
        if address is not None:
            program.report("MEM-ADDRESS", f"address={address}", op, "address")
            storage.partition0 = int(address[0])
    elif buffer is SHARED_HBM:
        storage = shared_allocation(program, lambda: Storage(buffer, "shared", shape, size, name=name), shape, dtype)
    else:
        storage = Storage(buffer, "private", shape, size, name=name)
    return NkiTensor(storage, dtype, shape, layout.row_major(shape), name=name)


def full(shape, fill_value, dtype, buffer=SBUF, name=""):
    """A tile filled with a constant by memset."""
    t = ndarray(shape, dtype, buffer, name)
    if t.on_chip:
        memset(t, fill_value)
        return t
    current().report("OP-SUBSET", f"a filled tensor in {t.buffer.value}; write it with a DMA", "nl.full", "buffer")
    return t


def zeros(shape, dtype, buffer=SBUF, name=""):
    """A tile of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape, dtype, buffer=SBUF, name=""):
    """A tile of ones."""
    return full(shape, 1, dtype, buffer, name)


def empty_like(x, dtype=None, buffer=None, name=""):
    """An uninitialized tensor of x's shape."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def zeros_like(x, dtype=None, buffer=None, name=""):
    """A tile of zeros of x's shape."""
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def _filled(buffer, kind, shape, dtype, codes, name):
    data = np.ascontiguousarray(codes).reshape(-1).view(np.uint8)
    storage = Storage(buffer, kind, shape, size_of(dtype), data, name)
    return NkiTensor(storage, dtype, shape, layout.row_major(shape), name=name)


def shared_constant(constant):
    """A numpy array (or the path of a .npy file) as a read-only HBM tensor."""
    array = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    dtype = _dtype(current(), array.dtype, "nl.shared_constant")
    return _filled(SHARED_HBM, "constant", array.shape, dtype, array, "constant")


def shared_identity_matrix(n, dtype="uint8", dst=None):
    """The n x n identity in SBUF."""
    program = current()
    dtype = _dtype(program, dtype, "nl.shared_identity_matrix")
    if n > PARTITIONS:
        program.report("MEM-PARTITIONS", f"identity of {n}", "nl.shared_identity_matrix", "n")
    eye = np.eye(n, dtype=np.float32)
    codes = eye.astype(np.uint8) if dtype == "bool" else from_float32(eye, dtype)
    if dst is None:
        t = _filled(SBUF, "tile", (n, n), dtype, codes, "identity")
        t.storage.lease = program.lease("sbuf", math.prod(t.shape[1:]) * t.itemsize)
        return t
    from v41.backends.neuron.sim.instr import Instr

    ins = Instr("nl.shared_identity_matrix")
    tile = ins.tile("dst", dst, (SBUF,))
    ins.dtype("dst", tile, (dtype,), "TYPE-SAME")
    ins.put_raw("dst", tile, codes)
    ins.finish("gpsimd", 0.1)
    return tile
