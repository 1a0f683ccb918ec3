# SPDX-License-Identifier: Apache-2.0
"""Token choice over the released vocabulary: one row, the 6 of a step with 5 drafts, and the shares of 8 and 64 ranks."""

from typing import Any

import torch
from torch import Tensor

from v41.backends.neuron.bench.case import BenchCase
from v41.spec.ops.choose import Sample

VOCAB, DRAFTS = 129280, 5
# Two DMAs; maximum and place in a lane's share of a row, then over 128 lanes.
DMAS = 4.0
BEST = DMAS + 4 * 0.1 + 2 * (VOCAB / 128 + 128) / 960
# Top-p without a sort: 30 bits of the threshold, each a pass over a lane's share, a sum over the lanes and a comparison.
SEARCH = 30 * (0.1 + VOCAB / 128 / 960 + 0.1 + 0.1)
# 20 rounds of an addition with its carry, a rotation and an xor; six key additions.
THREEFRY = DMAS + 0.1 * (20 * (3 + 3) + 6 * 3)


def logits(n: int, vocab: int) -> Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(0)) * 3


def best(n: int, vocab: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        return logits(n, vocab), None, 0

    chain = DMAS + 0.4 + 2 * (vocab / 128 + 128) / 960
    return BenchCase("choose", f"best of {n} x {vocab}", "small", "decode", make, n * vocab * 4, 0, chain, f"in, two searches, out: {chain:.1f} us")


def drawn(n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        return logits(n, VOCAB), Sample(torch.ones(n), torch.full((n,), 0.9), torch.rand(n, 1, generator=torch.Generator().manual_seed(1))), 0

    note = f"best, and a threshold by its 30 bits: {BEST + SEARCH:.1f} us"
    return BenchCase("choose", f"drawn of {n} x {VOCAB}", "small", "decode", make, n * VOCAB * 4, 0, BEST + SEARCH, note)


def shares(n: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        return logits(n, VOCAB)[None], torch.ones(1), torch.full((1,), 0.9)

    note = f"a threshold by its 30 bits: {DMAS + SEARCH:.1f} us"
    return BenchCase("chosen_from", f"{n} x {VOCAB}", "small", "decode", make, 2 * n * VOCAB * 4, 0, DMAS + SEARCH, note)


def verdict(kernel: str) -> BenchCase:
    def make() -> tuple[Any, ...]:
        p = logits(DRAFTS + 1, VOCAB).softmax(-1)[None]
        drafts, offered = torch.arange(DRAFTS, dtype=torch.int32)[None], torch.tensor([DRAFTS], dtype=torch.int32)
        if kernel == "accept_greedy":
            return p, drafts, offered
        return p, p[:, :DRAFTS].contiguous(), drafts, offered, torch.full((1, DRAFTS), 0.5), torch.tensor([0.5])

    rows = {"accept_greedy": DRAFTS + 1, "accept_token": 2, "accept_block": 2 * DRAFTS}[kernel]
    chain = BEST if kernel == "accept_greedy" else BEST + 2.0 + 2 * (2 * 0.1 + 3 * VOCAB / 128 / 960)
    note = f"in, {'searches' if kernel == 'accept_greedy' else 'gathered rows, remainder, sums, search'}, out: {chain:.1f} us"
    return BenchCase(kernel, f"{DRAFTS} drafts, {VOCAB}", "small", "decode", make, rows * VOCAB * 4, 0, chain, note)


def random(lanes: int) -> BenchCase:
    def make() -> tuple[Any, ...]:
        return torch.ones(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 0, lanes

    return BenchCase("uniforms", f"{lanes} lanes", "small", "decode", make, 8 * lanes, 0, THREEFRY, f"two DMAs, 20 rounds: {THREEFRY:.1f} us")


CASES = (
    *(best(1, VOCAB), best(6, VOCAB), best(6, VOCAB // 8), best(6, VOCAB // 64)),
    *(drawn(1), shares(6)),
    *(verdict(k) for k in ("accept_greedy", "accept_token", "accept_block")),
    random(6),
)
