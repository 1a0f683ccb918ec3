# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1-Flash as pure functions over explicit parameters and caches."""

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
from v41.params_io import init_params, load_params, save_params
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.ops.choose import Sample
from v41.spec.params import Params

__all__ = [
    "Backend",
    "Cache",
    "Config",
    "Numerics",
    "Params",
    "Sample",
    "available_backends",
    "draft",
    "embed",
    "export_cache",
    "head",
    "init_cache",
    "init_params",
    "layers",
    "load_params",
    "record",
    "record_draft",
    "rewind",
    "save_params",
    "step",
]
