# SPDX-License-Identifier: Apache-2.0
"""Makes the kit importable whatever import mode pytest uses."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
