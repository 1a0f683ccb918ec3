# SPDX-License-Identifier: Apache-2.0
"""One instruction while it executes: checks operands, moves values, books time and hazards."""

import numpy as np

from v41.backends.neuron.sim import layout
from v41.backends.neuron.sim.context import current
from v41.backends.neuron.sim.dtypes import CastError, from_float32, to_float32
from v41.backends.neuron.sim.memory import ANYWHERE, HBM, ON_CHIP, PSUM
from v41.backends.neuron.sim.registers import index_value
from v41.backends.neuron.sim.storage import Access
from v41.backends.neuron.sim.tensor import NkiTensor
from v41.backends.neuron.sim.views import check_inside

NUMBERS = (int, float, np.number)


def _same_layout(a, b):
    """Whether two views of one storage reach the same bytes in the same order."""
    first, second = (layout.merged(t.shape, [s * t.itemsize for s in t.strides]) for t in (a, b))
    return (a.offset * a.itemsize, first) == (b.offset * b.itemsize, second)


def _pattern(t):
    """How a DMA walks through HBM: shape and strides, or rows of one stride."""
    return (t.shape, t.strides) if t.index is None else ("rows", t.index.stride)


class Instr:
    """Collects what an instruction reads and writes; `finish` books it on an engine."""

    def __init__(self, op):
        self.op, self.program = op, current()
        self.read, self.written, self.floats = [], [], []

    def fail(self, rule, detail, operand=""):
        """Report a broken rule at this instruction."""
        self.program.report(rule, detail, self.op, operand)

    # Operand checks --------------------------------------------------------------------------

    def tensor(self, role, t, where=ANYWHERE, rule="PLACE-BUFFER"):
        """The tensor with its scalar run-time offset applied; OP-ARG, PLACE-BUFFER."""
        if not isinstance(t, NkiTensor):
            self.fail("OP-ARG", f"{t!r} is not a tensor", role)
        if t.buffer not in where:
            names = ", ".join(w.value for w in where)
            self.fail(rule, f"{t!r} must be in {names}", role)
        if t.index is not None and t.index.kind == "scalar":
            t = self._resolve(role, t)
        return t

    def _resolve(self, role, t):
        value = index_value(self, role, t)
        if not 0 <= value < t.index.bound:
            self.fail("OP-OOB", f"index {value} of a dimension of size {t.index.bound}", role)
        moved = NkiTensor(t.storage, t.dtype, t.shape, t.strides, t.offset + value * t.index.stride, None, t.name)
        check_inside(moved, self.op)
        return moved

    def tile(self, role, t, where=ON_CHIP, rule="PLACE-BUFFER"):
        """An operand of a compute engine: on chip, with a legal partition range and access pattern."""
        t = self.tensor(role, t, where, rule)
        if t.legal:
            return t
        self.partitions(role, t)
        count, start = t.shape[0], t.partition
        legal = (0,) if count > 64 else (0, 64) if count > 32 else (0, 32, 64, 96)
        if start not in legal:
            self.fail("MEM-START", f"{count} partitions from {start}; legal starts: {legal}", role)
        self._pattern(role, t)
        t.legal = True
        return t

    def partitions(self, role, t):
        """MEM-STEP: consecutive partitions."""
        row = t.storage.pitch // t.itemsize
        if t.shape[0] > 1 and t.strides[0] != row:
            self.fail("MEM-STEP", f"partition stride {t.strides[0]} elements, a partition has {row}", role)

    def _pattern(self, role, t):
        pairs = layout.merged(t.shape[1:], t.strides[1:])
        for candidate in (list(zip(t.shape[1:], t.strides[1:], strict=True)), pairs):
            if all(n <= 65535 and -32768 <= s <= 32767 for n, s in candidate):
                return
        self.fail("MEM-STRIDE", f"counts and strides {pairs} exceed uint16 / int16", role)

    def match(self, first, *others):
        """MEM-SHAPE: same partitions and elements per partition; pairs are (role, tensor)."""
        role0, t0 = first
        for role, t in others:
            if t.shape[0] != t0.shape[0] or t.size != t0.size:
                self.fail("MEM-SHAPE", f"{role} {t.shape} and {role0} {t0.shape} differ", role)

    def not_both_psum(self, *operands):
        """PLACE-PSUM2 for (role, tensor) pairs."""
        inside = [role for role, t in operands if t.buffer == PSUM]
        if len(inside) > 1:
            self.fail("PLACE-PSUM2", f"{' and '.join(inside)} are both in PSUM", inside[1])

    def dtype(self, role, t, allowed, rule="TYPE-DTYPE"):
        """The tensor's dtype is one of `allowed`."""
        if t.dtype not in allowed:
            self.fail(rule, f"dtype {t.dtype}; allowed: {', '.join(allowed)}", role)

    def same_dtype(self, first, *others):
        """TYPE-SAME for (role, tensor) pairs."""
        for role, t in others:
            if t.dtype != first[1].dtype:
                self.fail("TYPE-SAME", f"{role} {t.dtype} and {first[0]} {first[1].dtype} differ", role)

    def column(self, role, value, data, dtypes=("float32",)):
        """An immediate as float32, or a (P, 1) tile as float32 (P, 1); TYPE-ROW, TYPE-OPERAND."""
        if isinstance(value, NUMBERS):
            return self._immediate(role, value)
        t = self.tile(role, value)
        if t.size != t.shape[0]:
            self.fail("TYPE-ROW", f"{t.shape} has {t.size // t.shape[0]} elements per partition, not 1", role)
        if t.shape[0] != data.shape[0]:
            self.fail("MEM-SHAPE", f"{t.shape} beside data with {data.shape[0]} partitions", role)
        if t.dtype not in dtypes:
            self.fail("TYPE-OPERAND", f"tile of {t.dtype}; must be {' or '.join(dtypes)}", role)
        return self.f32(role, t).reshape(-1, 1)

    def _immediate(self, role, value):
        with np.errstate(over="ignore"):
            result = np.float32(value)
        if isinstance(value, (int, np.integer)) and int(result) != value:
            self.fail("NUM-INT24", f"the immediate {value} is no float32", role)
        return result

    # Values ----------------------------------------------------------------------------------

    def raw(self, role, t):
        """Container values of a checked tensor, after the poison check."""
        if not t.storage.written(t.cells):
            self.fail("INIT-POISON", f"{t!r} has bytes that were never written", role)
        self.read.append((role, t))
        return t.codes()

    def f32(self, role, t, rows=True):
        """Values as float32, shaped (P, elements per partition) unless rows is False."""
        self._computes(role, t)
        codes = self.raw(role, t)
        try:
            values = to_float32(codes, t.dtype)
        except CastError as error:
            self.fail(error.rule, str(error), role)
            values = codes.astype(np.float32)
        self.floats.append((role, values))
        return values.reshape(t.shape[0], -1) if rows else values

    def _computes(self, role, t):
        if t.dtype == "float8_e4m3fn":
            self.fail("TYPE-E4M3FN", "float8_e4m3fn is a carrier on trn2", role)
        if t.dtype == "float8_e8m0fnu":
            self.fail("TYPE-CARRIER", "float8_e8m0fnu is a carrier on trn2", role)

    def cast(self, role, values, dtype):
        """float32 to the container of dtype, with the rules of the cast."""
        if dtype in ("int32", "uint32") and values.size and np.abs(values).max() >= float(1 << 24):
            self.fail("NUM-INT24", f"a float32 result of magnitude {np.abs(values).max():g} becomes {dtype}", role)
        try:
            codes = from_float32(values, dtype)
            if dtype == "float16" and (np.isinf(codes) & np.isfinite(values)).any():
                self.fail("NUM-NONFINITE", "a finite value overflows float16", role)
            return codes
        except CastError as error:
            self.fail(error.rule, str(error), role)
            return np.zeros(values.shape, np.uint8)

    def put(self, role, t, values):
        """Write float32 values, cast to the tensor's dtype; warns when finite inputs gave a non-finite result."""
        self._computes(role, t)
        values = np.asarray(values, np.float32)
        if not np.isfinite(values).all() and all(np.isfinite(v).all() for _, v in self.floats):
            self.fail("NUM-NONFINITE", "finite inputs gave NaN or infinity", role)
        self.put_raw(role, t, self.cast(role, values, t.dtype))

    def put_raw(self, role, t, codes, matmul=False):
        """Write container values of the tensor's dtype and book the write."""
        self.write(role, t, codes, matmul)
        self.written.append((role, t))

    def write(self, role, t, codes, matmul=False):
        """Write container values; the caller books the write."""
        storage = t.storage
        codes = codes if codes.shape == t.shape else codes.reshape(t.shape)
        self._touch(role, t, codes)
        storage.own()
        t.codes()[...] = codes
        storage.mark(t.cells, t.everything())
        if storage.matmul is not None:
            t.cells(storage.matmul)[...] = matmul

    def put_where(self, role, t, codes, chosen):
        """Write container values where `chosen`; the other elements keep their bytes and their written state."""
        self._touch(role, t, None)
        t.storage.own()
        chosen = chosen.reshape(t.shape)
        np.copyto(t.codes(), np.broadcast_to(codes, (t.shape[0], t.size // t.shape[0])).reshape(t.shape), where=chosen)
        t.storage.mark_where(t.cells, chosen)
        if t.storage.matmul is not None:
            t.cells(t.storage.matmul)[chosen] = False
        self.written.append((role, t))

    def _touch(self, role, t, codes):
        """Bookkeeping of a write to memory that outlives the core: mutation of inputs, bytes written by both cores."""
        storage = t.storage
        if storage.kind == "constant":
            self.fail("PLACE-BUFFER", f"{t!r} is a constant", role)
        if storage.kind == "input":
            if any(a.region.overlaps(t.region()) for a in storage.writes if a.program == self.program.index):
                self.fail("PLACE-MUTATED2", f"input {t.name} is written again through an overlapping view", role)
            storage.mutated = True
        if self.program.pair is None or storage.kind not in ("input", "shared"):
            return
        if storage.owner is None:
            storage.owner = np.zeros(storage.nbytes, np.uint32)
        mark = np.uint32(2 * storage.epoch + self.program.index + 1)
        other = np.uint32(2 * storage.epoch + (1 - self.program.index) + 1)
        if (t.cells(storage.owner) == other).any():
            same = codes is not None and np.array_equal(t.codes(), codes)
            rule = "LNC-WRITE-SAME" if same else "LNC-WRITE"
            self.fail(rule, f"{t!r} was written by core {1 - self.program.index} since the last barrier", role)
        t.cells(storage.owner)[...] = mark

    # Booking ---------------------------------------------------------------------------------

    def finish(self, engine, busy, latency=0.0, flops=0, elements=None, nbytes=None, descriptors=0):
        """Book the instruction: dependencies by region, counters, race checks between the cores."""
        clock, program = self.program.clock, self.program
        ready = (0.0, 0, 0.0)
        for _, t in self.read:
            ready = self._after(ready, t, t.storage.writes)
        for _, t in self.written:
            ready = self._after(self._after(ready, t, t.storage.writes), t, t.storage.reads)
        self._overlaps()
        end = clock.issue(engine, busy, latency, ready)
        counter = clock.counters[engine]
        counter.flops += flops
        counter.descriptors += descriptors
        counter.elements += sum(t.size for _, t in self.written) if elements is None else elements
        counter.bytes += sum(t.size * t.itemsize for _, t in self.written) if nbytes is None else nbytes
        self._remember(end)
        program.count_instruction(self.op)
        return end

    def _overlaps(self):
        """HAZ-OVERLAP: a destination that shares bytes with a source of another pattern is read while it is written."""
        for role, w in self.written:
            for source, r in self.read:
                if r.storage is not w.storage or not r.region().overlaps(w.region()):
                    continue
                same = (r.offset, r.strides, r.shape) == (w.offset, w.strides, w.shape)
                if not same and not _same_layout(r, w) and np.may_share_memory(r.codes(), w.codes(), 10_000):
                    self.fail("HAZ-OVERLAP", f"{role} overlaps {source} with another pattern", role)

    def _after(self, ready, t, history):
        if history:
            box = t.region()
            for a in history:
                if a.program == self.program.index and a.region.overlaps(box):
                    (p, d, s), (q, e, r) = ready, a.clock
                    ready = (max(p, q), max(d, e), max(s, r))
        return ready

    def _remember(self, end):
        for kind, operands in (("reads", self.read), ("writes", self.written)):
            for role, t in operands:
                storage = t.storage
                if storage.buffer in HBM:
                    self._race(role, t, kind)
                access = Access(t.region(), end, self.program.index, storage.epoch, (*_pattern(t), t.offset, t.dtype))
                storage.remember(getattr(storage, kind), access)

    def _race(self, role, t, kind):
        storage, box, me = t.storage, t.region(), self.program.index
        if kind == "reads" and storage.kind in ("private", "shared"):
            mine = [a for a in storage.writes if (a.program, a.epoch) == (me, storage.epoch) and a.region.overlaps(box)]
            if mine and any(a.pattern[:2] != _pattern(t) for a in mine):
                self.fail("HAZ-SCRATCH", f"{t!r} is read with another pattern than it was written with", role)
        if self.program.pair is None or storage.kind not in ("input", "shared"):
            return
        others = storage.writes if kind == "reads" else storage.reads
        if any(a.program != me and a.epoch == storage.epoch and a.region.overlaps(box) for a in others):
            self.fail("LNC-READ", f"{t!r}: one core writes what the other reads, with no barrier between", role)
