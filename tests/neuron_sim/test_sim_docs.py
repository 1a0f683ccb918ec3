# SPDX-License-Identifier: Apache-2.0
"""docs/nki-simulator.md says what the code enforces, and the example on it runs."""

import re
from pathlib import Path

import numpy as np

from v41.backends.neuron import sim
from v41.backends.neuron.sim import cost, memory
from v41.backends.neuron.sim.rules import RULES

PAGE = (Path(__file__).parents[2] / "docs" / "nki-simulator.md").read_text()


def test_the_rule_tables_of_the_page_are_the_rules_of_the_code():
    rows = [tuple(c.strip() for c in line.strip("| \n").split(" | ")) for line in PAGE.splitlines() if re.match(r"\| [A-Z]+-", line)]
    assert rows == [(r.id, r.severity, r.text, r.source, r.seen) for r in RULES]


def test_every_section_that_an_error_names_is_a_heading():
    headings = {line.lstrip("#").strip() for line in PAGE.splitlines() if line.startswith("#")}
    assert {r.section for r in RULES} <= headings


def test_rule_ids_are_unique_and_their_fields_are_of_the_listed_kinds():
    assert len({r.id for r in RULES}) == len(RULES)
    assert {r.severity for r in RULES} == {"error", "warning"}
    assert {r.source for r in RULES} <= {"doc", "field", "library", "inferred"} and {r.seen for r in RULES} <= {"no", "by others"}


def test_the_page_states_the_constants_of_the_model():
    assert memory.SBUF_BYTES == 192 * 1024 and "192 KiB" in PAGE
    assert cost.DMA_FIXED == 2.0 and "2 us of latency" in PAGE and cost.PE_WEIGHTS == 0.105 and "105 ns" in PAGE
    assert cost.LOOP_FIXED == 7.0 and "| 7 us" in PAGE and cost.SENDRECV_FIXED == 4.0 and "| 4 us" in PAGE


def test_the_kernel_on_the_page_runs(tmp_path, monkeypatch):
    source = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "@nki.jit" in block)
    (tmp_path / "page_kernel.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import page_kernel

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(sim.simulate(page_kernel.double, sim.PEDANTIC)(x), x + x)
