# SPDX-License-Identifier: Apache-2.0
"""View methods against numpy on the same elements, and the constraints that they keep."""

import numpy as np
import pytest
from simkit import NO_LINT, broken, numbers

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

DATA = np.arange(128 * 24, dtype=np.float32).reshape(128, 24)

ON_CHIP = {
    "slice": (lambda t: t[:, 4:20], lambda a: a[:, 4:20]),
    "step": (lambda t: t[:, 1:24:5], lambda a: a[:, 1:24:5]),
    "negative": (lambda t: t[:, -8:-2], lambda a: a[:, -8:-2]),
    "partitions": (lambda t: t[32:64, :], lambda a: a[32:64]),
    "one partition": (lambda t: t[64, :], lambda a: a[64:65]),
    "one column": (lambda t: t[:, 7], lambda a: a[:, 7:8]),
    "ellipsis": (lambda t: t[..., 3], lambda a: a[:, 3:4]),
    "ds": (lambda t: t[nl.ds(96, 32), nl.ds(2, 3)], lambda a: a[96:128, 2:5]),
    "slice method": (lambda t: t.slice(1, 2, 22, 4), lambda a: a[:, 2:22:4]),
    "select": (lambda t: t.reshape((128, 4, 6)).select(1, 2), lambda a: a.reshape(128, 4, 6)[:, 2]),
    "permute": (lambda t: t.reshape_dim(1, (4, 6)).permute((0, 2, 1)), lambda a: a.reshape(128, 4, 6).transpose(0, 2, 1)),
    "broadcast": (lambda t: t[:, 0:1].broadcast(1, 9), lambda a: np.broadcast_to(a[:, 0:1], (128, 9))),
    "expand": (lambda t: t.expand_dim(1), lambda a: a[:, None]),
    "squeeze": (lambda t: t.expand_dim(2).squeeze_dim(2), lambda a: a),
    "split": (lambda t: t.reshape_dim(1, (-1, 3)), lambda a: a.reshape(128, 8, 3)),
    "flatten": (lambda t: t.reshape_dim(1, (2, 3, 4)).flatten_dims(2, 3), lambda a: a.reshape(128, 2, 12)),
    "rearrange": (
        lambda t: t.rearrange(("p", ("h", "w")), ("p", "w", "h"), {"h": 4}),
        lambda a: a.reshape(128, 4, 6).transpose(0, 2, 1),
    ),
    "view narrower": (lambda t: t.view(nl.uint16), lambda a: a.view(np.uint16)),
    "view same size": (lambda t: t[:, 4:8].view(nl.int32), lambda a: a[:, 4:8].copy().view(np.int32)),
    "ap": (lambda t: t.ap([[24, 128], [6, 4], [1, 3]], offset=2), lambda a: a.reshape(128, 4, 6)[:, :, 2:5]),
    "ap backward": (lambda t: t.ap([[24, 128], [-2, 5]], offset=20), lambda a: a[:, 20:11:-2]),
    "ap stride 0": (lambda t: t.ap([[24, 128], [1, 2], [0, 5]]), lambda a: np.repeat(a[:, :2, None], 5, 2)),
    "ap keeps the base": (lambda t: t[:, 8:16].ap([[24, 128], [1, 4]]), lambda a: a[:, 8:12]),
    "ap adds to the base": (lambda t: t[:, 8:16].ap([[24, 128], [1, 4]], offset=3), lambda a: a[:, 11:15]),
    "ap other dtype": (lambda t: t.ap([[48, 128], [2, 24]], offset=1, dtype=nl.uint16), lambda a: a.view(np.uint16)[:, 1::2]),
}


@pytest.mark.parametrize("case", ON_CHIP)
def test_an_on_chip_view_reads_the_elements_that_numpy_reads(case):
    view, want = ON_CHIP[case]

    def kernel(a):
        t = nl.ndarray(a.shape, a.dtype)
        nisa.dma_copy(t, a)
        v = view(t)
        out = nl.ndarray(v.shape, v.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, v)
        return out

    got = numbers(sim.simulate(kernel, NO_LINT)(DATA))
    assert got.shape == want(DATA).shape and np.array_equal(got, want(DATA))


NOT_FOR_WRITES = {"broadcast", "ap stride 0", "view narrower", "view same size", "ap other dtype"}


