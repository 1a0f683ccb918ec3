# SPDX-License-Identifier: Apache-2.0
"""DMA instructions: copies with casts, gathers and scatters, transposes, summed copies."""

import numpy as np

from v41.backends.neuron.sim import layout
from v41.backends.neuron.sim.alu import canonical
from v41.backends.neuron.sim.cost import DMA_FIXED, dma_busy
from v41.backends.neuron.sim.dma_rows import gather, rows_of, scatter
from v41.backends.neuron.sim.enums import dge_mode as dge
from v41.backends.neuron.sim.enums import engine as engines
from v41.backends.neuron.sim.enums import oob_mode as oob
from v41.backends.neuron.sim.instr import Instr
from v41.backends.neuron.sim.memory import HBM, PARTITIONS, SBUF

REACHABLE = (SBUF,) + HBM
TRANSPOSES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def _side(ins, role, t):
    t = ins.tensor(role, t, REACHABLE)
    if t.on_chip:
        ins.partitions(role, t)
    return t


def _free(t):
    first = 1 if t.on_chip or t.index is not None else 0
    return t.shape[first:], t.strides[first:], t.itemsize


def _book(ins, dst, src, share=1.0, rows=None):
    """Bytes on the HBM side and the shorter contiguous run of the two sides decide the cost; rows that are skipped move nothing."""
    run = min(layout.run_bytes(*_free(dst)), layout.run_bytes(*_free(src)))
    valid, count = (1, 1) if rows is None else (int(rows.valid.sum()), len(rows.valid))
    size = dst.size * valid // count
    nbytes = sum(t.size * t.itemsize for t in (dst, src) if not t.on_chip) * valid // count
    nbytes = nbytes or size * dst.itemsize
    descriptors = -(-size * dst.itemsize // run)
    ins.finish("dma", dma_busy(nbytes, run, share), DMA_FIXED, elements=size, nbytes=nbytes, descriptors=descriptors)


def _modes(ins, dst, src, priority, mode, engine):
    indirect = any(t.index is not None for t in (dst, src))
    if priority is not None:
        ins.fail("OP-GEN4", "DMA priority needs gen4", "priority")
    if not isinstance(mode, dge):
        ins.fail("OP-ENUM", f"{mode!r} is no nisa.dge_mode", "dge_mode")
        mode = dge(mode)
    if indirect and mode not in (dge.unknown, dge.swdge):
        ins.fail("OP-DMA", f"a vector-indexed DMA needs swdge, not {mode.name}", "dge_mode")
    if mode is dge.hwdge and dst.dtype != src.dtype:
        ins.fail("TYPE-HWDGE", f"{src.dtype} to {dst.dtype}", "dst")
    if engine is not engines.unknown and (mode is not dge.hwdge or engine not in (engines.sync, engines.scalar)):
        ins.fail("PLACE-ENGINE", "engine= is sync or scalar, with dge_mode.hwdge only", "engine")


def _partial_3d(ins, dst, src):
    for chip, other in ((dst, src), (src, dst)):
        if not chip.on_chip or other.on_chip or chip.shape[0] * chip.storage.pitch == chip.storage.nbytes:
            continue
        if len(layout.merged(other.shape, other.strides)) >= 3:
            ins.fail("MEM-DMA3D", f"{other.shape} in HBM to {chip.shape[0]} partitions of a larger tile", "dst")


def _convert(ins, values_of, dst):
    """Container values for dst from (role, tensor, container values)."""
    role, src, codes = values_of
    if src.dtype == dst.dtype:
        return codes
    for t, name in ((src, role), (dst, "dst")):
        if t.dtype in ("float8_e4m3fn", "float8_e8m0fnu"):
            rule = "TYPE-E4M3FN" if t.dtype == "float8_e4m3fn" else "TYPE-CARRIER"
            ins.fail(rule, f"a DMA cast {src.dtype} to {dst.dtype}", name)
    from v41.backends.neuron.sim.dtypes import CastError, to_float32

    try:
        values = to_float32(codes, src.dtype)
    except CastError as error:
        ins.fail(error.rule, str(error), role)
        values = codes.astype(np.float32)
    return ins.cast("dst", values, dst.dtype)


def dma_copy(
    dst,
    src,
    priority=None,
    oob_mode=oob.error,
    dge_mode=dge.unknown,
    engine=engines.unknown,
    name=None,
):
    """dst = src in row-major element order, HBM or SBUF on either side; dtypes convert through float32."""
    ins = Instr("nisa.dma_copy")
    dst, src = _side(ins, "dst", dst), _side(ins, "src", src)
    if dst.size != src.size:
        ins.fail("OP-DMA", f"{dst.size} elements from {src.size} ({dst.shape}, {src.shape})", "src")
    _modes(ins, dst, src, priority, dge_mode, engine)
    _partial_3d(ins, dst, src)
    if dst.index is not None and src.index is not None:
        ins.fail("OP-DMA", "vector offsets on both sides", "src")
    rows = None
    if src.index is not None:
        rows = rows_of(ins, "src", src, oob_mode is oob.skip)
        _gathered(ins, dst, src, rows)
    elif dst.index is not None:
        rows = rows_of(ins, "dst", dst, oob_mode is oob.skip)
        codes = _convert(ins, ("src", src, ins.raw("src", src)), dst)
        scatter(ins, "dst", dst, rows, codes.reshape(len(rows.valid), -1))
    else:
        codes = _convert(ins, ("src", src, ins.raw("src", src)), dst)
        ins.put_raw("dst", dst, codes)
    _book(ins, dst, src, rows=rows)


def _gathered(ins, dst, src, rows):
    if dst.shape[0] != src.shape[0]:
        ins.fail("OP-DMA", f"{src.shape[0]} gathered rows into a dst of {dst.shape[0]} rows", "dst")
    codes = _convert(ins, ("src", src, gather(ins, "src", src, rows)), dst)
    if rows.valid.all():
        ins.put_raw("dst", dst, codes)
        return
    # A skipped row keeps what dst had: if it was never written it stays poison.
    for r, row in zip(np.flatnonzero(rows.valid), codes, strict=True):
        ins.write("dst", dst[int(r) : int(r) + 1], row)
    ins.written.append(("dst", dst))


def dma_transpose(
    dst,
    src,
    axes=None,
    priority=None,
    dge_mode=dge.unknown,
    oob_mode=oob.error,
    name=None,
):
    """dst = src permuted (1,0), (2,1,0) or (3,1,2,0), into SBUF; with a vector offset rows are gathered first."""
    ins = Instr("nisa.dma_transpose")
    dst, src = ins.tensor("dst", dst, (SBUF,)), _side(ins, "src", src)
    ins.partitions("dst", dst)
    permutation = TRANSPOSES.get(src.ndim)
    if permutation is None or tuple(axes or permutation) != permutation:
        ins.fail("OP-DMA", f"axes {axes} of a {src.ndim}-D source", "axes")
    ins.same_dtype(("src", src), ("dst", dst))
    if src.itemsize == 1:
        ins.fail("TYPE-TRANSPOSE8", f"{src.dtype}", "src")
    if priority is not None:
        ins.fail("OP-GEN4", "DMA priority needs gen4", "priority")
    if dst.shape != tuple(src.shape[a] for a in permutation):
        ins.fail("OP-DMA", f"dst {dst.shape} is not src {src.shape} permuted by {permutation}", "dst")
    if src.index is None:
        _direct_form(ins, src, dge_mode)
        values = ins.raw("src", src)
    else:
        _indirect_form(ins, src, dge_mode)
        rows = rows_of(ins, "src", src, oob_mode is oob.skip, transposed=True)
        if not rows.valid.all():
            ins.fail("OP-SUBSET", "oob_mode.skip in a gathering transpose is not simulated", "src")
        values = gather(ins, "src", src, rows).reshape(src.shape)
    ins.put_raw("dst", dst, values.transpose(permutation))
    _book(ins, dst, src, 0.5 if src.on_chip else 0.9)


def _direct_form(ins, src, mode):
    if mode not in (dge.unknown, dge.hwdge):
        ins.fail("OP-DMA", f"a direct transpose takes dge_mode unknown or hwdge, not {mode.name}", "dge_mode")
    if mode is not dge.hwdge:
        return
    n = src.shape[0]
    rows_ok = n == 16 if src.ndim == 2 else n in (1, 2, 4, 8, 16) and n * src.shape[-2] % 16 == 0
    if src.itemsize != 2 or src.shape[-1] > 128 or not rows_ok:
        ins.fail("OP-DMA", f"hwdge transpose of {src.shape} {src.dtype}", "src")


def _indirect_form(ins, src, mode):
    n, index = src.shape[0], src.index.source
    if mode not in (dge.unknown, dge.swdge):
        ins.fail("OP-DMA", f"a gathering transpose takes dge_mode unknown or swdge, not {mode.name}", "dge_mode")
    if src.itemsize != 2 or src.shape[-1] > 128 or n % 16 or (src.ndim == 4 and 1 not in src.shape[1:3]):
        ins.fail("OP-DMA", f"gathering transpose of {src.shape} {src.dtype}", "src")
    if index.ndim != 2 or not 16 <= index.shape[0] <= 128 or index.shape[0] % 16 or index.size < n:
        ins.fail("OP-DMA", f"index tile {index.shape} for {n} rows", "src")
    if index.shape[1] > 1 and index.shape[0] != PARTITIONS:
        ins.fail("OP-DMA", f"index tile {index.shape}: more than one column needs 128 rows", "src")


def _sum_form(ins, srcs, reduce_op, scales, unique_indices):
    if canonical(reduce_op) != "add":
        ins.fail("OP-ALU", f"{reduce_op!r}; only nl.add", "reduce_op")
    if scales is not None and any(s != 1.0 for s in scales):
        ins.fail("OP-ARG", f"{scales}: all scales are 1.0", "scales")
    if not isinstance(srcs, (list, tuple)) or not 1 <= len(srcs) <= 16:
        ins.fail("OP-ARG", "1 to 16 sources", "srcs")
    if not unique_indices:
        ins.fail("OP-ARG", "non-unique indices are not supported", "unique_indices")


def dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=oob.error, name=None):
    """dst = sum of srcs in float32, cast once; with a vector offset a read-modify-write gather or scatter of 2 sources."""
    ins = Instr("nisa.dma_compute")
    _sum_form(ins, srcs, reduce_op, scales, unique_indices)
    dst = _side(ins, "dst", dst)
    sides = [_side(ins, f"srcs[{i}]", s) for i, s in enumerate(srcs)]
    if any(s.size != dst.size for s in sides):
        ins.fail("OP-DMA", f"element counts {[s.size for s in sides]} into {dst.size}", "srcs")
    indexed = [t for t in (*sides, dst) if t.index is not None]
    if indexed and (len(sides) != 2 or sum(s.index is not None for s in sides) != 1):
        ins.fail("OP-DMA", "a vector offset needs exactly 2 sources, one of them indexed", "srcs")
    skip = oob_mode is oob.skip
    rows = rows_of(ins, "srcs", indexed[0], skip) if indexed else None
    if dst.index is not None and not np.array_equal(rows_of(ins, "dst", dst, skip).flat, rows.flat):
        ins.fail("OP-DMA", "a scatter's dst and its source name different rows", "dst")
    total = np.zeros((dst.shape[0], dst.size // dst.shape[0]) if rows is None else rows.flat.shape, np.float32)
    for i, s in enumerate(sides):
        total = total + _term(ins, f"srcs[{i}]", s, rows).reshape(total.shape)
    if dst.index is not None:
        scatter(ins, "dst", dst, rows, ins.cast("dst", total, dst.dtype), unique=True)
    elif rows is not None and not rows.valid.all():
        for r in np.flatnonzero(rows.valid):
            ins.write("dst", dst[int(r) : int(r) + 1], ins.cast("dst", total[r], dst.dtype))
        ins.written.append(("dst", dst))
    else:
        ins.put("dst", dst, total)
    _book(ins, dst, sides[0], rows=rows)


def _term(ins, role, t, rows):
    from v41.backends.neuron.sim.dtypes import to_float32

    if t.index is None:
        return ins.f32(role, t)
    values = np.zeros(rows.flat.shape, np.float32)
    values[rows.valid] = to_float32(gather(ins, role, t, rows), t.dtype)
    return values
