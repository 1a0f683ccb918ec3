# SPDX-License-Identifier: Apache-2.0
"""Index scores, selection and candidate blocks equal their definitions, and wrong kernels do not."""

import pytest
import torch
from bounds import Near, U, check_equal, check_near, check_rows, rounded, strict
from cases_index import BF16, BLOCKS, BLOCKS_FULL, CHOICES, CHOICES_FULL, F32, NUMERICS, SCORES, SCORES_FULL
from mutate import mutated

from v41.backends.neuron.kernels import best, candidate_blocks, index_scores, select
from v41.spec.numerics import Numerics
from v41.spec.ops import index, partial


def scores_hold(module, b, s, heads, d, t, dtype):
    g = torch.Generator().manual_seed(t)
    iq, ik, iw = (torch.randn(*shape, generator=g).to(dtype) for shape in ((b, s, heads, d), (b, t, d), (b, s, heads)))
    numerics = NUMERICS[dtype]
    products = torch.einsum("bshd,btd->bsht", iq.double(), ik.double())
    sizes = torch.einsum("bshd,btd->bsht", iq.double().abs(), ik.double().abs())
    dots = rounded(Near(products, sizes * d * U), dtype)
    dots = Near(dots.value.clamp_min(0), dots.error)
    weights = iw.double()[..., None]
    exact = (dots.value * weights).sum(2)
    error = (dots.error * weights.abs()).sum(2) + (dots.value * weights.abs()).sum(2) * (heads + 2) * U
    case = f"{b} x {s} x {heads} x {d}, {t} keys, {dtype}"
    got = module.index_scores(strict, iq, ik, iw, numerics)
    check_near(got, Near(exact, error), case)
    wide = module.partial_index_scores(strict, iq, ik, iw, numerics)
    assert wide.dtype == F32
    check_near(wide, Near(exact, error), "partial " + case)
    if dtype == F32:
        check_rows(got, index.index_scores(iq, ik, iw, numerics), case)
        check_rows(wide, partial.index_scores(iq, ik, iw, numerics), case)


@pytest.mark.parametrize("case", SCORES, ids=str)
def test_index_scores_equal_their_definition_within_its_roundings(case):
    scores_hold(index_scores, *case)


def test_keys_that_are_read_in_several_parts_are_scored_in_their_places(monkeypatch):
    monkeypatch.setattr(index_scores, "HELD", 3)
    scores_hold(index_scores, 1, 3, 4, 16, 8 * 1024 + 5, BF16)
    scores_hold(index_scores, 2, 3, 32, 16, 8 * 256 + 1, F32)


@pytest.mark.slow
@pytest.mark.parametrize("case", SCORES_FULL, ids=str)
def test_index_scores_of_full_size_equal_their_definition(case):
    scores_hold(index_scores, *case)


def test_index_scores_of_values_whose_sums_are_exact_equal_the_definition_in_every_bit():
    """Values as the fp4 round trip leaves them, weights that are powers of two: no order of sums can round."""
    g = torch.Generator().manual_seed(0)
    iq, ik = (torch.randint(-12, 13, shape, generator=g).to(BF16) / 2 for shape in ((1, 6, 4, 128), (1, 700, 128)))
    iw = torch.exp2(torch.randint(-3, 3, (1, 6, 4), generator=g).float()).to(BF16)
    args = (iq, ik, iw, NUMERICS[BF16])
    check_equal(index_scores.index_scores(strict, *args), index.index_scores(*args), "exact sums")
    check_equal(index_scores.partial_index_scores(strict, *args), partial.index_scores(*args), "exact partial sums")


