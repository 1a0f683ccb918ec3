# SPDX-License-Identifier: Apache-2.0
"""One call per remaining check of an instruction or view: (rule, kernel). Each gets X (128, 64) float32."""

from broken_memory import new, rc, tile

from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl
from v41.backends.neuron.sim.launch import jit

U32, I32, BF16, U8, U16 = nl.uint32, nl.int32, nl.bfloat16, nl.uint8, nl.uint16
hw, sw = nisa.dge_mode.hwdge, nisa.dge_mode.swdge


def bank(shape=(64, 64), dtype=nl.float32):
    """An uninitialized PSUM tile."""
    return new(shape, dtype, nl.psum)


def psum(shape=(128, 64)):
    """A PSUM tile of zeros."""
    return tile(shape, buffer=nl.psum)


def rows(n=4, dtype=U32, columns=1):
    """An index tile."""
    return tile((n, columns), dtype)


def half_words(x, n=128, columns=1, src=(64, 128), indexed=True):
    """(dst, src) of a 2-byte transpose, gathering unless told otherwise."""
    h = nl.ndarray(src, BF16, buffer=nl.private_hbm)
    v = h.ap([[src[-1], n * columns], [1, src[-1]]], vector_offset=rows(n, U32, columns)) if indexed else h
    return new((v.shape[-1], v.shape[0]), BF16), v


def few_indices():
    """32 rows by 16 indices."""
    h = nl.ndarray((64, 128), BF16, buffer=nl.private_hbm)
    return h.ap([[128, 32], [1, 128]], vector_offset=rows(16))


def skipping():
    """(dst, src) of a gathering transpose whose indices are out of range."""
    h = nl.ndarray((64, 128), BF16, buffer=nl.private_hbm)
    return new((128, 128), BF16), h.ap([[128, 128], [1, 128]], vector_offset=tile((128, 1), U32, value=64))


DMA = [
    ("PLACE-ENGINE", lambda x: nisa.dma_copy(new(), x, engine=nisa.engine.sync)),
    ("OP-DMA", lambda x: nisa.dma_copy(x.vector_select(0, rows()), x.vector_select(0, rows()))),
    ("OP-DMA", lambda x: nisa.dma_copy(new((8, 32)), x.vector_select(0, rows()))),
    ("OP-DMA", lambda x: nisa.dma_copy(new((4, 64)), x.ap([[64, 4], [1, 64]], vector_offset=rows(8)))),
    ("TYPE-INDEX", lambda x: nisa.dma_copy(new((4, 64)), x.vector_select(0, rows(4, U16)))),
    ("INIT-POISON", lambda x: nisa.dma_copy(new((4, 64)), nl.ndarray((8, 64), nl.float32, buffer=nl.private_hbm).vector_select(0, rows()))),
    ("OP-GEN4", lambda x: nisa.dma_transpose(new((64, 128)), x, priority=1)),
    ("MEM-STEP", lambda x: nisa.dma_transpose(new((128, 128))[0:128:2], x)),
    ("OP-DMA", lambda x: nisa.dma_transpose(new((64, 128)), x, dge_mode=sw)),
    ("OP-DMA", lambda x: nisa.dma_transpose(new((64, 128)), x, dge_mode=hw)),
    ("OP-DMA", lambda x: nisa.dma_transpose(*half_words(x), dge_mode=hw)),
    ("OP-DMA", lambda x: nisa.dma_transpose(new((64, 128)), x.ap([[64, 128], [1, 64]], vector_offset=rows(128)))),
    ("OP-DMA", lambda x: nisa.dma_transpose(*half_words(x, n=8))),
    ("OP-DMA", lambda x: nisa.dma_transpose(*half_words(x, n=64, columns=2))),
    ("OP-DMA", lambda x: nisa.dma_transpose(new((128, 32), BF16), few_indices())),
    ("OP-SUBSET", lambda x: nisa.dma_transpose(*skipping(), oob_mode=nisa.oob_mode.skip)),
    ("OP-ALU", lambda x: nisa.dma_compute(new(), [x, x], nl.maximum)),
    ("OP-ARG", lambda x: nisa.dma_compute(new(), [x, x], nl.add, scales=[1.0, 2.0])),
    ("OP-ARG", lambda x: nisa.dma_compute(new(), [x] * 17, nl.add)),
    ("OP-ARG", lambda x: nisa.dma_compute(new(), [x], nl.add, unique_indices=False)),
    ("OP-DMA", lambda x: nisa.dma_compute(new(), [x, x[0:64]], nl.add)),
    ("OP-DMA", lambda x: nisa.dma_compute(new((4, 64)), [x.vector_select(0, rows())], nl.add)),
]

