# SPDX-License-Identifier: Apache-2.0
"""The Engram kernels: rows of n-grams and gathered values to the bit, gates within their rounding; wrong ones are caught."""

import pytest
import torch
from bounds import Near, U, check_equal, check_near, check_rows, strict
from cases_engram import GATED, HASHES, RELEASED, ROWS, SMALL, Gate, Hash, Rows
from mutate import mutated

from v41.backends.neuron.kernels import engram_gate, engram_hash, engram_rows
from v41.spec.numerics import Numerics
from v41.spec.ops import ngram


def hash_holds(module, case):
    args = case.args()
    check_equal(module.engram_hash(strict, *args), ngram.engram_hash(*args), str(case))


@pytest.mark.parametrize("case", HASHES, ids=str)
def test_hashes_equal_their_definition_in_every_bit(case):
    hash_holds(engram_hash, case)


def test_ids_behind_the_mask_are_not_read():
    ids, mask, *rest = RELEASED.args()
    poison = torch.where(mask.int().cumprod(-1) > 0, ids, torch.tensor(-(2**31), dtype=torch.int32))
    check_equal(engram_hash.engram_hash(strict, poison, mask, *rest), ngram.engram_hash(ids, mask, *rest), "masked")
    none = torch.zeros_like(mask)
    check_equal(engram_hash.engram_hash(strict, poison, none, *rest), ngram.engram_hash(ids, none, *rest), "all masked")


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("for c in range(BYTES - 1):", "for c in range(BYTES - 2):", HASHES[3]),
        ("operand0=255", "operand0=127", RELEASED),
        ("for a in range(4):", "for a in range(3):", HASHES[3]),
        ("op0=nl.right_shift, operand0=7)", "op0=nl.right_shift, operand0=8)", HASHES[3]),
        ("before = product[:, 0, :] if n == 1 else bits[:, n - 2, :]", "before = product[:, 0, :]", RELEASED),
        ("nisa.tensor_tensor(dst=r, data1=r, data2=fix, op=nl.add)", "nisa.tensor_copy(dst=fix, src=r)", RELEASED),
        ("data1=quotient, data2=upper if half == 0 else lower", "data1=quotient, data2=upper", HASHES[4]),
        ("data1=holds[:, j : j + 1], data2=holds[:, j - 1 : j]", "data1=holds[:, j : j + 1], data2=holds[:, j : j + 1]", RELEASED),
        ("engine=nisa.engine.gpsimd)\n        nisa.dma", "engine=nisa.engine.vector)\n        nisa.dma", RELEASED),
    ],
    ids=(
        "a carry missing",
        "seven bits",
        "ids of three bytes",
        "no sign",
        "xor not cumulative",
        "remainders below 0",
        "halves of a prime",
        "mask not cumulative",
        "offsets added in float",
    ),
)
def test_a_wrong_hash_is_caught(old, new, case, tmp_path):
    text = old.replace("operand0=255", "value=255"), new.replace("operand0=127", "value=127")
    with pytest.raises(Exception, match=r"differ|NUM-INT24"):
        hash_holds(mutated(engram_hash, *text, tmp_path), case)


def test_primes_and_rows_that_the_hash_does_not_take_are_refused():
    ids, mask, pad, multipliers, primes, offsets = RELEASED.args()
    with pytest.raises(ValueError, match=r"2\.\.2\^24"):
        engram_hash.engram_hash(strict, ids, mask, pad, multipliers, primes + 2**24, offsets)
    with pytest.raises(ValueError, match=r"rows up to 2147483649"):
        engram_hash.tables(multipliers, torch.tensor([[5]]), torch.tensor([2**31 - 4]))
    with pytest.raises(ValueError, match="lookback 1"):
        engram_hash.engram_hash(strict, ids[..., :1], mask[..., :1], pad, multipliers[:1], primes[:0], offsets)
    assert engram_hash.engram_hash(strict, ids[:, :0], mask[:, :0], pad, multipliers, primes, offsets).shape == (1, 0, 24)


def rows_hold(module, case):
    numerics = Numerics(case.regime)
    table, ids = case.args()
    check_equal(module.engram_rows(strict, table, ids, numerics), ngram.engram_rows(table, ids, numerics), str(case))


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_gathered_rows_equal_their_definition_in_every_bit_and_rows_not_held_are_zero(case):
    rows_hold(engram_rows, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FROM_240 = 3824.0", "FROM_240 = 3840.0"),
        ("operand0=float(0x77)", "operand0=float(0x76)"),
        ("scale=-1.0, bias=127.5", "scale=-1.0, bias=255.5"),
        ("nisa.memset(dst=t, value=0,", "nisa.memset(dst=t, value=1,"),
        ("operand0=23)", "operand0=22)"),
    ],
    ids=("codes above 240 too small", "240 lost", "no sign", "rows that are not held", "half of the exponent"),
)
def test_wrong_rows_are_caught(old, new, tmp_path):
    with pytest.raises(AssertionError, match="differ"):
        rows_hold(mutated(engram_rows, old, new, tmp_path), Rows(2, 12, 40, 64, "exact"))


