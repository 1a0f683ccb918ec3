# SPDX-License-Identifier: Apache-2.0
"""Cases of hyper-connections, experts and the Engram."""

from collections.abc import Callable

import torch

from v41.conformance.primitives_linear import Arguments, Cases
from v41.golden.pack_numbers import Inputs

COPIES, DIM = 4, 32
MIXES = COPIES * (COPIES + 2)


def mixes(iters: int, s: int = 3, scale: float = 1.0) -> Callable[[Inputs], Arguments]:
    def build(i: Inputs) -> Arguments:
        stream = i.bell("stream", 2, s, COPIES, DIM) * scale
        stream[0, 0] = stream[0, 0] * 1e-4
        fn, three, base = i.f32("fn", MIXES, COPIES * DIM, scale=0.3), i.f32("scale", 3), i.f32("base", MIXES)
        return (i.as_act(stream), fn, three, base), {"iters": iters, "eps": 1e-6, "norm_eps": 1e-20, "numerics": i.numerics}

    return build


def collapse(i: Inputs) -> Arguments:
    return (i.act("stream", 2, 3, COPIES, DIM), i.wide("pre", 2, 3, COPIES).abs()), {}


def expand(i: Inputs) -> Arguments:
    comb = i.wide("comb", 2, 3, COPIES, COPIES).abs()
    return (i.act("x", 2, 3, DIM), i.act("stream", 2, 3, COPIES, DIM), i.wide("post", 2, 3, COPIES).abs(), comb), {}


def routed(k: int, function: str, normalize: bool, experts: int = 9, scale: float = 1.0) -> Callable[[Inputs], Arguments]:
    """A row of zeros, at which experts with equal bias tie; a row that reaches the tails."""

    def build(i: Inputs) -> Arguments:
        x, weight, bias = i.bell("x", 7, 64) * scale, i.bf16("w", experts, 64, scale=0.3), i.f32("bias", experts)
        x[1], x[2] = 0, x[2] * 40
        weight[4], bias[4] = weight[2], bias[2]
        return (i.as_act(x), weight, bias), {"k": k, "function": function, "normalize": normalize, "route_scale": 1.5, "numerics": i.numerics}

    return build


def experts(limit: float, scale: float, rows: int = 6) -> Callable[[Inputs], Arguments]:
    """Nobody asks for expert 3; ids outside the stack are other ranks' experts."""

    def build(i: Inputs) -> Arguments:
        ids = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0], [2, -1], [4, 2]], dtype=torch.int32)[:rows]
        stacks = (i.fp4("w1", 4, 32, 64), i.fp4("w2", 4, 64, 32), i.fp4("w3", 4, 32, 64))
        return (i.act("x", rows, 64, scale=scale), i.wide("weights", rows, 2).abs(), ids, *stacks), {"limit": limit, "numerics": i.numerics}

    return build


def shared(limit: float, scale: float, rows: int = 6) -> Callable[[Inputs], Arguments]:
    def build(i: Inputs) -> Arguments:
        weights = (i.fp8("w1", 32, 64), i.fp8("w2", 64, 32), i.fp8("w3", 32, 64))
        return (i.act("x", rows, 64, scale=scale), *weights), {"limit": limit, "numerics": i.numerics}

    return build


def hashed(dead: bool) -> Callable[[Inputs], Arguments]:
    """The first positions look back beyond the start; dead: an image in between, which hides what lies behind it."""

    def build(i: Inputs) -> Arguments:
        at = torch.arange(9)[:, None] - torch.arange(4)
        alive = torch.ones(2, 9, dtype=torch.bool)
        alive[1, 4] = not dead
        known = alive[:, at.clamp_min(0)] & (at >= 0)
        ids = i.ids("ids", 0, 407, 2, 9)[:, at.clamp_min(0)]
        primes = torch.tensor([[211, 223], [227, 229], [233, 239]])
        factors = torch.tensor([7919 * 10**12 + 1, 104729 * 10**11 + 3, 1299709 * 10**9 + 7, 15485863 * 10**8 + 9])
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), primes.flatten().cumsum(0)[:-1]))
        return (ids, known, torch.tensor(5, dtype=torch.int32), factors, primes, offsets), {}

    return build


def table(i: Inputs) -> Arguments:
    ids = i.ids("ids", 0, 20, 2, 3, 4)
    ids[0, 0, 0], ids[1, 2, 3] = -1, 20  # another rank's rows
    return (i.fp8_rows("table", 20, 32), ids, i.numerics), {}


def gated(images: bool) -> Callable[[Inputs], Arguments]:
    """Dot products of 0, negative ones, and (with images) positions whose gate is shut."""

    def build(i: Inputs) -> Arguments:
        stream, kv = i.bell("stream", 2, 3, COPIES, DIM), i.bell("kv", 2, 3, (COPIES + 1) * DIM)
        stream[0, 0], kv[0, 1] = 0, 0
        kv[1, 0, : COPIES * DIM] = -stream[1, 0].flatten()
        mask = torch.tensor([[True, True, False], [True, False, True]]) if images else None
        weights = (i.bf16("q", COPIES, DIM), i.bf16("k", COPIES, DIM))
        return (i.as_act(stream), i.as_act(kv), *weights, mask), {"eps": 1e-20, "numerics": i.numerics}

    return build


MIX: dict[str, Cases] = {
    "hc_mixes": {"settled": mixes(20), "one_iteration": mixes(1), "one_row": mixes(20, s=1), "huge": mixes(20, scale=1e4), "nineteen": mixes(19)},
    "hc_pre": {"random": collapse},
    "hc_post": {"random": expand},
    "gate": {
        "six_of_384": routed(6, "sqrtsoftplus", True, experts=384),
        "ties": routed(3, "sqrtsoftplus", True),
        "one": routed(1, "sqrtsoftplus", True),
        "not_normalized": routed(3, "sqrtsoftplus", False),
        "sigmoid": routed(3, "sigmoid", True),
        "softmax": routed(3, "softmax", True),
    },
    "experts": {"random": experts(10.0, 1.0), "clamped": experts(10.0, 8.0), "no_limit": experts(0.0, 8.0), "one_row": experts(10.0, 1.0, rows=1)},
    "shared_expert": {"random": shared(10.0, 1.0), "clamped": shared(10.0, 8.0), "no_limit": shared(0.0, 8.0), "one_row": shared(10.0, 1.0, rows=1)},
    "engram_hash": {"start": hashed(False), "image": hashed(True)},
    "engram_rows": {"rows_of_others": table},
    "engram_gate": {"text": gated(False), "images": gated(True)},
}
