# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernels that choose tokens, as data, and what decides whether a case has one right answer."""

from dataclasses import dataclass

import torch
from cases_rows import normal
from torch import Tensor

from v41.spec.ops import choose as choosing
from v41.spec.ops.choose import Sample

# Sums over a vocabulary: a few roundings of the total each, in the definition (prefix sums kept in float32) and in the kernel (a scan of a
# lane's elements, products with ones). A decision counts as decided when it is further from its edge than this share of the total.
EDGE = 2.0**-17


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Choice:
    """b rows over a vocabulary; heat multiplies normal logits. ties: few different logits. flat: all alike. minus: a part is -inf."""

    b: int
    vocab: int
    values: str = "random"

    def logits(self) -> Tensor:
        x = normal(self.b, self.vocab) * 3
        if self.values == "ties":
            x = x.round()
        if self.values == "flat":
            x = torch.zeros_like(x) - 7
        if self.values == "minus":
            x[:, : self.vocab // 3] = -torch.inf
            x[-1] = -torch.inf
            x[-1, self.vocab // 2] = 0.0
        if self.values == "signs":
            x = -torch.rand_like(x)
            x[:, self.vocab // 2] = -0.0
            x[:, self.vocab // 2 + 3] = 0.0
        return x

    def sample(self) -> Sample:
        """Temperatures from hot to 0, top_p from 0 to 1; two columns of uniforms."""
        heat = (0.3 + uniform(self.b, seed=1)).clone()
        top_p = uniform(self.b, seed=2).clone()
        if self.b > 1:
            heat[-1], top_p[0] = 0, 1
        if self.b > 2:
            top_p[1] = 0
        return Sample(heat, top_p, uniform(self.b, 2, seed=3))


GREEDY = (
    Choice(5, 129280),
    Choice(9, 129279 // 4, "ties"),
    Choice(1, 1010),
    Choice(7, 1000, "ties"),
    Choice(3, 5, "flat"),
    Choice(2, 300, "minus"),
    Choice(3, 200, "signs"),
    Choice(131, 9, "ties"),
)
SAMPLED = (
    Choice(1, 2020),
    Choice(3, 1000),
    Choice(5, 300, "ties"),
    Choice(3, 500, "minus"),
    Choice(1, 7),
)


def edges(logits: Tensor, heat: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(what tokens are drawn from, in float64; how far the closest decision about what is kept lies from its edge), by row."""
    wide = logits.double()
    p = (wide / heat.clamp_min(choosing.COLDEST)[:, None].double()).softmax(-1)
    order = p.sort(dim=-1, descending=True, stable=True)
    before = order.values.cumsum(-1) - order.values
    # The first is kept whatever it is; a token of no probability, or any where top_p is 1, is kept or not to no effect.
    gap = torch.where(order.values > 0, (before - top_p[:, None]).abs(), 1)
    gap[:, 0] = 1
    gap[(heat <= 0) | (top_p >= 1)] = 1
    return choosing.chosen_from(wide[:, None], heat.double(), top_p.double())[:, 0], gap.amin(-1)


def draw_gap(p: Tensor, u: Tensor) -> Tensor:
    """How far each uniform lies from an edge of the cumulative sum, as a share of the total."""
    total = p.double().cumsum(-1)
    return ((total - u.double()[:, None] * total[:, -1:]) / total[:, -1:]).abs().amin(-1)


@dataclass(frozen=True)
class Drafts:
    """b sequences of n drafts: p and q are softmaxes of nearby logits, over a vocabulary; drafts come from q."""

    b: int
    n: int
    vocab: int
    near: float = 0.5
    seed: int = 0

    def args(self) -> tuple[Tensor, ...]:
        """p, q, drafts, offered, u, u_next; the first sequence offers all, the last none."""
        b, n, s = self.b, self.n, self.seed
        logits = normal(b, n + 1, self.vocab, seed=s) * 2
        p = logits.softmax(-1)
        q = (logits[:, :n] + normal(b, n, self.vocab, seed=s + 1) * self.near).softmax(-1)
        drafts = choosing.draw(q.flatten(0, 1), uniform(b * n, seed=s + 2)).view(b, n)
        offered = torch.randint(0, n + 1, (b,), generator=torch.Generator().manual_seed(s + 3), dtype=torch.int64).to(torch.int32)
        offered[0] = n
        if b > 1:
            offered[-1] = 0
        return p, q, drafts, offered, uniform(b, n, seed=s + 4), uniform(b, seed=s + 5)


DRAFTED = (
    Drafts(1, 5, 4040),
    Drafts(9, 5, 40),
    Drafts(9, 5, 40, near=0.05, seed=10),
    Drafts(6, 1, 300),
    Drafts(7, 3, 100, near=0.0, seed=20),
    Drafts(8, 7, 17, near=0.2, seed=30),
)
