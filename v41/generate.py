# SPDX-License-Identifier: Apache-2.0
"""Generation: prompts in, tokens and text out, with or without drafts (docs/speculation.md 6)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from v41.api import draft as fill_rings
from v41.api import init_cache, rewind, step
from v41.spec.backend import Backend
from v41.spec.cache import SLACK, Cache
from v41.spec.params import Params
from v41.spec.verify import Emitted, SpecState
from v41.spec_api import init_spec, refuse_regime, spec_step
from v41.text_stream import TextStream, finish, push

CHUNK = 512  # prompt rows of one call
EMPTY = TextStream()
OnToken = Callable[[int, int | None, str], None]


@dataclass(frozen=True)
class Generated:
    """One continuation. finish: "stop" or "length".

    tokens ends with the stop token, where one ended it, or with the token that completed a stop string; text holds neither, and is None
    without a tokenizer.
    """

    tokens: tuple[int, ...]
    text: str | None
    finish: str


@dataclass(frozen=True)
class Statistics:
    """Steps are counted per live sequence. offered[i], accepted[i]: steps that verified, and that accepted, draft i.

    tokens are those that steps emitted: not the first ones, which come from the prefill. Seconds are wall time of prefill (with its first
    drafts) and of the steps.
    """

    steps: int
    tokens: int
    offered: tuple[int, ...]
    accepted: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step emitted on average: 1 without drafts."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences per second of decoding."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Generation:
    """What came of each prompt; the statistics; and the cache, which holds every token of a sequence but the last."""

    sequences: tuple[Generated, ...]
    statistics: Statistics
    cache: Cache


@dataclass(frozen=True)
class Ending:
    """What ends a sequence: token ids, strings (with a tokenizer), a number of tokens."""

    tokens: tuple[int, ...]
    strings: tuple[str, ...]
    most: int
    tokenizer: Any


@dataclass(frozen=True)
class Progress:
    """One sequence on its way."""

    tokens: tuple[int, ...] = ()
    stream: TextStream = EMPTY
    finish: str | None = None


def token_lists(params: Params, prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """Every prompt as token ids; texts through the tokenizer as they are, no token added."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(f"prompts: {prompts!r} is not a list of token lists or texts")
    made = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError(f"prompts[{i}]: a text, but there is no tokenizer")
            prompt = tokenizer.encode(prompt, add_special_tokens=False).ids
        if not isinstance(prompt, Sequence) or any(type(t) is not int for t in prompt):
            raise ValueError(f"prompts[{i}]: {prompt!r} is neither a text nor a list of token ids")
        ids = list(prompt)
        bad = next((t for t in ids if not 0 <= t < params.config.vocab_size), None)
        if bad is not None or not ids:
            raise ValueError(f"prompts[{i}]: " + ("empty" if not ids else f"{bad} is not a token id (0..{params.config.vocab_size - 1})"))
        made.append(ids)
    return made


def prefill(params: Params, prompts: list[list[int]], capacity: int, slack: int, draft: bool, ops: Backend | None) -> tuple[Cache, Tensor]:
    """(cache, logits [batch, vocab] of each prompt's last token): chunks of equal rows, shorter prompts end in earlier ones."""
    counts = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
    longest = int(counts.max())
    table = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], dtype=torch.int32)
    cache = init_cache(params, len(prompts), capacity, slack=slack)
    device = cache.length.device
    last = torch.zeros((len(prompts), params.config.vocab_size), dtype=params.numerics.wide, device=device)
    for at in range(0, longest, CHUNK):
        rows = table[:, at : at + CHUNK].to(device)
        valid = (counts - at).clamp(0, rows.shape[1]).to(torch.int32).to(device)
        out, cache = step(params, cache, rows, valid=valid, logits="last", ops=ops)
        if draft:
            _, cache = fill_rings(params, cache, out.hidden, None, valid=valid, ops=ops)
        last = torch.where((valid > 0)[:, None], out.logits[:, 0], last)
    return cache, last


def take(progress: Progress, token: int, sequence: int, ending: Ending, on_token: OnToken | None) -> Progress:
    """The sequence with one more token; its finish where that ends it."""
    tokens, stream, piece, why = (*progress.tokens, token), progress.stream, "", None
    if token in ending.tokens:
        why = "stop"
    elif ending.tokenizer is not None:
        stream, piece = push(stream, token, ending.tokenizer, ending.strings)
        why = "stop" if stream.stopped else None
    if why is None and len(tokens) >= ending.most:
        why = "length"
    if on_token is not None:
        on_token(sequence, token, piece)
    if why is not None and ending.tokenizer is not None:
        stream, rest = finish(stream, ending.tokenizer)
        if rest and on_token is not None:
            on_token(sequence, None, rest)
    return Progress(tokens, stream, why)


def absorb(progress: list[Progress], emitted: Emitted, ending: Ending, on_token: OnToken | None) -> tuple[list[Progress], list[int]]:
    """(progress after a step, how many tokens of the step each sequence kept): a stop string inside a block cuts there."""
    made, kept = [], []
    for b, (now, row, count) in enumerate(zip(progress, emitted.tokens.tolist(), emitted.counts.tolist(), strict=True)):
        used = 0
        while used < count and now.finish is None:
            now = take(now, row[used], b, ending, on_token)
            used += 1
        made.append(now)
        kept.append(used)
    return made, kept


