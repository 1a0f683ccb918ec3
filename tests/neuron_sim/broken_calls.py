# SPDX-License-Identifier: Apache-2.0
"""Minimal kernels, each breaking one rule of operations, numerics, cores or hazards: rule id -> [(kernel, arrays), ...]."""

import numpy as np
from broken_memory import IDX, X, loaded, new, stored, tile

from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl
from v41.backends.neuron.sim.launch import jit

rc = nisa.reduce_cmd
BIG = np.full((128, 64), 1 << 24, np.int32)


def endless(x):
    """A while loop whose register never reaches 0."""
    nl.while_loop(nisa.register_alloc(1), same_register)


def two_indices(x):
    """A read-modify-write whose source and destination rows differ."""
    a, b = (x.vector_select(0, tile((1, 1), nl.uint32, value=v)) for v in (1, 2))
    nisa.dma_compute(a, [b, tile((1, 64))], nl.add)
    return x


def same_register(r):
    """Body that changes nothing."""
    return r


OPS = {
    "OP-GEN4": [
        (lambda x: nisa.nc_matmul_mx(1, 2, 3, 4, 5), (X,)),
        (lambda x: nisa.exponential(new(), tile()), (X,)),
        (lambda x: nisa.activate2(dst=new()), (X,)),
        (lambda x: nisa.quantize_mx(1, 2, 3), (X,)),
        (lambda x: nisa.rand2(new(), 0.0, 1.0), (X,)),
        (lambda x: nisa.dma_copy(new(), x, priority=1), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.square, None), (X,)),
        (lambda x: new(dtype=nl.float4_e2m1fn_x4), (X,)),
    ],
    "OP-HARDWARE": [
        (lambda x: nisa.tensor_tensor(new(), tile(), tile(), nl.divide), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.mod, 2.0), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.fmod, 2.0), (X,)),
    ],
    "OP-ALU": [
        (lambda x: nisa.tensor_reduce(new((128, 1)), nl.less, tile(), 1), (X,)),
        (lambda x: nisa.activation(new(), nl.prelu, tile()), (X,)),
        (lambda x: nisa.tensor_tensor(new(), tile(), tile(), np.add), (X,)),
    ],
    "OP-ABSMAX": [(lambda x: nisa.tensor_reduce(new((128, 1)), nl.abs_max, tile(), 1), (X,))],
    "OP-IMMEDIATE": [(lambda x: nisa.tensor_scalar(new(dtype=nl.int32), tile(dtype=nl.int32), nl.bitwise_and, 0x7070707), (X,))],
    "OP-ENUM": [(lambda x: nisa.dma_copy(new(), x, dge_mode=3), (X,))],
    "OP-ARG": [
        (lambda x: nisa.tensor_copy(new(), tile(), mask=None), (X,)),
        (lambda x: nisa.tensor_copy(new(), 1.0), (X,)),
        (lambda x: nisa.tensor_reduce(new((128, 1)), nl.add, tile((128, 4, 4)), 1), (X,)),
        (lambda x: nisa.nc_stream_shuffle(new(), tile(), [0] * 31), (X,)),
    ],
    "OP-DMA": [
        (lambda x: nisa.dma_copy(new((128, 63)), x), (X,)),
        (lambda x: nisa.dma_transpose(new((64, 64)), x[0:64], axes=(0, 1)), (X,)),
        (lambda x: nisa.dma_transpose(new((128, 64)), x), (X,)),
        (two_indices, (X,)),
        (lambda x: nisa.dma_copy(new((4, 64)), x.vector_select(0, tile((4, 1), nl.uint32)), dge_mode=nisa.dge_mode.none), (X,)),
    ],
    "OP-OOB": [
        (lambda x: nisa.dma_copy(new((4, 64)), x.vector_select(0, tile((4, 1), nl.uint32, value=128))), (X,)),
        (lambda x: nisa.nc_n_gather(new(), tile(), tile(dtype=nl.uint32, value=64)), (X,)),
        (lambda x: nl.fori_loop(128, 129, beyond_rows), (X,)),
    ],
    "OP-SUBSET": [(lambda x: nisa.rng(new(dtype=nl.int32)), (X,)), (lambda x: nl.dynamic_range(3), (X,))],
    "OP-LIMIT": [(endless, (X,))],
}


