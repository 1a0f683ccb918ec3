# SPDX-License-Identifier: Apache-2.0
"""The vendor's packages, in one place (docs/neuron-graph.md 7). Not run on a device: no line of this file has ever met torch_neuronx."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from v41.backends.neuron.calls import decode, encode
from v41.backends.neuron.ops import DEFINITIONS, PARTS, kernel_of, listed
from v41.spec.backend import Backend

PACKAGES = ("torch_neuronx", "nki", "neuronxcc")


def missing() -> tuple[str, ...]:
    """Which of the vendor's packages cannot be imported here."""
    return tuple(p for p in PACKAGES if importlib.util.find_spec(p) is None)


def require() -> None:
    """ValueError where a package is missing."""
    if absent := missing():
        raise ValueError(f"backend 'neuron': {', '.join(absent)} not installed; 'neuron-sim' runs the same kernels in the simulator on this CPU")


def device_run(kernel: Any, cores: int, *args: Any) -> Any:
    """One launch inside a compiled graph. The number of cores goes on the caller, never on the kernel (NCC_ILLC059)."""
    return importlib.import_module("torch_neuronx").wrap_nki(kernel)[cores](*args)


def device_op(name: str) -> Callable[..., Any]:
    """The operator of one kernel, under the primitive's name, with its kernels launched on the device."""
    kernel = kernel_of(name)
    assert kernel is not None

    def body(tensors: list[Tensor], call: str) -> list[Tensor]:
        args, named = decode(tensors, call)
        return listed(kernel(device_run, *args, **named))

    op = importlib.import_module("torch_neuronx").nki_op(f"v41_neuron::{name}", body, mutates_args={})

    def call(*args: Any, **named: Any) -> Any:
        tensors, text = encode(args, named)
        found = op([t.contiguous() for t in tensors], text)
        return found[0] if len(found) == 1 else tuple(found)

    return call


def device_backend() -> tuple[Backend, dict[str, Callable]]:
    """(record, bodies of partial sums) with every kernel that exists; other primitives are the spec's own operations, for the compiler."""
    found = {n: device_op(n) for n in DEFINITIONS if kernel_of(n) is not None}
    bodies = {name: found.get(part, DEFINITIONS[part]) for name, part in PARTS.items()}
    changed: dict[str, Any] = {n: op for n, op in found.items() if n not in PARTS.values()}
    return replace(Backend("neuron"), **changed), bodies