INDEX = [
    ("MEM-SHAPE", lambda x: nisa.max8(new((128, 7)), tile())),
    ("MEM-DIMS", lambda x: nisa.max8(new((128, 8)), tile((128, 2, 2, 8)))),
    ("MEM-SHAPE", lambda x: nisa.nc_find_index8(new((64, 8), U32), tile(), tile((128, 8)))),
    ("MEM-SHAPE", lambda x: nisa.nc_find_index8(new((128, 8), U32), tile(), tile((128, 9)))),
    ("MEM-SHAPE", lambda x: nisa.nc_match_replace8(new((128, 63)), tile(), tile((128, 8)), 0.0)),
    ("MEM-SHAPE", lambda x: nisa.nc_match_replace8(new(), tile(), tile((128, 9)), 0.0)),
    ("MEM-SHAPE", lambda x: nisa.nc_match_replace8(new(), tile(), tile((128, 8)), 0.0, new((128, 9), U32))),
    ("OP-ARG", lambda x: nisa.nc_match_replace8(new(), tile(), tile((128, 8)), tile())),
    ("OP-ARG", lambda x: nisa.iota(new(dtype=I32), [[1, 2]] * 5)),
    ("MEM-SHAPE", lambda x: nisa.iota(new(dtype=I32), [[1, 63]])),
    ("OP-ARG", lambda x: nisa.iota(new(dtype=I32), [[1 << 26, 64]])),
    ("MEM-SHAPE", lambda x: nisa.affine_select(new((128, 63)), [[1, 63]], 0, tile(), 0.0)),
    ("OP-ARG", lambda x: nisa.affine_select(new(), [[1, 64]], 0, tile(), tile())),
    ("TYPE-DTYPE", lambda x: nisa.nonzero_with_count(new((128, 65), I32), tile(dtype=BF16))),
    ("TYPE-DTYPE", lambda x: nisa.nonzero_with_count(new((128, 65)), tile())),
    ("MEM-SHAPE", lambda x: nisa.nonzero_with_count(new((128, 64), I32), tile())),
    ("HAZ-OVERLAP", lambda x: overlapping_nonzero()),
    ("TYPE-DTYPE", lambda x: nisa.topk(new((128, 8), BF16), new((128, 8), U32), tile(), 64)),
    ("TYPE-DTYPE", lambda x: nisa.topk(new((128, 8)), new((128, 8), U32), tile(dtype=BF16), 64)),
    ("TYPE-INDEX", lambda x: nisa.topk(new((128, 8), BF16), new((128, 8), I32), tile(dtype=BF16), 64)),
    ("MEM-SHAPE", lambda x: nisa.topk(new((128, 8), BF16), new((128, 9), U32), tile(dtype=BF16), 64)),
    ("MEM-SHAPE", lambda x: nisa.topk(new((8, 8), BF16), new((8, 8), U32), tile((8, 64), BF16), 64)),
    ("MEM-RANGE", lambda x: nisa.topk(new((128, 8), BF16), new((128, 8), U32), tile(dtype=BF16), 1025)),
    ("HAZ-OVERLAP", lambda x: overlapping_topk()),
    ("MEM-SHAPE", lambda x: nisa.nc_n_gather(new((128, 8)), tile(), tile((128, 9), U32))),
    ("MEM-SHAPE", lambda x: nisa.nc_n_gather(new((64, 8)), tile(), tile((64, 8), U32))),
    ("TYPE-INDEX", lambda x: nisa.local_gather(new((128, 16)), tile(), tile((128, 1), U32))),
    ("TYPE-SAME", lambda x: nisa.local_gather(new((128, 16), BF16), tile(), tile((128, 1), U16))),
    ("MEM-SHAPE", lambda x: nisa.local_gather(new((128, 16)), tile((64, 4)), tile((64, 1), U16))),
    ("MEM-RANGE", lambda x: nisa.local_gather(new((128, 48)), tile(), tile((128, 1), U16), 3)),
    ("MEM-SHAPE", lambda x: nisa.local_gather(new((128, 15)), tile(), tile((128, 1), U16))),
    ("OP-OOB", lambda x: nisa.local_gather(new((128, 32)), tile(), tile((128, 1), U16, value=63), 2)),
    ("HAZ-OVERLAP", lambda x: overlapping_local_gather()),
]