def beyond_rows(i):
    """Reads the row of a register from a constant of 4 rows."""
    table = nl.shared_constant(np.zeros((4, 8), np.float32))
    nisa.dma_copy(new((1, 8)), table.ap([[8, 1], [1, 8]], scalar_offset=i, indirect_dim=0))


def nan_tile(shape=(128, 64)):
    """A tile of NaN."""
    t = new(shape)
    nisa.memset(t, float("nan"))
    return t


NUMERICS = {
    "NUM-RANGE": [
        (lambda x: nisa.activation(new(), nl.sqrt, tile(value=-1.0)), (X,)),
        (lambda x: nisa.activation(new(), nl.rsqrt, tile()), (X,)),
        (lambda x: nisa.activation(new(), nl.sin, tile(value=3.2)), (X,)),
        (lambda x: nisa.activation(new(), nl.log, tile()), (X,)),
        (lambda x: nisa.activation(new(), nl.arctan, tile(value=1.6)), (X,)),
        (lambda x: nisa.activation(new(), nl.reciprocal, tile(value=1e-20)), (X,)),
    ],
    "NUM-NAN8": [
        (lambda x: nisa.max8(new((128, 8)), nan_tile()), (X,)),
        (lambda x: nisa.nc_find_index8(new((128, 8), nl.uint32), tile(), nan_tile((128, 8))), (X,)),
    ],
    "NUM-FP8": [
        (lambda x: nisa.tensor_copy(new(dtype=nl.float8_e4m3), tile(value=240.5)), (X,)),
        (lambda x: nisa.tensor_copy(new(dtype=nl.float8_e5m2), tile(value=57345.0)), (X,)),
        (lambda x: loaded(x, nl.float8_e4m3), (X * 300,)),
    ],
    "NUM-INT24": [
        (lambda x: nisa.tensor_copy(new(), loaded(x)), (BIG,)),
        (lambda x: loaded(x, nl.float32), (BIG,)),
        (lambda x: nisa.tensor_scalar(new(dtype=nl.int32), loaded(x), nl.add, 1.0), (BIG,)),
        (lambda x: nisa.tensor_scalar(new(dtype=nl.int32), tile(value=4096.0), nl.multiply, 4096.0), (X,)),
        (lambda x: nisa.iota(new(), [[1 << 20, 64]]), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.add, (1 << 24) + 1), (X,)),
        (lambda x: nisa.tensor_tensor(new(dtype=nl.int32), loaded(x), loaded(x), nl.add, engine=nisa.engine.vector), (BIG,)),
    ],
    "NUM-NAN-INT": [(lambda x: nisa.tensor_copy(new(dtype=nl.int32), nan_tile()), (X,))],
    "NUM-NONFINITE": [
        (lambda x: nisa.reciprocal(new(), tile()), (X,)),
        (lambda x: nisa.tensor_tensor(new(), tile(value=3e38), tile(value=3e38), nl.add), (X,)),
        (lambda x: nisa.tensor_copy(new(dtype=nl.float16), tile(value=1e6)), (X,)),
    ],
}


def both_write(x):
    """Both cores store different values to one place."""
    out = nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile((1, 8), value=float(nl.program_id())))
    return out


def both_write_the_same(x):
    """Both cores store the same values to one place."""
    out = nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile((1, 8)))
    return out


def no_barrier(x):
    """Core 1 reads what core 0 wrote, with no barrier between."""
    me = nl.program_id()
    out = nl.ndarray((2, 8), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out[me : me + 1], tile((1, 8)))
    nisa.dma_copy(new((1, 8)), out[0:1])
    return out


def lone_barrier(x):
    """Only core 0 waits."""
    out = nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        nisa.core_barrier(out)
    return out


def different_pipes(x):
    """The cores name different pipes."""
    me = nl.program_id()
    nisa.sendrecv(tile((1, 8)), new((1, 8)), 1 - me, 1 - me, pipe_id=me)


