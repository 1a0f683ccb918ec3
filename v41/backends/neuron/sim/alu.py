# SPDX-License-Identifier: Apache-2.0
"""Operators: the values that kernels pass as op=, and what each computes.

Arithmetic operators map float32 to float32, rounded once. Bit operators work
on unsigned patterns. Activation functions are evaluated in float64 and
rounded to float32; the device uses piecewise polynomials, so compare with a
tolerance of a few float32 ulp at least.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Op:
    """An operator token; calling it applies it to tiles (the nl convenience layer)."""

    name: str

    def __call__(self, x, y=None, dtype=None):
        from v41.backends.neuron.sim import convenience

        return convenience.apply(self, x, y, dtype)


def _truth(fn):
    return lambda a, b: fn(a, b).astype(np.float32)


def _logical(fn):
    return lambda a, b: fn(a != 0, b != 0).astype(np.float32)


def _power(a, b):
    return np.power(np.asarray(a, np.float64), np.asarray(b, np.float64)).astype(np.float32)


ARITHMETIC = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": _power,
    "equal": _truth(np.equal),
    "not_equal": _truth(np.not_equal),
    "less": _truth(np.less),
    "less_equal": _truth(np.less_equal),
    "greater": _truth(np.greater),
    "greater_equal": _truth(np.greater_equal),
    "logical_and": _logical(np.logical_and),
    "logical_or": _logical(np.logical_or),
    "logical_xor": _logical(np.logical_xor),
}

UNARY = {
    "abs": np.abs,
    "rsqrt": lambda x: (1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32),
    "reciprocal": lambda x: (np.float32(1.0) / x).astype(np.float32),
}

BITVEC = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": lambda a, b: _shift(np.left_shift, a, b),
    "right_shift": lambda a, b: _shift(np.right_shift, a, b),
}

COMPARES = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
REDUCTIONS = ("add", "subtract", "multiply", "maximum", "minimum", "logical_and", "logical_or", "logical_xor")
BIT_REDUCTIONS = ("bitwise_and", "bitwise_or", "bitwise_xor")
NOT_ON_HARDWARE = ("divide", "mod", "fmod", "arithmetic_shift_right")
ABS_EXTREMA = ("abs_max", "abs_min")
IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}


def _shift(fn, a, b):
    # A shift by the width or more gives 0; numpy leaves it undefined.
    bits = a.dtype.itemsize * 8
    count = np.minimum(b, bits - 1).astype(a.dtype)
    return np.where(b < bits, fn(a, count), a.dtype.type(0))


def canonical(op):
    """Operator name with max/min read as maximum/minimum; None for something that is no operator."""
    name = getattr(op, "name", None)
    return {"max": "maximum", "min": "minimum"}.get(name, name)


def _erf(x):
    return np.frompyfunc(math.erf, 1, 1)(x).astype(np.float64)


def _sigmoid(x):
    positive = x >= 0
    e = np.exp(np.where(positive, -x, x))
    return np.where(positive, 1.0, e) / (1.0 + e)


def _softplus(x):
    return np.logaddexp(0.0, x)


def _gelu_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_dx(x):
    return 0.5 * (1.0 + _erf(x / math.sqrt(2.0))) + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _times_sigmoid(x, k=1.0):
    # x * sigmoid(k x) with the limit 0 at -inf, where the product is 0 * inf.
    return np.where(np.isneginf(x), 0.0, np.where(np.isneginf(x), 0.0, x) * _sigmoid(k * x))


def _sigmoid_dx(x, k):
    s = _sigmoid(k * x)
    return s + k * x * s * (1.0 - s)


def _mish(x):
    return x * np.tanh(_softplus(x))


EVERYWHERE = (-math.inf, math.inf)

# name -> (function in float64, (lowest, highest) valid input, whether the range is of the magnitude)
ACTIVATIONS = {
    "copy": (lambda x: x, EVERYWHERE, False),
    "square": (np.square, EVERYWHERE, False),
    "sigmoid": (_sigmoid, EVERYWHERE, False),
    "relu": (lambda x: np.maximum(x, 0.0), EVERYWHERE, False),
    "gelu": (lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))), EVERYWHERE, False),
    "gelu_dx": (_gelu_dx, EVERYWHERE, False),
    "gelu_apprx_tanh": (_gelu_tanh, EVERYWHERE, False),
    "gelu_apprx_sigmoid": (lambda x: _times_sigmoid(x, 1.702), EVERYWHERE, False),
    "gelu_apprx_sigmoid_dx": (lambda x: _sigmoid_dx(x, 1.702), EVERYWHERE, False),
    "silu": (_times_sigmoid, EVERYWHERE, False),
    "silu_dx": (lambda x: _sigmoid_dx(x, 1.0), EVERYWHERE, False),
    "tanh": (np.tanh, EVERYWHERE, False),
    "softplus": (_softplus, EVERYWHERE, False),
    "mish": (_mish, EVERYWHERE, False),
    "erf": (_erf, EVERYWHERE, False),
    "erf_dx": (lambda x: 2.0 / math.sqrt(math.pi) * np.exp(-x * x), EVERYWHERE, False),
    "exp": (np.exp, EVERYWHERE, False),
    "log": (np.log, (2.0**-64, 2.0**64), False),
    "sin": (np.sin, (-math.pi, math.pi), False),
    "arctan": (np.arctan, (-math.pi / 2, math.pi / 2), False),
    "sqrt": (np.sqrt, (2.0**-116, 2.0**118), False),
    "rsqrt": (lambda x: 1.0 / np.sqrt(x), (2.0**-87, 2.0**97), False),
    "reciprocal": (lambda x: 1.0 / x, (2.0**-42, 2.0**42), True),
    "sign": (np.sign, EVERYWHERE, False),
    "abs": (np.abs, EVERYWHERE, False),
}


def outside(name, x):
    """Boolean array: inputs outside the documented range of an activation; NaN counts as outside a narrow range."""
    low, high = ACTIVATIONS[name][1]
    if (low, high) == EVERYWHERE:
        return np.zeros(x.shape, bool)
    value = np.abs(x) if ACTIVATIONS[name][2] else x
    # The bound itself, rounded to float32, is inside: pi as float32 is slightly above pi.
    return ~((value >= np.float32(low)) & (value <= np.float32(high)))


def reduce_float32(name, x):
    """Reduction of a (P, N) float32 array over N to (P,): sums in float64 rounded once, the other reductions exact."""
    if name == "add":
        # Infinities that cancel, or a sum beyond float32, are values here; rule NUM-NONFINITE reports them.
        with np.errstate(invalid="ignore", over="ignore"):
            return x.sum(axis=1, dtype=np.float64).astype(np.float32)
    if name == "multiply":
        return x.prod(axis=1, dtype=np.float64).astype(np.float32)
    if name == "subtract":
        rest = x[:, 1:].sum(axis=1, dtype=np.float64)
        return (x[:, 0].astype(np.float64) - rest).astype(np.float32)
    return getattr(ARITHMETIC[name], "reduce", None)(x, axis=1) if name in ("maximum", "minimum") else _logical_reduce(name, x)


def _logical_reduce(name, x):
    fn = {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}[name]
    return fn.reduce(x != 0, axis=1).astype(np.float32)
