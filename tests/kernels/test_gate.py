# SPDX-License-Identifier: Apache-2.0
"""The router kernel chooses the definition's experts with its weights, and a wrong one does not."""

import pytest
import torch
from bounds import Near, U, check_equal, check_near, check_rows, strict
from cases_gate import BF16, F32, GATES, Router
from mutate import mutated

from v41.backends.neuron.kernels import gate
from v41.backends.neuron.prepare import tiled
from v41.spec.numerics import Numerics
from v41.spec.ops import experts

WIDE = Numerics("exact", dtype="float64")
SCALE = 1.5


def holds(module, case):
    x, weight, bias = case.args()
    keys = {"k": case.k, "function": case.function, "normalize": case.normalize, "route_scale": SCALE}
    numerics = Numerics("trn2") if case.dtype == BF16 else Numerics("exact")
    got, ids = module.gate(strict, x, weight, bias, **keys, numerics=numerics)
    # A dot's error: as many roundings as it has terms of one product and sums of products, against its largest partial sums.
    wide = x.double(), weight.double()
    noise = 4 * (128 + case.dim / 128) ** 0.5 * U * (wide[0].square() @ wide[1].square().T).sqrt().amax()
    biased = experts.score(wide[0] @ wide[1].T, case.function, WIDE) + bias.double()
    gaps = biased.sort(dim=-1, descending=True).values[:, : case.k + 1].diff().abs()
    # Where scores + bias are alike they are so in every precision (exact dots); else they lie further apart than their noise, or the row is left out.
    decided = ((gaps == 0) | (gaps > 2 * noise + 4 * U * biased.abs().max())).all(-1)
    assert decided.float().mean() >= 0.9, f"{case}: only {int(decided.sum())} of {case.n} rows are decided"
    want = biased.sort(dim=-1, descending=True, stable=True).indices[:, : case.k]
    check_equal(ids[decided], want[decided].to(torch.int32), f"ids {case}")
    told = experts.gate(x, weight, bias, **keys, numerics=numerics)
    check_equal(ids[decided], told[1][decided], f"ids of the definition {case}")
    got, told = got[decided], told[0][decided]
    exact = experts.gate(x.double(), weight, bias, **keys, numerics=WIDE)[0][decided]
    # Scores follow their logit with a slope of at most 1, and relatively so (softmax, small sqrt(softplus)); then a sum and three roundings.
    check_near(got, Near(exact, (exact.abs() + SCALE) * noise + exact.abs() * (2 * case.k + 12) * U), f"weights {case}")
    if case.dtype == F32:
        check_rows(got, told, f"weights {case}")


@pytest.mark.parametrize("case", GATES, ids=str)
def test_the_router_chooses_the_definitions_experts_with_its_weights(case):
    holds(gate, case)


TIES, MANY = GATES[8], Router(7, 12, 32, 32, "sigmoid", BF16, "ties")


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("accumulate=t > 0", "accumulate=False", Router(6, 256, 32, 6, "sigmoid", BF16)),
        ("data2=added, op=nl.add", "data2=added, op=nl.subtract", TIES),
        ("weights = chosen(score,", "weights = chosen(biased,", TIES),
        ("vals=top, imm=LOWEST", "vals=top, imm=0.0", MANY),
        ("data=weights[:, 0:k], axis=1", "data=weights, axis=1", TIES),
        ("r = first + block * rows", "r = first", Router(300, 64, 32, 4, "sigmoid", F32)),
        ("data1=root, data2=capped, op=nl.minimum", "data1=root, data2=root, op=nl.minimum", GATES[11]),
    ],
    ids=("last tile alone", "bias taken off", "weights with their bias", "taken ones can win again", "sum over eight", "first block again", "no tail of sqrt"),
)
def test_a_wrong_router_is_caught(old, new, case, tmp_path):
    wrong = mutated(gate, old, new, tmp_path)
    with pytest.raises(Exception, match=r"outside|above|differ|biased|INIT-"):
        holds(wrong, case)


def test_of_experts_all_alike_the_lowest_are_chosen():
    x, weight, bias = GATES[10].args()
    ids = gate.gate(strict, x, weight, bias, k=9, function="sigmoid", normalize=True, route_scale=1.0, numerics=Numerics("trn2"))[1]
    assert torch.equal(ids, torch.arange(9, dtype=torch.int32).expand(3, -1))


def test_no_rows_and_what_is_not_taken():
    x, weight, bias = GATES[0].args()
    keys = {"k": 6, "function": "sigmoid", "normalize": True, "route_scale": 1.0}
    assert [t.shape for t in gate.gate(strict, x[:0], weight, bias, **keys, numerics=Numerics("trn2"))] == [(0, 6), (0, 6)]
    with pytest.raises(ValueError, match="released"):
        gate.gate(strict, x, weight, bias, **keys, numerics=Numerics("released"))
    with pytest.raises(ValueError, match="4 experts, 6 chosen"):
        gate.gate(strict, x, weight[:4], bias[:4], **keys, numerics=Numerics("trn2"))


def test_a_weight_in_tiles_of_several_blocks_gives_the_same():
    x, weight, bias = GATES[0].args()
    keys = {"k": 6, "function": "sqrtsoftplus", "normalize": True, "route_scale": 1.0, "numerics": Numerics("trn2")}
    made = tiled(weight)
    assert made.weight.shape[0] > 1
    for a, b in zip(gate.gate(strict, x, made, bias, **keys), gate.gate(strict, x, weight, bias, **keys), strict=True):
        check_equal(a, b, "tiles")
