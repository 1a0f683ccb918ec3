# SPDX-License-Identifier: Apache-2.0
"""Experts as kernels against their definition in `trn2`, and what they read."""

from dataclasses import replace
from importlib import import_module

import cases_experts as cases
import pytest
import torch
from bounds import check_rows, strict
from cases_experts import FORMS, LIMIT
from mutate import everywhere

from v41.backends.neuron.bench import measure
from v41.backends.neuron.bench.moe import CASES, decode
from v41.backends.neuron.kernels import experts as kernels
from v41.backends.neuron.kernels import experts_layout as layout
from v41.backends.neuron.launch import profiled, simulate
from v41.backends.neuron.sim import SimError
from v41.spec.numerics import Numerics
from v41.spec.ops import experts as spec
from v41.spec.ops import partial

TRN2, EXACT = Numerics("trn2"), Numerics("exact")
KINDS = ("uniform", "one expert", "none", "duplicates", "no weight")
WHOLE = {"loop": kernels.experts, "unrolled": kernels.experts_unrolled}


def check(got, exact, error, what):
    """Every element within its bound of the exact value."""
    assert got.dtype == torch.float32 and got.shape == exact.shape
    off = (got.double() - exact).abs()
    bad = ~(off <= error)
    assert not bad.any(), f"{what}: {int(bad.sum())} of {bad.numel()} off; worst {float((off - error).max())} above its bound"


def compared(kernel, x, weights, ids, w, given=None):
    """A kernel's result and the definition's are both within the bound."""
    exact, error = cases.bound(x, weights, ids, w, TRN2)
    want = spec.experts(x, weights, ids, *w, limit=LIMIT, numerics=TRN2)
    check(want, exact, error, "definition")
    got = kernel(strict, x, weights, ids, *(given or w), limit=LIMIT, numerics=TRN2)
    check(got, exact, error, "kernel")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WHOLE)
def test_six_rows_are_their_definition(how, kind, form):
    w = cases.experts_of(5, 128, 96)
    given = tuple(cases.in_form(m, form) for m in w)
    compared(WHOLE[how], cases.rows_of(6, 128), *cases.routing(kind, 6, 3, 5), w, given)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("n", "k", "held", "dim", "inner"), [(1, 2, 3, 256, 32), (4, 6, 9, 64, 64), (17, 2, 2, 384, 160), (32, 3, 1, 96, 40 * 8), (6, 2, 2, 5120, 32)]
)
def test_other_sizes_are_their_definition(n, k, held, dim, inner, form):
    w = cases.experts_of(held, dim, inner)
    given = tuple(cases.in_form(m, form) for m in w)
    weights, ids = cases.routing("uniform", n, k, held)
    for kernel in WHOLE.values():
        compared(kernel, cases.rows_of(n, dim), weights, ids, w, given)


@pytest.mark.parametrize(
    ("n", "kind", "form"),
    [(33, "uniform", "codes"), (512, "uniform", "codes"), (150, "one expert", "fp4"), (70, "none", "codes"), (90, "duplicates", "values")],
)
def test_many_rows_are_their_definition(n, kind, form):
    w = cases.experts_of(3, 128, 96)
    given = tuple(cases.in_form(m, form) for m in w)
    compared(kernels.experts, cases.rows_of(n, 128), *cases.routing(kind, n, 2, 3), w, given)


def test_many_rows_without_loops_are_their_definition():
    w = cases.experts_of(2, 128, 32)
    compared(kernels.experts_unrolled, cases.rows_of(600, 128), *cases.routing("uniform", 600, 2, 2), w)


