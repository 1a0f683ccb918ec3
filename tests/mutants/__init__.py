# SPDX-License-Identifier: Apache-2.0
"""Known wrong models, each of which the golden comparison must notice. `python -m tests.mutants` prints the table."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `helpers`, also when the package is run as a command

from mutants.cases import MUTANTS
from mutants.kit import Mutant, Outcome
from mutants.run import CHECKS, run

__all__ = ["CHECKS", "MUTANTS", "Mutant", "Outcome", "run"]
