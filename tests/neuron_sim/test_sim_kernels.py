# SPDX-License-Identifier: Apache-2.0
"""Whole kernels of the kinds that the model needs, strict and without a warning, against numpy."""

import importlib
import sys
import types

import model_kernels
import numpy as np
import pytest
from simkit import bf16, normal, rng

from v41.backends.neuron import nki as names
from v41.backends.neuron import sim
from v41.backends.neuron.sim.dtypes import TABLES

EPS = float(np.finfo(np.float32).eps)
pytestmark = pytest.mark.skipif(not isinstance(model_kernels.gemm, sim.Kernel), reason="the real nki package is installed; run these through nki.simulate")


def clean(kernel, *arrays):
    """Result and report of a run in which even warnings raise."""
    return sim.profile(kernel, sim.PEDANTIC)(*arrays)


def test_gemm_is_a_product_within_its_roundings():
    x, w = normal(128, 1024), normal(1024, 512, seed=1)
    out, _ = clean(model_kernels.gemm, np.ascontiguousarray(x.T), w)
    want = x.astype(np.float64) @ w
    assert (np.abs(out - want) <= 1024 * EPS * (np.abs(x).astype(np.float64) @ np.abs(w))).all()


def test_block_scaled_fp8_weights_are_exact_until_the_sum():
    k, m, n = 256, 16, 128
    codes = rng().integers(0, 0x77, (k, n), dtype=np.uint8) | (rng(1).integers(0, 2, (k, n), dtype=np.uint8) << 7)
    scales = rng(2).integers(110, 130, (k // 32, n // 32), dtype=np.uint8)
    x = bf16(normal(m, k, seed=3))
    out, _ = clean(model_kernels.block_gemm, sim.typed(x.T, "bfloat16"), codes, scales)
    w = TABLES["float8_e4m3"][codes] * np.kron(2.0 ** (scales.astype(np.float64) - 127), np.ones((32, 32)))
    want, size = x.astype(np.float64) @ w, np.abs(x).astype(np.float64) @ np.abs(w)
    assert (np.abs(out - want) <= k * EPS * size).all()


def test_gathered_attention_equals_softmax_over_the_named_rows():
    heads, d = 64, 128
    q, cache = normal(heads, d), normal(300, d, seed=1)
    index = rng(2).permutation(300)[:128].astype(np.uint32)[:, None]
    out, report = clean(model_kernels.gathered_attention, np.ascontiguousarray(q.T), cache, index, 0.08)
    rows = cache[index[:, 0]].astype(np.float64)
    s = q.astype(np.float64) @ rows.T * 0.08
    p = np.exp(s - s.max(1, keepdims=True))
    want = (p / p.sum(1, keepdims=True)) @ rows
    # Scores carry 128 roundings of terms up to 5, exp turns them into relative errors, then 128 more roundings.
    assert np.abs(out - want).max() < 2 * 128 * EPS * np.abs(rows).max() * 0.08 * 40
    assert report.psum_peak_banks <= 8


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_dynamic_loop_walks_the_local_experts(count):
    e, k, m, n = 5, 64, 8, 96
    w, x = rng().integers(-4, 5, (e * k, n)).astype(np.float32), rng(1).integers(-4, 5, (m, k)).astype(np.float32)
    ids = (np.array([3, 0, 4])[:, None] * k + np.arange(k)).astype(np.uint32)
    gates = rng(2).integers(1, 4, (m, 3 * k)).astype(np.float32)
    want = sum((gates[:, [j * k]] * (x @ w[ids[j]]) for j in range(count)), np.zeros((m, n), np.float32))
    rows = np.array([[count * k]], np.int32)
    out, report = clean(model_kernels.experts, np.ascontiguousarray(x.T), w, ids.reshape(-1, 1), rows, gates)
    assert np.array_equal(out, want) and report.control_us == 7.0


def test_kernel_files_get_the_simulator_where_nki_is_missing():
    assert names.nl is sim.language and names.nisa is sim.isa and names.nki is sim
    assert names.runner(model_kernels.gemm)(np.eye(128, dtype=np.float32), np.eye(128, dtype=np.float32)).shape == (128, 128)
    with pytest.raises(AttributeError, match="torch"):
        _ = names.torch


def test_one_place_decides_what_runs_a_kernel(monkeypatch):
    assert [name for name, _ in names.runners(model_kernels.gemm)] == ["sim"]
    real = types.ModuleType("nki")
    real.simulate = lambda kernel: ("simulated", kernel)
    monkeypatch.setitem(sys.modules, "nki", real)
    assert names.runners("a real kernel") == (("nki.simulate", ("simulated", "a real kernel")),)
    assert [name for name, _ in names.runners(model_kernels.gemm)] == ["sim"]


def test_kernel_files_imported_inside_as_nki_run_on_the_simulator_too():
    kept = sys.modules.pop("model_kernels")
    try:
        with sim.as_nki() as nki:
            fresh = importlib.import_module("model_kernels")
            assert fresh.nl is nki.language and names.installed()
    finally:
        sys.modules["model_kernels"] = kept
    eye = np.eye(128, dtype=np.float32)
    assert np.array_equal(sim.simulate(fresh.gemm)(eye, eye), eye)


def test_as_nki_serves_all_five_modules_and_leaves_no_trace():
    before = {n for n in sys.modules if n.split(".")[0] == "nki"}
    with sim.as_nki() as nki:
        isa, language = importlib.import_module("nki.isa"), importlib.import_module("nki.language")
        typing, collectives = importlib.import_module("nki.typing"), importlib.import_module("nki.collectives")
        assert nki.isa is isa and nki.language is language and isa.nc_matmul is sim.isa.nc_matmul
        assert typing.tensor[128, 512] is typing.tensor
        with pytest.raises(sim.SimError, match="nki.collectives.all_reduce"):
            collectives.all_reduce([], [])
    assert {n for n in sys.modules if n.split(".")[0] == "nki"} == before


def test_as_nki_restores_a_package_that_was_there():
    class Fake:
        pass

    fake = Fake()
    sys.modules["nki"] = fake
    try:
        with sim.as_nki() as nki:
            assert sys.modules["nki"] is nki is not fake
        assert sys.modules["nki"] is fake
    finally:
        del sys.modules["nki"]


def test_a_jitted_kernel_called_from_a_kernel_is_inlined_and_called_alone_is_simulated():
    eye = np.eye(128, dtype=np.float32)
    assert np.array_equal(model_kernels.gemm(eye, eye), eye)

    def outer(a, b):
        return model_kernels.gemm(a, b)

    assert np.array_equal(sim.simulate(outer)(eye, eye), eye)
