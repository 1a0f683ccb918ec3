# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401  (this module is the namespace nki.language: most of it is re-exported)
"""The names of nki.language (NKI 0.6) that the simulator runs or refuses."""

from contextlib import contextmanager

from v41.backends.neuron.sim.alloc import (
    empty_like,
    full,
    ndarray,
    ones,
    shared_constant,
    shared_identity_matrix,
    zeros,
    zeros_like,
)
from v41.backends.neuron.sim.alu import Op
from v41.backends.neuron.sim.context import CURRENT, current, fail
from v41.backends.neuron.sim.convenience import (
    ReduceOp,
    broadcast_to,
    expand_dims,
    gather_flattened,
    load,
    load_transpose2d,
    matmul,
    mean,
    store,
    transpose,
    where,
)
from v41.backends.neuron.sim.memory import PRIVATE_HBM, PSUM, SBUF, SBUF_BYTES, SHARED_HBM, MemoryRegion
from v41.backends.neuron.sim.registers import fori_loop, while_loop
from v41.backends.neuron.sim.tensor import DynamicSlice, NkiTensor

bool_ = "bool"
int8, int16, int32 = "int8", "int16", "int32"
uint8, uint16, uint32 = "uint8", "uint16", "uint32"
float16, bfloat16, float32, tfloat32 = "float16", "bfloat16", "float32", "tfloat32"
float8_e4m3, float8_e4m3fn, float8_e5m2 = "float8_e4m3", "float8_e4m3fn", "float8_e5m2"
float8_e8m0fnu = "float8_e8m0fnu"
float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4 = "float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"

sbuf, psum, shared_hbm = SBUF, PSUM, SHARED_HBM
private_hbm = hbm = PRIVATE_HBM

add, subtract, multiply, divide = Op("add"), Op("subtract"), Op("multiply"), Op("divide")
maximum, minimum, power = Op("maximum"), Op("minimum"), Op("power")
abs_max, abs_min, mod, fmod = Op("abs_max"), Op("abs_min"), Op("mod"), Op("fmod")
equal, not_equal = Op("equal"), Op("not_equal")
less, less_equal, greater, greater_equal = Op("less"), Op("less_equal"), Op("greater"), Op("greater_equal")
logical_and, logical_or, logical_xor, logical_not = (
    Op("logical_and"),
    Op("logical_or"),
    Op("logical_xor"),
    Op("logical_not"),
)
bitwise_and, bitwise_or, bitwise_xor, invert = Op("bitwise_and"), Op("bitwise_or"), Op("bitwise_xor"), Op("invert")
left_shift, right_shift = Op("left_shift"), Op("right_shift")
average, bypass, prelu = Op("average"), Op("bypass"), Op("prelu")
copy, square, sigmoid, relu, silu, silu_dx = (
    Op("copy"),
    Op("square"),
    Op("sigmoid"),
    Op("relu"),
    Op("silu"),
    Op("silu_dx"),
)
gelu, gelu_dx, gelu_apprx_tanh = Op("gelu"), Op("gelu_dx"), Op("gelu_apprx_tanh")
gelu_apprx_sigmoid, gelu_apprx_sigmoid_dx = Op("gelu_apprx_sigmoid"), Op("gelu_apprx_sigmoid_dx")
tanh, softplus, mish, erf, erf_dx = Op("tanh"), Op("softplus"), Op("mish"), Op("erf"), Op("erf_dx")
exp, log, sin, arctan, sqrt = Op("exp"), Op("log"), Op("sin"), Op("arctan"), Op("sqrt")
rsqrt, reciprocal, sign, abs = Op("rsqrt"), Op("reciprocal"), Op("sign"), Op("abs")
max, min, sum = ReduceOp("max"), ReduceOp("min"), ReduceOp("sum")


class NKIObject:
    """Base class of kernel configuration objects."""


class TileSize:
    """Hardware sizes; those of the memories need a running kernel, as on the real package."""

    pmax = 128
    psum_fmax = psum_bank_fmax = 512
    psum_bank_fmax_bytes = 2048
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 4

    @staticmethod
    def _inside(value):
        if CURRENT.get() is None:
            fail("PY-TILESIZE", "No backend set: this size is known inside a kernel only", "nl.tile_size")
        return value

    @property
    def psum_num_banks(self):
        """PSUM banks."""
        return self._inside(8)

    @property
    def sbuf_size_bytes(self):
        """SBUF bytes of all partitions, within the simulator's budget."""
        return self._inside(SBUF_BYTES * 128)

    @property
    def sbuf_fmax(self):
        """float32 elements per partition."""
        return self._inside(SBUF_BYTES // 4)

    @property
    def sbuf_fmax_bytes(self):
        """Bytes per partition."""
        return self._inside(SBUF_BYTES)

    total_available_sbuf_size = sbuf_fmax_bytes


tile_size = TileSize()


def ds(start, size):
    """The slice start : start + size."""
    return DynamicSlice(start, size)


def affine_range(start, stop=None, step=1):
    """range(); unrolled."""
    return range(start) if stop is None else range(start, stop, step)


sequential_range = static_range = affine_range


def dynamic_range(start, stop=None, step=1):
    """Refused: the tracer has no such loop any more."""
    fail("OP-SUBSET", "use nl.fori_loop (NKI 0.6)", "nl.dynamic_range")


def program_id(axis=0):
    """This program's number."""
    return current().index


def num_programs(axes=0):
    """Programs in the grid."""
    return current().count


def program_ndim():
    """0 without a grid, else 1."""
    return 1 if current().grid else 0


@contextmanager
def no_reorder():
    """Program order; the simulator always keeps it. Dynamic loops are refused inside."""
    program = current()
    program.ordered += 1
    try:
        yield
    finally:
        program.ordered -= 1


def device_print(print_prefix, tensor):
    """Print a tensor's values."""
    from v41.backends.neuron.sim.dtypes import to_float32

    print(print_prefix, to_float32(tensor.codes(), tensor.dtype))


def __getattr__(name):
    raise AttributeError(f"nki.language.{name} is not simulated (docs/nki-simulator.md)")


def is_hbm(buffer):
    """Whether the region is in HBM."""
    return buffer in (PRIVATE_HBM, SHARED_HBM)


def is_on_chip(buffer):
    """Whether the region is SBUF or PSUM."""
    return buffer in (SBUF, PSUM)


def is_psum(buffer):
    """Whether the region is PSUM."""
    return buffer == PSUM


def is_sbuf(buffer):
    """Whether the region is SBUF."""
    return buffer == SBUF
