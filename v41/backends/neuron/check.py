# SPDX-License-Identifier: Apache-2.0
"""`python -m v41.backends.neuron.check`: the first thing to run on a Trainium2 (docs/neuron-graph.md 10). It has never been run on one.

Each question is one function; its answer is a line of JSON. Without the vendor's packages it says what is missing and exits 2.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from v41.backends.neuron.device import device_run, missing
from v41.backends.neuron.kernels import KERNELS
from v41.backends.neuron.launch import simulate
from v41.backends.neuron.options import environment
from v41.spec.backend import Backend

DEVICE = "neuron"


def versions() -> Any:
    """Which packages answer: signatures changed with every release."""
    found = {}
    for name in ("torch", "torch-neuronx", "nki", "neuronx-cc"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def spelling() -> Any:
    """Whether the number of cores goes on the caller as a bare number, and what nki_op takes."""
    torch_neuronx = importlib.import_module("torch_neuronx")
    return {name: str(getattr(torch_neuronx, name, None).__doc__)[:200] for name in ("wrap_nki", "nki_op")}


def usable_sbuf() -> Any:
    """Bytes of a partition that the compiler gives out; kernels here take at most 192 KiB."""
    sizes = importlib.import_module("nki.language").tile_size
    return {name: getattr(sizes, name, None) for name in ("sbuf_fmax_bytes", "psum_fmax", "psum_num_banks")}


def on_device(fn: Callable[..., Any], *args: torch.Tensor) -> Any:
    """fn compiled for the device, its results on the CPU."""
    return torch.compile(fn, backend=DEVICE, fullgraph=True, dynamic=False)(*[a.to(DEVICE) for a in args]).cpu()


def fp8_overflow() -> Any:
    """What 240, 250 and 1e4 become as e4m3 with infinities: kernels here clamp at 240 first."""
    x = torch.tensor([240.0, 248.0, 250.0, 1e4])
    return on_device(lambda t: t.to(torch.float8_e4m3fn).float(), x).tolist()


def fp32_products() -> Any:
    """Relative error of a product of float32 operands: below 1e-6 if TensorE keeps them, 1e-3 if it narrows them."""
    a, b = torch.rand(64, 64), torch.rand(64, 64)
    want = a.double() @ b.double()
    return float(((on_device(torch.matmul, a, b).double() - want) / want).abs().max())


def int32_sums() -> Any:
    """Whether 32-bit sums above 2^24 are exact."""
    x = torch.tensor([2**24 + 1, 2**30 + 7], dtype=torch.int32)
    return on_device(lambda t: t + 1, x).tolist() == (x + 1).tolist()


def kernel_agrees() -> Any:
    """rms_norm through the simulator and on the device: the largest difference in units of the last place of bfloat16."""
    x, w = torch.rand(6, 5120).bfloat16(), torch.rand(5120).bfloat16()
    want = KERNELS["rms_norm"](simulate, x, w, 1e-20)
    got = on_device(lambda a, b: KERNELS["rms_norm"](device_run, a, b, 1e-20), x, w)
    return float(((got.float() - want.float()).abs() / (want.float().abs() * 2.0**-8)).max())


def writes_land() -> Any:
    """Whether a cache that a kernel writes and returns is changed in place in a compiled graph. All else rests on this."""
    buffer, index, rows = torch.zeros(1, 257, 512).bfloat16(), torch.tensor([[3, 7]], dtype=torch.int32), torch.ones(1, 2, 512).bfloat16()
    held = buffer.to(DEVICE)
    torch.compile(lambda b, i, r: KERNELS["write_rows"](device_run, b, i, r), backend=DEVICE, fullgraph=True)(held, index.to(DEVICE), rows.to(DEVICE))
    return torch.equal(held.cpu(), Backend("spec").write_rows(buffer, index, rows))


def launch_seconds() -> Any:
    """Host time of a graph of one small node."""
    x = torch.ones(128, 128).to(DEVICE)
    step = torch.compile(lambda t: t + 1, backend=DEVICE, fullgraph=True)
    step(x)
    importlib.import_module("torch").neuron.synchronize()
    begun = time.monotonic()
    for _ in range(100):
        step(x)
    importlib.import_module("torch").neuron.synchronize()
    return (time.monotonic() - begun) / 100


QUESTIONS: tuple[Callable[[], Any], ...] = (
    versions,
    spelling,
    usable_sbuf,
    fp8_overflow,
    fp32_products,
    int32_sums,
    kernel_agrees,
    writes_land,
    launch_seconds,
)


def answers() -> Iterator[dict[str, Any]]:
    """One answer a question; a question that fails says how and does not stop the others."""
    for question in QUESTIONS:
        told = {"question": question.__name__, "about": str(question.__doc__).split("\n")[0]}
        try:
            yield told | {"answer": question()}
        except Exception as e:
            yield told | {"error": f"{type(e).__name__}: {e}"}


def main() -> int:
    """0 where every question has an answer, 1 where one failed, 2 where there is nothing to ask."""
    if absent := missing():
        print(f"not installed: {', '.join(absent)}. Nothing was checked. On a Trainium2 with them, set first:")
        for name, value in environment("neff-cache").items():
            print(f"  {name}={value}")
        return 2
    found = list(answers())
    for answer in found:
        print(json.dumps(answer, default=str))
    return 1 if any("error" in a for a in found) else 0


if __name__ == "__main__":
    sys.exit(main())
