# SPDX-License-Identifier: Apache-2.0
"""Cases of token choice, uniforms and acceptance."""

from collections.abc import Callable

import torch
from torch import Tensor

from v41.conformance.primitives_linear import Arguments, Cases
from v41.golden.pack_numbers import Inputs
from v41.spec.ops.choose import Sample

VOCAB, DRAFTS = 50, 4


def logits_of(i: Inputs, *shape: int) -> Tensor:
    """With a tie of the two best in the first row."""
    x = i.wide("logits", *shape, VOCAB, scale=2.0)
    x.view(-1, VOCAB)[0, [3, 6]] = 9.0
    return x


def greedy(i: Inputs) -> Arguments:
    return (logits_of(i, 5), None, 0), {}


def heat() -> tuple[Tensor, Tensor]:
    return torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0]), torch.tensor([1.0, 1.0, 0.5, 0.9, 0.0])


def drawn(u: float) -> Callable[[Inputs], Arguments]:
    return lambda i: ((logits_of(i, 5), Sample(*heat(), torch.full((5, 2), u)), 1), {})


def shares(i: Inputs) -> Arguments:
    return (logits_of(i, 5, 2), *heat()), {}


def keyed(lanes: int) -> Callable[[Inputs], Arguments]:
    """Keys and positions up to the largest, and below 0."""
    keys = torch.tensor([[0, 0], [1, 2], [2**31 - 1, 2**31 - 1], [-1, 7]], dtype=torch.int32)
    at = torch.tensor([0, 1, 2**31 - 1, 12345], dtype=torch.int32)
    return lambda i: ((keys, at, 65536, lanes), {})


def offered() -> Tensor:
    return torch.tensor([4, 4, 2, 0], dtype=torch.int32)


def best(i: Inputs) -> Arguments:
    """All accepted, none, two of which only two were offered, none offered."""
    logits = logits_of(i, 4, DRAFTS + 1)
    drafts = logits[:, :-1].argmax(-1).to(torch.int32)
    drafts[1, 0] = (drafts[1, 0] + 1) % VOCAB
    return (logits, drafts, offered()), {}


def rows_of(i: Inputs, name: str, rows: int) -> Tensor:
    return i.wide(name, 4, rows, VOCAB).double().mul(2).softmax(-1).to(i.numerics.wide)


def chance(same: bool) -> Callable[[Inputs], Arguments]:
    """Draft distributions that are the target's own (same), or others; uniforms from 0 to just below 1."""

    def build(i: Inputs) -> Arguments:
        p = rows_of(i, "p", DRAFTS + 1)
        q = p[:, :-1].clone() if same else rows_of(i, "q", DRAFTS)
        u = torch.tensor([[0.0, 0.2, 0.5, 0.9], [1 - 2.0**-24] * 4, [0.1] * 4, [0.3] * 4])
        return (p, q, q.argmax(-1).to(torch.int32), offered(), u, torch.tensor([0.1, 0.5, 0.9, 0.0])), {}

    return build


CHOOSE: dict[str, Cases] = {
    "choose": {"best": greedy, "first_draw": drawn(0.0), "draw": drawn(0.37), "last_draw": drawn(1 - 2.0**-24)},
    "chosen_from": {"heats": shares},
    "uniforms": {"one": keyed(1), "lanes": keyed(9)},
    "accept_greedy": {"all_none_some": best},
    "accept_token": {"others": chance(False), "same": chance(True)},
    "accept_block": {"others": chance(False), "same": chance(True)},
}
