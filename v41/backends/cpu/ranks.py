# SPDX-License-Identifier: Apache-2.0
"""All ranks of a mesh in one process (docs/sharding.md 6): a thread each, of which one runs at a time, in rank order, up to its next collective.

So a run is deterministic, sums are taken in the order of the ranks, and what cannot go on is seen at once: a rank that fails, one that
comes to another collective than its group, one that returned while others wait for it.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Semaphore, Thread
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from v41.backends.cpu import backend as cpu
from v41.backends.cpu.linears import partial_shared_expert
from v41.backends.cpu.moe import partial_experts
from v41.backends.sharded import Wire, sharded
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.spec.backend import Backend

PATIENCE = 600.0  # seconds that a rank may compute between two collectives
CPU_BODIES: dict[str, Callable] = {"experts": partial_experts, "shared_expert": partial_shared_expert}


class RankError(RuntimeError):
    """A run of ranks that could not go on; the message names the rank and its place."""


class Stopped(BaseException):
    """Ends the thread of a rank after another one failed."""


class Meeting(NamedTuple):
    """One collective as a rank comes to it."""

    kind: str  # reduce or gather
    mesh_axes: tuple[str, ...]
    axis: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kind} of {self.axis} over {' x '.join(self.mesh_axes)}, {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass
class Seat:
    """One rank of a run: its thread, what it waits in, and how it ended."""

    rank: int
    meetings: list[Meeting] = field(default_factory=list)
    go: Semaphore = field(default_factory=lambda: Semaphore(0))
    thread: Thread | None = None
    offer: Tensor | None = None
    answer: Tensor | None = None
    done: bool = False
    stop: bool = False
    value: Any = None
    error: BaseException | None = None

    @property
    def waits(self) -> bool:
        """Whether it waits for its group."""
        return not self.done and self.offer is not None


class Run(NamedTuple):
    """What a run gives: the value of every rank, and the collectives of every rank in their order."""

    values: list[Any]
    meetings: list[list[Meeting]]


def spec_line(frames: list[tuple[str, int]]) -> str:
    """The innermost line of the spec among frames, else the innermost of all."""
    inner = [f for f in frames if "/spec/" in f[0]] or frames[:1]
    file, line = inner[0]
    return f"{'/'.join(file.rsplit('/', 2)[-2:])}:{line}"


def place_of(seat: Seat) -> str:
    """Where a rank stands or failed: collectives behind it, and the line."""
    frames: list[tuple[str, int]] = []
    frame: FrameType | None = sys._current_frames().get(seat.thread.ident or 0) if seat.thread and not seat.done else None
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    trace: TracebackType | None = seat.error.__traceback__ if seat.error else None
    while trace is not None:
        frames.insert(0, (trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return f"after {len(seat.meetings) - seat.waits} collectives" + (f" at {spec_line(frames)}" if frames else "")


@dataclass(frozen=True)
class Table:
    """The ranks of a run, and the semaphore by which a rank gives the turn back."""

    mesh: Mesh
    seats: list[Seat]
    back: Semaphore
    watch: Callable[[int, Meeting, Tensor], None]

    def meet(self, seat: Seat, meeting: Meeting, tensor: Tensor) -> Tensor:
        """In the thread of a rank: waits for its group."""
        self.watch(seat.rank, meeting, tensor)
        seat.meetings.append(meeting)
        seat.offer = tensor
        self.back.release()
        seat.go.acquire()
        if seat.stop:
            raise Stopped
        answer, seat.answer, seat.offer = seat.answer, None, None
        assert answer is not None
        return answer

    def wire(self, seat: Seat) -> Wire:
        """How the backend of a rank meets the others."""

        def call(kind: str) -> Callable[[Tensor, tuple[str, ...], str], Tensor]:
            return lambda t, axes, axis: self.meet(seat, Meeting(kind, axes, axis, tuple(t.shape), t.dtype), t)

        return Wire(call("reduce"), call("gather"))

    def answered(self) -> list[Seat]:
        """The ranks whose group is complete, with their answers; RankError where one disagrees with its group."""
        ready: list[Seat] = []
        for seat in self.seats:
            if not seat.waits or seat.answer is not None:
                continue
            axes = seat.meetings[-1].mesh_axes
            group = [self.seats[r] for r in self.mesh.group(seat.rank, axes)]
            if not all(s.waits and s.answer is None and s.meetings[-1].mesh_axes == axes for s in group):
                continue
            agree(group)
            answer = combine(seat.meetings[-1].kind, [s.offer for s in group if s.offer is not None])
            for s in group:
                s.answer = answer
            ready += group
        return sorted(ready, key=lambda s: s.rank)

    def stuck(self) -> str:
        """Who waits in what, and who will not come."""
        lines = [f"rank {s.rank} waits in {s.meetings[-1]} ({place_of(s)})" for s in self.seats if s.waits]
        gone = [str(s.rank) for s in self.seats if s.done]
        return "; ".join(lines[:4]) + (f"; {len(lines) - 4} more wait" if len(lines) > 4 else "") + (f"; returned: {', '.join(gone)}" if gone else "")


def agree(group: list[Seat]) -> None:
    """RankError that names the first rank whose collective is not that of the others."""
    usual, _ = Counter(s.meetings[-1] for s in group).most_common(1)[0]
    for s in group:
        if s.meetings[-1] != usual:
            other = next(o for o in group if o.meetings[-1] == usual)
            raise RankError(f"rank {s.rank} comes to {s.meetings[-1]} ({place_of(s)}), rank {other.rank} of its group to {usual} ({place_of(other)})")


def combine(kind: str, offers: list[Tensor]) -> Tensor:
    """The sum in the order of the ranks, or all of them stacked."""
    if kind == "gather":
        return torch.stack(offers)
    total = offers[0]
    for offer in offers[1:]:
        total = total + offer
    return total


def work(table: Table, seat: Seat, fn: Callable[[int, Backend], Any], ops: Backend) -> None:
    """The thread of a rank. Threads and gradients are settings of a thread in torch."""
    seat.go.acquire()
    try:
        if not seat.stop:
            torch.set_num_threads(1)
            with torch.no_grad():
                seat.value = fn(seat.rank, ops)
    except Stopped:
        pass
    except BaseException as e:
        seat.error = e
    finally:
        seat.done = True
        table.back.release()


def take_turns(table: Table, patience: float) -> None:
    """Runs ranks in order, each up to its next collective, until all have returned."""
    ready = list(table.seats)
    while ready:
        for seat in ready:
            seat.go.release()
            if not table.back.acquire(timeout=patience):
                raise RankError(f"rank {seat.rank} has not come to its next collective for {patience:g} s ({place_of(seat)})")
            if seat.error is not None:
                raise RankError(f"rank {seat.rank} failed {place_of(seat)}: {type(seat.error).__name__}: {seat.error}") from seat.error
        ready = table.answered()
    if not all(s.done for s in table.seats):
        raise RankError(f"no rank can go on: {table.stuck()}")


def run_ranks(
    fn: Callable[[int, Backend], Any],
    mesh: Mesh,
    rules: Rules,
    *,
    ops: Backend = cpu,
    bodies: dict[str, Callable] | None = None,
    watch: Callable[[int, Meeting, Tensor], None] = lambda rank, meeting, tensor: None,
    patience: float = PATIENCE,
) -> Run:
    """fn(rank, backend) on every rank of the mesh; the backend's collectives meet those of the other ranks.

    RankError with rank and place where a rank fails, disagrees with its group on a collective, its axis, shape or dtype, returns while
    others wait for it, or computes for longer than `patience` seconds. watch(rank, collective, what the rank brings) sees every collective.
    """
    table = Table(mesh, [Seat(r) for r in range(mesh.size)], Semaphore(0), watch)
    for seat in table.seats:
        mine = sharded(ops, rules, mesh, torch.tensor(seat.rank, dtype=torch.int32), table.wire(seat), CPU_BODIES if bodies is None else bodies)
        seat.thread = Thread(target=work, args=(table, seat, fn, mine), daemon=True, name=f"rank {seat.rank}")
        seat.thread.start()
    try:
        take_turns(table, patience)
    finally:
        for seat in table.seats:
            seat.stop = True
            if not seat.done:
                seat.go.release()
    return Run([s.value for s in table.seats], [s.meetings for s in table.seats])
