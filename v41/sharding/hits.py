# SPDX-License-Identifier: Apache-2.0
"""How many experts a step reads if every row chooses evenly and independently; rows of one text agree more, and hit fewer."""

from functools import cache

import numpy as np

TRIALS = 2000  # standard error of a mean below 0.03 experts
SURE = 1e-3  # an expert that is missed with a lower probability counts as hit


@cache
def expected_hits(experts: int, k: int, rows: int, groups: int) -> float:
    """Expected number of distinct experts hit on the fullest of `groups` equal groups, by a seeded simulation."""
    if (1 - k / experts) ** rows < SURE:
        return experts / groups
    random = np.random.default_rng(0).random((TRIALS, rows, experts), dtype=np.float32)
    chosen = np.argpartition(random, k - 1, axis=2)[:, :, :k].reshape(TRIALS, -1)
    hit = np.zeros((TRIALS, experts), dtype=bool)
    hit[np.arange(TRIALS)[:, None], chosen] = True
    return float(hit.reshape(TRIALS, groups, -1).sum(2).max(1).mean())
