# SPDX-License-Identifier: Apache-2.0
"""The one place that decides which NKI a kernel file of this package is written against.

    from v41.backends.neuron.nki import nisa, nki, nl

gives the real package where it is installed (so that the device compiler sees
real names) and the simulator otherwise. Resolved on first use, never at import.
Within `sim.as_nki()` the answer is the simulator, also for kernel files that
are imported there for the first time.
"""

import importlib
import importlib.util
import sys

from v41.backends.neuron import sim


def installed():
    """Whether `import nki` gives a package: the real one, or the simulator inside sim.as_nki()."""
    return "nki" in sys.modules or importlib.util.find_spec("nki") is not None


def _names():
    if installed():
        return {
            "nki": importlib.import_module("nki"),
            "nisa": importlib.import_module("nki.isa"),
            "nl": importlib.import_module("nki.language"),
        }
    return {"nki": sim, "nisa": sim.isa, "nl": sim.language}


def __getattr__(name):
    if name in ("nki", "nisa", "nl"):
        return _names()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def runners(kernel):
    """(name, callable) of every way to run this kernel here, so that the same cases run on all of them.

    "sim" for a kernel written against the simulator; else "nki.simulate" and, where torch-neuronx is importable,
    "device", the kernel itself. The last two have never been exercised by this project.
    """
    if isinstance(kernel, sim.Kernel) or not installed():
        return (("sim", sim.simulate(kernel)),)
    ways = (("nki.simulate", importlib.import_module("nki").simulate(kernel)),)
    return ways if importlib.util.find_spec("torch_neuronx") is None else (*ways, ("device", kernel))


def runner(kernel):
    """The CPU runner of this kernel: the first of `runners`."""
    return runners(kernel)[0][1]
