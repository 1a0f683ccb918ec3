# SPDX-License-Identifier: Apache-2.0
"""TensorE: matmul and transpose."""

import numpy as np

from v41.backends.neuron.sim import layout
from v41.backends.neuron.sim.cost import matmul_busy, vector_busy
from v41.backends.neuron.sim.dtypes import FP8, size_of
from v41.backends.neuron.sim.enums import engine as engines
from v41.backends.neuron.sim.enums import matmul_perf_mode as perf
from v41.backends.neuron.sim.instr import Instr
from v41.backends.neuron.sim.memory import PARTITIONS, PSUM, PSUM_BANK, SBUF

WIDE = ("float32", "tfloat32")
OPERANDS = ("float8_e4m3", "float8_e5m2", "bfloat16", "float16") + WIDE
COLUMNS = 512


def _operands(ins, dst, stationary, moving):
    stationary = ins.tile("stationary", stationary, (SBUF,), "PLACE-MATMUL")
    moving = ins.tile("moving", moving, (SBUF,), "PLACE-MATMUL")
    dst = ins.tile("dst", dst, (PSUM,), "PLACE-MATMUL")
    for role, t in (("stationary", stationary), ("moving", moving)):
        if t.dtype == "float8_e4m3fn":
            ins.fail("TYPE-E4M3FN", "float8_e4m3fn in a matmul needs gen4", role)
        ins.dtype(role, t, OPERANDS, "TYPE-MATMUL")
    if (stationary.dtype in WIDE) != (moving.dtype in WIDE):
        ins.fail("TYPE-MATMUL", f"{stationary.dtype} with {moving.dtype}", "moving")
    return dst, stationary, moving


def _bank(ins, dst):
    first = dst.offset * dst.itemsize % dst.storage.pitch
    last = first + (layout.extent(dst.shape[1:], dst.strides[1:])[1] + 1) * dst.itemsize - 1
    if first // PSUM_BANK != last // PSUM_BANK:
        ins.fail("MEM-BANK", f"bytes {first}..{last} of a partition", "dst")


def _tiling(ins, position, size, k, m):
    if bool(position) != bool(size):
        ins.fail("OP-ARG", "tile_position and tile_size go together", "tile_position")
    if not size:
        return PARTITIONS, PARTITIONS
    (row, column), (rows, columns) = position, size
    legal = (32, 64, 128)
    if rows not in legal or columns not in legal or row % rows or column % columns or row >= 128 or column >= 128:
        ins.fail("MEM-MATMUL", f"tile_position {position}, tile_size {size}", "tile_position")
    return rows, columns


def _stationary_form(ins, t, double):
    pairs = layout.merged(t.shape[1:], t.strides[1:])
    if double:
        pairs = [p for p in pairs if p[0] != 2]
    if len(pairs) > 1:
        ins.fail("MEM-STATIONARY", f"free pattern {pairs} (size, stride)", "stationary")


def _accumulates(ins, dst, accumulate):
    """Whether this matmul adds to dst; INIT-ACCUMULATE."""
    ours = dst.cells(dst.storage.matmul)
    if accumulate is None:
        if ours.all():
            return True
        if ours.any():
            ins.fail("INIT-ACCUMULATE", "part of dst was written by a matmul, part was not", "dst")
        return False
    if accumulate and not ours.all():
        ins.fail("INIT-ACCUMULATE", "accumulate=True on PSUM that no matmul wrote last", "dst")
    return bool(accumulate)