def overlapping_nonzero():
    """Output and input share columns."""
    t = tile((128, 128), I32)
    nisa.nonzero_with_count(t[:, 32:97], t[:, 0:64])


def overlapping_topk():
    """Values are written onto the source."""
    t = tile(dtype=BF16)
    nisa.topk(t[:, 0:8], new((128, 8), U32), t, 64)


def overlapping_local_gather():
    """Gathers onto its source."""
    t = tile()
    nisa.local_gather(t[:, 0:16], t, tile((128, 1), U16))


def partly_accumulated():
    """Half of dst was written by a matmul."""
    ps = bank((64, 128))
    nisa.nc_matmul(ps[:, 0:64], tile(), tile())
    nisa.nc_matmul(ps, tile(), tile((128, 128)))


def turning(moving=None, dst=None, stationary=None, accumulate=None):
    """A transposing matmul."""
    eye = nl.shared_identity_matrix(128, nl.float32)
    nisa.nc_matmul(dst or bank((64, 128)), stationary or tile(), moving or eye, is_transpose=True, accumulate=accumulate)


F8 = nl.float8_e4m3
double = nisa.matmul_perf_mode.double_row

PE = [
    ("OP-ARG", lambda x: nisa.nc_matmul(bank(), tile(), tile(), tile_size=(128, 128))),
    ("MEM-SHAPE", lambda x: nisa.nc_matmul(bank((64, 63)), tile(), tile())),
    ("MEM-MATMUL", lambda x: nisa.nc_matmul(bank(), tile(), tile(), tile_position=(0, 0), tile_size=(32, 128))),
    ("MEM-MATMUL", lambda x: nisa.nc_matmul(bank(), tile((32, 64)), tile((32, 64)), tile_position=(0, 0), tile_size=(32, 32))),
    ("TYPE-MATMUL", lambda x: nisa.nc_matmul(bank((32, 32)), tile((128, 2, 32)), tile((128, 2, 32)), perf_mode=double)),
    ("MEM-SHAPE", lambda x: nisa.nc_matmul(bank((32, 32)), tile(dtype=F8), tile(dtype=F8), perf_mode=double)),
    (
        "MEM-MATMUL",
        lambda x: nisa.nc_matmul(bank((32, 32)), tile((128, 2, 32), F8), tile((128, 2, 32), F8), tile_position=(0, 0), tile_size=(128, 64), perf_mode=double),
    ),
    ("NUM-NONFINITE", lambda x: nisa.nc_matmul(bank(), tile(value=3e38), tile(value=1.0))),
    ("INIT-ACCUMULATE", lambda x: partly_accumulated()),
    ("OP-ARG", lambda x: turning(accumulate=True)),
    ("TYPE-SAME", lambda x: turning(dst=bank((64, 128), BF16))),
    ("OP-ARG", lambda x: turning(moving=tile((128, 128)))),
    ("TYPE-TRANSPOSE8", lambda x: nisa.nc_matmul(bank((64, 128), F8), tile(dtype=F8), tile((128, 128), BF16), is_transpose=True)),
    ("MEM-SHAPE", lambda x: nisa.nc_transpose(bank((64, 127)), tile())),
    ("PLACE-ENGINE", lambda x: nisa.nc_transpose(bank((64, 128)), tile(), engine=nisa.engine.scalar)),
    ("PLACE-MATMUL", lambda x: nisa.nc_transpose(new((64, 128)), tile(), engine=nisa.engine.tensor)),
    ("TYPE-DTYPE", lambda x: nisa.nc_transpose(bank((64, 128), I32), tile(dtype=I32))),
    ("MEM-BANK", lambda x: nisa.nc_transpose(bank((64, 700))[:, 500:628], tile())),
]

