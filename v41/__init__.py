# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1-Flash as pure functions over explicit parameters and caches."""

from v41 import pytrees
from v41.api import (
    available_backends,
    draft,
    embed,
    export_cache,
    head,
    init_cache,
    layers,
    record,
    record_draft,
    rewind,
    step,
)
from v41.cache_io import load_cache, save_cache, take
from v41.chat import encode_chat
from v41.compile_api import compile
from v41.generate import Generated, Generation, Statistics, generate
from v41.inspect_report import inspect_folder
from v41.params_io import init_params, load_params, save_params
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.ops.choose import Sample
from v41.spec.params import Params
from v41.spec.verify import Emitted, SpecState
from v41.spec_api import init_spec, spec_step
from v41.stream.plan import read_plan

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Cache",
    "Config",
    "Emitted",
    "Generated",
    "Generation",
    "Numerics",
    "Params",
    "Sample",
    "SpecState",
    "Statistics",
    "available_backends",
    "compile",
    "draft",
    "embed",
    "encode_chat",
    "export_cache",
    "generate",
    "head",
    "init_cache",
    "init_params",
    "init_spec",
    "inspect_folder",
    "layers",
    "load_cache",
    "load_params",
    "pytrees",
    "read_plan",
    "record",
    "record_draft",
    "rewind",
    "save_cache",
    "save_params",
    "spec_step",
    "step",
    "take",
]
