# SPDX-License-Identifier: Apache-2.0
"""Known wrong models, each of which the golden comparison must notice. `python -m tests.mutants` prints the table."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `helpers`, also when the package is run as a command

from mutants.run import CHECKS, run
from v41.conformance.mutants.cases import MUTANTS
from v41.conformance.mutants.kit import Mutant, Outcome

__all__ = ["CHECKS", "MUTANTS", "Mutant", "Outcome", "run"]
