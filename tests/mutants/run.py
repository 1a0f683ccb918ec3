# SPDX-License-Identifier: Apache-2.0
"""The checks: short parts of the golden comparison that stop at the first tensor that differs."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from helpers import LOGIT_BOUND, PROMPT, RELEASED, config, golden, relative, stored_boundary, tiny, unchecked
from torch import Tensor

import v41
from mutants import vectors
from v41.conformance.mutants.kit import Mutant, Outcome
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.params import Params


class DiffersError(Exception):
    """The first tensor that is not the stored one."""

    def __init__(self, name: str, error: float) -> None:
        super().__init__(name, error)
        self.outcome = Outcome(name, error)


def compare(name: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Raises where floats are further apart than the bound, or anything else is not equal."""
    if got.numel() != want.numel():
        raise DiffersError(name, float("inf"))
    got = got.reshape(want.shape)
    if not want.is_floating_point():
        if not torch.equal(got.long(), want.long()):
            raise DiffersError(name, float("inf"))
        return
    error = relative(got, want)
    if not error <= bound:
        raise DiffersError(name, error)


def in_rows(name: str, want: Tensor, shift: int) -> Tensor:
    """A stored tensor in the spec's own coordinates: top-k as row numbers."""
    return torch.where(want >= 0, want - shift, -1) if name.endswith("topk_idxs") else want


def watching(ops: Backend, stored: dict[str, Tensor], shift: int, bound: float) -> tuple[Backend, dict[str, int]]:
    """A backend whose tap compares with the stored tensors as they are made; and how many rows of each were seen."""
    seen: dict[str, int] = {}

    def tap(name: str, tensor: Tensor) -> Tensor:
        if name in stored:
            first, want = seen.get(name, 0), in_rows(name, stored[name], shift)
            if name.endswith(("index_score", "candidates", "topk_idxs")):  # these come in parts of rows
                want = want[:, first : first + tensor.shape[1]]
            seen[name] = first + tensor.shape[1]
            compare(name, tensor, want, bound)
        return tensor

    return replace(ops, name="watching", tap=tap), seen


def all_seen(stored: dict[str, Tensor], seen: dict[str, int]) -> None:
    for name in stored:
        if name not in seen:
            raise DiffersError(name, float("inf"))


def part(stored: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}


def same_caches(params: Params, cache: Cache, names: str = "") -> None:
    """The live cache rows after the prefill, of names that start so."""
    for name, want in part(golden("main.caches"), "after_prefill.").items():
        if name.startswith(names) and not name.startswith("mtp.") and name != "engram_token_cache":
            got = v41.export_cache(params, cache)[name]
            live = PROMPT % config().compress_ratios[int(name.split(".")[1])] if name.endswith("_state") else got.shape[1]
            compare("cache " + name, got[:, :live], want[:, :live], LOGIT_BOUND)


def empty(params: Params) -> Cache:
    return v41.init_cache(params, batch=1, capacity=PROMPT + 4)


def prefill(params: Params, ops: Backend) -> None:
    """The released prefill, every stored tap, the caches, the logits."""
    stored = {n: t for n, t in golden("main.prefill").items() if not n.startswith("mtp.")}
    watched, seen = watching(ops, stored, PROMPT, LOGIT_BOUND)
    out, cache = v41.step(params, empty(params), golden("main.outputs")["prompt"], ops=watched)
    all_seen(stored, seen)
    compare("logits", out.logits[:, 0], golden("main.outputs")["logits"][:, 0], LOGIT_BOUND)
    same_caches(params, cache)


def one_layer(layer: int) -> Callable[[Params, Backend], None]:
    """One released layer on stored inputs: its taps and the cache rows that it writes."""

    def check(params: Params, ops: Backend) -> None:
        stored = {n: t for n, t in golden("main.prefill").items() if n.startswith(f"layers.{layer}.")}
        watched, seen = watching(ops, stored, PROMPT, LOGIT_BOUND)
        _, cache = v41.layers(params, *stored_boundary(layer, params), layer, layer + 1, ops=watched)
        all_seen(stored, seen)
        same_caches(params, cache, f"layers.{layer}.")

    return check


@cache
def after_prefill() -> Cache:
    """The unchanged model's cache behind the prompt, draft rings included."""
    params = tiny(RELEASED)
    out, cache = v41.step(params, empty(params), golden("main.outputs")["prompt"])
    return v41.draft(params, cache, out.hidden, None)[1]


@cache
def after_step() -> tuple[Tensor, Cache]:
    """(main_hidden of step 0, the cache behind it)."""
    out, cache = v41.step(tiny(RELEASED), after_prefill(), golden("main.outputs")["tokens"][:, :1])
    return out.hidden, cache


def decode(params: Params, ops: Backend) -> None:
    """Two released decode steps on the unchanged model's cache: one that finishes a group of ratio 2, one that does not."""
    tokens, cache = golden("main.outputs")["tokens"], replace(after_prefill(), config=params.config)
    for k in range(2):
        stored = {n: t for n, t in part(golden("main.decode"), f"step{k}.").items() if not n.startswith("mtp.")}
        watched, seen = watching(ops, stored, config().sliding_window, LOGIT_BOUND)
        with named(f"step {k}: "):
            out, cache = v41.step(params, cache, tokens[:, k : k + 1], ops=watched)
            all_seen(stored, seen)
            compare("logits", out.logits[:, 0], golden("main.outputs")["logits"][:, k + 1], LOGIT_BOUND)


def draft(params: Params, ops: Backend) -> None:
    """The draft block after the first decode step: taps of all stages, tokens, logits, confidence."""
    hidden, cache = after_step()
    stored = {n: t for n, t in part(golden("main.decode"), "step0.").items() if n.startswith("mtp.")}
    watched, seen = watching(ops, stored, 0, LOGIT_BOUND)
    drafted, _ = v41.draft(params, replace(cache, config=params.config), hidden, golden("main.outputs")["tokens"][:, 1], ops=watched)
    all_seen(stored, seen)
    want = golden("main.outputs")
    compare("spec.logits", drafted.logits, want["spec.logits"][:, 0], LOGIT_BOUND)
    compare("spec.output_ids", drafted.tokens, want["spec.output_ids"][:, 0, 1:], LOGIT_BOUND)
    compare("spec.confidence", drafted.confidence, want["spec.confidence"][:, 0], LOGIT_BOUND)


def vector(name: str) -> Callable[[Params, Backend], None]:
    """The vectors of one operation, for what no text of the tiny model reaches."""

    def check(params: Params, ops: Backend) -> None:
        for tensor, got, want, bound in vectors.VECTORS[name](params, ops):
            compare(f"{name}: {tensor}", got, want, bound)

    return check


CHECKS: dict[str, Callable[[Params, Backend], None]] = {"prefill": prefill, "decode": decode, "draft": draft}
CHECKS |= {f"layer {i}": one_layer(i) for i in range(8)} | {f"vectors {n}": vector(n) for n in vectors.VECTORS}


class named:
    """Puts words before the name of a tensor that differs."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, DiffersError):
            raise DiffersError(self.words + error.outcome.first, error.outcome.error) from error


def run(mutant: Mutant) -> Outcome:
    """The outcome of a mutant's check."""
    with unchecked(), torch.no_grad():
        after_step()  # before anything is changed
        try:
            with mutant.change(tiny(RELEASED), Backend("spec")) as (params, ops):
                CHECKS[mutant.check](params, ops)
        except DiffersError as e:
            return e.outcome
    return Outcome(None, 0.0)