REDUCE = [
    ("MEM-SHAPE", lambda x: nisa.tensor_scalar_reduce(new((128, 63)), tile(), nl.add, 0.0, nl.add)),
    ("OP-ARG", lambda x: nisa.tensor_scalar_reduce(new(), tile(), nl.add, 0.0, nl.add, reduce_cmd=rc.idle)),
    ("OP-ARG", lambda x: nisa.tensor_scalar_reduce(new(), tile(), nl.add, 0.0, nl.add, reverse0=True)),
    ("OP-ARG", lambda x: nisa.tensor_scalar_reduce(new(), tile(), nl.add, 0.0, nl.add, reduce_init=0.0)),
    ("TYPE-ROW", lambda x: nisa.tensor_scalar_reduce(new(), tile(), nl.add, 0.0, nl.add, new((128, 2)))),
    ("OP-ALU", lambda x: nisa.tensor_scalar_reduce(new(), tile(), nl.add, 0.0, nl.subtract)),
    ("MEM-SHAPE", lambda x: nisa.tensor_scalar_cumulative(new((128, 63)), tile(), nl.add, nl.add, 0.0)),
    ("OP-ARG", lambda x: nisa.tensor_scalar_cumulative(new(), tile(), nl.add, nl.add, 0.0, reduce_cmd=rc.reset)),
    ("OP-ARG", lambda x: nisa.tensor_scalar_cumulative(new(), tile(), nl.add, nl.add, 0.0, imm1=1.0)),
    ("TYPE-DTYPE", lambda x: nisa.tensor_scalar_cumulative(new(), tile(dtype=I32), nl.add, nl.add, 0.0)),
    ("MEM-SHAPE", lambda x: ranged(dst=new((128, 63)))),
    ("TYPE-DTYPE", lambda x: ranged(source=tile(dtype=I32))),
    ("OP-ARG", lambda x: ranged(command=rc.load_reduce)),
    ("NUM-INT24", lambda x: ranged(start=(1 << 24) - 63)),
    ("OP-ARG", lambda x: ranged(fill=0.0)),
    ("OP-ARG", lambda x: ranged(bound=3.0)),
    ("MEM-SHAPE", lambda x: nisa.select_reduce(new((128, 63)), tile(dtype=U8), tile(), 0.0)),
    ("PLACE-PSUM2", lambda x: nisa.select_reduce(new(), tile(dtype=U8, buffer=nl.psum), psum(), 0.0)),
    ("OP-ARG", lambda x: nisa.select_reduce(new(), tile(dtype=U8), tile(), 0.0, reduce_cmd=rc.reset)),
    ("MEM-SHAPE", lambda x: nisa.bn_stats(new((128, 5)), tile())),
    ("MEM-SHAPE", lambda x: nisa.bn_aggr(new((128, 2)), tile())),
    ("MEM-SHAPE", lambda x: nisa.activation(new((128, 63)), nl.copy, tile())),
    ("OP-ARG", lambda x: nisa.activation(new(), nl.copy, tile(), reduce_cmd=rc.load_reduce)),
    ("OP-ALU", lambda x: nisa.activation(new(), nl.copy, tile(), reduce_op=nl.maximum, reduce_cmd=rc.reset_reduce)),
    ("TYPE-ROW", lambda x: nisa.activation_reduce(new(), nl.copy, tile(), nl.add, new((128, 2)))),
    ("INIT-ACCREG", lambda x: nisa.activation(new(), nl.copy, tile(), reduce_res=new((128, 1)))),
]


def ranged(dst=None, source=None, command=rc.reset_reduce, start=0, fill=-3.4028235e38, bound=None):
    """A range_select with one argument out of order."""
    limits = tile((128, 1)) if bound is None else bound
    nisa.range_select(dst or new(), source or tile(), nl.less, nl.less, limits, tile((128, 1)), command, range_start=start, on_false_value=fill)


