# SPDX-License-Identifier: Apache-2.0
"""The Python subset: each forbidden construct is found in a kernel or in a helper that it reaches, with its line."""

import inspect

import lint_kernels
import numpy as np
import pytest
from simkit import broken

from v41.backends.neuron import sim
from v41.backends.neuron.sim.rules import PYTHON_IDS

X = np.ones((4, 4), np.float32)
# Raised while the kernel runs or is called; tested in test_sim_rules.
RUNTIME = {"PY-LISTARG", "PY-TILESIZE", "PY-REGISTER"}


@pytest.mark.parametrize(("kernel", "rule"), lint_kernels.BROKEN.items(), ids=[f.__name__ for f in lint_kernels.BROKEN])
def test_a_construct_that_the_tracer_refuses_is_found(kernel, rule):
    assert rule in {f.rule for f in sim.lint(kernel)}
    error = broken(kernel, X)
    assert error.rule in PYTHON_IDS and rule in str(error)


def test_every_python_rule_has_a_kernel_that_breaks_it():
    assert set(lint_kernels.BROKEN.values()) | RUNTIME == PYTHON_IDS


def test_the_documented_subset_passes():
    assert [f for k in lint_kernels.LEGAL for f in sim.lint(k)] == []


def test_a_finding_in_a_helper_names_the_helpers_file_and_line():
    finding = sim.lint(lint_kernels.reaches_deep)[0]
    line = inspect.getsourcelines(lint_kernels.deep_helper)[1] + 1
    assert (finding.rule, finding.line) == ("PY-RAISE", line) and finding.file.endswith("lint_kernels.py")


def test_findings_are_warnings_for_kernels_of_others():
    with sim.as_nki() as nki:
        kernel = nki.jit(lint_kernels.raises)
    result, report = sim.profile(kernel)(X)
    assert result is None and [w.rule for w in report.warnings] == ["PY-RAISE"]


def test_the_simulators_own_functions_are_not_linted():
    assert sim.lint(lint_kernels.clean_helper) == ()
