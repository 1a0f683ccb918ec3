# SPDX-License-Identifier: Apache-2.0
"""Elementwise instructions against numpy written out here."""

import numpy as np
import pytest
from simkit import bf16, normal, one, rng, run

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

A, B = normal(128, 40), normal(128, 40, seed=1)
COLUMN = normal(128, 1, seed=2)
ALU = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": lambda a, b: (a == b).astype(np.float32),
    "not_equal": lambda a, b: (a != b).astype(np.float32),
    "less": lambda a, b: (a < b).astype(np.float32),
    "less_equal": lambda a, b: (a <= b).astype(np.float32),
    "greater": lambda a, b: (a > b).astype(np.float32),
    "greater_equal": lambda a, b: (a >= b).astype(np.float32),
    "logical_and": lambda a, b: ((a != 0) & (b != 0)).astype(np.float32),
    "logical_or": lambda a, b: ((a != 0) | (b != 0)).astype(np.float32),
    "logical_xor": lambda a, b: ((a != 0) ^ (b != 0)).astype(np.float32),
}


def rounded(x):
    return np.round(x * 2) / 2


@pytest.mark.parametrize("op", ALU)
def test_tensor_tensor_computes_in_float32(op):
    a, b = rounded(A), rounded(B)
    got = one(lambda o, x, y: nisa.tensor_tensor(o, x, y, getattr(nl, op)), (A.shape, nl.float32), a, b)
    assert np.array_equal(got, ALU[op](a, b))


@pytest.mark.parametrize("op", ALU)
def test_tensor_scalar_takes_immediates_and_columns_in_both_orders(op):
    a, c = rounded(A), rounded(COLUMN)
    fn = getattr(nl, op)

    def body(outs, x, col):
        nisa.tensor_scalar(outs[0], x, fn, 0.5)
        nisa.tensor_scalar(outs[1], x, fn, col, True)
        nisa.tensor_scalar(outs[2], x, nl.add, 0.25, op1=fn, operand1=col, reverse1=True)

    outs = [(A.shape, nl.float32)] * 3
    got = run(body, outs, a, c)
    assert np.array_equal(got[0], ALU[op](a, np.float32(0.5)))
    assert np.array_equal(got[1], ALU[op](c, a))
    assert np.array_equal(got[2], ALU[op](c, a + np.float32(0.25)))


def test_each_step_of_tensor_scalar_is_rounded_to_float32():
    a = np.full((1, 8), 1 + 2.0**-23, np.float32)
    got = one(lambda o, x: nisa.tensor_scalar(o, x, nl.multiply, 1 + 2.0**-23, op1=nl.subtract, operand1=1.0), ((1, 8), nl.float32), a)
    assert got[0, 0] == np.float32(np.float32(a[0, 0] * a[0, 0]) - np.float32(1)) != np.float64(a[0, 0]) ** 2 - 1


def test_scalar_tensor_tensor_rounds_after_each_operator_and_reverses():
    def body(outs, x, y, col):
        nisa.scalar_tensor_tensor(outs[0], x, nl.multiply, col, nl.add, y)
        nisa.scalar_tensor_tensor(outs[1], x, nl.subtract, 2.0, nl.subtract, y, reverse0=True, reverse1=True)

    got = run(body, [(A.shape, nl.float32)] * 2, A, B, COLUMN)
    assert np.array_equal(got[0], (A * COLUMN).astype(np.float32) + B)
    assert np.array_equal(got[1], B - (np.float32(2) - A))


def test_results_are_cast_to_the_destination_and_inputs_to_float32():
    a = sim.typed(A, "bfloat16")
    got = run(lambda o, x, y: [nisa.tensor_tensor(t, x, y, nl.multiply) for t in o], [(A.shape, nl.bfloat16), (A.shape, nl.int8)], a, B)
    product = bf16(A) * B
    assert np.array_equal(got[0], bf16(product))
    assert np.array_equal(got[1], np.rint(product).astype(np.int8))


