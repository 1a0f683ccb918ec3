# SPDX-License-Identifier: Apache-2.0
"""Draft, verify and commit in one step whose shapes never change (docs/speculation.md)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v41.spec import cache as caches
from v41.spec import draft as drafting
from v41.spec import model
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.draft import Drafted
from v41.spec.ops.accept import accept_best
from v41.spec.ops.choose import Sample, best_of
from v41.spec.ops.draws import ACCEPT, DRAFT, NEXT
from v41.spec.ops.place import HEAD
from v41.spec.params import Params
from v41.spec.table import static
from v41.spec.types import F32, I32, Act, Flag, Ids, Wide


@dataclass(frozen=True)
class SpecState:
    """What a sequence carries from step to step beside its cache.

    token       chosen, not in the cache yet: the one at position cache.length
    drafts      for the positions after it; `offered`: how many of them the next step verifies
    q           what each draft was drawn from; None for rule "greedy"
    since       from this position on the draft rings hold every row, where the cache says that they do not join on
    alive       false once a stop token came or the budget is spent: the sequence is left as it is
    budget      tokens that may still be emitted
    stops       token ids that end the sequence, -1 for none
    key         (seed, sequence id) of the uniforms
    temperature, top_p   0 temperature: the best token
    floor       drafts are offered while their confidence says that they survive with at least this probability; 0 offers all
    rule        "greedy", "token" or "block"
    """

    token: I32[Tensor, "b"]
    drafts: I32[Tensor, "b n"]
    offered: I32[Tensor, "b"]
    q: Wide[Tensor, "b n vocab"] | None
    since: I32[Tensor, "b"]
    alive: Flag[Tensor, "b"]
    budget: I32[Tensor, "b"]
    stops: I32[Tensor, "b stops"]
    key: I32[Tensor, "b 2"]
    temperature: F32[Tensor, "b"]
    top_p: F32[Tensor, "b"]
    floor: F32[Tensor, "b"]
    rule: str = static()

    @property
    def depth(self) -> int:
        """Drafts per step."""
        return self.drafts.shape[1]


@dataclass(frozen=True)
class Emitted:
    """Tokens of one step, -1 behind the `counts` of each sequence; and, for statistics, how many drafts were offered and accepted."""

    tokens: I32[Tensor, "b rows"]
    counts: I32[Tensor, "b"]
    offered: I32[Tensor, "b"]
    accepted: I32[Tensor, "b"]


def survival(confidence: Wide[Tensor, "b n"]) -> Wide[Tensor, "b n"]:
    """Probability that each draft and all before it are accepted, by the draft head's own word."""
    return (1 / (1 + torch.exp(-confidence))).cumprod(-1)


def first_state(
    params: Params,
    cache: Cache,
    logits: Wide[Tensor, "b vocab"],
    state: SpecState,
    ops: Backend,
) -> SpecState:
    """`state` with its first token, chosen from the logits of the newest position, and the drafts after it."""
    u = ops.uniforms(state.key, cache.length - 1, NEXT, 1)
    token = ops.choose(logits, Sample(state.temperature, state.top_p, u), 0) if state.rule != "greedy" else ops.choose(logits, None, 0)
    since = torch.where(cache.draft_length == cache.length, 0, cache.length)
    state = replace(state, token=token, since=since, alive=state.alive & (state.budget > 0) & ~is_stop(token[:, None], state)[:, 0])
    return state if state.depth == 0 else propose(params, replace(cache, draft_length=cache.length), state, ops)


def is_stop(tokens: I32[Tensor, "b n"], state: SpecState) -> Flag[Tensor, "b n"]:
    return (tokens[..., None] == state.stops[:, None]).any(-1)


def whole(since: I32[Tensor, "b"], length: I32[Tensor, "b"], window: int) -> Flag[Tensor, "b"]:
    """Whether rings with every row from `since` on hold the window in front of `length`, or all there is."""
    return length - since >= length.clamp_max(window)


def propose(params: Params, cache: Cache, state: SpecState, ops: Backend) -> SpecState:
    """The state with a new block of drafts after its token, and how many of them to verify.

    A ring that lacks positions of the window drafts nothing that is offered. What is offered follows from the drafts before alone: the
    confidence in draft i does not read draft i, so that the distribution of what is emitted stays (docs/speculation.md 3).
    """
    n, config = state.depth, params.config
    sample = None
    if state.rule != "greedy":
        sample = Sample(state.temperature, state.top_p, ops.uniforms(state.key, cache.length, DRAFT, config.dspark_block_size))
    stream, pre, told = drafting.stages(params, cache, state.token, None, ops)
    drafted: Drafted = drafting.draft_head(params, stream, pre, told, sample, drafting.draft_cut(sample, ops), ops)
    q = None if state.rule == "greedy" else ops.chosen_from(drafted.logits[:, :n], state.temperature, state.top_p)
    likely = (survival(drafted.confidence[:, :n]) >= state.floor[:, None]).cumprod(-1, dtype=torch.int32).sum(-1, dtype=torch.int32)
    offered = torch.where(whole(state.since, cache.length, config.sliding_window), likely, 0)
    return replace(state, drafts=drafted.tokens[:, :n], q=q, offered=offered)


def elected(logits: Wide[Tensor, "b rows vocab"], cut: str, vocab: int, ops: Backend) -> I32[Tensor, "b rows"]:
    """The best token of logits that are cut like the axis `cut`."""
    none = logits.new_zeros((*logits.shape[:2], 0))
    best, _ = ops.elect(*best_of(logits, ops.first(cut, logits.shape[-1], logits.device), vocab), none, cut)
    return best


