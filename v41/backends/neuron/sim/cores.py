# SPDX-License-Identifier: Apache-2.0
"""Two programs of one kernel: they run one at a time, hand over at barriers and sendrecv, and can never hang."""

import threading

import numpy as np

from v41.backends.neuron.sim.context import fail
from v41.backends.neuron.sim.cost import DMA_FIXED, SENDRECV_FIXED, dma_busy
from v41.backends.neuron.sim.enums import dma_engine as transports
from v41.backends.neuron.sim.enums import engine as engines
from v41.backends.neuron.sim.instr import Instr
from v41.backends.neuron.sim.memory import SBUF, SHARED_HBM

GPSIMD_LIMIT = {4: 1024, 2: 512, 1: 256}


class Aborted(Exception):
    """The other program failed; this one stops without a report of its own."""


class Pair:
    """The baton between two programs: a program runs until it meets the other, ends or fails."""

    def __init__(self):
        self.cond = threading.Condition()
        self.turn = 0
        self.done = [False, False]
        self.failed = False
        self.offers = [None, None]
        self.results = [None, None]
        self.shared = []

    def wait_turn(self, me):
        """Block until it is this program's turn."""
        with self.cond:
            self.cond.wait_for(lambda: self.turn == me or self.failed)
            if self.failed:
                raise Aborted

    def meet(self, me, offer):
        """Exchange offers; (other's offer, whether this program came second), or (None, True) when the other has ended.

        The second to arrive keeps the baton; the first resumes when the second next waits or ends.
        """
        with self.cond:
            if self.offers[1 - me] is not None:
                theirs, self.offers[1 - me] = self.offers[1 - me], None
                self.results[1 - me] = offer
                return theirs, True
            if self.done[1 - me]:
                return None, True
            self.offers[me] = offer
            self.turn = 1 - me
            self.cond.notify_all()
            self.cond.wait_for(lambda: self.turn == me or self.failed)
            if self.failed:
                raise Aborted
            theirs, self.results[me], self.offers[me] = self.results[me], None, None
            return theirs, False

    def finish(self, me, failed):
        """This program has ended."""
        with self.cond:
            self.done[me] = True
            self.failed = self.failed or failed
            self.turn = 1 - me
            self.cond.notify_all()


def _rendezvous(ins, kind, key, payload):
    """(the other program's payload, its clock, whether this one came second); LNC-RENDEZVOUS when it never comes or does not match."""
    program = ins.program
    if program.pair is None:
        ins.fail("LNC-RENDEZVOUS", "one program only: nobody to meet")
        return None, None, False
    mine = (kind, key, payload, program.clock.now())
    other, second = program.pair.meet(program.index, mine)
    if other is None:
        ins.fail("LNC-RENDEZVOUS", f"core {program.index} waits at {kind} {key}; the other core's program has ended")
    if other[:2] != mine[:2]:
        ins.fail("LNC-RENDEZVOUS", f"core {program.index} is at {kind} {key}, the other core at {other[0]} {other[1]}")
    return other[2], other[3], second


def core_barrier(data, cores=(0, 1), engine=engines.gpsimd, name=None):
    """Both cores wait for each other; orders accesses to `data` (shared HBM)."""
    ins = Instr("nisa.core_barrier")
    t = ins.tensor("data", data, (SHARED_HBM,))
    if tuple(cores) != (0, 1):
        ins.fail("LNC-RENDEZVOUS", f"cores {cores}; only (0, 1)", "cores")
    if not isinstance(engine, engines):
        ins.fail("OP-ARG", f"{engine!r}", "engine")
    other, clock, second = _rendezvous(ins, "core_barrier", t.shape, t.storage)
    if other is not None and other is not t.storage:
        ins.fail("LNC-RENDEZVOUS", f"the other core's barrier is on another tensor than {t!r}", "data")
    ins.finish(engine.name if engine is not engines.unknown else "gpsimd", 0.1)
    # The second to arrive opens the new epoch, before either continues.
    t.storage.epoch += second
    ins.program.clock.barrier(SENDRECV_FIXED, clock)


def sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=transports.dma, name=None):
    """Exchange SBUF tiles: src goes to the other core's dst."""
    ins = Instr("nisa.sendrecv")
    src, dst = ins.tensor("src", src, (SBUF,)), ins.tensor("dst", dst, (SBUF,))
    other = 1 - ins.program.index
    if (send_to_rank, recv_from_rank) != (other, other):
        ins.fail("LNC-RENDEZVOUS", f"core {1 - other} sends to {send_to_rank}, receives from {recv_from_rank}", "send_to_rank")
    if src.shape != dst.shape:
        ins.fail("MEM-SHAPE", f"src {src.shape}, dst {dst.shape}", "dst")
    ins.same_dtype(("src", src), ("dst", dst))
    row = src.size // src.shape[0] * src.itemsize
    if dma_engine is transports.gpsimd_dma and row > GPSIMD_LIMIT[src.itemsize]:
        ins.fail("MEM-RANGE", f"{row} bytes per partition; gpsimd_dma takes {GPSIMD_LIMIT[src.itemsize]}", "dma_engine")
    key = (pipe_id, src.shape, src.dtype, dma_engine.name)
    values, clock, _ = _rendezvous(ins, "sendrecv", key, np.array(ins.raw("src", src)))
    if values is None:
        return
    ins.put_raw("dst", dst, values)
    ins.finish("dma", dma_busy(src.size * src.itemsize, row), DMA_FIXED)
    ins.program.clock.barrier(SENDRECV_FIXED - DMA_FIXED, clock)


def shared_allocation(program, make, shape, dtype):
    """The n-th shared tensor of both programs is one storage; LNC-SHARED when they ask for different ones."""
    if program.pair is None:
        return make()
    position = len(program.shared)
    if position == len(program.pair.shared):
        program.pair.shared.append((make(), tuple(shape), dtype))
    storage, other_shape, other_dtype = program.pair.shared[position]
    if (tuple(shape), dtype) != (other_shape, other_dtype):
        detail = f"shared tensor {position} is {tuple(shape)} {dtype} here and {other_shape} {other_dtype} on the other core"
        fail("LNC-SHARED", detail, "nl.ndarray")
    program.shared.append(storage)
    return storage
