# SPDX-License-Identifier: Apache-2.0
"""Accumulator registers of an engine: one float32 per lane, and which lanes hold a defined value."""

from dataclasses import dataclass

import numpy as np

from v41.backends.neuron.sim.memory import PARTITIONS


@dataclass(frozen=True)
class Lanes:
    """Values and defined marks of the 128 lanes; replaced, never changed."""

    value: np.ndarray
    defined: np.ndarray

    def part(self, first, count):
        """Values of lanes first..first+count, or None when one of them is undefined."""
        return self.value[first : first + count] if self.defined[first : first + count].all() else None

    def with_part(self, first, values):
        """The lanes with some of them set."""
        value, defined = self.value.copy(), self.defined.copy()
        value[first : first + len(values)] = values
        defined[first : first + len(values)] = True
        return Lanes(value, defined)


UNDEFINED = Lanes(np.zeros(PARTITIONS, np.float32), np.zeros(PARTITIONS, bool))