VECTOR = [
    ("MEM-SHAPE", lambda x: nisa.tensor_scalar(new((128, 63)), tile(), nl.add, 1.0)),
    ("MEM-SHAPE", lambda x: nisa.tensor_scalar(new((64, 64)), tile((64, 64)), nl.add, tile((128, 1)))),
    ("TYPE-MEMSET", lambda x: nisa.memset(new(), tile())),
    ("PLACE-ENGINE", lambda x: nisa.tensor_tensor(new(), tile(), tile(), nl.power, engine=nisa.engine.vector)),
    ("TYPE-BITVEC", lambda x: nisa.tensor_tensor(new(dtype=I32), tile(dtype=I32), tile(), nl.bitwise_or)),
    ("TYPE-SAME", lambda x: nisa.tensor_tensor(new(dtype=I32), tile(dtype=I32), tile(dtype=U8), nl.bitwise_or)),
    ("TYPE-BITVEC", lambda x: nisa.tensor_scalar(new(dtype=I32), tile(dtype=I32), nl.left_shift, 0.5)),
    ("TYPE-BITVEC", lambda x: nisa.tensor_scalar(new(dtype=I32), tile(), nl.left_shift, 1)),
    ("TYPE-SAME", lambda x: nisa.tensor_scalar(new(dtype=I32), tile(dtype=U8), nl.left_shift, 1)),
    ("TYPE-BITVEC", lambda x: nisa.tensor_scalar(new(dtype=I32), tile(dtype=I32), nl.left_shift, tile((128, 1)))),
    ("TYPE-ROW", lambda x: nisa.tensor_scalar(new(dtype=I32), tile(dtype=I32), nl.left_shift, tile((128, 2), I32))),
    ("OP-ARG", lambda x: nisa.tensor_scalar(new(), tile(), nl.add, 1.0, operand1=2.0)),
    ("OP-ARG", lambda x: nisa.tensor_scalar(new(), tile(), nl.add, None)),
    ("OP-ARG", lambda x: nisa.tensor_scalar(new(), tile(), nl.abs, 1.0)),
    ("PLACE-ENGINE", lambda x: nisa.tensor_scalar(new(dtype=I32), tile(dtype=I32), nl.invert, None, engine=nisa.engine.scalar)),
    ("MEM-SHAPE", lambda x: nisa.scalar_tensor_tensor(new((128, 63)), tile(), nl.add, 1.0, nl.add, tile())),
    ("PLACE-PSUM2", lambda x: nisa.scalar_tensor_tensor(new(), psum(), nl.add, 1.0, nl.add, psum())),
    ("MEM-SHAPE", lambda x: nisa.tensor_tensor_scan(new((128, 63)), tile(), tile(), 0.0, nl.add, nl.add)),
    ("PLACE-PSUM2", lambda x: nisa.tensor_tensor_scan(new(), psum(), psum(), 0.0, nl.add, nl.add)),
    ("MEM-SHAPE", lambda x: nisa.reciprocal(new((128, 63)), tile(value=1.0))),
    ("MEM-SHAPE", lambda x: nisa.tensor_reduce(new((128, 2)), nl.add, tile(), 1)),
    ("TYPE-BITVEC", lambda x: nisa.tensor_reduce(new((128, 1)), nl.bitwise_or, tile(), 1)),
    ("TYPE-SAME", lambda x: nisa.tensor_reduce(new((128, 1), I32), nl.bitwise_or, tile(dtype=U8), 1)),
    ("OP-ARG", lambda x: nisa.tensor_reduce(new((128, 1), U8), nl.bitwise_or, tile(dtype=U8), 1, negate=True)),
    ("MEM-SHAPE", lambda x: nisa.tensor_partition_reduce(new((1, 63)), nl.add, tile())),
    ("TYPE-BITVEC", lambda x: nisa.tensor_partition_reduce(new((1, 64)), nl.bitwise_or, tile())),
    ("TYPE-SAME", lambda x: nisa.tensor_partition_reduce(new((1, 64), I32), nl.bitwise_or, tile(dtype=U8))),
    ("MEM-SHAPE", lambda x: nisa.tensor_copy_predicated(new((128, 63)), 1.0, tile(dtype=U8))),
    ("MEM-SHAPE", lambda x: nisa.tensor_copy_predicated(new(), tile((128, 63)), tile(dtype=U8))),
    ("TYPE-SAME", lambda x: nisa.tensor_copy_predicated(new(), tile(dtype=BF16), tile(dtype=U8))),
    ("PLACE-PSUM2", lambda x: nisa.tensor_copy_predicated(new(), psum(), tile(dtype=U8, buffer=nl.psum))),
    ("TYPE-SAME", lambda x: nisa.nc_stream_shuffle(new(dtype=BF16), tile(), [0] * 32)),
    ("MEM-SHAPE", lambda x: nisa.nc_stream_shuffle(new((128, 63)), tile(), [0] * 32)),
    ("MEM-START", lambda x: nisa.nc_stream_shuffle(new((40, 8)), tile()[32:64, 0:8], [0] * 32)),
]


