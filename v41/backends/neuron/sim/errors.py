# SPDX-License-Identifier: Apache-2.0
"""The one exception of the simulator and the place in the kernel that it names."""

import os
import sys
from dataclasses import dataclass

from v41.backends.neuron.sim.rules import BY_ID, DOC

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Place:
    """File and line of a kernel."""

    file: str
    line: int

    def __str__(self):
        return f"{os.path.basename(self.file)}:{self.line}"


def _inside(file):
    """Whether a frame is the simulator's own, or a wrapper that a type checker put around one of its functions."""
    return file.startswith(PACKAGE) or file.startswith("<@beartype") or os.sep + "jaxtyping" + os.sep in file


def caller():
    """The nearest frame outside this package: the kernel line that issued the instruction."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _inside(frame.f_code.co_filename):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


class SimError(ValueError):
    """A kernel broke a rule: names kernel, line, instruction, operand, rule and the section that states it."""

    def __init__(self, rule, detail, kernel="", place=None, op="", operand=""):
        self.rule, self.detail, self.kernel = rule, detail, kernel
        self.place, self.op, self.operand = place, op, operand
        entry = BY_ID[rule]
        where = f" at {place}" if place else ""
        call = f" {op}({operand})" if operand else f" {op}" if op else ""
        super().__init__(f"kernel {kernel or '?'}{where}:{call}: {detail}. Rule {rule}: {entry.text} ({DOC}, section '{entry.section}')")


@dataclass(frozen=True)
class Note:
    """A finding that does not stop the kernel."""

    rule: str
    detail: str
    place: Place | None
    op: str

    def __str__(self):
        return f"{self.rule} at {self.place}: {self.op}: {self.detail}"
