# SPDX-License-Identifier: Apache-2.0
"""How fast the simulator is: a GEMM against numpy's own product, and simulated instructions per second."""

import time

import model_kernels
import numpy as np
from simkit import NO_LINT, normal

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

REPEAT = 200


def best(run, times=3):
    """Shortest wall time of several runs."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return min(spent)


def test_a_gemm_runs_within_50_times_numpys_product(capsys):
    x, w = normal(128, 2048), normal(2048, 512, seed=1)
    x_t = np.ascontiguousarray(x.T)
    kernel = sim.simulate(model_kernels.gemm)
    kernel(x_t, w)
    ratio = best(lambda: kernel(x_t, w)) / best(lambda: x @ w, 5)
    with capsys.disabled():
        print(f"\nGEMM 128 x 2048 x 512 on the simulator: {ratio:.1f} times numpy")
    assert ratio < 50


def loads(x, t, u, v, p):
    nisa.dma_copy(t, x)


def copies(x, t, u, v, p):
    nisa.tensor_copy(u, t)


def adds(x, t, u, v, p):
    nisa.tensor_tensor(u, t, t, nl.add)


def scales(x, t, u, v, p):
    nisa.tensor_scalar(v, t, nl.multiply, 2.0, op1=nl.add, operand1=1.0)


def exps(x, t, u, v, p):
    nisa.activation(v, nl.exp, t)


def sums(x, t, u, v, p):
    nisa.tensor_reduce(v[:, 0:1], nl.add, t, 1)


def products(x, t, u, v, p):
    nisa.nc_matmul(p, t[:, 0:128], t, accumulate=False)


def searches(x, t, u, v, p):
    nisa.max8(v[:, 0:8], t)


ROWS = {f.__name__: f for f in (loads, copies, adds, scales, exps, sums, products, searches)}


def per_second(step, width):
    """Instructions per second on a (128, width) tile."""

    def kernel(x):
        t, u = nl.ndarray((128, width), x.dtype), nl.ndarray((128, width), x.dtype)
        v = nl.ndarray((128, width), nl.bfloat16)
        p = nl.ndarray((128, width), nl.float32, buffer=nl.psum)
        nisa.dma_copy(t, x)
        start = time.perf_counter()
        for _ in range(REPEAT):
            step(x, t, u, v, p)
        spent.append(time.perf_counter() - start)

    spent = []
    sim.simulate(kernel, NO_LINT)(normal(128, width))
    return REPEAT / spent[0]


def test_a_table_of_simulated_instructions_per_second(capsys):
    table = {name: (per_second(step, 128), per_second(step, 512)) for name, step in ROWS.items()}
    with capsys.disabled():
        print(f"\n{'instructions per second':24}{'128 x 128':>12}{'128 x 512':>12}")
        for name, (narrow, wide) in table.items():
            print(f"{name:24}{narrow:12.0f}{wide:12.0f}")
    # The floor keeps a decode kernel of 10,000 instructions below a minute and a half.
    assert min(min(pair) for pair in table.values()) > 120
