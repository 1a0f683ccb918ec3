# SPDX-License-Identifier: Apache-2.0
"""The NKI kernels in the simulator, one primitive at a time. Not run on a device."""

from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from typing import Any

from v41.backends.neuron.kernels import KERNELS
from v41.backends.neuron.launch import simulate
from v41.conformance.claims import Claims
from v41.conformance.target import Target
from v41.spec.backend import Backend, definition

LACKS = {
    "regime:released": "no kernel follows the release's ties and compact lists",
    "regime:faithful": "the tensor engine has neither e4m3 values above 240 nor the order of sums; its regime is trn2",
    "regime:exact-float64": "the device has no float64",
    "ranks": "the simulator runs one logical core",
}


def body(name: str, spec: Callable) -> Callable:
    """A kernel with the arguments of the primitive."""
    kernel = KERNELS[name]

    def run(*args: Any, **options: Any) -> Any:
        return kernel(simulate, *args, **options)

    run.__signature__ = signature(spec)  # type: ignore[attr-defined]
    return run


def target() -> Target:
    """Every primitive that has a kernel; the others are the spec's own bodies and are skipped."""
    defined = {f.name: definition(f) for f in fields(Backend)[1:]}
    ops = replace(Backend("neuron-sim"), **{n: body(n, defined[n]) for n in KERNELS if n in defined})  # type: ignore[arg-type]
    missing = {f"primitive:{n}": "no kernel: the spec's own body" for n in defined if n not in KERNELS}
    return Target("neuron-sim", ops, Claims(LACKS | missing))
