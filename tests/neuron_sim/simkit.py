# SPDX-License-Identifier: Apache-2.0
"""What the simulator's tests share: a kernel that loads tiles, runs a body on them and stores the results."""

import numpy as np

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl
from v41.backends.neuron.sim.rules import PYTHON_IDS

# The kernels below are closures, which the lint refuses; the lint has tests of its own.
NO_LINT = sim.Policy(demote=PYTHON_IDS - {"PY-REGISTER"})


def numbers(x):
    """Values of a result as numpy: float32 for bfloat16 and fp8."""
    return x.float32() if isinstance(x, sim.Typed) else x


def make(body, outs):
    """A kernel: body(out tiles, *input tiles) between loads of the inputs and stores of the outputs."""

    def kernel(a=None, b=None, c=None, d=None):
        tiles = []
        for x in (a, b, c, d):
            if x is not None:
                t = nl.ndarray(x.shape if x.ndim > 1 else (1, *x.shape), x.dtype)
                nisa.dma_copy(t, x)
                tiles.append(t)
        results = [nl.ndarray(shape, dtype) for shape, dtype in outs]
        body(results, *tiles)
        stored = []
        for t in results:
            h = nl.ndarray(t.shape, t.dtype, buffer=nl.shared_hbm)
            nisa.dma_copy(h, t)
            stored.append(h)
        return tuple(stored)

    return kernel


def run(body, outs, *arrays, policy=NO_LINT):
    """Results of `make(body, outs)` on arrays, as numpy values."""
    results = sim.simulate(make(body, outs), policy)(*arrays)
    return [numbers(r) for r in results]


def one(body, out, *arrays, policy=NO_LINT):
    """`run` for a single result; the body gets that tile itself."""
    return run(lambda outs, *tiles: body(outs[0], *tiles), [out], *arrays, policy=policy)[0]


def report(body, outs, *arrays, policy=NO_LINT):
    """The Report of `make(body, outs)`."""
    return sim.profile(make(body, outs), policy)(*arrays)[1]


def broken(kernel, *arrays, policy=None):
    """The SimError that a kernel raises; fails when it raises none."""
    try:
        sim.simulate(kernel, policy)(*arrays)
    except sim.SimError as error:
        return error
    raise AssertionError("the kernel broke a rule and was accepted")


def rng(seed=0):
    """A seeded generator."""
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    """float32 normal values."""
    return rng(seed).standard_normal(shape, dtype=np.float32)


def bf16(x):
    """float32 values rounded to bfloat16 by masks: an oracle of its own, round to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)
