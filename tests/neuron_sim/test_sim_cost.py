# SPDX-License-Identifier: Apache-2.0
"""Counters, the time model, the dependency graph, memory peaks and the report's two forms."""

import json
from itertools import pairwise

import model_kernels
import numpy as np
import pytest
from simkit import NO_LINT, normal, report

from v41.backends.neuron import sim
from v41.backends.neuron.sim import cost
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

X = np.ones((128, 1024), np.float32)


def use(result, engine):
    """One engine's totals."""
    return next(e for e in result.engines if e.engine == engine)


def test_a_gemm_counts_its_instructions_bytes_and_flops():
    r = sim.profile(model_kernels.gemm)(np.ones((512, 128), np.float32), np.ones((512, 256), np.float32))[1]
    pe, dma, vector = use(r, "tensor"), use(r, "dma"), use(r, "vector")
    assert (pe.instructions, pe.flops) == (4, 2 * 512 * 128 * 256)
    assert (dma.instructions, dma.bytes) == (9, 4 * (512 * 128 + 512 * 256 + 128 * 256))
    # Row slices of the whole width are contiguous in HBM, so the 512 or 1024 byte rows of the tile bound a descriptor.
    assert dma.descriptors == 512 + 512 + 128 and dma.elements == dma.bytes // 4
    assert (vector.instructions, vector.elements) == (1, 128 * 256)
    assert r.instructions == 14 and r.cores == 1


def chain(n):
    """n copies, each of the result of the one before."""

    def body(outs, x):
        t = x
        for _ in range(n):
            u = nl.ndarray(x.shape, x.dtype)
            nisa.tensor_copy(u, t)
            t = u
        nisa.tensor_copy(outs[0], t)

    return body


def fan(n):
    """n copies of one tile."""

    def body(outs, x):
        for _ in range(n):
            u = nl.ndarray(x.shape, x.dtype)
            nisa.tensor_copy(u, x)
        nisa.tensor_copy(outs[0], x)

    return body


def test_the_critical_path_follows_dependencies_not_program_order():
    out = [(X.shape, nl.float32)]
    deep, wide = report(chain(6), out, X), report(fan(6), out, X)
    assert deep.instructions == wide.instructions and deep.engine_us == pytest.approx(wide.engine_us)
    step = cost.vector_busy(1024)
    assert deep.critical_path_us - wide.critical_path_us == pytest.approx(6 * step)
    assert deep.schedule_us == pytest.approx(wide.schedule_us)


def two_loads(dependent):
    """Two HBM round trips, the second after the first or beside it."""

    def kernel(x):
        a, b = nl.ndarray((1, 64), x.dtype), nl.ndarray((1, 64), x.dtype)
        scratch = nl.ndarray((2, 64), x.dtype, buffer=nl.private_hbm)
        nisa.dma_copy(a, x[0:1, 0:64])
        nisa.dma_copy(scratch[0:1], a)
        nisa.dma_copy(b, scratch[0:1] if dependent else x[1:2, 0:64])
        out = nl.ndarray((1, 64), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, b)
        return out

    return kernel


def test_dependent_dmas_cost_two_microseconds_each():
    deep = sim.profile(two_loads(True), NO_LINT)(X)[1]
    wide = sim.profile(two_loads(False), NO_LINT)(X)[1]
    assert (deep.dma_chain_us, wide.dma_chain_us) == (8.0, 4.0)
    assert deep.time_us == pytest.approx(wide.time_us + 4.0)


def test_parts_of_a_tile_are_separate_in_the_graph():
    def body(outs, x):
        t = nl.ndarray((128, 8, 64), x.dtype)
        for i in range(8):
            nisa.tensor_copy(t[:, i], x[:, i * 64 : i * 64 + 64])
        nisa.tensor_copy(outs[0], t[:, 7])

    r = report(body, [((128, 64), nl.float32)], X)
    load = cost.DMA_FIXED + cost.dma_busy(X.nbytes, 4096)
    store = cost.DMA_FIXED + cost.dma_busy(128 * 256, 256)
    assert r.critical_path_us == pytest.approx(load + 2 * cost.vector_busy(64) + store)


