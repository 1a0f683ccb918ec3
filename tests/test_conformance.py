# SPDX-License-Identifier: Apache-2.0
"""The conformance run: right backends pass, wrong ones fail at the tensor that is wrong first, and nothing passes that was not compared."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from inspect import signature

import pack_kit
import pytest
import torch
from click.testing import CliRunner
from helpers import ROOT

import v41
from v41.backends.neuron.kernels import KERNELS
from v41.checkpoint import write_file
from v41.cli.conformance import conformance
from v41.conformance import primitives, selftest, states
from v41.conformance.blocks import teacher_forced
from v41.conformance.cases import Case, all_cases
from v41.conformance.causes import RULES
from v41.conformance.claims import Claims
from v41.conformance.gates import K, gate, spread
from v41.conformance.judge import Finding, Stored, judge
from v41.conformance.layouts import brought
from v41.conformance.mutants.cases import MUTANTS
from v41.conformance.mutants.more import MORE
from v41.conformance.patterns import Patterns, read_patterns
from v41.conformance.results import judge_folder
from v41.conformance.run import run
from v41.conformance.target import Target, cpu, target_named
from v41.golden.pack_calls import Twin
from v41.golden.pack_noise import EXACT
from v41.spec.backend import Backend, definition

FAITHFUL, EXACT32 = v41.Numerics(), v41.Numerics("exact")
SPEC = Backend("spec")


def ran(cases, target=None, patterns=None, seconds=None):
    return run(cases, target or cpu(), patterns or Patterns(), seconds, told=lambda r: None)


def named(cases, *parts):
    found = [c for c in cases if any(p in c.name for p in parts)]
    assert found, parts
    return found


# What passes


def test_every_primitive_has_cases_and_the_spec_passes_them():
    assert primitives.uncovered() == set()
    verdict = ran(all_cases([], [FAITHFUL]), Target("spec", SPEC, Claims(bits=frozenset({"faithful"}))))
    assert verdict.exit_code == 0 and set(verdict.counts) == {"pass"} and verdict.counts["pass"] > 80


def test_the_cpu_passes_every_kind_of_case():
    calls = ("block/decode.c2/", "step/padded.c1/", "free/decode/", "ranks/decode.c3/", "schedule.chunks.c1/", "garbage.permute.c1/", "permute.permute.c1/")
    checked_at = [f"{check}.decode.c2/" for check in ("repeat", "untouched", "poison", "rewind", "restore")]
    cases = named(all_cases([pack_kit.opened()], []), *calls, *checked_at)
    verdict = ran(cases)
    assert verdict.exit_code == 0, verdict.first
    assert {c.name.split("/")[0] for c in cases} == {"block", "step", "free", "state", "ranks"}
    checked = {c.name.split("/")[1].split(".")[0] for c in cases if c.name.startswith("state")}
    assert checked == set(states.CHECKS)
    assert set(verdict.counts) == {"pass"}, verdict.counts


def wide(spec):
    """A primitive in float64 arithmetic, rounded once: another right implementation."""

    def body(*args, **options):
        def widened(v):
            if isinstance(v, v41.Numerics):
                return Twin(v.regime, v.index_keys, v.dtype, True)
            if isinstance(v, torch.dtype):
                return torch.float64
            return v.double() if isinstance(v, torch.Tensor) and v.dtype in (torch.bfloat16, torch.float32) else v

        given = [v if n == "f" else widened(v) for n, v in zip(signature(spec).parameters, args, strict=False)]
        made, usual = spec(*given, **{n: widened(v) for n, v in options.items()}), spec(*args, **options)
        return tuple(m.to(u.dtype) for m, u in zip(made, usual, strict=True)) if isinstance(made, tuple) else made.to(usual.dtype)

    return body


WIDE = ("linear", "partial_linear", "plain_linear", "wide_linear", "grouped_linear", "rms_norm", "rope", "rope_inverse", "sparse_attn")
WIDE += ("index_scores", "softmax_pool", "hc_mixes", "hc_pre", "hc_post", "experts", "shared_expert", "engram_gate")


def other() -> Target:
    """No bits are claimed: what differs has to pass the gates."""
    return Target("wide", replace(SPEC, **{n: wide(definition(f)) for f in fields(Backend)[1:] for n in [f.name] if n in WIDE}))


def test_a_backend_with_other_last_bits_passes_the_gates_and_is_not_equal():
    verdict = ran(named(all_cases([pack_kit.opened()], [EXACT32]), "primitive/", "block/decode.c0", "block/decode.c1"), other())
    found = [f.status for r in verdict.results for f in r.findings]
    assert verdict.exit_code == 0, verdict.first
    assert found.count("within") > 50 and "differs" not in found


def test_a_sum_rounded_where_it_stays_wide_does_not_pass_the_gates():
    narrow = replace(SPEC, partial_linear=lambda x, w, numerics: SPEC.linear(x, w, numerics).to(numerics.wide))
    verdict = ran(named(all_cases([], [FAITHFUL]), "primitive/partial_linear"), Target("narrow", narrow))
    assert verdict.exit_code == 1 and verdict.counts["fail"] == 3


def test_kernels_in_the_simulator_pass_what_they_claim():
    target = target_named("neuron-sim")
    cases = named(all_cases([], [v41.Numerics("trn2"), FAITHFUL]), "rms_norm", "act_round", "softmax_pool", "/tap.")
    verdict = ran(cases, target)
    skipped = {r.reason.split(":")[1] for r in verdict.results if r.status == "skip"}
    assert verdict.exit_code == 0 and verdict.counts["pass"] >= 8 and skipped == {"faithful", "tap"} and "rms_norm" in KERNELS


@pytest.mark.slow
@pytest.mark.capture
def test_the_compiled_cpu_gives_the_stored_bits():
    small = pack_kit.opened("faithful", None, ("window",), layers=1)
    verdict = ran(named(all_cases([small], []), "block/window.c1"), target_named("cpu-compiled"))
    assert verdict.exit_code == 0 and {f.status for f in verdict.results[0].findings} == {"equal"}, verdict.first


# What fails, and where. The call in which each is looked for.

WRONG = {
    # rotation and positions
    "pairs split by halves": ("prefill.c0", "rows.layers.0.window", "rotation of window rows"),
    "compressing layers without YaRN": ("prefill.c0", "rows.layers.1.window", "rotation of window rows"),
    "attention output not rotated back": ("prefill.c0", "layers.0.attn_out", "inverse rotation"),
    "compressed rows not rotated": ("prefill.c0", "rows.layers.1.compressed", "position of a compressed row"),
    # attention, sinks, window
    "sinks zeroed": ("prefill.c0", "layers.0.attn_out", "sink"),
    "window one position short": ("decode.c0", "layers.0.attn_out", "list of slots"),
    "window rows one slot too far": ("prefill.c0", "rows.layers.0.window", "another slot of the ring"),
    "first head a fifth too large": ("prefill.c0", "layers.0.attn_out", "attention"),
    # compressor, chunks
    "unfinished group forgotten": ("decode.c2", "rows.layers.1.group_kv", "not carried over"),
    "group pooled by its mean": ("prefill.c0", "rows.layers.1.compressed", "pooling"),
    "index keys after rounding": ("prefill.c0", "rows.layers.1.index_keys", "before its rotation"),
    "group seen before its last token": ("prefill.c0", "layers.1.index_score", "which rows are scored"),
    "groups counted from the call": ("chunks.c1", "rows.layers.1.compressed", ""),
    # indexer, candidates
    "no ReLU in index scores": ("prefill.c0", "layers.1.index_score", "ReLU"),
    "newest block not pinned": ("decode.c3", "layers.2.candidates", "newest block"),
    "candidates applied to their own source": ("decode.c2", "layers.2.topk_idxs", "candidate source"),
    "selection in order of score": ("prefill.c0", "layers.1.topk_idxs", "ascending"),
    # Engram
    "token history lost between calls": ("decode.c0", "engram_hash_ids", "history"),
    "columns by head, then n-gram size": ("prefill.c0", "engram_hash_ids", "order of the columns"),
    "empty tables": ("prefill.c0", "layers.2.engram_out", "Engram"),
    # streams
    "each sublayer collapses with its own pre mix": ("prefill.c0", "layers.0.route_weights", "the FFN's input"),
    "comb transposed": ("prefill.c0", "layers.0.h_out", "comb"),
    # experts
    "gate and up exchanged": ("prefill.c0", "layers.0.ffn_out", "gate and up"),
    "routing weights not scaled": ("prefill.c0", "layers.0.route_weights", "constant factor"),
    "bias left out of the choice": ("prefill.c0", "layers.0.route_experts", "bias added for the choice only"),
    "experts summed twice": ("prefill.c0", "layers.0.ffn_out", "experts"),
    # formats
    "rotary part of window rows not rounded": ("prefill.c0", "rows.layers.0.window", "round trip"),
    "even column in the high nibble": ("prefill.c0", "layers.0.ffn_out", "nibble"),
    "window rows in the format of index keys": ("prefill.c0", "rows.layers.0.window", "round trip"),
    # draft head
    "taps before the Engram": ("prefill.c0", "main_hidden", "taps"),
    "another noise token": ("decode.c1", "mtp.0.attn_in", "wrong stream"),
    "Markov bias of the given token at every place": ("decode.c1", "draft.logits", "Markov"),
    "confidence after the norm": ("decode.c1", "draft.confidence", "before its norm"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backend_fails_at_the_tensor_that_is_wrong_first(name):
    """By the gates alone: no bits are claimed."""
    call, first, cause = WRONG[name]
    mutant = next(m for m in (*MUTANTS, *MORE) if m.name == name)
    opened = pack_kit.opened()
    with mutant.change(opened.params, SPEC) as (params, ops):
        changed, stop = selftest.changed(opened, pack_kit.stop(call), params)
        case = Case(f"block/{call}", (), lambda target: teacher_forced(target, changed, stop), stop, changed)
        verdict = ran([case], Target(name, ops))
    assert verdict.exit_code == 1 and verdict.first.status == "fail"
    assert verdict.first.first.name == first
    assert cause in verdict.first.cause, verdict.first.cause


def test_state_checks_find_what_reads_or_writes_outside_its_rows():
    def with_memory():
        kept = []

        def body(x, weight, eps):
            kept.append(x)
            return SPEC.rms_norm(x, weight, eps) * (1 if len(kept) < 20 else 1.5)

        return replace(SPEC, rms_norm=body)

    def sloppy(buffer, index, rows):
        return SPEC.write_rows(buffer, index, rows).index_fill(1, torch.tensor([3]), 1)

    def leaky(q, window, listed, rows, chosen, sink, scale, numerics):
        return SPEC.sparse_attn(q, window, listed, rows, chosen, sink, scale, numerics) + window.float().sum() * 0

    def mixing(x, *weights, limit, numerics):
        return SPEC.shared_expert(x, *weights, limit=limit, numerics=numerics) + x.sum(0) * 0.1

    cases = all_cases([pack_kit.opened()], [])
    for ops, case in (
        (with_memory(), "state/repeat.decode.c0"),
        (replace(SPEC, write_rows=sloppy), "state/untouched.decode.c0"),
        (replace(SPEC, sparse_attn=leaky), "state/poison.decode.c0"),
        (replace(SPEC, shared_expert=mixing), "state/garbage.permute.c1"),
    ):
        verdict = ran(named(cases, case), Target("wrong", ops))
        assert verdict.counts == {"fail": 1} and verdict.first.cause, case
        assert ran(named(cases, case), Target("right", SPEC)).counts == {"pass": 1}


def test_ranks_that_sum_twice_fail_and_name_the_tensor():
    doubled = replace(SPEC, grouped_linear=lambda x, w, groups, numerics: SPEC.grouped_linear(x, w, groups, numerics) * 2)
    verdict = ran(named(all_cases([pack_kit.opened()], []), "ranks/decode.c3"), Target("twice", doubled))
    assert verdict.counts == {"fail": 1} and verdict.first.first.name == "layers.0.attn_out" and "twice over ranks" in verdict.first.cause


def test_an_exception_is_a_failure_with_its_text():
    def broken(x, weight, eps):
        raise RuntimeError("out of memory on core 3")

    verdict = ran(named(all_cases([], [FAITHFUL]), "rms_norm"), Target("broken", replace(SPEC, rms_norm=broken)))
    assert verdict.exit_code == 1 and verdict.first.status == "error" and "core 3" in verdict.first.reason


# Gates and choices


def test_gates_pass_equal_noise_and_refuse_truncation_a_bias_and_one_wrong_element():
    want = torch.randn(64, 3, 256).to(torch.bfloat16)
    exact = want.double() + (torch.rand(want.shape).double() - 0.5) * torch.exp2(torch.floor(torch.log2(want.double().abs().clamp_min(1e-30))) - 7)
    far = exact - want.double()
    assert gate(want, want, far, False).tensor == 1.0
    rounded = exact.to(torch.bfloat16)
    assert gate(rounded, want, far, False).passes and gate((rounded.double() * (1 + 2.0**-12)).to(torch.bfloat16), want, far, False).passes
    bits = exact.float().view(torch.int32) & ~0xFFFF
    assert not gate(bits.view(torch.float32).to(torch.bfloat16), want, far, False).passes  # toward zero
    assert not gate((exact * 1.02).to(torch.bfloat16), want, far, False).passes
    one = rounded.clone()
    one[3, 1, 7] += 0.5
    found = gate(one, want, far, False)
    assert not found.passes and found.row_at == 3 * 3 + 1 and found.element > 1
    assert 1.41 < K < 2 and spread(1) > 4 and abs(spread(10**6) - 1) < 0.01


def test_nothing_but_equal_passes_where_the_stored_tensor_has_no_error():
    want = torch.ones(2, 3, 4)
    assert gate(want, want, torch.zeros(2, 3, 4), False).passes
    assert not gate(want + 1e-6, want, torch.zeros(2, 3, 4), False).passes


def test_nan_fails_before_anything_else():
    want = torch.ones(1, 2, 4)
    stored = Stored({"x": want, "s": want.neg() * torch.inf}, {"x" + EXACT: torch.ones(1, 2, 4).double()})
    bad = want.clone()
    bad[0, 1, 2] = torch.nan
    assert judge("x", bad, stored, {}, False, True).status == "non-finite" and judge("x", bad, stored, {}, True, True).at == (0, 1, 2)
    assert judge("s", want, stored, {}, False, True).status != "equal" and judge("s", stored.want["s"].clone(), stored, {}, False, True).status == "equal"
    assert judge("s", torch.full((1, 2, 4), torch.inf), stored, {}, False, True).status == "non-finite"


def chosen(scores, k=2):
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values.to(torch.int32)


def test_choices_flip_within_the_margin_of_their_scores_and_fail_beyond_it():
    scores = torch.tensor([[[5.0, 4.0, 3.999, 1.0], [9.0, 8.0, 2.0, 1.0]]])
    far = torch.full(scores.shape, 0.001).double()
    want = chosen(scores)
    stored = Stored({"l.index_score": scores, "l.topk_idxs": want}, {"l.index_score" + EXACT: far})
    near, wide_off = want.clone(), want.clone()
    near[0, 0], wide_off[0, 1] = torch.tensor([0, 2]), torch.tensor([0, 2])
    found = judge("l.topk_idxs", near, stored, {}, False, True)
    assert found.status == "flip" and abs(found.numbers["allowed"][0] - 2 * K * 0.001) < 1e-9 and abs(found.numbers["margins"][0] - 0.001) < 1e-6
    assert judge("l.topk_idxs", wide_off, stored, {}, False, True).status == "differs"
    assert judge("l.topk_idxs", near, stored, {}, True, True).status == "differs"  # bits are claimed
    assert judge("l.topk_idxs", want.flip(-1), stored, {}, False, True).reason.endswith("another order")
    assert "outside" in judge("l.topk_idxs", want + 7, stored, {}, False, True).reason
    verdict = ran([Case("block/x", (), lambda t: [found])])
    assert verdict.counts == {"flip": 1} and verdict.exit_code == 0


def test_the_tie_rule_holds_where_scores_are_given():
    higher = next(m for m in MORE if m.name == "the higher row wins a tie")
    with higher.change(pack_kit.opened().params, SPEC) as (_, ops):
        verdict = ran(named(all_cases([], [FAITHFUL]), "primitive/select"), Target("higher", ops))
    failed = {r.case.split(".")[1].split("/")[0] for r in verdict.results if r.status == "fail"}
    assert {"ties", "all_equal"} <= failed and "few" not in failed


# Patterns, skips, budgets


def findings(status):
    return lambda target: [Finding("x", status)]


CASES = [Case("primitive/a/faithful", ("step",), findings("equal")), Case("primitive/b/faithful", ("draft",), findings("differs"))]


def test_patterns_must_match_and_expected_failures_must_fail(tmp_path):
    assert ran(CASES).exit_code == 1 and ran(CASES, patterns=Patterns(exclude=("*/b/*",))).exit_code == 0
    assert ran(CASES, patterns=Patterns(xfail={"*/b/*": "later"})).counts == {"pass": 1, "xfail": 1}
    assert ran(CASES, patterns=Patterns(xfail={"*/b/*": "later"})).exit_code == 0
    passes = ran(CASES[:1], patterns=Patterns(xfail={"*/a/*": "later"}))
    assert passes.exit_code == 1 and passes.counts == {"xpass": 1}
    for idle in (Patterns(include=("*/a/*", "*/c/*")), Patterns(exclude=("*/c/*",)), Patterns(xfail={"*/c/*": "later"})):
        verdict = ran(CASES[:1], patterns=idle)
        assert verdict.exit_code == 1 and "'*/c/*'" in verdict.idle[0]


def test_skips_have_reasons_and_are_no_passes():
    verdict = ran(CASES, Target("poor", SPEC, Claims({"draft": "no draft kernels yet"})))
    assert verdict.exit_code == 0 and verdict.results[1].reason == "draft: no draft kernels yet"
    assert ran(CASES, Target("poorer", SPEC, Claims({"draft": "none", "step": "none"}))).exit_code == 2
    assert ran([Case("free/x", (), findings("told"))]).exit_code == 2 and ran([]).exit_code == 2
    assert ran(CASES, patterns=Patterns(lacks={"draft": "not ported"})).counts == {"pass": 1, "skip": 1}
    late = ran(CASES, seconds=-1.0)
    assert late.exit_code == 2 and late.counts == {"late": 2}
    for wrong in ({"drafts": "x"}, {"draft": " "}):
        with pytest.raises(ValueError, match="lacks"):
            Claims(wrong)


def test_files_of_patterns_are_read_strictly(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('include = ["a*"]\n[lacks]\n"draft" = "no"\n[xfail]\n"b" = "why"\n', encoding="utf-8")
    assert read_patterns(file) == Patterns(("a*",), (), {"b": "why"}, {"draft": "no"})
    for text in ("include = 3", "skip = []", 'xfail = ["a"]', "include = [", '[xfail]\n"a" = ""'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"mine\.toml"):
            read_patterns(file)


# Folders of tensors, the command, the example, the self-test


def test_a_folder_of_tensors_is_judged_without_a_backend(tmp_path):
    opened = pack_kit.opened()
    clean = brought(opened, "decode")
    write_file(tmp_path / "decode.safetensors", {n: t for n, t in clean.items() if n.startswith("c0.layers.1.")})
    verdict = judge_folder(tmp_path, opened)
    assert verdict.exit_code == 0 and verdict.counts == {"pass": 1} and "were not brought" in verdict.notes[0]
    wrong = clean | {"c0.layers.2.attn_out": clean["c0.layers.2.attn_out"] * 1.5}
    write_file(tmp_path / "decode.safetensors", wrong)
    verdict = judge_folder(tmp_path, opened)
    assert verdict.exit_code == 1 and verdict.first.first.name == "layers.2.attn_out" and "constant factor" in verdict.first.cause
    write_file(tmp_path / "decode.safetensors", {"c0.attn": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"c0\.attn is no tensor"):
        judge_folder(tmp_path, opened)
    (tmp_path / "decode.safetensors").unlink()
    assert judge_folder(tmp_path, opened).exit_code == 2


def test_the_command_reports_and_leaves_with_the_verdict(tmp_path):
    def command(*args):
        return CliRunner().invoke(conformance, list(args))

    one = command("--backend", "cpu", "--include", "primitive/rms_norm.*/faithful", "--json")
    told = json.loads(one.output)
    assert one.exit_code == 0 and told["counts"]["pass"] == 1 and told["exit"] == 0
    idle = command("--backend", "cpu", "--include", "primitive/rms_norm.*/faithful", "--exclude", "nothing/*")
    assert idle.exit_code == 1 and "matches no case" in idle.output
    assert command().exit_code == 2 and command("--results", str(tmp_path)).exit_code == 2
    empty = command("--results", str(tmp_path), "--pack", str(pack_kit.folder()))
    assert empty.exit_code == 2 and "nothing was compared" in empty.output
    listed = command("--backend", "neuron-sim", "--list")
    assert listed.exit_code == 0 and "primitive/gate.six_of_384/trn2  needs regime:trn2, primitive:gate" in listed.output
    with pytest.raises(ValueError, match="'gpu' is not one of cpu"):
        CliRunner().invoke(conformance, ["--backend", "gpu"], catch_exceptions=False)


def test_the_example_backend_installs_and_passes(tmp_path):
    shutil.copytree(ROOT / "examples" / "backend", tmp_path / "backend")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    built = subprocess.run([*install, str(tmp_path / "backend")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    source = (tmp_path / "backend" / "float64_products.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 13
    call = [
        "-c",
        "from v41.cli import main; main()",
        "conformance",
        "--backend",
        "float64-products",
        "--config",
        str(tmp_path / "backend" / "conformance.toml"),
    ]
    command = [sys.executable, *call, "--pack", str(pack_kit.folder()), "--json"]
    environment = {"PYTHONPATH": f"{ROOT}:{site}", "OMP_NUM_THREADS": "1", "PATH": ""}
    kinds = [a for p in ("primitive/plain_linear*", "primitive/wide_linear*", "block/decode*", "primitive/tap*") for a in ("--include", p)]
    done = subprocess.run([*command, *kinds], capture_output=True, text=True, env=environment)
    told = json.loads(done.stdout)
    statuses = [f["status"] for r in told["results"] for f in r["findings"]]
    assert done.returncode == 0 and told["counts"]["pass"] > 10 and told["counts"]["skip"] > 0, told["first"]
    assert "within" in statuses and "differs" not in statuses


SOME = ("sinks zeroed", "one Sinkhorn iteration less", "a dead token hides only itself")


def test_the_self_test_catches_mutants_edits_and_layouts(monkeypatch):
    monkeypatch.setattr(selftest, "packs_of", lambda given, checkpoint, folder: [pack_kit.opened("faithful", None, ("prefill",))])
    rows = list(selftest.self_test((), None, SOME))
    assert all(r.caught for r in rows), [r.name for r in rows if not r.caught]
    kinds = {k: sum(r.kind == k for r in rows) for k in ("code", "bytes", "layout")}
    assert kinds["code"] == 1 + len(SOME) and kinds["bytes"] > 30 and kinds["layout"] > 15
    assert [r.name for r in rows if r.where == "passes"] == ["unchanged: nothing may be caught", "unchanged: nothing may be noticed"]


@pytest.mark.slow
def test_the_whole_self_test_misses_nothing():
    rows = list(selftest.self_test((), None))
    assert [r.name for r in rows if not r.caught] == [] and sum(r.kind == "code" for r in rows) > 95


def test_every_likely_cause_stands_in_the_documentation():
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert len(RULES) > 40 and [text for _, _, text in RULES if text not in page] == []


@pytest.mark.parametrize("name", ["faithful", "trn2"])
def test_the_committed_packs_are_what_the_cpu_computes(name):
    """A prefill call and a decode step of the tiny model, from stored states."""
    opened = pack_kit.committed(name)
    cases = named(all_cases([opened], []), "block/prefill.c0", "block/decode.c2")
    verdict = ran(cases, replace(cpu(), claims=Claims()))  # by the gates: bits may differ on another processor
    assert verdict.exit_code == 0, verdict.first
