# SPDX-License-Identifier: Apache-2.0
"""`v41 bench cpu`: its JSON, its comparisons, its exit codes. Nothing is timed here."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from helpers import FAITHFUL, relative, tiny

import v41
from v41.backends.cpu import backend
from v41.backends.cpu.blocks import backend as blocks
from v41.cli import cpu_figures
from v41.cli.bench import bench
from v41.spec.params import param_specs

SHORT = ["cpu", "--config", "tiny", "--rows", "6", "--threads", "1", "--rounds", "1", "--json"]
FIGURES = {"seconds", "baseline_seconds", "ratio", "limit_seconds", "threads", "baseline_threads", "equal", "weight_bytes", "flops"}


def run(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(bench, [*SHORT, *options])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def told() -> dict:
    code, output = run()
    assert code == 0, output
    return json.loads(output)


def test_every_work_has_its_figures_and_the_bits_of_the_spec(told):
    works = {"decode", "prefill_6", "draft"}
    assert works <= set(told) and {"machine", "peak_rss", "held_bytes", "versions", "rounds", "config", "resident", "seed"} <= set(told)
    for name in works:
        assert set(told[name]) == FIGURES and told[name]["equal"] is True
        assert told[name]["ratio"] == told[name]["baseline_seconds"] / told[name]["seconds"]
    machine = told["machine"]
    for work in (told[n] for n in works):
        least = max(work["weight_bytes"] / machine["bytes_per_second"], work["flops"] / machine["flops_per_second"])
        assert work["limit_seconds"] == least > 0


def test_a_run_compares_with_an_earlier_one(told, tmp_path):
    path = tmp_path / "before.json"
    path.write_text(json.dumps(told))
    code, output = run("--compare", str(path))
    compared = json.loads(output)
    assert code == 0
    for name in ("decode", "prefill_6", "draft"):
        before = told[name]["seconds"]
        assert compared["compared"][name] == {"seconds_before": before, "change": before / compared[name]["seconds"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "no JSON"),
        ("[]", "no figures"),
        ('{"decode": {"seconds": 1}}', "no figures"),
        ('{"config": "medium", "seed": 41, "resident": "bf16", "decode": {"baseline_seconds": 1}}', "config 'medium', now 'tiny'"),
    ],
)
def test_an_earlier_run_that_does_not_compare_is_a_usage_error(tmp_path, text, message):
    path = tmp_path / "before.json"
    path.write_text(text)
    code, output = run("--compare", str(path))
    assert code == 2 and message in output


def test_a_prefill_beyond_the_positions_is_a_usage_error():
    code, output = run("--rows", "131071")
    assert code == 2 and "more than the 131072 positions" in output


def test_other_bits_than_the_specs_fail(monkeypatch):
    def wrong(x, w, numerics):
        return backend.wide_linear(x, w, numerics) + 2.0**-20

    monkeypatch.setattr(cpu_figures, "cpu", replace(backend, wide_linear=wrong))
    code, output = run()
    assert code == 1 and "decode, prefill_6, draft: other bits than the spec's" in output


def test_the_counts_are_those_of_the_table():
    """One row and every expert chosen: the bytes of all weights that are multiplied, and two operations for each of their elements."""
    params = tiny(FAITHFUL)
    config = replace(params.config, num_experts_per_tok=params.config.n_routed_experts)
    params = replace(params, config=config)
    ops, count = cpu_figures.counting(backend)
    v41.step(params, v41.init_cache(params, 1, 8), torch.tensor([[5]]), ops=ops)
    parts = ("norm", "bias", ".base", "attn_sink", "q_weight", "k_weight", "embed", "mtp.")
    specs = [s for s in param_specs(config) if not any(p in s.name for p in parts) and not s.name.endswith(("_scale", "_base"))]
    sizes = {s.name: torch.Size(s.shape).numel() for s in specs}
    assert count["weight_bytes"] == sum(sizes[s.name] * s.dtype.itemsize for s in specs)
    codes = sum(n * (2 if s.dtype == torch.int8 else 1) for s, n in zip(specs, sizes.values(), strict=True) if not s.name.endswith(".scale"))
    pooled = sum(sizes[n] for n in sizes if n.endswith("indexer.wk.weight"))  # a source of ratio 1 makes a key of one token, others may make none
    assert 2 * (codes - pooled) <= count["flops"] <= 2 * codes


def test_the_baseline_is_the_model_up_to_the_order_of_its_sums():
    """In exact float32 nothing but rounding of sums differs: 2^-24 of each of some hundred sums in a row."""
    params = tiny(v41.Numerics("exact"))
    tokens = torch.randint(3, 300, (1, 20))
    cache = v41.init_cache(params, 1, 32)
    assert 0 < relative(v41.step(params, cache, tokens, ops=blocks)[0].logits, v41.step(params, cache, tokens)[0].logits) < 1e-5


def test_importing_costs_less_than_two_seconds_beyond_torch():
    code = "import time, torch; a = time.process_time(); import v41; print(time.process_time() - a)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2
