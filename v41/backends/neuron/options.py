# SPDX-License-Identifier: Apache-2.0
"""How the device's compiler and runtime are told what to do, each setting with its reason (docs/neuron-graph.md 7). Not run on a device."""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
KERNEL_SOURCES = ("kernels", "nki.py", "launch.py", "calls.py")


class Setting(NamedTuple):
    """One environment variable."""

    name: str
    value: str
    why: str


ENVIRONMENT = (
    Setting("NEURON_LOGICAL_NC_CONFIG", "2", "a rank is two physical cores; kernels are launched on 2, and runtime and compiler must agree"),
    Setting("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2", "compiling without a device, and the vendor's simulator, which takes trn3 otherwise"),
    Setting("NEURON_COMPILER_OPT_LEVEL", "1", "level 2 can run the compiler out of memory on a graph of a whole step (NCC_F137)"),
    Setting(
        "NEURON_CC_FLAGS",
        "--target trn2 --lnc 2 --model-type transformer -O1 --auto-cast=none --native-int64=disabled --implicit-integer-downcast=all",
        "no silent narrowing of floats; the graph has no 64-bit integer, so that the last two only concern what the framework adds",
    ),
    Setting("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1", "a failed compilation must be an error: the fallback runs the step op by op, silently"),
    Setting("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", "1", "a tensor on the host is a mistake of ours, not something to copy in every step"),
    Setting("NKI_PRECISE_FP", "1", "the vendor's simulator then computes bfloat16 and fp8 as the device does"),
    Setting("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0", "fp32 to bfloat16 is to nearest even everywhere in this project"),
    Setting("NEURON_SCRATCHPAD_PAGE_SIZE", "256", "MiB: published advice; the planner counts scratch in these pages"),
)
COMPILE = {"fullgraph": True, "dynamic": False}  # one graph or an error; shapes are static, a new one is a new bucket
RANKS = "torchrun --nproc-per-node=64"  # one process a logical core; init_process_group before the device is touched


@cache
def source_digest() -> str:
    """SHA-256 over the sources of the kernels and of what they are built from.

    The vendor's caches look at a kernel's own source only: an edited helper would be served stale. So this is part of the cache's folder.
    """
    digest = hashlib.sha256()
    for name in KERNEL_SOURCES:
        place = HERE / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def environment(cache_dir: str) -> dict[str, str]:
    """Every variable to set before the vendor's packages are imported; compiled graphs go to a folder named after the kernels' sources."""
    folder = f"{cache_dir}/{source_digest()[:16]}"
    return {s.name: s.value for s in ENVIRONMENT} | {"TORCH_NEURONX_NEFF_CACHE_DIR": folder, "NKI_COMPILE_CACHE_URL": f"{folder}/nki"}