def test_int32_pairs_are_exact_and_wrap_on_gpsimd_but_float32_on_vector():
    a = np.array([[2**31 - 1, 2**24 + 1, -5, 7]], np.int32).repeat(4, 0)
    b = np.array([[1, 2**24 + 1, 3, 2]], np.int32).repeat(4, 0)
    add, mul = run(
        lambda o, x, y: (nisa.tensor_tensor(o[0], x, y, nl.add), nisa.tensor_tensor(o[1], x, y, nl.multiply)),
        [(a.shape, nl.int32)] * 2,
        a,
        b,
    )
    with np.errstate(over="ignore"):
        assert np.array_equal(add, a + b) and np.array_equal(mul, a * b)
    small = np.array([[100, -7]], np.int32)
    got = one(lambda o, x: nisa.tensor_tensor(o, x, x, nl.add, engine=nisa.engine.vector), (small.shape, nl.int32), small)
    assert got.tolist() == [[200, -14]]


def test_bit_operations_work_on_patterns_and_shifts_are_logical():
    a = rng().integers(-(2**31), 2**31, (8, 16), dtype=np.int32)
    b = rng(1).integers(0, 2**31, (8, 16), dtype=np.int32)

    def body(o, x, y):
        nisa.tensor_tensor(o[0], x, y, nl.bitwise_and)
        nisa.tensor_tensor(o[1], x, y, nl.bitwise_xor)
        nisa.tensor_scalar(o[2], x, nl.right_shift, 4, op1=nl.bitwise_and, operand1=16)
        nisa.tensor_scalar(o[3], x, nl.left_shift, 23)
        nisa.tensor_scalar(o[4], x, nl.invert, None)
        nisa.tensor_scalar(o[5], x, nl.bitwise_and, -1)
        nisa.tensor_scalar(o[6], x, nl.left_shift, 32)
        nisa.tensor_scalar(o[7], x, nl.bitwise_or, y[:, 0:1])

    got = run(body, [(a.shape, nl.int32)] * 8, a, b)
    u = a.view(np.uint32)
    assert np.array_equal(got[0], a & b) and np.array_equal(got[1], a ^ b)
    assert np.array_equal(got[2].view(np.uint32), (u >> 4) & 16)
    assert np.array_equal(got[3].view(np.uint32), u << np.uint32(23)) and np.array_equal(got[4], ~a)
    assert np.array_equal(got[5], a) and not got[6].any() and np.array_equal(got[7], a | b[:, :1])


def test_a_scale_byte_becomes_a_power_of_two_by_shift_and_view():
    codes = np.arange(1, 255, dtype=np.uint8)[None]

    def body(o, x):
        wide = nl.ndarray(x.shape, nl.int32)
        nisa.tensor_copy(wide, x)
        nisa.tensor_scalar(wide, wide, nl.left_shift, 23)
        nisa.tensor_copy(o, wide.view(nl.float32))

    got = one(body, (codes.shape, nl.float32), codes)
    assert np.array_equal(got, (2.0 ** (codes.astype(np.float64) - 127)).astype(np.float32))


def test_an_fp8_tile_is_a_view_of_a_byte_tile():
    codes = np.array([[0x00, 0x38, 0x77, 0xF7, 0x01, 0xB8]], np.uint8)
    got = one(lambda o, x: nisa.tensor_copy(o, x.view(nl.float8_e4m3)), (codes.shape, nl.float32), codes)
    assert got.tolist() == [[0.0, 1.0, 240.0, -240.0, 2.0**-9, -1.0]]


