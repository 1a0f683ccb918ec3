# SPDX-License-Identifier: Apache-2.0
"""Reductions, activations and the accumulators of the two engines."""

import math

import numpy as np
import pytest
from simkit import bf16, normal, one, run

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

A = normal(128, 48)
ULP = float(np.finfo(np.float32).eps)


def exact_sum(x, axis):
    return x.astype(np.float64).sum(axis=axis).astype(np.float32)


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("add", lambda x: exact_sum(x, -1)),
        ("maximum", lambda x: x.max(-1)),
        ("minimum", lambda x: x.min(-1)),
        ("multiply", lambda x: x.astype(np.float64).prod(-1).astype(np.float32)),
        ("subtract", lambda x: (2 * x[..., 0].astype(np.float64) - x.astype(np.float64).sum(-1)).astype(np.float32)),
    ],
)
def test_tensor_reduce_folds_the_last_dimensions(op, want):
    got = run(
        lambda o, x: (
            nisa.tensor_reduce(o[0], getattr(nl, op), x, 1),
            nisa.tensor_reduce(o[1], getattr(nl, op), x.reshape((128, 6, 8)), (2,), negate=True),
        ),
        [((128, 1), nl.float32), ((128, 6), nl.float32)],
        A,
    )
    assert np.allclose(got[0][:, 0], want(A), rtol=2 * ULP, atol=0)
    assert np.allclose(got[1], -want(A.reshape(128, 6, 8)), rtol=2 * ULP, atol=0)


def test_reduction_of_a_permuted_view_sums_columns():
    a = A[:, :16].copy()
    got = one(lambda o, x: nisa.tensor_reduce(o, nl.add, x.reshape((128, 4, 4)).permute((0, 2, 1)), 2), ((128, 4), nl.float32), a)
    assert np.array_equal(got, exact_sum(a.reshape(128, 4, 4), 1))


def test_bit_reductions_and_partition_reductions():
    a = np.random.default_rng(0).integers(0, 255, (32, 8), dtype=np.uint8)
    got = run(
        lambda o, x, f: (
            nisa.tensor_reduce(o[0], nl.bitwise_or, x, 1),
            nisa.tensor_partition_reduce(o[1], nl.bitwise_and, x),
            nisa.tensor_partition_reduce(o[2], nl.add, f),
            nisa.tensor_partition_reduce(o[3], nl.average, f),
            nisa.tensor_partition_reduce(o[4], nl.maximum, f),
        ),
        [((32, 1), nl.uint8), ((1, 8), nl.uint8), ((1, 48), nl.float32), ((1, 48), nl.float32), ((1, 48), nl.float32)],
        a,
        A,
    )
    assert np.array_equal(got[0][:, 0], np.bitwise_or.reduce(a, 1))
    assert np.array_equal(got[1][0], np.bitwise_and.reduce(a, 0))
    assert np.array_equal(got[2][0], exact_sum(A, 0)) and np.array_equal(got[4][0], A.max(0))
    assert np.allclose(got[3][0], exact_sum(A, 0) / 128, rtol=ULP)


