# SPDX-License-Identifier: Apache-2.0
"""`with as_nki():` lets kernels that import nki import the simulator instead."""

import sys
import types
from contextlib import contextmanager

from v41.backends.neuron.sim import isa, language, launch, refused
from v41.backends.neuron.sim.rules import FOREIGN

NAMES = ("nki", "nki.isa", "nki.language", "nki.collectives", "nki.typing")


def _module(name, content):
    module = types.ModuleType(name)
    module.__dict__.update(content)
    return module


class tensor:
    """Annotation of nki.typing: tensor[128, 512]."""

    def __class_getitem__(cls, item):
        return cls


def _public(module):
    return {k: v for k, v in vars(module).items() if not k.startswith("__") or k == "__getattr__"}


def foreign_jit(fn=None, mode=None, platform_target=None):
    """jit for kernels of others: what only the tracer refuses becomes a warning."""
    if fn is None:
        return foreign_jit
    return launch.Kernel(fn, 0, FOREIGN)


def build():
    """Fresh modules under their nki names."""
    collectives = {n: refused.refusal("OP-SUBSET", f"nki.collectives.{n}", "not simulated") for n in refused.COLLECTIVES}
    made = {
        "nki.isa": _module("nki.isa", _public(isa)),
        "nki.language": _module("nki.language", _public(language)),
        "nki.collectives": _module("nki.collectives", collectives),
        "nki.typing": _module("nki.typing", {"tensor": tensor}),
    }
    children = {name.split(".")[1]: module for name, module in made.items()}
    made["nki"] = _module("nki", {"jit": foreign_jit, "simulate": launch.simulate, "__path__": [], **children})
    return made


@contextmanager
def as_nki():
    """Within the block `import nki` and its submodules give the simulator; afterwards sys.modules is as before.

    Kernels imported inside keep the simulator for good. Lint findings of their kernels are warnings.
    """
    before = {name: sys.modules[name] for name in sys.modules if name == "nki" or name.startswith("nki.")}
    for name in before:
        del sys.modules[name]
    sys.modules.update(build())
    try:
        yield sys.modules["nki"]
    finally:
        for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
            del sys.modules[name]
        sys.modules.update(before)
