# SPDX-License-Identifier: Apache-2.0
"""Minimal kernels, each breaking one rule of memory, initialization, placement or dtypes: rule id -> [(kernel, arrays), ...]."""

import numpy as np

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

X = np.ones((128, 64), np.float32)
IDX = np.zeros((4, 1), np.uint32)
rc = nisa.reduce_cmd


def tile(shape=(128, 64), dtype=nl.float32, buffer=nl.sbuf, value=0):
    """A tile of a constant."""
    t = nl.ndarray(shape, dtype, buffer=buffer)
    nisa.memset(t, value)
    return t


def new(shape=(128, 64), dtype=nl.float32, buffer=nl.sbuf):
    """An uninitialized tile."""
    return nl.ndarray(shape, dtype, buffer=buffer)


def loaded(x, dtype=None):
    """A tile with the values of an HBM tensor."""
    t = nl.ndarray(x.shape, dtype or x.dtype)
    nisa.dma_copy(t, x)
    return t


def stored(t):
    """A new HBM result with a tile's values."""
    out = nl.ndarray(t.shape, t.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


MEMORY = {
    "MEM-PARTITIONS": [(lambda x: new((129, 4)), (X,))],
    "MEM-START": [
        (lambda x: nisa.memset(new()[16:48], 0.0), (X,)),
        (lambda x: nisa.memset(new()[32:96], 0.0), (X,)),
    ],
    "MEM-STEP": [
        (lambda x: nisa.memset(new()[0:128:2], 0.0), (X,)),
        (lambda x: nisa.dma_copy(new()[0:112:16], x[0:7]), (X,)),
        (lambda x: nisa.tensor_copy(new((8, 64)), tile().ap([[0, 8], [1, 64]])), (X,)),
    ],
    "MEM-SHAPE": [
        (lambda x: nisa.tensor_copy(new((128, 63)), tile()), (X,)),
        (lambda x: nisa.tensor_tensor(new(), tile(), tile((64, 64)), nl.add), (X,)),
        (lambda x: nisa.nc_matmul(new((64, 64), buffer=nl.psum), tile(), tile((64, 64))), (X,)),
    ],
    "MEM-BOUNDS": [(lambda x: nisa.dma_copy(new(), x[0:128, 0:65]), (X,))],
    "MEM-VIEW": [(lambda x: tile().permute((1, 0)), (X,))],
    "MEM-DIMS": [(lambda x: new((2, 2, 2, 2, 2, 2)), (X,))],
    "MEM-STRIDE": [(lambda x: nisa.memset(new((1, 33000 * 3), nl.int8)[:, 0:70000:32999], 0), (X,))],
    "MEM-SBUF": [(lambda x: [new((128, 49152)), new((1, 1))], (X,))],
    "MEM-PSUM": [(lambda x: [new((128, 512), buffer=nl.psum) for _ in range(9)], (X,))],
    "MEM-BANK": [(lambda x: nisa.nc_matmul(new((64, 600), buffer=nl.psum)[:, 500:564], tile(), tile()), (X,))],
    "MEM-MATMUL": [
        (lambda x: nisa.nc_matmul(new((64, 513), buffer=nl.psum), tile(), tile((128, 513))), (X,)),
        (lambda x: nisa.nc_matmul(new((128, 8), buffer=nl.psum)[0:128], tile((128, 129)), tile((128, 8))), (X,)),
        (
            lambda x: nisa.nc_matmul(new((64, 64), buffer=nl.psum), tile(), tile(), tile_position=(16, 0), tile_size=(32, 128)),
            (X,),
        ),
    ],
    "MEM-STATIONARY": [(lambda x: nisa.nc_matmul(new((12, 8), buffer=nl.psum), tile((128, 4, 6))[:, :, 0:3], tile((128, 8))), (X,))],
    "MEM-RANGE": [
        (lambda x: nisa.max8(new((128, 8)), tile((128, 7))), (X,)),
        (lambda x: nisa.max8(new((1, 8)), tile((1, 16385))), (X,)),
        (lambda x: nisa.bn_stats(new((128, 6)), tile((128, 513))), (X,)),
        (lambda x: nisa.nc_transpose(new((64, 64)), tile((64, 64)), engine=nisa.engine.vector), (X,)),
    ],
    "MEM-ADDRESS": [(lambda x: nl.ndarray((128, 4), nl.float32, address=(0, 0)), (X,))],
}


def strided_3d(x):
    """A 3-D HBM pattern onto half of a tile."""
    nisa.dma_copy(new((128, 2, 3))[0:64], x.ap([[12, 64], [4, 2], [1, 3]]))


MEMORY["MEM-DMA3D"] = [(strided_3d, (np.ones((64, 12), np.float32),))]


def unwritten_result(x):
    """Half of the result is never written."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out[0:64], x[0:64])
    return out


def skipped_row(x, i):
    """A row that oob skip leaves untouched was never written."""
    t = new((4, 64))
    nisa.dma_copy(t, x.vector_select(0, loaded(i)), oob_mode=nisa.oob_mode.skip)
    return stored(t)


def half_byte(x):
    """The second byte of each 16-bit element is missing."""
    t = new((128, 8), nl.uint8)
    nisa.memset(t[:, 0:8:2], 1)
    nisa.tensor_copy(new((128, 4), nl.uint16), t.view(nl.uint16))


def accumulates_on_memset(x):
    """accumulate=True on a memset tile."""
    ps = tile((64, 64), buffer=nl.psum)
    nisa.nc_matmul(ps, tile(), tile(), accumulate=True)


def other_lanes(x):
    """Reduces into lanes 64..127 after a reset of lanes 0..63."""
    t = tile()
    nisa.tensor_scalar_reduce(new((64, 64)), t[0:64], nl.add, 0.0, nl.add)
    nisa.tensor_scalar_reduce(new((64, 64)), t[64:128], nl.add, 0.0, nl.add, reduce_cmd=rc.reduce)


INITIALIZATION = {
    "INIT-POISON": [
        (lambda x: nisa.tensor_copy(new(), new()), (X,)),
        (skipped_row, (X, np.array([[0], [0xFFFFFFFF], [1], [2]], np.uint32))),
        (half_byte, (X,)),
        (lambda x: nisa.nc_stream_shuffle(new((32, 4)), tile((2, 4)), [3] * 32), (X,)),
    ],
    "INIT-ACCUMULATE": [
        (accumulates_on_memset, (X,)),
        (lambda x: nisa.nc_matmul(new((64, 64), buffer=nl.psum), tile(), tile(), accumulate=True), (X,)),
    ],
    "INIT-OUTPUT": [(unwritten_result, (X,))],
    "INIT-REGISTER": [(lambda x: nl.fori_loop(0, nisa.register_alloc(), print), (X,))],
    "INIT-ACCREG": [
        (lambda x: nisa.tensor_scalar_reduce(new(), tile(), nl.add, 0.0, nl.add, reduce_cmd=rc.reduce), (X,)),
        (lambda x: nisa.activation(new(), nl.copy, tile(), reduce_op=nl.add, reduce_cmd=rc.reduce), (X,)),
        (other_lanes, (X,)),
    ],
}


def mutates(x):
    """Writes its input and returns something else."""
    nisa.dma_copy(x[0:1], tile((1, 64)))
    return stored(tile())


def mutates_twice(x):
    """Writes overlapping rows of its input."""
    nisa.dma_copy(x[0:2], tile((2, 64)))
    nisa.dma_copy(x[1:3], tile((2, 64)))
    return x


PLACEMENT = {
    "PLACE-BUFFER": [
        (lambda x: nisa.dma_copy(new(), tile(buffer=nl.psum)), (X,)),
        (lambda x: nl.store(x, tile(buffer=nl.psum)), (X,)),
        (lambda x: nisa.tensor_copy(new(), tile(buffer=nl.psum), engine=nisa.engine.gpsimd), (X,)),
        (lambda x: nisa.tensor_copy(new(), x), (X,)),
        (lambda x: nisa.dma_copy(nl.shared_constant(np.zeros((128, 64), np.float32)), x), (X,)),
        (lambda x: nisa.dma_transpose(new((64, 128), buffer=nl.psum), x), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(buffer=nl.psum, value=1), nl.rsqrt, 0.0), (X,)),
    ],
    "PLACE-PSUM2": [
        (lambda x: nisa.tensor_tensor(new(), tile(buffer=nl.psum), tile(buffer=nl.psum), nl.add), (X,)),
    ],
    "PLACE-MATMUL": [
        (lambda x: nisa.nc_matmul(new((64, 64)), tile(), tile()), (X,)),
        (lambda x: nisa.nc_matmul(new((64, 64), buffer=nl.psum), tile(), tile(buffer=nl.psum)), (X,)),
    ],
    "PLACE-GATHER": [(lambda x: tile().ap([[64, 4], [1, 64]], vector_offset=tile((4, 1), nl.uint32)), (X,))],
    "PLACE-OUTPUT": [(lambda x: tile(), (X,)), (lambda x: new(buffer=nl.private_hbm), (X,))],
    "PLACE-MUTATED": [(mutates, (X,))],
    "PLACE-MUTATED2": [(mutates_twice, (X,))],
    "PLACE-CONTIGUOUS": [(stored, (X.T,))],
    "PLACE-ENGINE": [
        (lambda x: nisa.memset(new(), 0.0, engine=nisa.engine.scalar), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.maximum, 1.0, engine=nisa.engine.scalar), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.add, 1.0, engine=nisa.engine.gpsimd), (X,)),
    ],
}

U8 = sim.Typed(np.zeros((128, 64), np.uint8), "float8_e4m3fn")

TYPES = {
    "TYPE-BITVEC": [
        (lambda x: nisa.tensor_tensor(new(), tile(), tile(), nl.bitwise_and), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.left_shift, 1), (X,)),
        (lambda x: nisa.tensor_scalar(tile(dtype=nl.int32), tile(dtype=nl.int32), nl.add, 1, op1=nl.bitwise_or, operand1=1), (X,)),
    ],
    "TYPE-OPERAND": [
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.add, tile((128, 1), nl.int32)), (X,)),
        (lambda x: nisa.activation(new(), nl.exp, tile(), scale=tile((128, 1), nl.bfloat16)), (X,)),
    ],
    "TYPE-ROW": [
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.add, tile((1, 64))), (X,)),
        (lambda x: nisa.tensor_scalar(new(), tile(), nl.add, tile()), (X,)),
    ],
    "TYPE-PREDICATE": [
        (lambda x: nisa.tensor_copy_predicated(new(), tile(), tile()), (X,)),
        (lambda x: nisa.select_reduce(new(), tile(dtype=nl.uint32), tile(), 0.0), (X,)),
    ],
    "TYPE-SELECT": [(lambda x: nisa.select_reduce(new(), tile(dtype=nl.uint8), tile(dtype=nl.int32), 0.0), (X,))],
    "TYPE-SAME": [
        (lambda x: nisa.nc_transpose(new((64, 128), nl.bfloat16, nl.psum), tile()), (X,)),
        (lambda x: nisa.dma_transpose(new((64, 128), nl.bfloat16), x), (X,)),
        (lambda x: nisa.nc_n_gather(new(dtype=nl.bfloat16), tile(), tile(dtype=nl.uint32)), (X,)),
    ],
    "TYPE-TRANSPOSE8": [
        (lambda x: nisa.dma_transpose(new((64, 128), nl.uint8), x), (X.astype(np.uint8),)),
        (lambda x: nisa.nc_transpose(new((64, 128), nl.float8_e4m3, nl.psum), tile(dtype=nl.float8_e4m3)), (X,)),
    ],
    "TYPE-MATMUL": [
        (lambda x: nisa.nc_matmul(new((64, 64), buffer=nl.psum), tile(), tile(dtype=nl.bfloat16)), (X,)),
        (lambda x: nisa.nc_matmul(new((64, 64), buffer=nl.psum), tile(dtype=nl.int8), tile(dtype=nl.int8)), (X,)),
        (lambda x: nisa.nc_matmul(new((64, 64), nl.bfloat16, nl.psum), tile(), tile()), (X,)),
    ],
    "TYPE-E4M3FN": [
        (lambda x: nisa.nc_matmul(new((64, 64), buffer=nl.psum), loaded(x), loaded(x)), (U8,)),
        (lambda x: nisa.activation(new(), nl.copy, loaded(x)), (U8,)),
        (lambda x: loaded(x, nl.bfloat16), (U8,)),
    ],
    "TYPE-CARRIER": [(lambda x: nisa.tensor_copy(new(), tile(dtype=nl.uint8).view(nl.float8_e8m0fnu)), (X,))],
    "TYPE-HWDGE": [(lambda x: nisa.dma_copy(new(dtype=nl.bfloat16), x, dge_mode=nisa.dge_mode.hwdge), (X,))],
    "TYPE-MEMSET": [
        (lambda x: tile(dtype=nl.int8, value=0.5), (X,)),
        (lambda x: tile(dtype=nl.uint8, value=-1), (X,)),
        (lambda x: tile(dtype=nl.float16, value=1e6), (X,)),
    ],
    "TYPE-INDEX": [
        (lambda x: nisa.nc_n_gather(new(), tile(), tile(dtype=nl.int32)), (X,)),
        (lambda x: nisa.nc_find_index8(new((128, 8), nl.int32), tile(), tile((128, 8))), (X,)),
    ],
    "TYPE-INDEX32": [(lambda x, i: nisa.dma_copy(new((4, 64)), x.vector_select(0, loaded(i))), (X, IDX.astype(np.int32)))],
    "TYPE-DTYPE": [(lambda x: new(dtype="float64"), (X,)), (lambda x: None, (X.astype(np.int64),))],
}
