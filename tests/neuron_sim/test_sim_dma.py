# SPDX-License-Identifier: Apache-2.0
"""DMA: casts, gathers, scatters, transposes, sums, dynamic offsets, registers and loops."""

import numpy as np
import pytest
import torch
from simkit import NO_LINT, bf16, broken, normal, numbers, rng

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

torch.set_num_threads(1)
TABLE = normal(50, 24)
SKIPPED = 0xFFFFFFFF


def test_copies_reshape_in_row_major_order_and_cast_through_float32():
    def kernel(x):
        out = nl.ndarray((24, 50), nl.bfloat16, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    assert np.array_equal(numbers(sim.simulate(kernel)(TABLE)), bf16(TABLE).reshape(24, 50))


def test_a_dma_decodes_fp8_weights_to_bfloat16():
    codes = np.r_[0:0x78, 0x80:0xF8].astype(np.uint8).reshape(8, 30)

    def kernel(x):
        t = nl.ndarray(x.shape, nl.bfloat16)
        nisa.dma_copy(t, x)
        out = nl.ndarray(x.shape, nl.bfloat16, buffer=nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out

    w = sim.Typed(codes, "float8_e4m3")
    assert np.array_equal(numbers(sim.simulate(kernel)(w)), w.float32())


def gather(x, idx):
    """Rows of x by an index column, skipping what is out of range."""
    n = idx.shape[0]
    i = nl.ndarray((n, 1), nl.uint32)
    nisa.dma_copy(i, idx)
    t = nl.ndarray((n, x.shape[1]), x.dtype)
    nisa.memset(t, -1.0)
    nisa.dma_copy(t, x.ap([[x.shape[1], n], [1, x.shape[1]]], vector_offset=i, indirect_dim=0), oob_mode=nisa.oob_mode.skip)
    out = nl.ndarray(t.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


def test_a_gather_reads_rows_and_skip_keeps_what_was_there():
    idx = np.array([[3], [49], [SKIPPED], [0], [50], [3]], np.uint32)
    got = sim.simulate(gather)(TABLE, idx)
    want = np.stack([TABLE[i] if i < 50 else np.full(24, -1, np.float32) for i in idx[:, 0]])
    assert np.array_equal(got, want)


def test_skipped_rows_move_no_bytes():
    idx = np.array([[3], [SKIPPED], [SKIPPED], [0]], np.uint32)
    moved = {e.engine: e for e in sim.profile(gather)(TABLE, idx)[1].engines}["dma"]
    assert moved.bytes == 2 * 24 * 4 + idx.nbytes + 4 * 24 * 4


def two_sums(cache, rows, idx):
    """A copy of the cache to which the rows are added twice, at other rows the second time."""
    out = nl.ndarray(cache.shape, cache.dtype, buffer=nl.shared_hbm)
    t, i = nl.ndarray(rows.shape, rows.dtype), nl.ndarray(idx.shape, nl.uint32)
    nisa.dma_copy(t, rows)
    nisa.dma_copy(i, idx)
    nisa.dma_copy(out.vector_select(0, i[:, 0:1]), t)
    nisa.dma_compute(out.vector_select(0, i[:, 1:2]), [out.vector_select(0, i[:, 1:2]), t], nl.add, oob_mode=nisa.oob_mode.skip)
    nisa.dma_copy(cache, out[0:4])
    return cache


def test_rows_of_one_size_are_read_as_they_were_written():
    rows, idx = normal(4, 24, seed=2), np.array([[0, 1], [1, 2], [2, 3], [3, SKIPPED]], np.uint32)
    got, report = sim.profile(two_sums)(np.zeros((4, 24), np.float32), rows, idx)
    want = rows.copy()
    want[1:] += rows[:3]
    assert np.array_equal(got, want)
    assert [w.rule for w in report.warnings] == ["HAZ-SCRATCH"], "the last copy only, which reads rows as a block"


def row_by_row(x, idx):
    """A copy of x, one row a DMA, read back and written again by one gather and one scatter."""
    n, width = x.shape
    out = nl.ndarray((n, width), x.dtype, buffer=nl.shared_hbm)
    i, t = nl.ndarray((n, 1), nl.uint32), nl.ndarray((n, width), x.dtype)
    nisa.dma_copy(i, idx)
    nisa.dma_copy(t, x)
    for r in range(0, n, 2):
        nisa.dma_copy(out.vector_select(0, i[r : r + 1]), t[r : r + 1])
    for r in range(1, n, 2):
        nisa.dma_copy(out.vector_select(0, i[r : r + 1]), t[r : r + 1])
    nisa.dma_copy(t, out.vector_select(0, i))
    nisa.dma_copy(out.vector_select(0, i), t)
    return out


def test_a_long_history_of_rows_is_still_one_of_rows(monkeypatch):
    monkeypatch.setattr("v41.backends.neuron.sim.storage.LIMIT", 16)
    x = normal(96, 8)
    got, report = sim.profile(row_by_row)(x, np.arange(96, dtype=np.uint32)[:, None])
    assert np.array_equal(got, x) and report.warnings == ()


def scatter(cache, rows, idx):
    """cache[idx] = rows, out-of-range rows dropped."""
    i = nl.ndarray(idx.shape, nl.uint32)
    t = nl.ndarray(rows.shape, rows.dtype)
    nisa.dma_copy(i, idx)
    nisa.dma_copy(t, rows)
    nisa.dma_copy(cache.vector_select(0, i), t, oob_mode=nisa.oob_mode.skip)
    return cache


def test_a_scatter_writes_rows_of_a_returned_cache_and_leaves_the_argument_alone():
    rows, idx = normal(4, 24, seed=2), np.array([[7], [SKIPPED], [0], [49]], np.uint32)
    before = TABLE.copy()
    got = sim.simulate(scatter)(TABLE, rows, idx)
    want = TABLE.copy()
    want[[7, 0, 49]] = rows[[0, 2, 3]]
    assert np.array_equal(got, want) and np.array_equal(TABLE, before)


def test_torch_tensors_come_back_as_torch_tensors():
    table, rows = torch.randn(50, 24).bfloat16(), torch.randn(2, 24).bfloat16()
    idx = torch.tensor([[5], [6]], dtype=torch.int32).view(torch.uint32)
    got = sim.simulate(scatter)(table, rows, idx)
    want = table.clone()
    want[5:7] = rows
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


def test_read_modify_write_gathers_and_scatters_add_in_float32():
    idx, add = np.array([[4], [9], [1]], np.uint32), normal(3, 24, seed=3)

    def kernel(x, i, a):
        ix, t = nl.ndarray((3, 1), nl.uint32), nl.ndarray((3, 24), x.dtype)
        nisa.dma_copy(ix, i)
        nisa.dma_copy(t, a)
        rows = x.ap([[24, 3], [1, 24]], vector_offset=ix)
        total = nl.ndarray((3, 24), x.dtype)
        nisa.dma_compute(total, [t, rows], nl.add)
        nisa.dma_compute(rows, [rows, t], nl.add)
        out = nl.ndarray((3, 24), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_compute(out, [total, total], nl.add)
        return x, out

    x, out = sim.simulate(kernel)(TABLE, idx, add)
    want = TABLE.copy()
    want[idx[:, 0]] += add
    assert np.array_equal(x, want) and np.array_equal(out, 2 * (TABLE[idx[:, 0]] + add))


@pytest.mark.parametrize("shape", [(48, 64), (3, 16, 64), (2, 3, 5, 32)])
def test_dma_transpose_permutes_as_documented(shape):
    a = rng().integers(0, 65536, shape, dtype=np.uint16)
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]

    def kernel(x):
        t = nl.ndarray([x.shape[i] for i in axes], x.dtype)
        nisa.dma_transpose(t, x)
        out = nl.ndarray(t.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out

    assert np.array_equal(sim.simulate(kernel, NO_LINT)(a), a.transpose(axes))


def test_a_gathering_transpose_flattens_its_index_column_first():
    a = rng().integers(0, 65536, (300, 128), dtype=np.uint16)
    idx = rng(1).integers(0, 300, (128, 2), dtype=np.uint32)

    def kernel(x, i):
        ix, t = nl.ndarray((128, 2), nl.uint32), nl.ndarray((128, 256), x.dtype)
        nisa.dma_copy(ix, i)
        nisa.dma_transpose(t, x.ap([[128, 256], [1, 128]], vector_offset=ix, indirect_dim=0), axes=(1, 0))
        out = nl.ndarray((128, 256), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out

    assert np.array_equal(sim.simulate(kernel)(a, idx), a[idx.T.reshape(-1)].T)


def dynamic_rows(x, n):
    """Sum of the first n rows, n known at run time only; also their count."""
    acc = nl.ndarray((1, x.shape[1]), nl.float32)
    nisa.memset(acc, 0.0)
    limit = nl.ndarray((1, 1), nl.int32)
    nisa.dma_copy(limit, n)
    upper = nisa.register_alloc()
    nisa.register_load(upper, limit)
    seen = nl.ndarray((1, 1), nl.int32)
    nisa.memset(seen, 0)

    def body(i):
        row = nl.ndarray((1, x.shape[1]), x.dtype)
        nisa.dma_copy(row, x.ap([[x.shape[1], 1], [1, x.shape[1]]], scalar_offset=i, indirect_dim=0))
        nisa.tensor_tensor(acc, acc, row, nl.add)
        nisa.register_store(seen, i)

    nl.fori_loop(0, upper, body)
    out = nl.ndarray(acc.shape, nl.float32, buffer=nl.shared_hbm)
    last = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
    nisa.dma_copy(out, acc)
    nisa.dma_copy(last, seen)
    return out, last


@pytest.mark.parametrize("n", [0, 1, 17, 50])
def test_a_fori_loop_runs_to_a_bound_that_is_data(n):
    x = rng().integers(-9, 10, (50, 24)).astype(np.float32)
    out, last = sim.simulate(dynamic_rows)(x, np.array([[n]], np.int32))
    assert np.array_equal(out[0], x[:n].sum(0)) and last[0, 0] == max(n - 1, 0)


def countdown(x):
    """Doubles x until its integer counter is 0."""
    t, count, one = nl.ndarray((1, 8), nl.float32), nl.ndarray((1, 1), nl.int32), nl.ndarray((1, 1), nl.int32)
    nisa.dma_copy(t, x)
    nisa.memset(count, 5)
    nisa.memset(one, 1)
    reg = nisa.register_alloc()
    nisa.register_load(reg, count)

    def body(r):
        nisa.tensor_tensor(t, t, t, nl.add)
        nisa.tensor_tensor(count, count, one, nl.subtract)
        nisa.register_load(r, count)
        return r

    nl.while_loop(reg, body)
    out = nl.ndarray((1, 8), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


def test_a_while_loop_follows_the_register_that_its_body_returns():
    assert np.array_equal(sim.simulate(countdown)(np.ones((1, 8), np.float32)), np.full((1, 8), 32.0))


def test_a_dynamic_select_uses_a_uint32_tile_and_checks_the_range():
    def kernel(x, n):
        i = nl.ndarray((1, 1), nl.uint32)
        nisa.dma_copy(i, n)
        out = nl.ndarray((24,), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x.select(0, i))
        return out

    assert np.array_equal(sim.simulate(kernel)(TABLE, np.array([[31]], np.uint32)), TABLE[31])
    assert broken(kernel, TABLE, np.array([[50]], np.uint32)).rule == "OP-OOB"


def test_dynamic_reads_on_chip_move_along_a_free_dimension():
    def kernel(x, n):
        t, i = nl.ndarray((50, 24), x.dtype), nl.ndarray((1, 1), nl.uint32)
        nisa.dma_copy(t, x)
        nisa.dma_copy(i, n)
        column = nl.ndarray((50, 2), x.dtype)
        nisa.tensor_copy(column, t.ap([[24, 50], [1, 2]], scalar_offset=i, indirect_dim=1))
        out = nl.ndarray((50, 2), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, column)
        return out

    assert np.array_equal(sim.simulate(kernel)(TABLE, np.array([[9]], np.uint32)), TABLE[:, 9:11])


def test_registers_move_and_store():
    def kernel(x):
        a, b = nisa.register_alloc(41), nisa.register_alloc()
        nisa.register_move(b, a)
        nisa.register_move(a, 7)
        t = nl.ndarray((1, 2), nl.int32)
        nisa.register_store(t[:, 0:1], a)
        nisa.register_store(t[:, 1:2], b)
        out = nl.ndarray((1, 2), nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out

    assert sim.simulate(kernel)(TABLE).tolist() == [[7, 41]]


def test_constants_and_convenience_loads():
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)

    def kernel(x):
        c = nl.load(nl.shared_constant(GRID))
        t = nl.load(x)
        s = nl.sum(t, axis=1, keepdims=True)
        b = nl.broadcast_to(c[0:1, :], (3, 4))
        out = nl.ndarray((3, 4), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.add(nl.multiply(t, b), nl.broadcast_to(s, (3, 4))))
        return out

    assert np.array_equal(sim.simulate(kernel)(grid), grid * GRID[:1] + grid.sum(1, keepdims=True))


GRID = np.arange(12, dtype=np.float32).reshape(3, 4) - 2
