# SPDX-License-Identifier: Apache-2.0
"""The parameter table without its repetitions: layers of one kind have the same tensors."""

import re
from collections import Counter
from functools import cache

from v41.spec.config import Config
from v41.spec.params import param_specs
from v41.spec.table import ParamSpec


@cache
def distinct(config: Config, draft: bool) -> tuple[tuple[ParamSpec, int], ...]:
    """(first of its kind, how many) of every tensor; rules see no layer numbers, so that one of a kind stands for all."""
    counts: Counter[tuple[object, ...]] = Counter()
    first: dict[tuple[object, ...], ParamSpec] = {}
    for spec in param_specs(config, draft):
        kind = (re.sub(r"\.\d+\.", ".", spec.name), *spec[1:])
        counts[kind] += 1
        first.setdefault(kind, spec)
    return tuple((first[k], n) for k, n in counts.items())
