# SPDX-License-Identifier: Apache-2.0
"""TensorE: products of every dtype pair, accumulation, tiling, double rows, transposes."""

import numpy as np
import pytest
from simkit import NO_LINT, normal, numbers, one, rng

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl
from v41.backends.neuron.sim.dtypes import TABLES

EPS = float(np.finfo(np.float32).eps)


def product(a, b, **options):
    def body(o, x, y):
        ps = nl.ndarray(o.shape, nl.float32, buffer=nl.psum)
        nisa.nc_matmul(ps, x, y, **options)
        nisa.tensor_copy(o, ps)

    shape = (a.shape[-1], b.shape[-1])
    return one(body, (shape, nl.float32), a, b)


def bound(a, b, k):
    """k roundings of partial sums, each at most EPS of the sum of magnitudes."""
    return k * EPS * (np.abs(a).T.astype(np.float64) @ np.abs(b))


DTYPES = ["float8_e4m3", "float8_e5m2", "bfloat16", "float16"]


@pytest.mark.parametrize("left", DTYPES)
@pytest.mark.parametrize("right", DTYPES)
def test_products_of_narrow_floats_are_exact_and_summed_in_float32(left, right):
    a, b = sim.typed(np.clip(normal(96, 17), -3, 3), left), sim.typed(np.clip(normal(96, 33, seed=1), -3, 3), right)
    # numpy has no container for bfloat16 or fp8, float16 is passed as an array
    args = [x.codes if x.dtype == "float16" else x for x in (a, b)]
    got = product(*args)
    x, y = a.float32().astype(np.float64), b.float32().astype(np.float64)
    assert (np.abs(got - x.T @ y) <= bound(x, y, 96)).all()


def test_float32_products_and_integer_sums_are_exact():
    a, b = rng().integers(-8, 9, (128, 128)).astype(np.float32), rng(1).integers(-8, 9, (128, 512)).astype(np.float32)
    assert np.array_equal(product(a, b), a.T @ b)


def test_accumulation_overwrites_first_and_adds_later():
    a, b = rng().integers(-8, 9, (64, 8)).astype(np.float32), rng(1).integers(-8, 9, (64, 16)).astype(np.float32)

    def body(o, x, y):
        explicit = nl.ndarray((8, 16), nl.float32, buffer=nl.psum)
        automatic = nl.ndarray((8, 16), nl.float32, buffer=nl.psum)
        nisa.memset(automatic, 55.0)
        for k in range(3):
            nisa.nc_matmul(explicit, x, y, accumulate=k > 0)
            nisa.nc_matmul(automatic, x, y)
        total = nl.ndarray((8, 16), nl.float32)
        nisa.tensor_copy(total, automatic)
        nisa.tensor_tensor(o, total, explicit, nl.add)

    assert np.array_equal(one(body, ((8, 16), nl.float32), a, b), 6 * (a.T @ b))