@pytest.mark.parametrize("block", [64, 128])
def test_blocks_of_more_rows_are_their_definition(block, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_ROWS", ((4096, block),))
    w = cases.experts_of(2, 128, 96)
    compared(kernels.experts, cases.rows_of(200, 128), *cases.routing("uniform", 200, 2, 2), w, tuple(cases.in_form(m, "codes") for m in w))


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_shares_of_the_inner_dimension_add_up_to_the_whole(parts):
    w1, w2, w3 = cases.experts_of(3, 128, 256)
    x, (weights, ids) = cases.rows_of(6, 128), cases.routing("uniform", 6, 2, 3)
    total = torch.zeros(6, 128)
    for p in range(parts):
        cut = slice(p * 256 // parts, (p + 1) * 256 // parts)
        codes = slice(cut.start // 2, cut.stop // 2)
        scales = slice(cut.start // 32, cut.stop // 32)
        own = replace(w1, weight=w1.weight[:, cut], scale=w1.scale[:, cut]), replace(w2, weight=w2.weight[:, :, codes], scale=w2.scale[:, :, scales])
        own = (*own, replace(w3, weight=w3.weight[:, cut], scale=w3.scale[:, cut]))
        part = kernels.experts(strict, x, weights, ids, *own, limit=LIMIT, numerics=TRN2)
        exact, error = cases.bound(x, weights, ids, own, TRN2)
        check(part, exact, error, f"part {p}")
        check(partial.experts(x, weights, ids, *own, limit=LIMIT, numerics=TRN2), exact, error, f"definition of part {p}")
        total = total + part
    check(total, *cases.bound(x, weights, ids, (w1, w2, w3), TRN2), "sum of the parts")


@pytest.mark.parametrize(("n", "dim", "inner"), [(6, 128, 64), (1, 64, 32), (40, 128, 96)])
def test_the_shared_expert_alone_and_with_the_routed_ones(n, dim, inner):
    w, shared, x = cases.experts_of(2, dim, 32), cases.shared_of(dim, inner), cases.rows_of(n, dim)
    exact, error = cases.shared_bound(x, shared, TRN2)
    check(spec.shared_expert(x, *shared, limit=LIMIT, numerics=TRN2), exact, error, "definition")
    check(kernels.shared_expert(strict, x, *shared, limit=LIMIT, numerics=TRN2), exact, error, "alone")
    weights, ids = cases.routing("uniform", n, 2, 2)
    routed, more = cases.bound(x, weights, ids, w, TRN2)
    for form in FORMS:
        tiles = layout.prepared(*(cases.in_form(m, form) for m in w), TRN2, shared)
        for kernel in WHOLE.values():
            both = kernel(strict, x, weights, ids, tiles, None, None, limit=LIMIT, numerics=TRN2)
            check(both, exact + routed, error + more + 8 * cases.U * (exact.abs() + routed.abs()), f"both, {form}")
    nothing = layout.SharedTiles(None, dim, 1)
    assert not kernels.shared_expert(None, x, nothing, None, None, limit=LIMIT, numerics=TRN2).any()


@pytest.mark.parametrize("n", [6, 40])
def test_in_exact_float32_only_the_order_of_sums_differs(n):
    w, shared, x = cases.experts_of(3, 128, 96), cases.shared_of(128, 64), torch.randn(n, 128)
    weights, ids = cases.routing("uniform", n, 2, 3)
    want = spec.experts(x, weights, ids, *w, limit=LIMIT, numerics=EXACT)
    for kernel in WHOLE.values():
        check_rows(kernel(simulate, x, weights, ids, *w, limit=LIMIT, numerics=EXACT), want, "experts")
    want = spec.shared_expert(x, *shared, limit=LIMIT, numerics=EXACT)
    check_rows(kernels.shared_expert(simulate, x, *shared, limit=LIMIT, numerics=EXACT), want, "shared")


def test_the_clamp_of_zero_is_none():
    w, x = cases.experts_of(2, 128, 32), cases.rows_of(4, 128) * 8
    weights, ids = cases.routing("uniform", 4, 2, 2)
    want = spec.experts(x, weights, ids, *w, limit=0.0, numerics=TRN2)
    clamped = spec.experts(x, weights, ids, *w, limit=LIMIT, numerics=TRN2)
    got = kernels.experts(strict, x, weights, ids, *w, limit=0.0, numerics=TRN2)
    assert (got - want).abs().max() < 1e-3 * want.abs().max() < (clamped - want).abs().max()


@pytest.mark.parametrize("n", [6, 40])
def test_a_row_of_nan_stays_alone_and_a_row_without_experts_is_zero(n):
    w, x = cases.experts_of(3, 128, 32), cases.rows_of(n, 128)
    weights, ids = cases.routing("uniform", n, 2, 3)
    ids[1], ids[2] = -1, torch.tensor([0, -1], dtype=torch.int32)
    for kernel in WHOLE.values():
        clean = kernel(simulate, x, weights, ids, *w, limit=LIMIT, numerics=TRN2)
        rows = torch.arange(n)[:, None]
        dirty = kernel(simulate, torch.where((rows == 1) | (rows == 2), torch.nan, x), weights, ids, *w, limit=LIMIT, numerics=TRN2)
        assert not clean[1].any() and dirty[2].isnan().all()
        rest = [r for r in range(n) if r != 2]
        assert torch.equal(clean[rest], dirty[rest])


def test_no_rows_give_no_rows_and_wrong_calls_are_refused():
    w, x = cases.experts_of(2, 128, 32), cases.rows_of(4, 128)
    weights, ids = cases.routing("uniform", 4, 2, 2)
    empty = kernels.experts(None, x[:0], weights[:0], ids[:0], *w, limit=LIMIT, numerics=TRN2)
    assert empty.shape == (0, 128) and empty.dtype == torch.float32
    with pytest.raises(ValueError, match="'faithful'"):
        kernels.experts(None, x, weights, ids, *w, limit=LIMIT, numerics=Numerics("faithful"))
    with pytest.raises(ValueError, match=r"limit 10\.01"):
        kernels.experts(None, x, weights, ids, *w, limit=10.01, numerics=TRN2)
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        kernels.experts(None, x, weights[:3], ids, *w, limit=LIMIT, numerics=TRN2)
    tiles = layout.prepared(*w, TRN2)
    with pytest.raises(ValueError, match="501 experts of 1 items"):
        kernels.experts(None, x, weights, ids, replace(tiles, weight=torch.empty(501, 1, 128, 8)), None, None, limit=LIMIT, numerics=TRN2)
    with pytest.raises(ValueError, match="400 experts and 1000 rows"):
        many = torch.zeros(1000, 128), torch.zeros(1000, 2), torch.zeros(1000, 2, dtype=torch.int32)
        kernels.experts(None, *many, replace(tiles, weight=torch.empty(400, 1, 128, 8)), None, None, limit=LIMIT, numerics=TRN2)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "held", "inner"), [(6, 2, 2304), (6, 6, 576), (6, 8, 288), (512, 2, 288)])
def test_experts_of_full_size_are_their_definition(n, held, inner, form):
    w = cases.experts_of(held, 5120, inner)
    compared(kernels.experts, cases.rows_of(n, 5120), *cases.routing("uniform", n, 2, held), w, tuple(cases.in_form(m, form) for m in w))


# What is read


def poisoned(tiles, hit):
    """Tiles whose experts that are not hit hold codes that are no numbers."""
    keep = torch.zeros(len(tiles.weight), dtype=torch.bool)
    keep[list(hit)] = True
    return replace(tiles, weight=torch.where(keep[:, None, None, None], tiles.weight, 0x7F))


@pytest.mark.parametrize("hit", [(0, 3), (6, 7), (2, 5)])
def test_experts_without_rows_are_not_read(hit):
    w, x = cases.experts_of(8, 128, 256), cases.rows_of(6, 128)
    tiles = layout.prepared(*(cases.in_form(m, "codes") for m in w), TRN2)
    weights, ids = torch.rand(6, 2) + 0.1, torch.tensor(hit, dtype=torch.int32).expand(6, 2).contiguous()
    got = kernels.experts(strict, x, weights, ids, poisoned(tiles, hit), None, None, limit=LIMIT, numerics=TRN2)
    check(got, *cases.bound(x, weights, ids, w, TRN2), "poisoned")


def counters(tiles, x, ids):
    """(bytes by DMA, instructions) of one core."""
    reports = []
    kernels.experts(profiled(reports), x, torch.ones(ids.shape), ids, tiles, None, None, limit=LIMIT, numerics=TRN2)
    assert reports[0].warnings == ()
    return next(e.bytes for e in reports[0].engines if e.engine == "dma"), reports[0].instructions


def test_bytes_are_those_of_the_experts_hit_and_instructions_do_not_depend_on_which():
    """8 groups of an expert are one step of both cores, so that h experts take h steps."""
    w, x = cases.experts_of(8, 128, 256), cases.rows_of(6, 128)
    tiles = layout.prepared(*(cases.in_form(m, "codes") for m in w), TRN2)
    one_expert = 3 * 256 * 128
    found = {}
    for hit in ((), (1,), (7,), (0, 1), (2, 6), (0, 3, 4, 7)):
        ids = torch.full((6, 4), -1, dtype=torch.int32)
        ids[:, : len(hit)] = torch.tensor(hit, dtype=torch.int32)
        found.setdefault(len(hit), set()).add(counters(tiles, x, ids))
    assert all(len(seen) == 1 for seen in found.values())
    bytes_of, instructions = ({h: next(iter(seen))[i] for h, seen in found.items()} for i in (0, 1))
    for h in (1, 2, 4):
        assert 2 * (bytes_of[h] - bytes_of[0]) == h * one_expert
        assert instructions[h] - instructions[0] == h * (instructions[1] - instructions[0])


def test_seven_experts_of_a_rank_stay_near_their_floor_and_every_step_of_the_loop_is_counted():
    seven, one = (measure(decode("TP8 x EP8", hit)) for hit in (7, 1))
    assert seven.ratio <= 1.5 and seven.bound_by == "tensor"
    moved = [sum(e.bytes for e in m.reports[0].engines if e.engine == "dma") for m in (seven, one)]
    steps = [-(-hit * 9 // 8) for hit in (7, 1)]
    assert moved[0] - moved[1] == (steps[0] - steps[1]) * 4 * 128 * 3840
    assert not seven.reports[0].warnings and not one.reports[0].warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.phase == "decode" and "codes" in c.shape and " 0 of" not in c.shape and " 1 of" not in c.shape], ids=lambda c: c.shape
)
def test_experts_hit_stay_near_their_floor(case):
    assert measure(case).ratio <= 1.5


# Wrong kernels

AFTER = """weight = nl.ndarray((rows, items, GROUP), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=weight, data=per_item(meta, 0, rows, items, 1), op0=nl.maximum, operand0=1e-3)
        without = nl.ndarray((rows, items, GROUP), dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=without, data=weight)
        divided = nl.ndarray((rows, items * GROUP), dtype=hidden.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=divided, data1=hidden, data2=without, op=nl.multiply)
        hidden = round_trip(divided, rows, items * GROUP, limit)
        nisa.tensor_tensor(dst=hidden, data1=hidden, data2=weight, op=nl.multiply)"""
MUTANTS = (
    (
        "experts_route",
        "op0=nl.multiply, operand0=float(groups), op1=nl.add",
        "op0=nl.multiply, operand0=float(groups - 1), op1=nl.add",
        "loop",
        "an expert's end is skipped",
    ),
    ("experts_route", "operand0=first, op1=nl.multiply", "operand0=1.0, op1=nl.multiply", "loop", "the list ends in an expert that is not hit"),
    ("experts_route", "padding_val=0", "padding_val=1", "loop", "the last items are added twice"),
    ("experts_route", "operand1=float(step - 1)", "operand1=0.0", "loop", "a stale count: the last step is missing"),
    ("experts_route", "nisa.memset(dst=table[:, 0, 0:1], value=0.0)", "pass", "loop", "rows of no expert count for column 0"),
    (
        "experts_kernel",
        "column = item // groups + 1 if item < count else 0",
        "column = min(item, count - 1) // groups + 1",
        "unrolled",
        "an item is added twice",
    ),
    ("experts_core", "hidden = round_trip(hidden, rows, items * GROUP, limit)", "hidden = hidden", "loop", "no round trip before w2"),
    (
        "experts_core",
        "data1=gated, data2=per_item(meta, 0, rows, items, 1)",
        "data1=gated, data2=per_item(meta, 1, rows, items, 1)",
        "loop",
        "no routing weight",
    ),
    ("experts_core", "hidden = round_trip(hidden, rows, items * GROUP, limit)", AFTER, "loop", "routing weight after the round trip"),
    ("experts_core", "accumulate=t > 0", "accumulate=t > 1", "loop", "the first tile is lost"),
    (
        "experts_core",
        "op0=nl.minimum, operand0=clamp)",
        "op0=nl.minimum, operand0=clamp, op1=nl.maximum, operand1=-clamp)",
        "loop",
        "the gate is clamped on both sides",
    ),
    ("experts_core", 'some, splits):\n    """Fills', 'some, splits):\n    first = 0\n    """Fills', "unrolled", "rows of the first part only"),
    ("experts_kernel", "    added(total, 0, 1, z, parts, before, n, ITEMS, splits, False)\n    stored", "    stored", "loop", "the last step is not added"),
    ("experts_fetch", "value=0x7070", "value=0x3070", "fp4", "a bit of a high nibble"),
    ("experts_fetch", "op1=nl.left_shift, operand1=4)", "op1=nl.left_shift, operand1=3)", "fp4", "the sign of the low nibble"),
    ("experts_fetch", "words, mask, True, nisa", "words, mask, False, nisa", "fp4", "the wrong nibble"),
    ("experts_rows", "op1=nl.add, operand1=counts)", "op1=nl.add, operand1=ones[:, 0:columns])", "many", "places start again every 128 rows"),
    ("experts_prefill", "operand0=1.0 - float(me))", "operand0=1.0)", "many", "the middle item is added twice"),
)


def outcome(kernel, x, weights, ids, tiles, w):
    """Whether the result is right; a run that the simulator refuses is not."""
    try:
        check(kernel(simulate, x, weights, ids, tiles, None, None, limit=LIMIT, numerics=TRN2), *cases.bound(x, weights, ids, w, TRN2), "")
    except (AssertionError, SimError):
        return False
    return True


@pytest.mark.parametrize(("name", "old", "new", "where", "what"), MUTANTS, ids=[m[4] for m in MUTANTS])
def test_a_wrong_kernel_is_caught(name, old, new, where, what, tmp_path, monkeypatch):
    """By one of four routings, to 1, 2, 3 or 5 of 5 experts, of which those without rows are poisoned."""
    n, dim = 160 if "many" in where or "part" in what else 6, 256 if "tile" in what else 128
    w, x = cases.experts_of(5, dim, 96), cases.rows_of(n, dim) * (4 if "clamp" in what else 1)
    tiles = layout.prepared(*(cases.in_form(m, "fp4" if where == "fp4" else "codes") for m in w), TRN2)
    kernel = kernels.experts_unrolled if where == "unrolled" else kernels.experts
    runs = []
    for hit in ((3,), (0, 3), (1, 2, 4), (0, 1, 2, 3, 4)):
        ids = torch.tensor(hit, dtype=torch.int32)[torch.rand(n, len(hit)).argsort(1)]
        ids[-1, 0] = -1
        runs.append((kernel, x, torch.rand(n, len(hit)) + 0.1, ids, poisoned(tiles, hit) if where == "loop" else tiles, w))
    assert outcome(*runs[3])
    everywhere(import_module(f"v41.backends.neuron.kernels.{name}"), old, new, tmp_path, monkeypatch)
    assert not all(outcome(*r) for r in runs)
