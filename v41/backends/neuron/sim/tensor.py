# SPDX-License-Identifier: Apache-2.0
"""NkiTensor: a typed, strided view of one allocation, with the view methods of NKI 0.6."""

import math
from dataclasses import dataclass

import numpy as np

from v41.backends.neuron.sim import layout, views
from v41.backends.neuron.sim.context import fail
from v41.backends.neuron.sim.dtypes import SPECS, as_dtype
from v41.backends.neuron.sim.storage import Region


@dataclass(frozen=True)
class DynamicSlice:
    """start and size of nl.ds(start, size)."""

    start: int
    size: int


@dataclass(frozen=True)
class Index:
    """A run-time offset: source * stride elements are added to the view's offset.

    `kind` is "scalar" (one value) or "vector" (one per row of dim 0, whose own stride then has no meaning);
    `bound` is the size of the indexed dimension.
    """

    kind: str
    source: object
    stride: int
    bound: int


class NkiTensor:
    """A view: shape, strides and offset in elements of `dtype` over a Storage. No method copies data."""

    __slots__ = ("__weakref__", "_box", "dtype", "index", "legal", "name", "offset", "shape", "storage", "strides")

    def __init__(self, storage, dtype, shape, strides, offset=0, index=None, name=""):
        self.storage, self.dtype = storage, dtype
        self.shape, self.strides, self.offset = tuple(shape), tuple(strides), offset
        self.index, self.name = index, name or storage.name
        # A view never changes, so its box and the outcome of the operand checks are kept.
        self._box, self.legal = None, False

    @property
    def buffer(self):
        """Memory region."""
        return self.storage.buffer

    @property
    def ndim(self):
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self):
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def on_chip(self):
        """Whether the tensor is in SBUF or PSUM, so that dim 0 is the partition dimension."""
        return self.storage.buffer in ("sbuf", "psum")

    @property
    def itemsize(self):
        """Bytes per element."""
        return SPECS[self.dtype].size

    @property
    def partition(self):
        """First partition that an on-chip view touches."""
        return self.storage.partition0 + self.offset * self.itemsize // self.storage.pitch

    def __repr__(self):
        return f"NkiTensor({self.name or '?'} {self.shape} {self.dtype} {self.buffer.value})"

    def __len__(self):
        return self.shape[0]

    def with_(self, shape, strides, offset=None, dtype=None, index=None):
        """The same storage under another pattern."""
        offset = self.offset if offset is None else offset
        return NkiTensor(self.storage, dtype or self.dtype, shape, strides, offset, index or self.index, self.name)

    # What the instructions use -------------------------------------------------------------

    def codes(self):
        """Writable container array over the storage; only for views without a run-time offset."""
        spec = SPECS[self.dtype]
        strides = tuple(s * spec.size for s in self.strides)
        return np.ndarray(self.shape, spec.container, self.storage.data, self.offset * spec.size, strides)

    def cells(self, mask):
        """The bytes of this view within a one-byte-per-byte mask of the storage: shape + (itemsize,)."""
        size = self.itemsize
        strides = tuple(s * size for s in self.strides) + (1,)
        return np.ndarray(self.shape + (size,), mask.dtype, mask, self.offset * size, strides)

    def region(self):
        """Bounding box of this view in its storage."""
        if self._box is None:
            self._box = self._bounding_box()
        return self._box

    def _bounding_box(self):
        pitch, size = self.storage.pitch, self.itemsize
        low = layout.extent(self.shape, self.strides)[0]
        row, column = divmod((self.offset + low) * size, pitch)
        rows = columns = 0
        for n, s in zip(self.shape, self.strides, strict=True):
            step = abs(s) * size
            if step and step % pitch == 0:
                rows += (n - 1) * (step // pitch)
            else:
                columns += (n - 1) * step
        if column + columns + size > pitch:
            return Region(row, row + rows + -(-(column + columns + size) // pitch), 0, pitch)
        return Region(row, row + rows + 1, column, column + columns + size)

    def everything(self):
        """Whether the view covers its whole storage."""
        return self.size * self.itemsize == self.storage.nbytes and layout.contiguous(self.shape, self.strides)

    # The documented interface --------------------------------------------------------------

    def is_contiguous(self):
        """Row-major without gaps; on chip judged per partition."""
        first = 1 if self.on_chip else 0
        return layout.contiguous(self.shape[first:], self.strides[first:])

    def get_pattern(self):
        """[[stride, count], ...]."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self):
        """Whether the view has a run-time offset."""
        return self.index is not None

    def __getitem__(self, key):
        return views.getitem(self, key)

    def __setitem__(self, key, value):
        fail("OP-SUBSET", "assignment into a tensor; use an instruction with dst=", "tensor[...] =")

    def slice(self, dim, start, end, step=1):
        """t[..., start:end:step, ...] on one dimension."""
        return views.slice_dim(self, dim, start, end, step)

    def select(self, dim, index):
        """One element of a dimension, which is dropped; an index tensor or register makes the offset dynamic."""
        return views.select(self, dim, index)

    def vector_select(self, dim, vector_offset):
        """One row per partition, chosen by a (P, 1) uint32 tile."""
        return views.vector_select(self, dim, vector_offset)

    def permute(self, dims):
        """Reorder dimensions."""
        return views.permute(self, dims)

    def broadcast(self, dim, size):
        """Repeat a size-1 dimension with stride 0."""
        return views.broadcast(self, dim, size)

    def expand_dim(self, dim):
        """Insert a size-1 dimension."""
        return views.expand_dim(self, dim)

    def squeeze_dim(self, dim):
        """Drop a size-1 dimension."""
        return views.squeeze_dim(self, dim)

    def reshape_dim(self, dim, shape):
        """Split one dimension."""
        return views.reshape_dim(self, dim, shape)

    def flatten_dims(self, start_dim, end_dim):
        """Merge neighboring dimensions."""
        return views.flatten_dims(self, start_dim, end_dim)

    def reshape(self, shape):
        """Another shape over the same elements, where the layout allows it."""
        return views.reshape(self, shape)

    def rearrange(self, src_pattern, dst_pattern, fixed_sizes=None):
        """Split, reorder and merge by names."""
        return views.rearrange(self, src_pattern, dst_pattern, fixed_sizes)

    def view(self, dtype):
        """The same bytes as another dtype; the last dimension is rescaled."""
        return views.view(self, as_dtype(dtype))

    reinterpret_cast = view

    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None):
        """Explicit [[stride, count], ...] over the storage, optionally with a run-time offset."""
        given = {"scalar": scalar_offset, "vector": vector_offset}
        return views.ap(self, pattern, offset, given, indirect_dim, as_dtype(dtype) if dtype else self.dtype)

    def indirect(self, index, num_elem=None):
        """Gen4 only."""
        fail("OP-GEN4", "tensor indirection (.indirect) needs gen4", "indirect")