def test_no_ids_give_no_rows_and_odd_widths_are_refused():
    table, ids = Rows(1, 12, 40, 32, "exact").args()
    assert engram_rows.engram_rows(strict, table, ids[:, :0], Numerics("trn2")).shape == (1, 0, 12 * 32)
    with pytest.raises(ValueError, match="31 codes"):
        engram_rows.engram_rows(strict, ngram.Fp8Rows(table.weight[:, :31], table.scale), ids, Numerics("trn2"))


def gate_holds(module, case):
    numerics = Numerics(case.regime)
    args = case.args(numerics.act)
    keys = {"eps": 1e-20, "numerics": numerics}
    got = module.engram_gate(strict, *args, **keys)
    if case.regime == "exact":
        check_rows(got, ngram.engram_gate(*args, **keys), str(case))
    h, kv, q, k, mask = args
    wide = Numerics("exact", dtype="float64")
    zero, value = torch.zeros_like(h).double(), kv.double()[..., case.copies * case.dim :]
    g = ngram.engram_gate(zero + h, torch.cat((kv.double()[..., : -case.dim], torch.ones_like(value)), -1), q, k, mask, eps=1e-20, numerics=wide) - h
    # The dot of normed rows against its largest partial sums: at most dim terms in chunks, then the norms; its root and sigmoid are no steeper
    # than 1 / (2 sqrt(1e-6)) / 4 there, and much flatter where the dot is not small.
    w = q.double() * k.double()
    keys64 = kv.double()[..., : -case.dim].unflatten(-1, h.shape[2:])
    norm = torch.rsqrt(h.double().square().mean(-1) + 1e-20) * torch.rsqrt(keys64.square().mean(-1) + 1e-20) * case.dim**-0.5
    terms = (h.double() * w * keys64).square().sum(-1).sqrt() * norm
    dot = (h.double() * w * keys64).sum(-1) * norm
    noise = 4 * (case.dim**0.5) * U * terms + 8 * U * dot.abs()
    slope = 1 / (8 * dot.abs().clamp_min(1e-6).sqrt())
    error = (noise * slope + 8 * U)[..., None] * value.abs()[..., None, :]
    exact = h.double() + g.mean(-1, keepdim=True) * value[..., None, :]
    check_near(got, Near(exact, error + 2 * U * (exact.abs() + value.abs()[..., None, :])), str(case))


@pytest.mark.parametrize("case", GATED, ids=str)
def test_gated_values_equal_their_definition_within_their_rounding(case):
    gate_holds(engram_gate, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("op1=nl.maximum, operand1=FLOOR", "op1=nl.maximum, operand1=0.01"),
        ("op=nl.bitwise_or", "op=nl.bitwise_and"),
        ("operand0=sees)", "operand0=1.0)"),
        ("cmp_op=nl.less_equal, offset=1 - chunks", "cmp_op=nl.less_equal, offset=-chunks"),
        ("offset=t * width + copies * dim", "offset=t * width"),
        ("operand1=dim**-0.5", "operand1=1.0"),
    ],
    ids=("another floor", "sign lost", "mask not read", "a chunk of the next row", "value of the first key", "dot not scaled"),
)
def test_a_wrong_gate_is_caught(old, new, tmp_path):
    with pytest.raises(Exception, match=r"outside|above|NUM-RANGE|rsqrt|finite"):
        gate_holds(mutated(engram_gate, old, new, tmp_path), Gate(5, 96, "exact"))


def test_a_gate_of_nothing_and_an_eps_below_what_rsqrt_takes():
    h, kv, q, k, mask = Gate(3, 64, "trn2").args(torch.bfloat16)
    keys = {"eps": 1e-20, "numerics": Numerics("trn2")}
    assert engram_gate.engram_gate(strict, h[:, :0], kv[:, :0], q, k, mask[:, :0], **keys).shape == (1, 0, 4, 64)
    with pytest.raises(ValueError, match="eps 0"):
        engram_gate.engram_gate(strict, h, kv, q, k, mask, **(keys | {"eps": 0.0}))


def test_a_hash_case_covers_both_signs_of_the_last_step():
    """Remainders above and below half of a prime: only those need the prime added."""
    ids, mask, pad, multipliers, primes, offsets = Hash(128, 2**31 - 1, 63, SMALL, signed=True).args()
    rows = (ngram.engram_hash(ids, mask, pad, multipliers, primes, offsets) - offsets).flatten(0, 1)
    above = rows * 2 > primes.flatten()
    assert above.any(0)[8:].any() and (~above).any(0).all()


def test_constants_made_at_load_stand_for_the_int64_ones():
    ids, mask, pad, *constants = RELEASED.args()
    made = engram_hash.tables(*constants)
    assert all(t.dtype != torch.int64 for t in made)
    check_equal(engram_hash.engram_hash(strict, ids, mask, pad, *made), ngram.engram_hash(ids, mask, pad, *constants), "made at load")