def queries_stay_apart(module, heads):
    """A query that is not real may hold NaN or infinity, and so may keys that nobody sees."""
    g = torch.Generator().manual_seed(5)
    iq, ik, iw = (torch.randn(*shape, generator=g).to(BF16) for shape in ((1, 6, heads, 128), (1, 1100, 128), (1, 6, heads)))
    want = module.index_scores(strict, iq, ik, iw, NUMERICS[BF16])
    iq[0, 1], iq[0, 4], iw[0, 1], iw[0, 5] = torch.nan, torch.inf, -torch.inf, torch.nan
    ik[0, 700:] = torch.nan
    got = module.index_scores(strict, iq, ik, iw, NUMERICS[BF16])
    check_equal(got[:, [0, 2, 3], :700], want[:, [0, 2, 3], :700], "scores beside NaN")


@pytest.mark.parametrize("heads", [4, 8, 32])
def test_queries_and_keys_that_are_not_real_leave_the_others_alone(heads):
    queries_stay_apart(index_scores, heads)


@pytest.mark.parametrize(
    ("old", "new", "heads"),
    [
        ("src=finite(ps, d, count, iq.dtype, LARGEST)", "src=ps", 32),
        ("operand0=finite(column, blocks * stride, 1, nl.float32, LARGEST)", "operand0=column", 4),
        ("if blocks > 1:", "if blocks > 4:", 4),
    ],
    ids=("queries", "weights", "keys"),
)
def test_index_scores_that_mix_queries_are_caught(old, new, heads, tmp_path):
    with pytest.raises(AssertionError, match="beside NaN"):
        queries_stay_apart(mutated(index_scores, old, new, tmp_path), heads)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("op=nl.relu, data=dots", "op=nl.copy, data=dots"),
        ("op0=nl.maximum, operand0=0.0)", "op0=nl.maximum, operand0=-9.0)"),
        ("accumulate=n > 0", "accumulate=False"),
        ("one, op0=nl.multiply, operand0=finite(column, blocks * stride, 1, nl.float32, LARGEST)", "one, op0=nl.multiply, operand0=1.0"),
        (".permute((0, 2, 1))", ""),
        ("operand0=float(t), op1", "operand0=float(t - 1), op1"),
        ("first + at * P)", "first)"),
        ("heads - 1 - first", "heads - first"),
    ],
    ids=(
        "no relu",
        "another relu",
        "accumulate flag",
        "no weights",
        "keys in lane order",
        "the last key left out",
        "every part at the front",
        "a pair too many",
    ),
)
def test_wrong_index_scores_are_caught(old, new, tmp_path):
    wrong = mutated(index_scores, old, new, tmp_path)
    wrong.HELD = 2
    with pytest.raises(Exception, match=r"outside|INIT-OUTPUT|MEM-SHAPE|PLACE-MUT|LNC-WRITE"):
        scores_hold(wrong, 1, 6, 32, 24, 1601, BF16)


def select_holds(kernel, case):
    args = (*case.args(), case.k, NUMERICS[case.dtype])
    check_equal(kernel(strict, *args), index.select(*args), f"select {case}")


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_select_equals_its_definition_index_by_index(case):
    select_holds(select.select, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CHOICES_FULL, ids=str)
def test_select_of_large_buckets_equals_its_definition(case):
    select_holds(select.select, case)


