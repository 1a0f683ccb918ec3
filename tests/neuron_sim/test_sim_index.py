# SPDX-License-Identifier: Apache-2.0
"""Searching and GpSimd library instructions against Python loops, ties included."""

import numpy as np
import pytest
from simkit import NO_LINT, bf16, normal, one, rng, run

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

TIES = rng().integers(0, 6, (16, 40)).astype(np.float32)


def find_by_loop(data, vals, order):
    out = np.full(vals.shape, -1)
    for p in range(len(data)):
        left = list(range(data.shape[1]))
        for i in order:
            hit = [j for j in left if data[p, j] == vals[p, i]]
            if hit:
                out[p, i] = hit[0]
                left.remove(hit[0])
    return out


def test_max8_repeats_equal_values_in_descending_order():
    got = one(lambda o, x: nisa.max8(o, x), ((16, 8), nl.float32), TIES)
    assert np.array_equal(got, np.sort(TIES, 1)[:, ::-1][:, :8])


def test_find_index8_gives_repeats_ascending_and_all_ones_when_absent():
    vals = np.tile(np.array([5, 5, 5, 0, 3, 99, 1, 5], np.float32), (16, 1))

    def body(o, x, v):
        nisa.nc_find_index8(o[0], x, v)
        nisa.nc_find_index8(o[1], x, v)

    got = run(body, [((16, 8), nl.uint32), ((16, 8), nl.uint16)], TIES, vals)
    want = find_by_loop(TIES, vals, range(8))
    assert np.array_equal(got[0], np.where(want < 0, 0xFFFFFFFF, want))
    assert np.array_equal(got[1], np.where(want < 0, 0xFFFF, want))


def test_match_replace8_pairs_repeats_in_descending_order():
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)

    def body(o, x, v):
        nisa.nc_match_replace8(o[0], x, v, -1.0, o[1])

    got = run(body, [(data.shape, nl.float32), ((1, 8), nl.uint32)], data, vals)
    assert got[1].tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    assert got[0].tolist() == [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]]


def test_top_k_by_rounds_of_max8_gives_the_lower_index_among_ties():
    k = 24

    def body(o, x):
        work = nl.ndarray(x.shape, x.dtype)
        nisa.tensor_copy(work, x)
        for r in range(k // 8):
            best = o[0][:, r * 8 : r * 8 + 8]
            nisa.max8(best, work)
            nisa.nc_match_replace8(work, work, best, -1.0, o[1][:, r * 8 : r * 8 + 8])

    values, index = run(body, [((16, k), nl.float32), ((16, k), nl.uint32)], TIES)
    order = np.argsort(-TIES, axis=1, kind="stable")[:, :k]
    assert np.array_equal(values, np.take_along_axis(TIES, order, 1))
    for p in range(16):
        assert sorted(index[p]) == sorted(order[p])


def test_nonzero_with_count_touches_every_sixteenth_partition_only():
    a = (rng(2).random((32, 20)) < 0.4).astype(np.float32)

    def body(o, x):
        nisa.memset(o, -7)
        nisa.nonzero_with_count(o, x, index_offset=100, padding_val=-1)

    got = one(body, ((32, 21), nl.int32), a)
    for p in range(32):
        hits = np.flatnonzero(a[p])
        row = [*(hits + 100), *([-1] * (20 - len(hits))), len(hits)] if p % 16 == 0 else [-7] * 21
        assert got[p].tolist() == row


def test_topk_reads_the_snake_and_returns_ascending_values():
    n, k = 75, 10
    flat = rng(5).permutation(200)[:n].astype(np.float32)
    a = np.zeros((16, 5), np.float32)
    for e in range(n):
        a[e % 16, e // 16] = flat[e]

    got = run(lambda o, x: nisa.topk(o[0], o[1], x, n), [((16, k), nl.bfloat16), ((16, k), nl.uint32)], sim.typed(a, "bfloat16"))
    order = np.argsort(flat)[n - k :]
    assert np.array_equal(got[0], np.tile(bf16(flat[order]), (16, 1))) and np.array_equal(got[1], np.tile(order, (16, 1)))


def test_n_gather_takes_within_each_partition():
    a, i = normal(128, 3, 7), rng(1).integers(0, 21, (128, 5), dtype=np.uint32)

    def kernel(x, idx):
        t, j = nl.ndarray(x.shape, x.dtype), nl.ndarray(idx.shape, idx.dtype)
        nisa.dma_copy(t, x)
        nisa.dma_copy(j, idx)
        g = nl.ndarray(idx.shape, x.dtype)
        nisa.nc_n_gather(g, t, j)
        out = nl.ndarray(idx.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, g)
        return out

    got = sim.simulate(kernel)(a, i)
    assert np.array_equal(got, np.take_along_axis(a.reshape(128, -1), i.astype(int), 1))


def test_local_gather_shares_indices_within_sixteen_partitions():
    a, i = normal(32, 24), rng(1).integers(0, 10, (32, 2), dtype=np.uint16) * np.uint16(2)
    got = one(lambda o, x, j: nisa.local_gather(o, x, j, 2, 30), ((32, 60), nl.float32), a, i)
    for p in range(32):
        group = i[p // 16 * 16 : p // 16 * 16 + 16]
        flat = group.T.reshape(-1)[:30].astype(int)
        want = [a[p, f + d] for f in flat for d in (0, 1)]
        assert got[p].tolist() == want


@pytest.mark.parametrize("dtype", ["int32", "float32", "uint16", "bfloat16"])
def test_iota_counts_in_int32_and_casts(dtype):
    got = one(lambda o: nisa.iota(o, [[100, 2], [3, 4]], offset=5, channel_multiplier=7), ((32, 8), dtype))
    want = 5 + 7 * np.arange(32)[:, None] + (100 * np.arange(2)[:, None] + 3 * np.arange(4)).reshape(1, 8)
    assert np.array_equal(got, bf16(want) if dtype == "bfloat16" else want)


@pytest.mark.parametrize("op", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
def test_affine_select_makes_masks(op):
    a = normal(64, 32)
    got = one(lambda o, x: nisa.affine_select(o, [[-1, 32]], 1, x, -9.5, getattr(nl, op), offset=-3), (a.shape, nl.float32), a)
    value = -3 + np.arange(64)[:, None] - np.arange(32)
    assert np.array_equal(got, np.where(getattr(np, op)(value, 0), a, np.float32(-9.5)))


def test_searching_limits_are_the_documented_ones():
    wide = np.zeros((1, 16384), np.float32)
    wide[0, 16383] = 1.0
    got = one(lambda o, x: nisa.max8(o, x), ((1, 8), nl.float32), wide)
    assert got.tolist() == [[1.0] + [0.0] * 7]
    assert sim.simulate(lambda_free_max8, NO_LINT)(np.zeros((1, 8), np.float32)).shape == (1, 8)


def lambda_free_max8(a):
    """max8 of the smallest legal row."""
    t, m = nl.ndarray(a.shape, a.dtype), nl.ndarray((1, 8), a.dtype)
    nisa.dma_copy(t, a)
    nisa.max8(m, t)
    out = nl.ndarray((1, 8), a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, m)
    return out
