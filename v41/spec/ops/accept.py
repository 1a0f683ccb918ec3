# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafts (docs/speculation.md 3). Row i of p is the target's distribution after i accepted drafts, row i of q the one that
draft i was drawn from; the first `offered` drafts stand for choice, the others are as if they had not been drafted.

Each rule gives (how many drafts are accepted, the token after them). Comparisons are written so that a token of probability 0 never passes:
uniforms lie in [0, 1).
"""

import torch
from torch import Tensor

from v41.spec.ops.choose import draw, greedy
from v41.spec.types import F32, I32, Flag, Wide

TINY = 2.0**-126
RULES = ("greedy", "token", "block")

Verdict = tuple[I32[Tensor, "b"], I32[Tensor, "b"]]


def in_offer(offered: I32[Tensor, "b"], drafts: I32[Tensor, "b n"]) -> Flag[Tensor, "b n"]:
    return torch.arange(drafts.shape[1], dtype=torch.int32, device=drafts.device) < offered[:, None]


def leading(passed: Flag[Tensor, "b n"]) -> I32[Tensor, "b"]:
    """How many stand in front of the first that did not pass."""
    return passed.cumprod(-1, dtype=torch.int32).sum(-1, dtype=torch.int32)


def accept_greedy(logits: Wide[Tensor, "b rows vocab"], drafts: I32[Tensor, "b n"], offered: I32[Tensor, "b"]) -> Verdict:
    """Drafts are accepted while they are the target's best token (lower id in a tie); the next token is its best one after them."""
    return accept_best(greedy(logits.flatten(0, 1)).view(logits.shape[:2]), drafts, offered)


def accept_best(best: I32[Tensor, "b rows"], drafts: I32[Tensor, "b n"], offered: I32[Tensor, "b"]) -> Verdict:
    """`accept_greedy` from the target's best tokens."""
    accepted = leading((drafts == best[:, :-1]) & in_offer(offered, drafts))
    return accepted, best[torch.arange(best.shape[0], dtype=torch.int32, device=best.device), accepted]


def chances(rows: Wide[Tensor, "b n vocab"], drafts: I32[Tensor, "b n"]) -> Wide[Tensor, "b n"]:
    """The probability of each draft."""
    return rows.gather(-1, drafts.long()[..., None])[..., 0]


def row_at(rows: Wide[Tensor, "b n vocab"], index: I32[Tensor, "b"]) -> Wide[Tensor, "b vocab"]:
    return rows.gather(1, index.long()[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]


def after(
    p: Wide[Tensor, "b rows vocab"],
    q: Wide[Tensor, "b n vocab"],
    weight: Wide[Tensor, "b"],
    accepted: I32[Tensor, "b"],
    offered: I32[Tensor, "b"],
) -> Wide[Tensor, "b vocab"]:
    """max(weight p - q, 0) at the first draft that was not accepted, p where all offered ones were; a multiple of what to draw from.

    Where rounding leaves nothing of the difference (p equal to q), p stands.
    """
    if q.shape[1] == 0:
        return p[:, 0]
    target, drafted = row_at(p, accepted), row_at(q, accepted.clamp_max(q.shape[1] - 1))
    rest = (weight[:, None] * target - drafted).clamp_min(0)
    bonus = (accepted >= offered) | ~(rest.sum(-1) > 0)
    return torch.where(bonus[:, None], target, rest)


def accept_token(
    p: Wide[Tensor, "b rows vocab"],
    q: Wide[Tensor, "b n vocab"],
    drafts: I32[Tensor, "b n"],
    offered: I32[Tensor, "b"],
    u: F32[Tensor, "b n"],
    u_next: F32[Tensor, "b"],
) -> Verdict:
    """Token by token: draft d_i is accepted when p_i(d_i) > u_i q_i(d_i), up to the first that is not."""
    passed = chances(p[:, :-1], drafts) > u * chances(q, drafts)
    accepted = leading(passed & in_offer(offered, drafts))
    weight = torch.ones_like(p[:, 0, 0])
    return accepted, draw(after(p, q, weight, accepted, offered), u_next)


def accept_block(
    p: Wide[Tensor, "b rows vocab"],
    q: Wide[Tensor, "b n vocab"],
    drafts: I32[Tensor, "b n"],
    offered: I32[Tensor, "b"],
    u: F32[Tensor, "b n"],
    u_next: F32[Tensor, "b"],
) -> Verdict:
    """Block verification: P_i = min(P_{i-1} p_i / q_i, 1) on the drafts, P_0 = 1; accepted up to the last i with u_i < h_i, where
    h_i = R_i / (R_i + 1 - P_i), R_i = sum_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0), and h_i = P_i for the last draft offered.

    The next token comes from max(P_i p_{i+1} - q_{i+1}, 0), or from p after all of them. Never shorter in expectation than token by token.
    """
    weights = [torch.ones_like(p[:, 0, 0])]
    # A draft that neither could have drawn has the ratio 0, not 0 / 0.
    ratio = chances(p[:, :-1], drafts) / chances(q, drafts).clamp_min(TINY)
    accepted = torch.zeros_like(offered)
    for i in range(1, drafts.shape[1] + 1):
        weights.append((weights[-1] * ratio[:, i - 1]).clamp_max(1))
        share = weights[i]
        if i < drafts.shape[1]:
            rest = (weights[i][:, None] * p[:, i] - q[:, i]).clamp_min(0).sum(-1)
            total = rest + 1 - weights[i]
            share = torch.where(total > 0, rest / total, 1)
        share = torch.where(offered == i, weights[i], share)
        accepted = torch.where((u[:, i - 1] < share) & (offered >= i), i, accepted)
    weight = torch.stack(weights, 1).gather(1, accepted[:, None].long())[:, 0]
    return accepted, draw(after(p, q, weight, accepted, offered), u_next)