def meets(first, second=None):
    """Two programs, each with its own call at the rendezvous."""

    def kernel(x):
        me = nl.program_id()
        (second if me and second else first)(1 - me)

    return jit(kernel)[2]


def exchange(other, src=(1, 8), dst=(1, 8), dtype=nl.float32, **options):
    """A sendrecv with one argument out of order."""
    nisa.sendrecv(tile(src), new(dst, dtype), other, other, 0, **options)


def two_barriers(x):
    """The cores wait on different tensors."""
    a, b = (nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm) for _ in range(2))
    nisa.core_barrier(b if nl.program_id() else a)


def shared():
    """A shared tensor."""
    return nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)


CORES = [
    ("MEM-SHAPE", meets(lambda other: exchange(other, dst=(1, 9)))),
    ("TYPE-SAME", meets(lambda other: exchange(other, dtype=BF16))),
    ("MEM-RANGE", meets(lambda other: exchange(other, (1, 257), (1, 257), dma_engine=nisa.dma_engine.gpsimd_dma))),
    ("LNC-RENDEZVOUS", jit(two_barriers)[2]),
    ("LNC-RENDEZVOUS", meets(lambda other: nisa.core_barrier(shared(), cores=(0, 1, 2)))),
    ("OP-ARG", meets(lambda other: nisa.core_barrier(shared(), engine=3))),
]


def in_order(x):
    """A dynamic loop where order is fixed."""
    with nl.no_reorder():
        nl.fori_loop(0, 2, print)


def register():
    """A register with a value."""
    return nisa.register_alloc(2)


CONTROL = [
    ("OP-ARG", lambda x: nisa.register_alloc(1.5)),
    ("OP-ARG", lambda x: nisa.register_move(3, register())),
    ("OP-ARG", lambda x: nisa.register_load(3, tile((1, 1), I32))),
    ("OP-ARG", lambda x: nisa.register_load(register(), tile((1, 2), I32))),
    ("TYPE-DTYPE", lambda x: nisa.register_load(register(), tile((1, 1)))),
    ("OP-ARG", lambda x: nisa.register_store(new((1, 2), I32), register())),
    ("TYPE-DTYPE", lambda x: nisa.register_store(new((1, 1)), register())),
    ("OP-ARG", in_order),
    ("OP-ARG", lambda x: nl.fori_loop(0, 2, print, 0)),
    ("OP-ARG", lambda x: nl.fori_loop(0, 2, register_of)),
    ("OP-ARG", lambda x: nl.fori_loop(0, 2.0, print)),
    ("OP-ARG", lambda x: nl.while_loop(3, print)),
    ("OP-ARG", lambda x: nl.while_loop(register(), no_register)),
    ("OP-ARG", lambda x: nisa.dma_copy(new((1, 64)), x.select(0, tile((1, 2), U32)).reshape((1, 64)))),
    ("TYPE-INDEX32", lambda x: nisa.dma_copy(new((1, 64)), x.select(0, tile((1, 1), I32)).reshape((1, 64)))),
    ("TYPE-INDEX", lambda x: nisa.dma_copy(new((1, 64)), x.select(0, tile((1, 1), U16)).reshape((1, 64)))),
    ("MEM-BOUNDS", lambda x: nisa.dma_copy(new((2, 64)), x.ap([[64, 2], [1, 64]], scalar_offset=nisa.register_alloc(127)))),
    ("OP-SUBSET", lambda x: nl.zeros((4, 4), nl.float32, buffer=nl.private_hbm)),
    ("OP-SUBSET", lambda x: nl.matmul(tile(), tile())),
    ("MEM-SHAPE", lambda x: nl.broadcast_to(tile(), (128, 128))),
    ("OP-ARG", lambda x: new((4, 0))),
    ("MEM-PARTITIONS", lambda x: nl.shared_identity_matrix(129)),
    ("TYPE-SAME", lambda x: nl.shared_identity_matrix(64, BF16, dst=new((64, 64)))),
    ("OP-ARG", lambda x: nl.add(1.0, tile())),
    ("OP-SUBSET", lambda x: assign(tile())),
]


