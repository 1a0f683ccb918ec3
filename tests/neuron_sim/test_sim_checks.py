# SPDX-License-Identifier: Apache-2.0
"""Every remaining argument check of instructions, views, loops and cores, one call each."""

import broken_more
import numpy as np
import pytest
from simkit import broken
from test_sim_rules import RAISE_ALL

X = np.ones((128, 64), np.float32)


@pytest.mark.parametrize("i", range(len(broken_more.CASES)))
def test_a_wrong_argument_is_refused_by_its_rule(i):
    rule, kernel = broken_more.CASES[i]
    error = broken(kernel, X, policy=RAISE_ALL)
    assert error.rule == rule, str(error)
