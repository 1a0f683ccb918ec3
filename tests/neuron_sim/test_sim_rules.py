# SPDX-License-Identifier: Apache-2.0
"""Every rule is raised by at least one minimal broken kernel, and the message says where and why."""

import re

import broken_calls as calls
import broken_memory as memory
import numpy as np
import pytest
from simkit import broken

from v41.backends.neuron import sim
from v41.backends.neuron.sim import context
from v41.backends.neuron.sim import isa as nisa
from v41.backends.neuron.sim import language as nl
from v41.backends.neuron.sim.rules import BY_ID, PYTHON_IDS

# Every warning raises, and the lint is off: these kernels are lambdas and closures on purpose.
RAISE_ALL = sim.Policy(PYTHON_IDS - {"PY-REGISTER", "PY-LISTARG", "PY-TILESIZE"}, sim.PEDANTIC.promote)
GROUPS = (
    memory.MEMORY,
    memory.INITIALIZATION,
    memory.PLACEMENT,
    memory.TYPES,
    calls.OPS,
    calls.NUMERICS,
    calls.TWO,
    calls.HAZARDS,
)
CASES = [(rule, i, *case) for group in GROUPS for rule, cases in group.items() for i, case in enumerate(cases)]
# The Python subset has tests of its own below and in test_sim_lint.
ELSEWHERE = PYTHON_IDS


@pytest.mark.parametrize(("rule", "i", "kernel", "arrays"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_broken_kernel_is_refused_by_its_rule(rule, i, kernel, arrays):
    error = broken(kernel, *arrays, policy=RAISE_ALL)
    assert error.rule == rule, str(error)


def test_every_rule_has_a_broken_kernel():
    covered = {c[0] for c in CASES}
    assert covered | ELSEWHERE == set(BY_ID) and not covered & ELSEWHERE


WARNINGS = [c for c in CASES if BY_ID[c[0]].severity == "warning"]


@pytest.mark.parametrize(("rule", "i", "kernel", "arrays"), WARNINGS, ids=[f"{c[0]}-{c[1]}" for c in WARNINGS])
def test_a_warning_is_reported_and_does_not_stop_the_kernel(rule, i, kernel, arrays):
    quiet = sim.Policy(RAISE_ALL.demote | {"PLACE-OUTPUT", "INIT-OUTPUT"})
    report = sim.profile(kernel, quiet)(*arrays)[1]
    assert rule in {w.rule for w in report.warnings}


def partial(x):
    t = nl.ndarray((128, 4), nl.float32)
    nisa.memset(t[0:64], 0.0)
    nisa.tensor_scalar(t, t, nl.add, 1.0)  # reads 64 unwritten rows


def test_an_error_names_kernel_line_instruction_operand_rule_and_section():
    error = broken(partial, np.ones((1, 1), np.float32))
    line = partial.__code__.co_firstlineno + 3
    assert error.kernel == "partial" and error.place.line == line and error.operand == "data"
    assert re.search(rf"partial at test_sim_rules.py:{line}: nisa.tensor_scalar\(data\)", str(error))
    assert "INIT-POISON" in str(error) and "docs/nki-simulator.md, section 'Initialization'" in str(error)


def test_a_list_argument_is_refused():
    assert broken(partial, [1, 2]).rule == "PY-LISTARG"


def test_a_memory_size_outside_a_kernel_is_refused():
    with pytest.raises(sim.SimError) as error:
        _ = nl.tile_size.psum_num_banks
    assert error.value.rule == "PY-TILESIZE"
    assert nl.tile_size.pmax == 128


USES = [lambda r: int(r), lambda r: bool(r), lambda r: r + 1, lambda r: 2 * r, lambda r: range(r), lambda r: r < 3]


@pytest.mark.parametrize("use", USES)
def test_a_register_has_no_value_for_python(use):
    def kernel(x):
        use(nisa.register_alloc(1))

    assert broken(kernel, np.ones((1, 1), np.float32), policy=RAISE_ALL).rule == "PY-REGISTER"


def test_a_kernel_may_not_exceed_the_compilers_instruction_limit(monkeypatch):
    def kernel(x):
        for _ in range(9):
            nisa.memset(nl.ndarray((1, 1), nl.float32), 0.0)

    monkeypatch.setattr(context, "MAX_INSTRUCTIONS", 8)
    assert broken(kernel, np.ones((1, 1), np.float32)).rule == "OP-LIMIT"
    monkeypatch.setattr(context, "MAX_INSTRUCTIONS", 9)
    assert sim.simulate(kernel)(np.ones((1, 1), np.float32)) is None


def test_policies_demote_and_promote():
    assert not sim.FOREIGN.raises("PY-RAISE") and sim.FOREIGN.raises("INIT-POISON") and sim.STRICT.raises("PY-RAISE")
    assert sim.PEDANTIC.raises("HAZ-SCRATCH") and not sim.STRICT.raises("HAZ-SCRATCH")


def test_the_kernel_asserts_of_a_caller_reach_the_caller():
    def kernel(x):
        assert x.shape == (2, 2), f"got {x.shape}"

    with pytest.raises(AssertionError, match=r"got \(1, 1\)"):
        sim.simulate(kernel)(np.ones((1, 1), np.float32))
