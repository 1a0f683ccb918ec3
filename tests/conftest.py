# SPDX-License-Identifier: Apache-2.0
"""One torch thread, and a seed per test that follows from its name."""

import zlib

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch and numpy with the test's name, so that a test's numbers do not depend on which others ran."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    np.random.seed(value)
    return value