def different_shapes(x):
    """The cores exchange tiles of different sizes."""
    me = nl.program_id()
    nisa.sendrecv(tile((1, 8 + me)), new((1, 8 + me)), 1 - me, 1 - me, pipe_id=0)


def to_itself(x):
    """A core sends to itself."""
    me = nl.program_id()
    nisa.sendrecv(tile((1, 8)), new((1, 8)), me, me, pipe_id=0)


def barrier_against_sendrecv(x):
    """One core waits at a barrier, the other at a sendrecv."""
    out = nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        nisa.core_barrier(out)
    else:
        nisa.sendrecv(tile((1, 8)), new((1, 8)), 0, 0, pipe_id=0)
    return out


def different_work(x):
    """Core 1 computes more than core 0."""
    t = tile()
    if nl.program_id() == 1:
        nisa.reciprocal(t, tile(value=1.0))


def guarded_store(x):
    """Only core 0 stores."""
    out = nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)
    t = tile((1, 8))
    if nl.program_id() == 0:
        nisa.dma_copy(out, t)
    return out


def different_results(x):
    """The programs return different tensors."""
    a, b = (nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm) for _ in range(2))
    return a if nl.program_id() == 0 else b


def different_shared(x):
    """The programs allocate shared tensors of different shapes."""
    return nl.ndarray((1, 8 + nl.program_id()), nl.float32, buffer=nl.shared_hbm)


TWO = {
    "LNC-GRID": [(jit(stored)[3], (X,)), (jit(stored)[(2,)], (X,))],
    "LNC-SEQUENCE": [(jit(different_work)[2], (X,))],
    "LNC-SEQUENCE-DMA": [(jit(guarded_store)[2], (X,))],
    "LNC-RENDEZVOUS": [
        (jit(lone_barrier)[2], (X,)),
        (jit(different_pipes)[2], (X,)),
        (jit(different_shapes)[2], (X,)),
        (jit(to_itself)[2], (X,)),
        (jit(barrier_against_sendrecv)[2], (X,)),
        (lambda x: nisa.core_barrier(nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)), (X,)),
    ],
    "LNC-WRITE": [(jit(both_write)[2], (X,))],
    "LNC-WRITE-SAME": [(jit(both_write_the_same)[2], (X,))],
    "LNC-READ": [(jit(no_barrier)[2], (X,))],
    "LNC-SHARED": [(jit(different_results)[2], (X,)), (jit(different_shared)[2], (X,))],
}


def overlapping_gather(x):
    """Gathers into its own source."""
    t = tile()
    nisa.nc_n_gather(t, t, tile(dtype=nl.uint32))


def shifted(x):
    """Copies a tile one column to the right, onto itself."""
    t = tile()
    nisa.tensor_copy(t[:, 1:64], t[:, 0:63])


def shared_scratch(x):
    """The same with a shared tensor."""
    h = nl.ndarray((4, 8), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(h, tile((4, 8)))
    nisa.dma_copy(new((1, 32)), h.reshape((1, 32)))


def scratch(x):
    """HBM scratch written by rows and read as one row."""
    h = nl.ndarray((4, 8), nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(h, tile((4, 8)))
    nisa.dma_copy(new((1, 32)), h.reshape((1, 32)))


def scatter_twice(x, i):
    """Two rows of one scatter have the same index."""
    nisa.dma_copy(x.vector_select(0, loaded(i)), tile((4, 64)))
    return x


def nested(x):
    """A loop in a loop."""
    nl.fori_loop(0, 2, inner)


def inner(i):
    """The inner loop."""
    nl.fori_loop(0, 2, nothing)


def nothing(i):
    """No work."""


HAZARDS = {
    "HAZ-OVERLAP": [(overlapping_gather, (X,)), (shifted, (X,))],
    "HAZ-SCRATCH": [(scratch, (X,)), (shared_scratch, (X,))],
    "HAZ-SCATTER": [(scatter_twice, (X, IDX))],
    "HAZ-NESTED": [(nested, (X,))],
    "HAZ-IDLE": [(lambda x: nisa.select_reduce(new(), tile(dtype=nl.uint8), tile(), 0.0, new((128, 1))), (X,))],
}