def register_of(i):
    """A loop body that returns something."""
    return i


def no_register(r):
    """A while body that returns no register."""
    return 3


def assign(t):
    """Assignment into a tensor."""
    t[0:1] = 3


def gathered(x):
    """A vector-indexed view."""
    return x.vector_select(0, rows())


VIEWS = [
    ("MEM-VIEW", lambda x: tile().select(0, register())),
    ("MEM-VIEW", lambda x: tile().expand_dim(0)),
    ("MEM-VIEW", lambda x: tile((1, 64)).squeeze_dim(0)),
    ("MEM-VIEW", lambda x: tile().slice(2, 0, 1)),
    ("OP-ARG", lambda x: tile()[..., ...]),
    ("OP-ARG", lambda x: tile()[:, "a"]),
    ("MEM-BOUNDS", lambda x: tile()[:, 0, 0]),
    ("MEM-VIEW", lambda x: x.select(0, register()).select(0, register())),
    ("MEM-VIEW", lambda x: gathered(x).vector_select(0, rows())),
    ("MEM-VIEW", lambda x: gathered(x)[0:2]),
    ("MEM-VIEW", lambda x: gathered(x).view(BF16)),
    ("MEM-VIEW", lambda x: x.permute((0, 0))),
    ("MEM-VIEW", lambda x: x.reshape_dim(1, (5, 13))),
    ("MEM-VIEW", lambda x: x.reshape((128, 8, 8)).permute((0, 2, 1)).flatten_dims(1, 2)),
    ("MEM-VIEW", lambda x: x.rearrange(("a",), ("a",))),
    ("MEM-VIEW", lambda x: x.rearrange(("a", "b"), ("a", "c"))),
    ("MEM-VIEW", lambda x: gathered(x).ap([[64, 4], [1, 64]], scalar_offset=register())),
    ("MEM-VIEW", lambda x: x.ap([[64, 4], [1, 64]], scalar_offset=register(), dtype=BF16)),
    ("MEM-VIEW", lambda x: x.ap([[64, 4], [1, 64]], scalar_offset=register(), vector_offset=rows())),
    ("MEM-VIEW", lambda x: x[:, 0:8].ap([[64, 4], [1, 8]], scalar_offset=register())),
    ("MEM-VIEW", lambda x: tile((128, 8), U8)[:, 1:5].ap([[2, 128], [1, 1]], dtype=nl.float32)),
    ("MEM-DIMS", lambda x: x.ap([])),
    ("MEM-BOUNDS", lambda x: tile().ap([[64, 64], [1, 65]])),
    ("PLACE-BUFFER", lambda x: nisa.tensor_copy(new((4, 64)), gathered(x))),
    ("PLACE-BUFFER", lambda x: nisa.tensor_copy(new((4, 64)), x[0:4])),
]

CASES = [*DMA, *INDEX, *PE, *REDUCE, *VECTOR, *CORES, *CONTROL, *VIEWS]
