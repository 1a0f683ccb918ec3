# SPDX-License-Identifier: Apache-2.0
"""Public kernels of others, unmodified, under as_nki().

Set V41_NKI_EXAMPLES to a checkout of aws-neuron/aws-neuron-sdk and
V41_NKI_LIBRARY to one of aws-neuron/nki-library. Nothing of theirs is copied here.
"""

import importlib
import importlib.util
import os
import sys
import types

import numpy as np
import pytest
import torch
from simkit import normal, rng

from v41.backends.neuron import sim

torch.set_num_threads(1)
EXAMPLES = os.environ.get("V41_NKI_EXAMPLES")
LIBRARY = os.environ.get("V41_NKI_LIBRARY")
examples = pytest.mark.skipif(not EXAMPLES, reason="V41_NKI_EXAMPLES does not name a checkout of aws-neuron-sdk")
library = pytest.mark.skipif(not LIBRARY, reason="V41_NKI_LIBRARY does not name a checkout of nki-library")
EPS = float(np.finfo(np.float32).eps)


def example(folder, name):
    """A module of nki/examples, imported against the simulator; the environment is left as it was."""
    path = os.path.join(EXAMPLES, "nki", "examples", folder, name + ".py")
    spec = importlib.util.spec_from_file_location(f"nki_example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    kept = dict(os.environ)
    with sim.as_nki():
        spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(kept)
    return module


def lib(name, monkeypatch):
    """A module of nkilib, imported against the simulator."""
    monkeypatch.syspath_prepend(os.path.join(LIBRARY, "src", "nkilib_src"))
    if importlib.util.find_spec("scipy") is None:
        # Only the circulant matrix of rotational_topk needs scipy.
        linalg = types.ModuleType("scipy.linalg")
        linalg.circulant = lambda c: np.stack([np.roll(c, i) for i in range(len(c))], 1)
        scipy = types.ModuleType("scipy")
        scipy.linalg = linalg
        monkeypatch.setitem(sys.modules, "scipy", scipy)
        monkeypatch.setitem(sys.modules, "scipy.linalg", linalg)
    with sim.as_nki():
        return importlib.import_module(f"nkilib.core.{name}")


@examples
def test_transpose2d():
    a = np.arange(60, dtype=np.int8).reshape(5, 12)
    kernel = example("transpose2d", "transpose2d_nki_kernels").tensor_transpose2D_kernel_
    assert np.array_equal(sim.simulate(kernel)(a, (3, 4)), a.reshape(5, 3, 4).transpose(0, 2, 1).reshape(5, 12))


@examples
def test_average_pool2d():
    a = np.arange(72, dtype=np.float16).reshape(2, 6, 6)
    module = example("average_pool2d", "average_pool2d_nki_kernels")
    assert np.array_equal(sim.simulate(module.tensor_avgpool_kernel)(a, 2), module.np_average_pool_2D(a, 2))


@examples
def test_tensor_addition():
    a, b = normal(256, 1024), normal(256, 1024, seed=1)
    kernel = example("tensor_addition", "tensor_addition_nki_kernels").nki_tensor_add
    assert np.array_equal(sim.simulate(kernel)(a, b), a + b)


MATMULS = {
    "nki_matmul_basic_": (128, 64, 512),
    "nki_matmul_tiled_": (512, 256, 1024),
    "nki_matmul_hoist_load_": (512, 256, 1024),
    "nki_matmul_block_free_dimension_": (512, 256, 1024),
    "nki_matmul_fully_optimized_": (1024, 2048, 1024),
}


@examples
@pytest.mark.parametrize("name", MATMULS)
def test_matrix_multiplication(name):
    k, m, n = MATMULS[name]
    a, b = rng().integers(-4, 5, (k, m)).astype(np.float32), rng(1).integers(-4, 5, (k, n)).astype(np.float32)
    kernel = getattr(example("matrix_multiplication", "matrix_multiplication_nki_kernels"), name)
    assert np.array_equal(sim.simulate(kernel)(a, b), a.T @ b)


@examples
@pytest.mark.parametrize("name", ["mamba_v1", "mamba_v2", "mamba_v3"])
def test_fused_mamba(name):
    c, s, n = 128, 2, 512
    delta, u, a = rng().random((1, c, n), dtype=np.float32), normal(1, c, n), -rng(1).random((c, s), dtype=np.float32)
    b, g = normal(1, s, n, seed=2), normal(1, s, n, seed=3)
    got = sim.simulate(getattr(example("fused_mamba", "mamba_nki_kernels"), name))(delta, u, a, b, g)
    state, want, size = np.zeros((c, s)), np.zeros((1, c, n)), np.zeros((c, s))
    worst = 0.0
    for i in range(n):
        decay, add = np.exp(delta[0, :, i, None].astype(np.float64) * a), (delta[0, :, i] * u[0, :, i])[:, None] * b[0, :, i]
        state, size = decay * state + add, decay * size + np.abs(add)
        want[0, :, i] = (state * g[0, :, i]).sum(1)
        worst = max(worst, (size * np.abs(g[0, :, i])).sum(1).max())
    # Each step rounds the product, the sum and the decay; a decay below 1 does not let older errors grow.
    assert np.abs(got - want).max() <= 8 * EPS * worst * np.log2(n)


@library
def test_cumsum(monkeypatch):
    module = lib("cumsum.cumsum", monkeypatch)
    x = rng().integers(-4, 5, (130, 2100)).astype(np.float32)
    assert np.array_equal(sim.simulate(module.cumsum)(x), np.cumsum(x, 1))
    t = torch.from_numpy(rng(1).integers(0, 2, (3, 5, 64)).astype(np.float32)).bfloat16()
    assert torch.equal(sim.simulate(module.cumsum)(t), torch.cumsum(t.float(), -1).bfloat16())


@library
@pytest.mark.parametrize("grid", [1, 2])
def test_rope_hf(grid, monkeypatch):
    module = lib("embeddings.rope_hf", monkeypatch)
    reference = importlib.import_module("nkilib.core.embeddings.rope_hf_torch").rope_hf_torch_ref
    torch.manual_seed(0)
    q, k, c, s = torch.randn(2, 2, 256, 64), torch.randn(2, 1, 256, 64), torch.randn(2, 256, 64), torch.randn(2, 256, 64)
    got = sim.simulate(module.rope_hf[grid])(q, k, torch.zeros_like(q), torch.zeros_like(k), c, s)
    want = reference(q, k, torch.zeros_like(q), torch.zeros_like(k), c, s)
    want = list(want.values()) if isinstance(want, dict) else list(want)
    for g, w in zip(got, want, strict=True):
        assert (g - w).abs().max() <= 4 * EPS * w.abs().max()


@library
@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize("shape", [(4, 2048), (1, 3000), (2, 3, 1000)])
def test_cascaded_max(shape, grid, monkeypatch):
    module = lib("max.cascaded_max", monkeypatch)
    x = rng().permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)
    values, index = sim.simulate(module.cascaded_max[grid])(x)
    assert np.array_equal(values[..., 0], x.max(-1)) and np.array_equal(index[..., 0], x.argmax(-1))