def test_a_write_after_a_read_waits_for_it():
    def body(outs, x):
        nisa.tensor_copy(outs[0], x)
        nisa.memset(x, 0.0)
        nisa.tensor_copy(outs[1], x)

    r = report(body, [(X.shape, nl.float32)] * 2, X)
    load = cost.DMA_FIXED + cost.dma_busy(X.nbytes, 4096)
    store = cost.DMA_FIXED + cost.dma_busy(X.nbytes, 4096)
    assert r.critical_path_us == pytest.approx(load + 3 * cost.vector_busy(1024) + store)


def test_dma_efficiency_meets_the_published_points_and_rises():
    assert [cost.dma_efficiency(b) for b in (512, 1024, 4096, 1 << 20)] == [0.25, 0.5, 0.9, 0.9]
    runs = [cost.dma_efficiency(b) for b in range(4, 9000, 4)]
    assert all(a <= b for a, b in pairwise(runs)) and runs[0] < 0.01


def test_weights_are_loaded_once_while_they_stay():
    def body(outs, x):
        ps = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
        for i in range(2):
            nisa.nc_matmul(ps, x[:, 0:128], x[:, 0:512] if i else x[:, 512:1024], accumulate=False)
        nisa.tensor_copy(outs[0], ps)

    r = report(body, [((128, 512), nl.float32)], X)
    stream = 4 * 512 / 2400
    assert use(r, "tensor").busy_us == pytest.approx(max(stream, cost.PE_WEIGHTS) + stream)


def test_tiles_live_as_long_as_they_are_referenced():
    def body(outs, x):
        for _ in range(50):
            t = nl.ndarray((128, 4096), nl.float32)
            nisa.memset(t, 0.0)
            t = None
        nisa.tensor_copy(outs[0], x)

    r = report(body, [((128, 8), nl.float32)], np.ones((128, 8), np.float32))
    assert r.sbuf_peak_bytes == 16384 + 2 * 32


def test_a_view_keeps_its_tile_alive():
    def body(outs, x):
        kept = [nl.ndarray((128, 4096), nl.float32)[:, 0:1] for _ in range(3)]
        nisa.tensor_copy(outs[0], x)
        assert len(kept) == 3

    r = report(body, [((128, 8), nl.float32)], np.ones((128, 8), np.float32))
    assert r.sbuf_peak_bytes == 3 * 16384 + 2 * 32


def test_small_psum_tiles_share_a_bank_and_large_ones_take_whole_banks():
    def body(outs, x):
        small = [nl.ndarray((128, 128), nl.float32, buffer=nl.psum) for _ in range(4)]
        large = nl.ndarray((128, 1024), nl.float32, buffer=nl.psum)
        nisa.tensor_copy(outs[0], x)
        assert len(small) == 4 and large.shape == (128, 1024)

    r = report(body, [((128, 8), nl.float32)], np.ones((128, 8), np.float32))
    assert (r.psum_peak_banks, r.psum_peak_bytes) == (3, 3 * 2048)


def test_a_report_is_a_table_and_json():
    r = sim.profile(model_kernels.gemm)(np.ones((128, 128), np.float32), np.ones((128, 256), np.float32))[1]
    data = json.loads(r.json())
    assert data["kernel"] == "gemm" and data["time_us"] == r.time_us >= 2.0
    assert [e["engine"] for e in data["engines"]] == list(cost.ENGINES) and data["warnings"] == []
    table = r.table()
    assert "not run on a device" in table.splitlines()[0] and "SBUF peak" in table and "tensor" in table


def test_the_slower_core_decides():
    def kernel(x):
        me = nl.program_id()
        n = 1 + 15 * me
        t = nl.ndarray((128, 64 * n), x.dtype)
        nisa.dma_copy(t, x[:, 0 : 64 * n])
        nisa.tensor_scalar(t, t, nl.add, 1.0)
        out = nl.ndarray((2, 128, 64), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out[me], t[:, 0:64])
        return out

    r = sim.profile(sim.jit(kernel)[2], NO_LINT)(normal(128, 1024))[1]
    assert use(r, "vector").busy_us == pytest.approx(cost.vector_busy(1024)) and r.cores == 2