FUNCTIONS = {
    "copy": lambda x: x,
    "square": lambda x: x * x,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x / (1 + math.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
    "erf": math.erf,
    "exp": math.exp,
    "sin": math.sin,
    "sign": lambda x: float(x > 0) - float(x < 0),
    "abs": abs,
}
POSITIVE = {"log": math.log, "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x), "reciprocal": lambda x: 1 / x}


@pytest.mark.parametrize("name", [*FUNCTIONS, *POSITIVE, "arctan"])
def test_activations_equal_the_math_library_within_one_float32_rounding(name):
    x = np.clip(A[:, :8], -3.1, 3.1)
    fn = {**FUNCTIONS, **POSITIVE, "arctan": math.atan}[name]
    x = np.abs(x) + np.float32(0.125) if name in POSITIVE else np.clip(x, -1.5, 1.5) if name == "arctan" else x
    got = one(lambda o, t: nisa.activation(o, getattr(nl, name), t), (x.shape, nl.float32), x)
    want = np.vectorize(fn)(x.astype(np.float64))
    assert np.allclose(got, want, rtol=ULP, atol=1e-44)


@pytest.mark.parametrize(("name", "h"), [("silu", "silu_dx"), ("gelu", "gelu_dx"), ("gelu_apprx_sigmoid", "gelu_apprx_sigmoid_dx"), ("erf", "erf_dx")])
def test_derivatives_are_the_central_differences_of_their_functions(name, h):
    x = np.linspace(-3, 3, 25, dtype=np.float32)[None]
    step = 2.0**-10
    fn = FUNCTIONS[name]
    want = np.vectorize(lambda v: (fn(v + step) - fn(v - step)) / (2 * step))(x.astype(np.float64))
    got = one(lambda o, t: nisa.activation(o, getattr(nl, h), t), (x.shape, nl.float32), x)
    # The third derivative of these functions is below 6, so the difference quotient is off by less than step**2.
    assert np.abs(got - want).max() < step**2 + 4 * ULP


def test_activation_scales_then_adds_bias_in_float32_and_sums_the_unrounded_result():
    scale, bias = normal(128, 1, seed=5), normal(128, 1, seed=6)

    def body(o, x, s, b):
        nisa.activation(o[0], nl.exp, x, bias=b, scale=s, reduce_op=nl.add, reduce_res=o[1], reduce_cmd=nisa.reduce_cmd.reset_reduce)

    got = run(body, [(A.shape, nl.bfloat16), ((128, 1), nl.float32)], A, scale, bias)
    value = np.exp(((A * scale) + bias).astype(np.float64)).astype(np.float32)
    assert np.array_equal(got[0], bf16(value))
    assert np.array_equal(got[1], exact_sum(value, 1)[:, None])


def test_the_scalar_accumulator_persists_until_it_is_reset():
    def body(o, x):
        junk = nl.ndarray(x.shape, nl.float32)
        rc = nisa.reduce_cmd
        nisa.activation(junk, nl.copy, x, reduce_cmd=rc.reset)
        nisa.activation(junk, nl.copy, x, reduce_op=nl.add, reduce_cmd=rc.reduce)
        nisa.activation(junk, nl.square, x)
        nisa.activation(junk, nl.copy, x, reduce_op=nl.add, reduce_res=o[0], reduce_cmd=rc.reduce)
        nisa.activation_reduce(junk, nl.copy, x, nl.add, o[1])

    got = run(body, [((128, 1), nl.float32)] * 2, A)
    half = exact_sum(A, 1)
    assert np.array_equal(got[0][:, 0], half + half) and np.array_equal(got[1][:, 0], half)


def test_tensor_scalar_reduce_accumulates_loads_and_negates():
    def body(o, x, start):
        junk = nl.ndarray(x.shape, nl.bfloat16)
        rc = nisa.reduce_cmd
        nisa.tensor_scalar_reduce(junk, x, nl.multiply, 2.0, nl.add, o[0])
        nisa.tensor_scalar_reduce(junk, x, nl.multiply, 1.0, nl.add, o[1], reduce_cmd=rc.reduce, reduce_res_negate=True)
        nisa.tensor_scalar_reduce(junk, x, nl.add, 1.0, nl.maximum, o[2], reduce_cmd=rc.load_reduce, reduce_init=start)
        nisa.tensor_scalar_reduce(junk, x, nl.add, 0.0, nl.minimum, o[3])

    start = np.linspace(-5, 5, 128, dtype=np.float32)[:, None]
    got = run(body, [((128, 1), nl.float32)] * 4, A, start)
    twice = exact_sum(A * np.float32(2), 1)
    assert np.array_equal(got[0][:, 0], twice) and np.array_equal(got[1][:, 0], -(twice + exact_sum(A, 1)))
    assert np.array_equal(got[2][:, 0], np.maximum(start[:, 0], (A + np.float32(1)).max(1)))
    assert np.array_equal(got[3][:, 0], A.min(1))


def test_cumulative_reduction_writes_every_prefix():
    def body(o, x):
        nisa.tensor_scalar_cumulative(o[0], x, nl.multiply, nl.add, 0.5)
        nisa.tensor_scalar_cumulative(o[1], x, nl.add, nl.maximum, 0.0, imm1=1.0, reduce_cmd=nisa.reduce_cmd.load_reduce)

    got = run(body, [(A.shape, nl.float32)] * 2, A)
    state = np.zeros(128, np.float32)
    for i in range(A.shape[1]):
        state = A[:, i] * np.float32(0.5) + state
        assert np.array_equal(got[0][:, i], state)
    assert np.array_equal(got[1], np.maximum(np.maximum.accumulate(A, 1), np.float32(1)))


def test_range_select_compares_positions_and_fills_with_the_lowest_float():
    lo, hi = np.arange(128, dtype=np.float32)[:, None] % 20, np.full((128, 1), 30, np.float32)

    def body(o, x, b0, b1):
        for t, m in ((o[0], o[1]), (o[2], o[3])):
            nisa.range_select(t, x, nl.greater_equal, nl.less, b0, b1, reduce_res=m, range_start=4)

    f = (A.shape, nl.float32)
    got = run(body, [f, ((128, 1), nl.float32), (A.shape, nl.bfloat16), ((128, 1), nl.float32)], A, lo, hi)
    at = np.arange(48) + 4
    want = np.where((at >= lo) & (at < hi), A, np.float32(-3.4028235e38))
    assert np.array_equal(got[0], want) and np.array_equal(got[1], want.max(1, keepdims=True))
    assert np.array_equal(np.isneginf(got[2]), want < -1e38)


def test_select_reduce_picks_by_predicate_and_keeps_a_maximum():
    p = (np.random.default_rng(3).random(A.shape) < 0.3).astype(np.uint8)
    other = normal(128, 1, seed=8)

    def body(o, x, pred, c):
        nisa.select_reduce(o[0], pred, x, c, o[1], nisa.reduce_cmd.reset_reduce)
        nisa.select_reduce(o[2], pred, x, -1.0, reverse_pred=True)

    got = run(body, [(A.shape, nl.float32), ((128, 1), nl.float32), (A.shape, nl.float32)], A, p, other)
    want = np.where(p, A, other)
    assert np.array_equal(got[0], want) and np.array_equal(got[1], want.max(1, keepdims=True))
    assert np.array_equal(got[2], np.where(p, np.float32(-1), A))


def test_bn_stats_and_aggr_give_mean_and_variance():
    def body(o, x):
        stats = nl.ndarray((128, 12), nl.float32)
        nisa.bn_stats(stats[:, 0:6], x[:, 0:31])
        nisa.bn_stats(stats[:, 6:12], x[:, 31:48])
        nisa.bn_aggr(o, stats)

    got = one(body, ((128, 2), nl.float32), A)
    wide = A.astype(np.float64)
    # 12 float32 roundings of values below 16, then sums of positive terms.
    assert np.abs(got[:, 0] - wide.mean(1)).max() < 16 * ULP and np.abs(got[:, 1] - wide.var(1)).max() < 64 * ULP


def test_a_typed_result_survives_a_round_trip():
    t = sim.typed(A, "bfloat16")
    assert np.array_equal(t.float32(), bf16(A)) and t.shape == A.shape