def cut(cache: Cache, state: SpecState, progress: list[Progress], counts: list[int], kept: list[int]) -> tuple[Cache, SpecState]:
    """Cache and state with the tokens behind a stop string taken back, and finished sequences idle."""
    over = torch.tensor([c - k for c, k in zip(counts, kept, strict=True)], dtype=torch.int32, device=cache.length.device)
    if bool(over.any()):
        cache = rewind(cache, cache.length - over)
    done = torch.tensor([p.finish is not None for p in progress], device=cache.length.device)
    token = torch.tensor([p.tokens[-1] for p in progress], dtype=torch.int32, device=cache.length.device)
    return cache, replace(state, token=token, alive=state.alive & ~done)


def decode(
    params: Params, cache: Cache, state: SpecState, ending: Ending, on_token: OnToken | None, ops: Backend | None
) -> tuple[list[Progress], Cache, dict[str, Any]]:
    """Steps until every sequence is finished: (progress, cache, counts for the statistics)."""
    progress = [take(Progress(), t, b, ending, on_token) for b, t in enumerate(state.token.tolist())]
    steps, tokens, depth = 0, 0, state.depth
    offered, accepted = [0] * depth, [0] * depth
    cache, state = cut(cache, state, progress, [0] * len(progress), [0] * len(progress))
    while any(p.finish is None for p in progress):
        emitted, state, cache = spec_step(params, cache, state, ops=ops)
        progress, kept = absorb(progress, emitted, ending, on_token)
        counts = emitted.counts.tolist()
        steps, tokens = steps + sum(c > 0 for c in counts), tokens + sum(kept)
        for i in range(depth):
            offered[i] += int((emitted.offered > i).sum())
            accepted[i] += int((emitted.accepted > i).sum())
        cache, state = cut(cache, state, progress, counts, kept)
    return progress, cache, {"steps": steps, "tokens": tokens, "offered": tuple(offered), "accepted": tuple(accepted)}


def _check(params: Params, most: int, strings: tuple[str, ...], tokenizer: Any, draft: bool, rule: str, temperature: float) -> None:
    refuse_regime(params)
    if type(most) is not int or most < 1:
        raise ValueError(f"max_tokens: {most!r} is not an integer of at least 1")
    if strings and tokenizer is None:
        raise ValueError("stop_strings: given, but there is no tokenizer")
    if not all(strings):
        raise ValueError("stop_strings: an empty one")
    if draft and params.draft is None:
        raise ValueError("draft: the parameters have no draft head; draft=False decodes plainly")
    if rule == "greedy" and temperature > 0:
        raise ValueError(f"rule: 'greedy' with temperature {temperature}")


def generate(
    params: Params,
    prompts: Sequence[Any],
    *,
    max_tokens: int,
    stop_tokens: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    draft: bool = True,
    rule: str | None = None,
    tokenizer: Any = None,
    on_token: OnToken | None = None,
    ops: Backend | None = None,
) -> Generation:
    """Continues every prompt (token ids, or text with a tokenizer) by up to max_tokens tokens; prompts may differ in length.

    stop_tokens: ids that end a sequence (eos_token_id of the config); stop_strings end it in front of themselves, wherever in a block.
    temperature 0 takes the best token, else tokens are drawn; draft: with the draft head, by rule "greedy" at temperature 0, else "block"
    (or "token"). Without drafts the tokens have the same distribution, and at temperature 0 they are the same. tokenizer: a byte-level
    `tokenizers.Tokenizer`. on_token(sequence, token, text) is called for every token with the text that it completes, and with token None
    for text that was held back to the end. Raises ValueError for bad arguments and where prompt and max_tokens do not fit
    max_position_embeddings.
    """
    if isinstance(stop_strings, str):
        raise ValueError(f"stop_strings: {stop_strings!r} is a string, not a list of strings")
    rule = rule or ("greedy" if temperature == 0 else "block")
    ending = Ending(tuple(stop_tokens) if stop_tokens is not None else (params.config.eos_token_id,), tuple(stop_strings), max_tokens, tokenizer)
    _check(params, max_tokens, ending.strings, tokenizer, draft, rule, temperature)
    listed = token_lists(params, prompts, tokenizer)
    longest, most = max(map(len, listed)), params.config.max_position_embeddings
    capacity = longest + max_tokens - 1
    if capacity > most:
        raise ValueError(f"max_tokens: {max_tokens} after a prompt of {longest} tokens exceeds max_position_embeddings {most}")
    depth = params.config.dspark_block_size if draft else 0
    began = perf_counter()
    cache, logits = prefill(params, listed, capacity, max(SLACK, depth), draft, ops)
    kinds: dict[str, Any] = {"budget": max_tokens - 1, "stops": ending.tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    state = init_spec(params, cache, logits, rule=rule, depth=depth, ops=ops, **kinds)
    ready = perf_counter()
    progress, cache, counted = decode(params, cache, state, ending, on_token, ops)
    statistics = Statistics(**counted, prefill_seconds=ready - began, decode_seconds=perf_counter() - ready)
    made = (Generated(p.tokens, None if tokenizer is None else p.stream.text, p.finish or "length") for p in progress)
    return Generation(tuple(made), statistics, cache)