def test_an_accumulator_is_overwritten_again_by_accumulate_false():
    a = rng().integers(-4, 5, (32, 8)).astype(np.float32)

    def body(o, x):
        ps = nl.ndarray((8, 8), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(ps, x, x)
        nisa.nc_matmul(ps, x, x, accumulate=False)
        nisa.tensor_copy(o, ps)

    assert np.array_equal(one(body, ((8, 8), nl.float32), a), a.T @ a)


def test_double_row_contracts_partitions_and_the_pair():
    a = sim.typed(rng().integers(-4, 5, (128, 2, 16)), "float8_e4m3")
    b = sim.typed(rng(1).integers(-4, 5, (128, 2, 24)), "float8_e5m2")

    def kernel(x, y):
        s, m = nl.ndarray(x.shape, x.dtype), nl.ndarray(y.shape, y.dtype)
        nisa.dma_copy(s, x)
        nisa.dma_copy(m, y)
        ps = nl.ndarray((16, 24), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(ps, s, m, perf_mode=nisa.matmul_perf_mode.double_row)
        r = nl.ndarray((16, 24), nl.float32)
        nisa.tensor_copy(r, ps)
        out = nl.ndarray((16, 24), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, r)
        return out

    got = sim.simulate(kernel)(a, b)
    assert np.array_equal(got, np.einsum("ktm,ktn->mn", a.float32(), b.float32()))


def test_row_tiles_of_32_partitions_multiply_a_slice():
    a, b = rng().integers(-4, 5, (128, 8)).astype(np.float32), rng(1).integers(-4, 5, (128, 16)).astype(np.float32)

    def body(o, x, y):
        ps = nl.ndarray((8, 16), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(ps, x[32:64], y[32:64], tile_position=(32, 0), tile_size=(32, 128))
        nisa.tensor_copy(o, ps)

    assert np.array_equal(one(body, ((8, 16), nl.float32), a, b), a[32:64].T @ b[32:64])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transposes_keep_every_bit_on_both_engines(dtype):
    bits = rng().integers(0, 65536, (96, 128), dtype=np.uint16)
    wide = rng().integers(0, 1 << 32, (96, 128), dtype=np.uint32)
    source = {"float32": wide.view(np.float32), "float16": bits.view(np.float16)}.get(dtype, sim.Typed(bits, dtype))

    def kernel(x):
        t = nl.ndarray(x.shape, x.dtype)
        nisa.dma_copy(t, x)
        ps = nl.ndarray((128, 96), x.dtype, buffer=nl.psum)
        nisa.nc_transpose(ps, t)
        r = nl.ndarray((128, 96), x.dtype)
        nisa.tensor_copy(r, ps)
        v = nl.ndarray((32, 32), x.dtype)
        nisa.nc_transpose(v, t[32:64, 0:32], engine=nisa.engine.vector)
        out = nl.ndarray((128, 96), x.dtype, buffer=nl.shared_hbm)
        small = nl.ndarray((32, 32), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, r)
        nisa.dma_copy(small, v)
        return out, small

    got = [g.codes if isinstance(g, sim.Typed) else g for g in sim.simulate(kernel)(source)]
    codes = wide if dtype == "float32" else bits
    assert np.array_equal(got[0].view(codes.dtype), codes.T)
    assert np.array_equal(got[1].view(codes.dtype), codes[32:64, 0:32].T)


def test_a_transposing_matmul_equals_a_transpose():
    a = normal(64, 48)

    def body(o, x):
        eye = nl.shared_identity_matrix(64, nl.float32)
        ps = nl.ndarray((48, 64), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(ps, x, eye, is_transpose=True)
        nisa.tensor_copy(o, ps)

    assert np.array_equal(one(body, ((48, 64), nl.float32), a), a.T)


def test_raw_e4m3fn_bytes_are_decoded_exactly_below_240():
    codes = np.r_[0:0x78, 0x80:0xF8].astype(np.uint8)[None]
    got = one(lambda o, x: nisa.tensor_copy(o, x.view(nl.float8_e4m3)), (codes.shape, nl.bfloat16), codes)
    assert np.array_equal(numbers(got), TABLES["float8_e4m3fn"][codes])


def test_convenience_matmul_and_transpose_give_psum_tiles():
    a, b = rng().integers(-4, 5, (64, 8)).astype(np.float32), rng(1).integers(-4, 5, (64, 16)).astype(np.float32)

    def kernel(x, y):
        s, m = nl.load(x), nl.load(y)
        p, t = nl.matmul(s, m, transpose_x=True), nl.transpose(s)
        out = nl.ndarray((8, 16), x.dtype, buffer=nl.shared_hbm)
        flip = nl.ndarray((8, 64), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.copy(p))
        nl.store(flip, nl.copy(t))
        return out, flip

    out, flip = sim.simulate(kernel, NO_LINT)(a, b)
    assert np.array_equal(out, a.T @ b) and np.array_equal(flip, a.T)
