# SPDX-License-Identifier: Apache-2.0
"""Every mutant is caught, at the tensor that says where the mistake is; the unchanged model passes every check that is used."""

import pytest
from mutants import CHECKS, MUTANTS, Mutant, run

from v41.conformance.mutants.kit import nothing


@pytest.mark.parametrize("check", sorted({m.check for m in MUTANTS}))
def test_the_unchanged_model_passes_the_check(check):
    assert run(Mutant("unchanged", "", check, "", nothing)).first is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_mutant_is_caught(mutant):
    found = run(mutant)
    assert found.first == mutant.first
    assert found.error > 0


def test_mutants_are_many_and_leave_nothing_changed_behind():
    names = [m.name for m in MUTANTS]
    assert len(names) == len(set(names)) >= 35 and {m.check for m in MUTANTS} <= set(CHECKS)
    for check in ("prefill", "draft"):
        assert run(Mutant("unchanged", "", check, "", nothing)).first is None