@pytest.mark.parametrize("case", sorted(set(ON_CHIP) - NOT_FOR_WRITES))
def test_an_on_chip_view_writes_only_its_elements(case):
    view, want = ON_CHIP[case]

    def kernel(a):
        t = nl.ndarray(a.shape, a.dtype)
        nisa.dma_copy(t, a)
        nisa.memset(view(t), -1)
        out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out

    expected = DATA.copy()
    # DATA counts its own elements, so the values that numpy selects are the flat positions.
    expected.reshape(-1)[want(DATA).reshape(-1).astype(int)] = -1
    assert np.array_equal(sim.simulate(kernel, NO_LINT)(DATA), expected)


def test_hbm_views_drop_indexed_dimensions_and_permute_freely():
    a = np.arange(2 * 3 * 8, dtype=np.int32).reshape(2, 3, 8)

    def kernel(x):
        out = nl.ndarray((8, 3), x.dtype, buffer=nl.shared_hbm)
        flat = nl.ndarray((24,), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x[1].permute((1, 0)))
        nisa.dma_copy(flat, x[0].reshape((24,)))
        return out, flat

    out, flat = sim.simulate(kernel)(a)
    assert np.array_equal(out, a[1].T) and np.array_equal(flat, a[0].reshape(-1))


def test_a_row_is_replicated_to_all_partitions_by_a_stride_0_dma():
    a = np.arange(40, dtype=np.float32).reshape(2, 20)

    def kernel(x):
        t = nl.ndarray((128, 20), x.dtype)
        nisa.dma_copy(t, x.ap([[0, 128], [1, 20]], offset=20))
        out = nl.ndarray((128, 20), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out

    assert np.array_equal(sim.simulate(kernel)(a), np.broadcast_to(a[1], (128, 20)))


REFUSED = {
    "slice past the end": (lambda t: t[:, 0:25], "MEM-BOUNDS"),
    "empty slice": (lambda t: t[:, 3:3], "MEM-BOUNDS"),
    "index past the end": (lambda t: t[:, 24], "MEM-BOUNDS"),
    "float slice": (lambda t: t[:, 0:2.0], "OP-ARG"),
    "permute partitions": (lambda t: t.permute((1, 0)), "MEM-VIEW"),
    "broadcast partitions": (lambda t: t[0:1].broadcast(0, 4), "MEM-VIEW"),
    "broadcast a wide dimension": (lambda t: t.broadcast(1, 4), "MEM-VIEW"),
    "split partitions": (lambda t: t.reshape_dim(0, (2, 64)), "MEM-VIEW"),
    "flatten partitions": (lambda t: t.flatten_dims(0, 1), "MEM-VIEW"),
    "reshape partitions": (lambda t: t.reshape((64, 48)), "MEM-VIEW"),
    "reshape to another size": (lambda t: t.reshape((128, 23)), "MEM-VIEW"),
    "reshape a strided slice": (lambda t: t.reshape((128, 4, 6))[:, :, 0:3].reshape((128, 12)), "MEM-VIEW"),
    "squeeze a wide dimension": (lambda t: t.squeeze_dim(1), "MEM-VIEW"),
    "view of a strided row": (lambda t: t[:, 0:8:2].view(nl.uint8), "MEM-VIEW"),
    "view that does not divide": (lambda t: t.view(nl.uint8)[:, 0:6].view(nl.float32), "MEM-VIEW"),
    "six dimensions": (lambda t: t.reshape((128, 2, 2, 2, 3)).expand_dim(1), "MEM-DIMS"),
    "ap past the storage": (lambda t: t.ap([[24, 129], [1, 24]]), "MEM-BOUNDS"),
    "ap past the partition": (lambda t: t.ap([[24, 128], [1, 25]]), "MEM-BOUNDS"),
    "ap with a foreign partition stride": (lambda t: t.ap([[23, 128], [1, 1]]), "MEM-BOUNDS"),
    "vector_select on chip": (lambda t: t.vector_select(0, t), "PLACE-GATHER"),
    "gen4 indirection": (lambda t: t.indirect(t), "OP-GEN4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_view_that_breaks_its_constraint_is_refused(case):
    view, rule = REFUSED[case]

    def kernel(a):
        view(nl.ndarray(a.shape, a.dtype))

    assert broken(kernel, DATA, policy=NO_LINT).rule == rule
