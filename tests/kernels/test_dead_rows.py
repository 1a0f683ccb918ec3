# SPDX-License-Identifier: Apache-2.0
"""Rows that are not real may hold NaN or infinity, which reach no other row, and values at the ends of their formats."""

import pytest
import torch
from bounds import check_equal, strict
from mutate import everywhere

from v41.backends.neuron.kernels import combine, engram_gate, engram_rows, hc_mixes, tiles
from v41.backends.neuron.kernels.accept import accept_block
from v41.backends.neuron.launch import simulate
from v41.spec.numerics import Numerics
from v41.spec.ops import accept, mix, ngram
from v41.spec.table import Fp8Rows

KERNELS = {"hc_pre": combine.hc_pre, "hc_post": combine.hc_post, "hc_mixes": hc_mixes.hc_mixes, "engram_gate": engram_gate.engram_gate}


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(name, tokens, numerics, dead=None):
    """Arguments for `tokens` rows of 4 x 64; row 2 holds `dead` throughout, the last row once."""
    stream, kv = (numbers(1, tokens, 4, 64).to(numerics.act), numbers(1, tokens, 320, seed=1).to(numerics.act))
    if dead is not None:
        stream[:, 2], stream[:, -1, 1, 5], kv[:, 2] = dead, -dead, dead
    pre, comb = numbers(1, tokens, 4, seed=2).abs(), numbers(1, tokens, 4, 4, seed=3).abs()
    gains = [numbers(4, 64, seed=s).bfloat16() for s in (4, 5)]
    return {
        "hc_pre": (stream, pre),
        "hc_post": (kv[..., :64], stream, pre, comb),
        "hc_mixes": (stream, numbers(24, 256, seed=6), numbers(3, seed=7), numbers(24, seed=8), 3, 1e-6, 1e-6, numerics),
        "engram_gate": (stream, kv, *gains, torch.ones(1, tokens, dtype=torch.bool), 1e-6, numerics),
    }[name]


def stays_alone(name, tokens, numerics, dead):
    live = torch.ones(tokens, dtype=torch.bool)
    live[2] = live[-1] = False
    # Not `strict`: a number in the place of NaN may leave its own row's range.
    found = [KERNELS[name](simulate, *arguments(name, tokens, numerics, d)) for d in (None, dead)]
    for n, (want, got) in enumerate(zip(*(f if isinstance(f, tuple) else (f,) for f in found), strict=True)):
        check_equal(got[:, live], want[:, live], f"{name}: result {n} beside {dead}")
        # What hc_pre and hc_post multiply rows with, among zeros.
        assert name != "hc_mixes" or got.isfinite().all()


@pytest.mark.parametrize("numerics", [Numerics("trn2"), Numerics("exact")], ids=lambda n: n.regime)
@pytest.mark.parametrize("name", KERNELS)
def test_a_row_that_is_not_real_reaches_no_other_row(name, numerics):
    for tokens, dead in ((6, torch.nan), (6, -torch.inf), (40, torch.nan)):
        stays_alone(name, tokens, numerics, dead)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_meet_zeros_as_they_are_are_caught(name, tmp_path, monkeypatch):
    first = "number = nl.ndarray((lanes, n), dtype=nl.uint8" if name == "engram_gate" else "if t.dtype == nl.float32:"
    everywhere(tiles, f"    {first}", f"    return t\n    {first}", tmp_path, monkeypatch)
    with pytest.raises(Exception, match="differ|sqrt of nan"):
        stays_alone(name, 6, Numerics("trn2"), torch.nan)


def test_the_largest_values_are_combined_unchanged():
    stream = torch.full((1, 3, 4, 64), torch.finfo(torch.bfloat16).max).bfloat16()
    stream[:, :, 1] *= -1
    pre = torch.tensor([0.5, 0.25, 0.0, 0.0]).expand(1, 3, 4)
    check_equal(combine.hc_pre(strict, stream, pre), mix.hc_pre(stream, pre), "the largest bfloat16")


@pytest.mark.parametrize("numerics", [Numerics("trn2"), Numerics("exact")], ids=lambda n: n.regime)
def test_a_scale_byte_of_zero_is_a_power_of_two(numerics):
    codes = torch.arange(256, dtype=torch.uint8).clamp_max(254).view(8, 32)
    codes[codes == 127] = 0
    table = Fp8Rows(codes.view(torch.float8_e4m3fn), torch.tensor([[0], [1]] * 4, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    ids = torch.arange(-1, 9, dtype=torch.int32).view(1, 5, 2)
    check_equal(engram_rows.engram_rows(strict, table, ids, numerics), ngram.engram_rows(table, ids, numerics), "rows with scale byte 0")


def test_a_draft_of_probability_zero_is_not_accepted():
    """p and q are 0 at the draft: no quotient, and block verification stops before it."""
    p = torch.tensor([0.0, 0.5, 0.5, 0.0]).expand(1, 3, 4)
    q = torch.tensor([0.0, 0.25, 0.75, 0.0]).expand(1, 2, 4)
    args = (p, q, torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.tensor([[0.0, 0.9]]), torch.tensor([0.1]))
    for got, want, right in zip(accept_block(strict, *args), accept.accept_block(*args), (0, 1), strict=True):
        assert got.tolist() == want.tolist() == [right]