def test_copies_of_equal_dtype_keep_bits_and_others_round():
    bits = np.array([[0x7FC01234, 0x7F800001, 0x80000000, 0xFFFFFFFF]], np.uint32)
    got = one(lambda o, x: nisa.tensor_copy(o, x.view(nl.float32)), (bits.shape, nl.float32), bits)
    assert np.array_equal(got.view(np.uint32), bits)
    half = np.array([[0.5, 1.5, 2.5, -0.5, 300.0, -300.0]], np.float32)
    assert one(lambda o, x: nisa.tensor_copy(o, x), (half.shape, nl.int8), half).tolist() == [[0, 2, 2, 0, 127, -128]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint16", "int32", "float8_e4m3"])
def test_memset_fills_with_the_rounded_value(dtype):
    got = one(lambda o: nisa.memset(o, 3), ((4, 5), dtype))
    assert got.shape == (4, 5) and (np.asarray(got, np.float32) == 3).all()


def test_memset_of_a_float_rounds_to_nearest():
    assert one(lambda o: nisa.memset(o, -9948.0), ((1, 1), nl.bfloat16))[0, 0] == bf16(np.float32(-9948.0))


def test_predicated_copy_keeps_the_rest_and_reverses():
    p = (rng().random((16, 9)) < 0.5).astype(np.uint8)
    a, b = normal(16, 9), normal(16, 9, seed=1)

    def body(o, x, y, pred):
        for t in o:
            nisa.tensor_copy(t, x)
        nisa.tensor_copy_predicated(o[0], y, pred)
        nisa.tensor_copy_predicated(o[1], y, pred, reverse_pred=True)
        nisa.tensor_copy_predicated(o[2], -2.0, pred)

    got = run(body, [(a.shape, nl.float32)] * 3, a, b, p)
    assert np.array_equal(got[0], np.where(p, b, a)) and np.array_equal(got[1], np.where(p, a, b))
    assert np.array_equal(got[2], np.where(p, np.float32(-2), a))


def test_scan_keeps_float32_state_and_casts_on_write_only():
    a, b = rng().random((4, 33), dtype=np.float32), normal(4, 33)
    start = normal(4, 1, seed=3)

    def body(o, x, y, s):
        nisa.tensor_tensor_scan(o[0], x, y, s, nl.multiply, nl.add)
        nisa.tensor_tensor_scan(o[1], x, y, 0.5, nl.subtract, nl.maximum, reverse0=True)
        nisa.tensor_tensor_scan(o[2], x, y, s, nl.multiply, nl.add)

    got = run(body, [(a.shape, nl.float32)] * 2 + [(a.shape, nl.bfloat16)], a, b, start)
    state, other = start[:, 0], np.full(4, 0.5, np.float32)
    for i in range(33):
        state = a[:, i] * state + b[:, i]
        other = np.maximum(other - a[:, i], b[:, i])
        assert np.array_equal(got[0][:, i], state) and np.array_equal(got[1][:, i], other)
        assert np.array_equal(got[2][:, i], bf16(state))


def test_reciprocal_is_correctly_rounded():
    a = np.abs(A) + np.float32(0.01)
    got = one(lambda o, x: nisa.reciprocal(o, x), (a.shape, nl.float32), a)
    assert np.array_equal(got, (1.0 / a.astype(np.float64)).astype(np.float32))


def test_rsqrt_and_power_run_on_gpsimd():
    a = np.abs(A) + np.float32(0.01)
    got = run(
        lambda o, x: (nisa.tensor_scalar(o[0], x, nl.rsqrt, 0.0), nisa.tensor_tensor(o[1], x, x, nl.power)),
        [(a.shape, nl.float32)] * 2,
        a,
    )
    wide = a.astype(np.float64)
    assert np.array_equal(got[0], (1 / np.sqrt(wide)).astype(np.float32))
    assert np.array_equal(got[1], (wide**wide).astype(np.float32))


def test_shuffle_moves_partitions_within_quadrants_and_255_keeps():
    a = normal(64, 3)
    mask = [*range(31, 0, -1), 255]

    def body(o, x):
        nisa.memset(o, 7.0)
        nisa.nc_stream_shuffle(o, x, mask)

    got = one(body, (a.shape, nl.float32), a)
    want = np.full_like(a, 7.0)
    for q in (0, 32):
        for i in range(31):
            want[q + i] = a[q + mask[i]]
    assert np.array_equal(got, want)


def test_shuffle_replicates_one_partition():
    a = normal(1, 6)
    got = one(lambda o, x: nisa.nc_stream_shuffle(o, x, [0] * 32), ((32, 6), nl.float32), a)
    assert np.array_equal(got, np.repeat(a, 32, 0))


def test_stride_0_and_partial_partitions_work_together():
    a, s = normal(128, 32), normal(128, 4, seed=4)

    def body(o, x, scale):
        nisa.memset(o, 0.0)
        blocks = scale.ap([[4, 128], [1, 4], [0, 8]])
        nisa.tensor_tensor(o[64:96], x[64:96].reshape((32, 4, 8)), blocks[64:96], nl.multiply)

    want = np.zeros_like(a)
    want[64:96] = (a.reshape(128, 4, 8) * s[:, :, None]).reshape(128, 32)[64:96]
    assert np.array_equal(one(body, (a.shape, nl.float32), a, s), want)
