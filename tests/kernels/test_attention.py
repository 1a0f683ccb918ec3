# SPDX-License-Identifier: Apache-2.0
"""Gathered attention equals its definition, and wrong kernels do not."""

from dataclasses import replace

import pytest
import torch
from bounds import Near, U, check_near, check_rows, rounded, strict
from cases_attention import BF16, CASES, F32, FULL, NUMERICS, Attention
from mutate import mutated

from v41.backends.neuron.bench import attention as bench
from v41.backends.neuron.bench import measure
from v41.backends.neuron.kernels import sparse_attn
from v41.spec.ops import attend


def near(q, window, listed, compressed, chosen, sink, scale, numerics):
    """The output in float64 with p rounded as the definition rounds it, and what float32 sums and a tie of p may change."""
    index = torch.cat((listed, chosen), -1)
    slots = torch.cat((attend.gather_rows(window, listed), attend.gather_rows(compressed, chosen)), 2).double()
    live, x = (index >= 0)[:, :, None], q.double()
    logits = torch.where(live, (x @ slots.transpose(-1, -2)) * scale, -torch.inf)
    sizes = (x.abs() @ slots.abs().transpose(-1, -2)) * scale
    top = logits.amax(-1, keepdim=True).clamp_min(-1e30)
    exact = (logits - top).exp()
    # Both dot products, the scale, the difference and exp: relative errors of p.
    slack = torch.where(live, (q.shape[-1] + 2) * U * (sizes + sizes.amax(-1, keepdim=True)) + 4 * U + 2 * U * (top - logits).clamp(0, 200), 0)
    p = rounded(Near(exact, exact * slack), q.dtype)
    total = exact.sum(-1, keepdim=True) + (sink.double()[:, None] - top).clamp_max(700).exp()
    error = p.error @ slots.abs() + (p.value @ slots.abs()) * ((slots.shape[2] + 6) * U + slack.amax(-1, keepdim=True))
    return Near((p.value @ slots) / total, error / total)


def holds(kernel, case):
    args = case.args()
    got = kernel(strict, *args)
    check_near(got, near(*args), str(case))
    if case.s > 1:
        assert (got[:, 1] == 0).all(), f"{case}: a query without slots is not exactly 0"
    if case.dtype == F32:
        check_rows(got, attend.sparse_attn(*args), str(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_its_definition_and_reads_no_row_that_is_not_listed(case):
    holds(sparse_attn.sparse_attn, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=str)
def test_attention_of_full_size_equals_its_definition(case):
    holds(sparse_attn.sparse_attn, case)


def test_the_interval_of_the_test_holds_the_definition_itself():
    for case in CASES:
        args = case.args()
        check_near(attend.sparse_attn(*args), near(*args), str(case))


def test_a_query_of_nan_leaves_the_others_alone():
    args = CASES[0].args()
    want = sparse_attn.sparse_attn(strict, *args)
    args[0][:, 2] = torch.nan
    got = sparse_attn.sparse_attn(strict, *args)
    live = [0, 1, 3, 4, 5]
    assert torch.equal(got[:, live], want[:, live])


def test_a_slot_that_is_listed_twice_counts_twice():
    args = list(CASES[3].args())
    args[4][:, 0, 1] = args[4][:, 0, 0]
    check_near(sparse_attn.sparse_attn(strict, *args), near(*args), "repeated slots")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("op1=nl.multiply, operand1=DEAD", "op1=nl.multiply, operand1=-0.5"),
        ("nisa.memset(dst=rows, value=0.0, engine=nisa.engine.gpsimd)", "index = 0"),
        ("nisa.tensor_tensor(dst=total, data1=total, data2=extra, op=nl.add)", "nisa.tensor_tensor(dst=total, data1=total, data2=total, op=nl.maximum)"),
        ("op1=nl.minimum, operand1=SINK_TOP", "op1=nl.minimum, operand1=1e30"),
        ("accumulate=c > 0)", "accumulate=c > 1)"),
        ("moving=flat[:, k, a:z], accumulate=True", "moving=flat[:, k, a:z], accumulate=k > 0"),
        ("offset=b * n * d, ", "offset=0, "),
        ("count * chunks[0] + i * chunks[1] + c - chunks[0]", "count * chunks[0] + c - chunks[0]"),
    ],
    ids=(
        "unmasked -1",
        "skipped rows are not cleared",
        "no sink",
        "an infinite sink term",
        "accumulate flag",
        "the mask is overwritten",
        "one sequence",
        "rows of the first query",
    ),
)
def test_a_wrong_attention_is_caught(old, new, tmp_path):
    wrong = mutated(sparse_attn, old, new, tmp_path).sparse_attn
    with pytest.raises(Exception, match=r"outside|INIT-|NUM-NONFINITE"):
        holds(wrong, Attention(2, 3, 4, 32, 20, 8, 300, 200, BF16))


def test_a_step_of_six_rows_is_within_one_and_a_half_times_its_floor():
    for case in bench.CASES:
        if case.phase == "decode":
            assert measure(case).ratio <= 1.5, case.shape


def test_calls_without_queries_start_no_kernel_and_other_regimes_are_refused():
    case = CASES[3]
    args = list(case.args())
    empty = [args[0][:, :0], args[1], args[2][:, :0], args[3], args[4][:, :0], *args[5:]]
    assert sparse_attn.sparse_attn(lambda *a: 1 / 0, *empty).shape == (2, 0, 4, 32)
    with pytest.raises(ValueError, match="^sparse_attn: regime 'exact' in torch.bfloat16"):
        sparse_attn.sparse_attn(strict, *args[:-1], NUMERICS[F32])
    with pytest.raises(ValueError, match="^sparse_attn: 4 heads of 32, 3073 slots"):
        sparse_attn.sparse_attn(strict, *args[:4], args[4].new_zeros(2, 3, 3065), *args[5:])
    with pytest.raises(ValueError, match="^sparse_attn: 129 heads"):
        sparse_attn.sparse_attn(strict, *replace(case, heads=129).args())