def nc_matmul(
    dst,
    stationary,
    moving,
    is_stationary_onezero=False,
    is_moving_onezero=False,
    is_transpose=False,
    accumulate=None,
    tile_position=(),
    tile_size=(),
    perf_mode=perf.none,
    name=None,
):
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N]; exact products, float32 sums, float32 PSUM."""
    ins = Instr("nisa.nc_matmul")
    dst, stationary, moving = _operands(ins, dst, stationary, moving)
    double = perf_mode is perf.double_row
    k, m, n = _sizes(ins, stationary, moving, double, tile_position, tile_size)
    if dst.shape[0] != m or dst.size != m * n:
        ins.fail("MEM-SHAPE", f"dst {dst.shape} for a result of ({m}, {n})", "dst")
    _bank(ins, dst)
    _stationary_form(ins, stationary, double)
    if is_transpose:
        _transpose(ins, dst, stationary, moving, accumulate)
    else:
        _multiply(ins, dst, stationary, moving, accumulate, double)
    loads = (id(stationary.storage), stationary.offset, stationary.shape)
    new = getattr(ins.program, "weights", None) != loads
    ins.program.weights = loads
    busy = matmul_busy(stationary.shape[0], n, new, stationary.dtype in WIDE)
    ins.finish("tensor", busy, flops=2 * k * m * n)


def _sizes(ins, stationary, moving, double, position, size):
    p = stationary.shape[0]
    if moving.shape[0] != p:
        ins.fail("MEM-SHAPE", f"stationary {stationary.shape} and moving {moving.shape}: K differs", "moving")
    if double:
        if stationary.dtype not in FP8 or moving.dtype not in FP8:
            ins.fail("TYPE-MATMUL", f"double_row takes fp8, not {stationary.dtype} and {moving.dtype}", "stationary")
        for role, t in (("stationary", stationary), ("moving", moving)):
            if t.ndim < 3 or t.shape[1] != 2:
                ins.fail("MEM-SHAPE", f"{t.shape}: double_row needs [K, 2, ...]", role)
    twice = 2 if double else 1
    m, n = stationary.size // p // twice, moving.size // p // twice
    rows, columns = _tiling(ins, position, size, p, m)
    if double and columns != PARTITIONS:
        ins.fail("MEM-MATMUL", "double_row with column tiling", "tile_size")
    if p > rows or m > columns or n > COLUMNS:
        ins.fail("MEM-MATMUL", f"K={p} (<= {rows}), M={m} (<= {columns}), N={n} (<= {COLUMNS})", "stationary")
    return p * twice, m, n


def _multiply(ins, dst, stationary, moving, accumulate, double):
    ins.dtype("dst", dst, ("float32",), "TYPE-MATMUL")
    adds = _accumulates(ins, dst, accumulate)
    a, b = ins.f32("stationary", stationary), ins.f32("moving", moving)
    if double:
        p = stationary.shape[0]
        a = a.reshape(p, 2, -1).transpose(1, 0, 2).reshape(2 * p, -1)
        b = b.reshape(p, 2, -1).transpose(1, 0, 2).reshape(2 * p, -1)
    # macOS and some x86 BLAS raise spurious flags on padded lanes; the result is checked instead.
    with np.errstate(all="ignore"):
        result = a.T @ b
        if adds:
            result = result + ins.raw("dst", dst).reshape(result.shape)
    if not np.isfinite(result).all() and all(np.isfinite(v).all() for _, v in ins.floats):
        ins.fail("NUM-NONFINITE", "finite inputs gave NaN or infinity", "dst")
    ins.put_raw("dst", dst, result, matmul=True)


def _transpose(ins, dst, stationary, moving, accumulate):
    if accumulate:
        ins.fail("OP-ARG", "a transpose does not accumulate", "accumulate")
    ins.same_dtype(("stationary", stationary), ("dst", dst))
    if size_of(stationary.dtype) == 1:
        ins.fail("TYPE-TRANSPOSE8", f"{stationary.dtype}: TensorE writes 16-bit elements here", "dst")
    identity = ins.f32("moving", moving)
    if identity.shape[1] != identity.shape[0] or not np.array_equal(identity, np.eye(len(identity), dtype=np.float32)):
        ins.fail("OP-ARG", "is_transpose needs an identity as moving", "moving")
    values = ins.raw("stationary", stationary).reshape(stationary.shape[0], -1)
    ins.put_raw("dst", dst, np.ascontiguousarray(values.T))


def nc_transpose(dst, data, engine=engines.unknown, name=None):
    """dst = data with partitions and (flattened) free elements swapped, bit for bit.

    TensorE: SBUF to PSUM, up to 128 x 128. VectorE: up to 32 x 32, SBUF or PSUM.
    """
    ins = Instr("nisa.nc_transpose")
    dst, data = ins.tile("dst", dst), ins.tile("data", data)
    rows, columns = data.shape[0], data.size // data.shape[0]
    if dst.shape[0] != columns or dst.size != data.size:
        ins.fail("MEM-SHAPE", f"dst {dst.shape} for data {data.shape}", "dst")
    ins.same_dtype(("data", data), ("dst", dst))
    tensor = engine is engines.tensor or (engine is engines.unknown and dst.buffer == PSUM and data.buffer == SBUF)
    if engine not in (engines.unknown, engines.tensor, engines.vector):
        ins.fail("PLACE-ENGINE", f"{engine.name}", "engine")
    if max(rows, columns) > (128 if tensor else 32):
        ins.fail("MEM-RANGE", f"{rows} x {columns} on {'TensorE (<= 128)' if tensor else 'VectorE (<= 32)'}", "data")
    if tensor:
        _tensor_form(ins, dst, data)
    values = np.ascontiguousarray(ins.raw("data", data).reshape(rows, columns).T)
    ins.put_raw("dst", dst, values)
    if tensor:
        ins.finish("tensor", matmul_busy(rows, rows, True, data.itemsize == 4))
    else:
        ins.finish("vector", vector_busy(columns))


def _tensor_form(ins, dst, data):
    if data.buffer != SBUF or dst.buffer != PSUM:
        ins.fail("PLACE-MATMUL", "TensorE reads SBUF and writes PSUM", "dst")
    if data.dtype not in OPERANDS:
        ins.fail("TYPE-DTYPE", f"{data.dtype} on TensorE: floats only", "data")
    if data.itemsize == 1:
        ins.fail("TYPE-TRANSPOSE8", f"{data.dtype}: TensorE writes 16-bit elements here", "dst")
    _bank(ins, dst)
