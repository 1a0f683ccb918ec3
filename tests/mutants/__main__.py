# SPDX-License-Identifier: Apache-2.0
"""Prints the table of mutants; exit 1 if one survives, 2 if the unchanged model does not pass a check."""

import sys

import torch

from mutants import CHECKS, MUTANTS, Mutant, run
from v41.conformance.mutants.kit import nothing


def main() -> int:
    """The table, one line as each mutant is through."""
    torch.set_num_threads(1)
    for name in sorted({m.check for m in MUTANTS}):
        found = run(Mutant("unchanged", "", name, "", nothing))
        if found.first is not None:
            print(f"the unchanged model differs in check {name!r} at {found.first}: {found.error:.1e}")
            return 2
    print(f"{len(CHECKS)} checks, the unchanged model passes the {len({m.check for m in MUTANTS})} in use")
    print(f"{'mutant':60} {'section':8} {'check':24} {'first tensor that differs':36} {'error':>8}  caught")
    survivors = 0
    for mutant in MUTANTS:
        found = run(mutant)
        survivors += found.first is None
        line = f"{mutant.name:60} {mutant.section:8} {mutant.check:24} {found.first or '-':36} {found.error:8.1e}"
        print(line, " yes" if found.first else " NO", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
