# SPDX-License-Identifier: Apache-2.0
"""The CPU backend."""

from v41.backends.cpu.index import seen_rows
from v41.backends.cpu.moe import experts
from v41.spec.backend import Backend

backend = Backend("cpu", experts=experts, seen_rows=seen_rows)
