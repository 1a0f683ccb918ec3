# SPDX-License-Identifier: Apache-2.0
"""`v41 bench kernels`: what it measures and what it prints."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from v41.backends.neuron import bench
from v41.backends.neuron.bench import linear as family
from v41.backends.neuron.bench.case import HBM_BYTES_PER_US, MACS_PER_US, BenchCase
from v41.backends.neuron.kernels import KERNELS
from v41.cli import cli

FIELDS = ["kernel", "shape", "kind", "phase", "seconds", "bound_by", "roofline_ratio", "sbuf_peak", "psum_peak", "instructions"]
SMALL = family.case("linear", "small", 6, 128, 256)


def run(*args):
    return CliRunner().invoke(cli, ["bench", "kernels", *args])


@pytest.fixture
def only_small(monkeypatch):
    monkeypatch.setattr(family, "CASES", (SMALL, family.rounding(512, 64)))
    monkeypatch.setattr(bench, "FAMILIES", ("linear",))


def test_json_is_a_list_with_every_field(only_small):
    found = run("--json")
    assert found.exit_code == 0
    told = json.loads(found.output)
    assert [t["kernel"] for t in told] == ["linear", "act_round"] and all(list(t) == FIELDS for t in told)
    one = told[0]
    assert one["kind"] == "gemm" and one["phase"] == "decode" and one["bound_by"] == "chain" and one["instructions"] > 10
    assert one["seconds"] * 1e6 == pytest.approx(one["roofline_ratio"] * SMALL.floor_us)
    assert 0 < one["sbuf_peak"] < 196608 and 0 < one["psum_peak"] < 16384


def test_kernels_and_phases_are_chosen_by_name(only_small):
    assert [t["kernel"] for t in json.loads(run("--json", "--kernel", "linear").output)] == ["linear"]
    assert [t["kernel"] for t in json.loads(run("--json", "--phase", "prefill").output)] == ["act_round"]
    assert "act_round" in run("--kernel", "act_round").output
    assert run("--kernel", "linear", "--phase", "prefill").exit_code == 2
    unknown = run("--kernel", "linar")
    assert unknown.exit_code == 2 and "linar" in unknown.output and "act_round, linear" in unknown.output


def test_the_floor_is_the_largest_of_bytes_products_and_chain():
    case = BenchCase("linear", "", "gemm", "decode", tuple, int(HBM_BYTES_PER_US * 3), int(MACS_PER_US * 2), 1.0, "")
    assert case.floor_us == pytest.approx(3.0)
    assert replace(case, must_macs=int(MACS_PER_US * 4)).floor_us == pytest.approx(4.0)
    assert replace(case, chain_us=5.0).floor_us == 5.0
    with pytest.raises(ValueError, match="'big'"):
        replace(case, kind="big")


def test_every_case_names_a_kernel_and_every_shape_is_there_once():
    every = bench.cases()
    assert {c.kernel for c in every} <= set(KERNELS)
    assert len({(c.kernel, c.shape, c.phase) for c in every}) == len(every)


@pytest.mark.parametrize("case", [c for c in family.DECODE if c.must_bytes < 7e6], ids=lambda c: f"{c.kernel} {c.shape}")
def test_products_of_six_rows_stay_near_their_floor(case):
    found = bench.measure(case)
    assert 1.0 <= found.ratio <= 1.5
    assert sum(len(r.warnings) for r in found.reports) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in family.CASES if c.kind == "gemm"], ids=lambda c: f"{c.kernel} {c.shape}")
def test_products_of_every_size_are_bound_by_what_the_notes_say(case):
    found = bench.measure(case)
    assert found.ratio <= (1.5 if case.phase == "decode" else 2.0)
