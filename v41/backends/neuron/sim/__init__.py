# SPDX-License-Identifier: Apache-2.0
"""A strict CPU simulator of the NKI 0.6 subset for Trainium2 (docs/nki-simulator.md).

from v41.backends.neuron import sim

out = sim.simulate(kernel)(x, w)            # numpy or torch in, the same out
out = sim.simulate(kernel[2])(x, w)         # both cores of a logical core
out, report = sim.profile(kernel)(x, w)     # with counters, time and memory
with sim.as_nki():                          # kernels that say `import nki`
    import their_kernels
"""

from v41.backends.neuron.sim import isa, language
from v41.backends.neuron.sim.arrays import Typed, typed
from v41.backends.neuron.sim.errors import SimError
from v41.backends.neuron.sim.launch import Kernel, jit, profile, simulate
from v41.backends.neuron.sim.lint import lint
from v41.backends.neuron.sim.modules import as_nki
from v41.backends.neuron.sim.report import Report
from v41.backends.neuron.sim.rules import FOREIGN, PEDANTIC, RULES, STRICT, Policy

__all__ = [
    "FOREIGN",
    "PEDANTIC",
    "RULES",
    "STRICT",
    "Kernel",
    "Policy",
    "Report",
    "SimError",
    "Typed",
    "as_nki",
    "isa",
    "jit",
    "language",
    "lint",
    "profile",
    "simulate",
    "typed",
]
