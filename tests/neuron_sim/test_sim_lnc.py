# SPDX-License-Identifier: Apache-2.0
"""Two programs: exchange, barriers, results; nothing hangs and every run is the same."""

import threading

import numpy as np
from simkit import NO_LINT, broken, rng

from v41.backends.neuron import sim
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl

X = rng().integers(-9, 10, (4, 64)).astype(np.float32)


@sim.jit
def split_sum(x):
    """Each core sums half of the columns, the halves are exchanged, each core stores half of the rows."""
    me = nl.program_id(0)
    half = x.shape[1] // nl.num_programs(0)
    t = nl.ndarray((x.shape[0], half), x.dtype)
    nisa.dma_copy(t, x[:, me * half : me * half + half])
    mine, theirs = nl.ndarray((x.shape[0], 1), nl.float32), nl.ndarray((x.shape[0], 1), nl.float32)
    nisa.tensor_reduce(mine, nl.add, t, 1)
    nisa.sendrecv(mine, theirs, send_to_rank=1 - me, recv_from_rank=1 - me, pipe_id=0)
    nisa.tensor_tensor(mine, mine, theirs, nl.add)
    out = nl.ndarray((x.shape[0], 1), nl.float32, buffer=nl.shared_hbm)
    rows = x.shape[0] // 2
    nisa.dma_copy(out[me * rows : me * rows + rows], mine[me * rows : me * rows + rows])
    return out


def test_sendrecv_swaps_tiles():
    assert np.array_equal(sim.simulate(split_sum[2])(X)[:, 0], X.sum(1))


@sim.jit
def through_hbm(x):
    """Each core writes a row, both wait, each reads the other's row."""
    me = nl.program_id()
    shared = nl.ndarray((2, x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray((1, x.shape[1]), x.dtype)
    nisa.dma_copy(t, x[me : me + 1])
    nisa.dma_copy(shared[me : me + 1], t)
    nisa.core_barrier(shared)
    other = nl.ndarray((1, x.shape[1]), x.dtype)
    nisa.dma_copy(other, shared[1 - me : 2 - me])
    out = nl.ndarray((2, x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out[me : me + 1], other)
    return out


def test_a_barrier_makes_the_other_cores_rows_visible():
    out, report = sim.profile(through_hbm[2], sim.PEDANTIC)(X)
    assert np.array_equal(out, X[[1, 0]]) and report.warnings == () and report.cores == 2


@sim.jit
def without_barrier(x):
    """through_hbm with the barrier left out."""
    me = nl.program_id()
    shared = nl.ndarray((2, x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    t = nl.ndarray((1, x.shape[1]), x.dtype)
    nisa.dma_copy(t, x[me : me + 1])
    nisa.dma_copy(shared[me : me + 1], t)
    other = nl.ndarray((1, x.shape[1]), x.dtype)
    nisa.dma_copy(other, shared[1 - me : 2 - me])
    return shared


def test_a_missing_barrier_is_a_read_of_unwritten_bytes_every_time():
    assert {broken(without_barrier[2], X).rule for _ in range(5)} == {"INIT-POISON"}


@sim.jit
def written_after_read(x):
    """Core 1 overwrites, with no barrier, a row that core 0 has read."""
    me = nl.program_id()
    t = nl.ndarray((1, x.shape[1]), x.dtype)
    nisa.dma_copy(t, x[0:1])
    nisa.dma_copy(x[me : me + 1], t)
    return x


def test_a_write_behind_the_other_cores_back_is_reported():
    report = sim.profile(written_after_read[2])(X)[1]
    assert "LNC-READ" in {w.rule for w in report.warnings}


@sim.jit
def two_trips(x, n):
    """A loop whose trip count differs between the cores, with a barrier inside."""
    me = nl.program_id()
    out = nl.ndarray((2, 1), nl.int32, buffer=nl.shared_hbm)
    t = nl.ndarray((1, 1), nl.int32)
    nisa.dma_copy(t, n[me : me + 1])
    upper = nisa.register_alloc()
    nisa.register_load(upper, t)

    def body(i):
        nisa.core_barrier(out)

    nl.fori_loop(0, upper, body)
    nisa.dma_copy(out[me : me + 1], t)
    return out


def test_a_barrier_that_one_core_never_reaches_ends_in_an_error_not_in_a_hang():
    n = np.array([[2], [3]], np.int32)
    found = []
    thread = threading.Thread(target=lambda: found.append(broken(two_trips[2], X, n)), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and found[0].rule == "LNC-RENDEZVOUS"
    assert "has ended" in str(found[0])
    same = sim.simulate(two_trips[2])(X, np.array([[3], [3]], np.int32))
    assert same.tolist() == [[3], [3]]


@sim.jit
def uneven_loop(x, n):
    """Different trip counts without anything to meet at: the traced program is the same."""
    me = nl.program_id()
    t, acc = nl.ndarray((1, 1), nl.int32), nl.ndarray((1, 8), nl.float32)
    nisa.memset(acc, 0.0)
    nisa.dma_copy(t, n[me : me + 1])
    upper = nisa.register_alloc()
    nisa.register_load(upper, t)

    def body(i):
        nisa.tensor_scalar(acc, acc, nl.add, 1.0)

    nl.fori_loop(0, upper, body)
    out = nl.ndarray((2, 8), nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(out[me : me + 1], acc)
    return out


def test_trip_counts_may_differ_between_the_cores():
    for counts in ([[2], [5]], [[0], [4]], [[3], [0]]):
        out, report = sim.profile(uneven_loop[2], sim.PEDANTIC)(X, np.array(counts, np.int32))
        assert out[:, 0].tolist() == [c[0] for c in counts] and report.warnings == ()


def test_an_error_on_one_core_is_the_error_of_the_run():
    def kernel(x):
        me = nl.program_id()
        t = nl.ndarray((1, 8), nl.float32)
        if me == 1:
            nisa.tensor_copy(t, t)
        nisa.sendrecv(t, t, 1 - me, 1 - me, 0)

    error = broken(sim.jit(kernel)[2], X, policy=NO_LINT)
    assert error.rule == "INIT-POISON" and error.op in ("nisa.tensor_copy", "nisa.sendrecv")


def test_grids_of_one_and_none_differ_only_in_program_ndim():
    def kernel(x):
        t = nl.ndarray((1, 2), nl.int32)
        nisa.memset(t[:, 0:1], nl.program_ndim())
        nisa.memset(t[:, 1:2], nl.num_programs())
        out = nl.ndarray((1, 2), nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, t)
        return out

    assert sim.simulate(sim.jit(kernel))(X).tolist() == [[0, 1]]
    assert sim.simulate(sim.jit(kernel)[1])(X).tolist() == [[1, 1]]
    assert sim.simulate(sim.jit(kernel)[2], sim.Policy(frozenset({"LNC-WRITE-SAME"})))(X).tolist() == [[1, 2]]