def blocks_hold(kernel, case, size):
    args = (*case.args(), case.k, size, NUMERICS[case.dtype])
    check_equal(kernel(strict, *args), index.candidate_blocks(*args), f"candidate_blocks {case}, {size} rows")


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_candidate_blocks_equal_their_definition_index_by_index(case):
    blocks_hold(candidate_blocks.candidate_blocks, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", BLOCKS_FULL, ids=str)
def test_candidate_blocks_of_large_buckets_equal_their_definition(case):
    blocks_hold(candidate_blocks.candidate_blocks, *case)


def all_choices(chosen, blocks):
    """Every case of both, with these kernels."""
    for case in CHOICES:
        select_holds(chosen, case)
    all_blocks(blocks)


def all_blocks(blocks):
    for case, size in BLOCKS:
        blocks_hold(blocks, case, size)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("op0=nl.add, op1=nl.minimum)", "op0=nl.add, op1=nl.maximum)"),
        ("for i in range(steps - 1, -1, -1)", "for i in range(steps - 1, 0, -1)"),
        ("op0=nl.less, operand0=ranks[:, n - 1 : n]", "op0=nl.less_equal, operand0=ranks[:, n - 1 : n]"),
        ("cmp_op=nl.less)", "cmp_op=nl.less_equal)"),
        ("above, above_count = compared(x, edge, total, n, nl.greater)", "above, above_count = compared(x, edge, total, n, nl.greater_equal)"),
        ("src=0.0, predicate=positive", "src=1.0, predicate=positive"),
        ("operand0=float(n), op1=nl.multiply, operand1=0.5", "operand0=float(n - 1), op1=nl.multiply, operand1=0.5"),
    ],
    ids=("tie order", "last bit of the threshold", "a lane too many", "a lane counts itself", "ties above", "a start above the threshold", "count off by one"),
)
def test_a_wrong_search_is_caught(old, new, tmp_path, monkeypatch):
    wrong = mutated(best, old, new, tmp_path)
    monkeypatch.setattr(select, "best", wrong.best)
    monkeypatch.setattr(candidate_blocks, "best", wrong.best)
    with pytest.raises(Exception, match=r"differ|NUM-|MEM-"):
        all_choices(select.select, candidate_blocks.candidate_blocks)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (select, "op0=nl.less_equal, operand0=limit", "op0=nl.less, operand0=limit"),
        (select, "(0, -t % lanes), value=-torch.inf", "(0, -t % lanes), value=9.0"),
        (candidate_blocks, "nisa.tensor_copy_predicated(dst=x, src=most, predicate=newest)", "nisa.tensor_copy(dst=newest, src=newest)"),
        (candidate_blocks, "lanes, n, k, real, True)", "lanes, n, k, real, False)"),
        (candidate_blocks, "op0=nl.greater_equal, operand0=seen", "op0=nl.greater, operand0=seen"),
    ],
    ids=("the last visible row lost", "padding wins", "the newest block lost", "-inf chosen", "another newest block"),
)
def test_a_wrong_choice_is_caught(module, old, new, tmp_path):
    wrong = mutated(module, old, new, tmp_path)
    with pytest.raises(AssertionError, match="differ"):
        if module == select:
            all_choices(wrong.select, candidate_blocks.candidate_blocks)
        all_blocks(wrong.candidate_blocks)


def test_calls_without_rows_start_no_kernel_and_other_regimes_are_refused():
    none, visible = torch.zeros(1, 0, 8, dtype=BF16), torch.zeros(1, 0, dtype=torch.int32)
    never = lambda *a: 1 / 0  # noqa: E731
    trn2, released = NUMERICS[BF16], Numerics("released")
    assert select.select(never, none, visible, 4, trn2).shape == (1, 0, 4)
    assert candidate_blocks.candidate_blocks(never, none, visible, 4, 4, trn2).shape == (1, 0, 2)
    assert index_scores.index_scores(never, torch.zeros(1, 0, 2, 8, dtype=BF16), none, none[..., :2], trn2).shape == (1, 0, 0)
    one = torch.zeros(1, 1, 8, dtype=BF16)
    with pytest.raises(ValueError, match="^select: .*released"):
        select.select(strict, one, visible, 4, released)
    with pytest.raises(ValueError, match="^candidate_blocks: .*released"):
        candidate_blocks.candidate_blocks(strict, one, visible, 4, 4, released)
    with pytest.raises(ValueError, match="^select: .* 4097 to choose"):
        select.select(strict, torch.zeros(1, 1, 5000), torch.zeros(1, 1, dtype=torch.int32), 4097, NUMERICS[F32])
    with pytest.raises(ValueError, match="^index_scores: regime 'released'"):
        index_scores.index_scores(strict, one[:, :, None], one, one[..., :1], released)
    with pytest.raises(ValueError, match="^index_scores: 65 queries"):
        index_scores.index_scores(strict, torch.zeros(1, 65, 1, 8, dtype=BF16), one, torch.zeros(1, 65, 1, dtype=BF16), trn2)