def accept(
    logits: Wide[Tensor, "b rows vocab"],
    cut: str,
    vocab: int,
    position: I32[Tensor, "b"],
    offered: I32[Tensor, "b"],
    state: SpecState,
    ops: Backend,
) -> tuple[Tensor, Tensor]:
    """(accepted drafts, token after them) by the state's rule; logits that are cut like the axis `cut` only serve the rule "greedy"."""
    if cut:
        return accept_best(elected(logits, cut, vocab, ops), state.drafts, offered)
    if state.rule == "greedy":
        return ops.accept_greedy(logits, state.drafts, offered)
    p = ops.chosen_from(logits, state.temperature, state.top_p)
    u = ops.uniforms(state.key, position, NEXT, ACCEPT + state.depth)
    rule = ops.accept_token if state.rule == "token" else ops.accept_block
    return rule(p, state.q, state.drafts, offered, u[:, ACCEPT:], u[:, NEXT])


def emit(
    state: SpecState, running: Flag[Tensor, "b"], offered: I32[Tensor, "b"], accepted: I32[Tensor, "b"], token: I32[Tensor, "b"]
) -> tuple[Emitted, SpecState]:
    """Accepted drafts and the token after them, cut behind the first stop token; the last one emitted becomes the pending token."""
    row = torch.arange(state.depth + 1, dtype=torch.int32, device=token.device)
    last = accepted[:, None]
    tokens = torch.where(row == last, token[:, None], torch.cat((state.drafts, token[:, None]), 1))
    stopped = is_stop(tokens, state) & (row <= last)
    cut = torch.where(stopped, row, state.depth + 1).amin(-1).to(torch.int32)
    counts = torch.where(running, torch.minimum(accepted, cut) + 1, 0)
    lead = torch.arange(tokens.shape[0], dtype=torch.int32, device=token.device)
    pending = tokens[lead, (counts - 1).clamp_min(0)]
    budget = state.budget - counts
    alive = state.alive & (budget > 0) & (cut > accepted)
    emitted = Emitted(
        tokens=torch.where(row < counts[:, None], tokens, -1),
        counts=counts,
        offered=torch.where(running, offered, 0),
        accepted=torch.where(running, accepted, 0),
    )
    token = torch.where(running, pending, state.token)
    return emitted, replace(state, token=token, budget=budget, alive=torch.where(running, alive, state.alive))


def fill(
    params: Params, before: Cache, cache: Cache, hidden: Act[Tensor, "b s flat"], counts: I32[Tensor, "b"], state: SpecState, ops: Backend
) -> tuple[Cache, Cache, SpecState]:
    """(cache, the same with every draft ring taken to join on, state): the draft rings get the committed rows, and no others.

    A ring that did not join on before the step starts anew; until it holds a whole window the cache goes on saying that it lacks rows.
    """
    since = torch.where(before.draft_length == before.length, 0, torch.minimum(state.since, before.length))
    filled = drafting.fill_rings(params, replace(cache, draft_length=before.length), hidden, counts, ops)
    full = whole(since, filled.length, params.config.sliding_window)
    told = torch.where(full, filled.draft_length, cache.draft_length)
    return replace(filled, draft_length=told), filled, replace(state, since=since)


def affordable(state: SpecState, room: I32[Tensor, "b"]) -> I32[Tensor, "b"]:
    """Drafts to verify: those offered, but no more than budget and capacity leave room for beside the token after them."""
    return torch.minimum(torch.minimum(state.offered, state.budget - 1), room - 1).clamp_min(0)


def spec_step(params: Params, cache: Cache, state: SpecState, ops: Backend) -> tuple[Emitted, SpecState, Cache]:
    """One step of every sequence: the target on its pending token and drafts, acceptance, commit, new drafts.

    The committed rows are as many as the emitted tokens: the pending token and the accepted drafts. The cache runs on all rows and is
    then rewound to them; high stays at most depth above length, because length grows by at least 1 where high grows by depth + 1.
    """
    room, n = cache.capacity - cache.length, state.depth
    running = state.alive & (room > 0)
    offered = affordable(state, room)
    rows = torch.cat((state.token[:, None], state.drafts), 1)
    valid = torch.where(running, offered + 1, 0)
    boundary, ran = model.backbone(params, cache, rows, valid, None, ops)
    cut = ops.choice_cut(HEAD) if state.rule == "greedy" else ""
    logits = model.scores(params, boundary, "all", cut, ops)
    accepted, token = accept(logits, cut, params.config.vocab_size, cache.length, offered, state, ops)
    emitted, state = emit(state, running, offered, accepted, token)
    kept = caches.rewind(ran, cache.length + emitted.counts)
    if n == 0:
        return emitted, state, kept
    kept, joined, state = fill(params, cache, kept, model.hidden(boundary, ops), emitted.counts, state, ops)
    return emitted, propose(params, joined, state, ops), kept


def prefill_step(params: Params, cache: Cache, tokens: Ids[Tensor, "b s"], valid: I32[Tensor, "b"], ops: Backend) -> tuple[I32[Tensor, "b"], Cache]:
    """Rows of a prompt: (best token after the last real row, cache with its draft rings filled). For rings that join on."""
    boundary, ran = model.backbone(params, cache, tokens, valid, None, ops)
    cut = ops.choice_cut(HEAD)
    logits = model.scores(params, boundary, "last", cut, ops)
    token = elected(logits, cut, params.config.vocab_size, ops)[:, 0] if cut else ops.choose(logits[:, 0], None, 0)
    return token, ran if params.draft is None else drafting.fill_rings(params, ran, model.hidden(boundary, ops), valid, ops)
