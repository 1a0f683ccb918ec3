# SPDX-License-Identifier: Apache-2.0
"""How a kernel is started: the one place that knows where it runs. `run` is the first argument of every kernel wrapper.

run(kernel, cores, *args)   one launch of an NKI kernel on 1 or 2 cores of a logical core; tensors in, a tensor or a tuple of them out
"""

from collections.abc import Callable
from typing import Any

from v41.backends.neuron import sim
from v41.backends.neuron.nki import runner
from v41.backends.neuron.sim.report import Report

Run = Callable[..., Any]


def simulate(kernel: Any, cores: int, *args: Any) -> Any:
    """One launch on this CPU: in the simulator, or with `nki.simulate` where the real package is installed."""
    return runner(kernel[cores])(*args)


def profiled(reports: list[Report]) -> Run:
    """A `run` that appends what the simulator counted to reports, one Report a launch."""

    def run(kernel: Any, cores: int, *args: Any) -> Any:
        out, report = sim.profile(kernel[cores])(*args)
        reports.append(report)
        return out

    return run
