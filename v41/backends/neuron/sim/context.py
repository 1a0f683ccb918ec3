# SPDX-License-Identifier: Apache-2.0
"""The program that is running: NKI calls have no context argument, so a context variable carries it."""

from contextvars import ContextVar

from v41.backends.neuron.sim.cost import Clock
from v41.backends.neuron.sim.errors import Note, SimError, caller
from v41.backends.neuron.sim.lanes import UNDEFINED
from v41.backends.neuron.sim.memory import Chip, OutOfMemory
from v41.backends.neuron.sim.rules import STRICT

CURRENT = ContextVar("v41_nki_program", default=None)
MAX_INSTRUCTIONS = 5_000_000


class Program:
    """State of one program (one physical core) of a kernel run."""

    def __init__(self, kernel, index=0, count=1, grid=0, policy=STRICT, pair=None):
        self.kernel, self.index, self.count, self.grid = kernel, index, count, grid
        self.policy, self.pair = policy, pair
        self.chip = Chip()
        self.clock = Clock()
        self.log = []
        self.warnings = {}
        self.accumulator = {"vector": UNDEFINED, "scalar": UNDEFINED}
        self.shared = []
        self.loops = 0
        self.ordered = 0

    def lease(self, buffer, nbytes):
        """Room on the chip; MEM-SBUF or MEM-PSUM when there is none."""
        try:
            return self.chip.sbuf_lease(nbytes) if buffer == "sbuf" else self.chip.psum_lease(nbytes)
        except OutOfMemory as error:
            self.report(error.rule, str(error), "nl.ndarray")
            return None

    def report(self, rule, detail, op="", operand=""):
        """Raise or note a broken rule, as the policy says."""
        place = caller()
        if self.policy.raises(rule):
            raise SimError(rule, detail, self.kernel, place, op, operand) from None
        self.warnings.setdefault((rule, place, op), Note(rule, detail, place, op))

    def count_instruction(self, op):
        """Log an instruction for the comparison of the two programs; OP-LIMIT beyond the compiler's limit."""
        self.log.append((op, caller()))
        if self.clock.instructions > MAX_INSTRUCTIONS:
            self.report("OP-LIMIT", f"more than {MAX_INSTRUCTIONS} instructions", op)


def current():
    """The running program; SimError outside of one."""
    program = CURRENT.get()
    if program is None:
        raise SimError("OP-ARG", "an NKI call outside of a simulated kernel", place=caller())
    return program


def fail(rule, detail, op="", operand=""):
    """Report through the running program, or raise when there is none (view methods of a tensor that outlived its run)."""
    program = CURRENT.get()
    if program is None:
        raise SimError(rule, detail, place=caller(), op=op, operand=operand) from None
    program.report(rule, detail, op, operand)