@library
@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize(("rows", "n", "k", "ordered"), [(4, 4096, 64, True), (8, 2048, 16, False), (2, 500, 8, True), (3, 1000, 10, True)])
def test_rotational_topk(rows, n, k, ordered, grid, monkeypatch):
    module = lib("topk.rotational_topk", monkeypatch)
    x = rng().permutation(rows * n).reshape(rows, n).astype(np.float32)
    base = module.create_topk_config(inp_shape=x.shape, inp_dtype="float32", k=k, sorted=ordered, num_programs=grid)
    config = module.prepare_rotational_constants(module.create_rotational_topk_config(inp_shape=x.shape, topk_config=base))
    values, index = sim.simulate(module.rotational_topk[config.n_prgs])(x, config)
    module.cleanup_rotational_constants()
    assert np.array_equal(np.take_along_axis(x, index.astype(int), 1), values)
    found = values if ordered else np.sort(values, 1)[:, ::-1]
    assert np.array_equal(found, np.sort(x, 1)[:, ::-1][:, :k])


@library
@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize(("batch", "seq", "hidden", "tp"), [(2, 1, 512, False), (4, 8, 1024, False), (2, 1, 512, True)])
def test_rmsnorm_tkg(batch, seq, hidden, tp, grid, monkeypatch):
    module = lib("subkernels.rmsnorm_tkg", monkeypatch)
    references = importlib.import_module("nkilib.core.subkernels.rmsnorm_torch")
    name = "rmsnorm_tkg_torch_ref" if grid == 2 and not tp else "rmsnorm_tkg_torch_ref_lnc1"
    torch.manual_seed(0)
    x, gamma = torch.randn(batch, seq, hidden), torch.randn(1, hidden)
    out = torch.zeros(128, batch * seq, hidden // 128)
    got = sim.simulate(sim.Kernel(module.rmsnorm_tkg, grid, sim.FOREIGN))(x, gamma, out, hidden_dim_tp=tp)
    want = getattr(references, name)(x, gamma, out, hidden_dim_tp=tp)["out"]
    # Two differently ordered sums of `hidden` squares, a square root and two products.
    assert (got - want).abs().max() <= (2 * np.log2(hidden) + 8) * EPS * want.abs().max()
