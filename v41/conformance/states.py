# SPDX-License-Identifier: Apache-2.0
"""Cases of state: what a call may write, what it may not read, and that it gives the same again. Bytes, for every backend (docs/conformance.md 6)."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from v41 import api, tree
from v41.cache_io import load_cache, save_cache, take
from v41.conformance.blocks import forced_by, run_call
from v41.conformance.judge import Finding
from v41.conformance.target import Target
from v41.conformance.walk import Opened, Stop, live_of, same_state
from v41.golden.metrics import same_bits
from v41.golden.pack_calls import Made
from v41.golden.pack_rows import draft_rows_written, rows_written, with_draft_rows, with_rows
from v41.spec.cache import Cache, LayerCache

Tensors = dict[str, Tensor]
GARBAGE = 11  # another token for rows that are not real


def same(name: str, reason: str, got: Tensors, want: Tensors) -> Iterator[Finding]:
    """One finding: the first tensor that differs in a byte, or that all are equal."""
    for n, t in want.items():
        if n not in got or not same_bits(got[n], t):
            bad = n in got and got[n].is_floating_point() and not bool(torch.isfinite(got[n]).all()) and bool(torch.isfinite(t).all())
            yield Finding(name, "non-finite" if bad else "differs", f"{n}: {reason}")
            return
    yield Finding(name, "equal" if want else "told", f"{len(want)} tensors")


def repeat(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """The same call twice: the same bytes, and arguments as they were."""
    kept = tree.map(torch.clone, stop.before)
    first, again = (run_call(target, opened, stop, forced_by(stop)) for _ in range(2))
    yield from same("repeat", "the same call gave other bytes", again.tensors, first.tensors)
    changed = same_state(stop.before, kept)
    yield Finding("arguments", "differs" if changed else "equal", f"{changed}: the call changed its argument" if changed else "")


def untouched(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """Nothing but the rows of the call is written."""
    made = run_call(target, opened, stop, forced_by(stop))
    if stop.op == "draft":
        rows = draft_rows_written(stop.before, made.cache, stop.hidden.shape[1])
        want = with_draft_rows(stop.before, stop.inputs["valid"], rows)
    else:
        rows = rows_written(stop.before, made.cache, stop.inputs["tokens"].shape[1])
        want = with_rows(stop.before, stop.inputs["valid"], rows)
    changed = same_state(made.cache, want)
    yield Finding("untouched", "differs" if changed else "equal", f"{changed}: a row outside the call was written" if changed else "")


def poisoned(cache: Cache) -> Cache:
    """NaN in every float row that nothing may read: rings beyond what is held, unfinished groups, sinks."""

    def dead(buffer: Tensor | None, held: Tensor) -> Tensor | None:
        if buffer is None:
            return None
        row = torch.arange(buffer.shape[1])
        return torch.where((row < held[:, None])[..., None] & (row < buffer.shape[1] - 1)[:, None], buffer, torch.nan)

    def layer(i: int, state: LayerCache) -> LayerCache:
        ratio = max(cache.config.layer_plan[i].ratio, 1)
        parts = {p: dead(getattr(state, p), cache.length) for p in ("window", "group_kv", "group_score")}
        parts |= {p: dead(getattr(state, p), cache.length // ratio) for p in ("compressed", "index_keys")}
        return replace(state, **parts)

    layers = tuple(layer(i, s) for i, s in enumerate(cache.layers))
    return replace(cache, layers=layers, draft=tuple(dead(r, cache.draft_length) for r in cache.draft))


def poison(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """Rows that are not held hold NaN: nothing changes."""
    clean = run_call(target, opened, stop, forced_by(stop))
    found = run_call(target, opened, replace(stop, before=poisoned(stop.before)), forced_by(stop))
    yield from same("poison", "a row that is not held was read", live(stop, found), live(stop, clean))


def live(stop: Stop, made: Made) -> Tensors:
    """The tensors of a call without the rows that are not real."""
    if stop.op == "draft":
        return made.tensors
    real = live_of(stop)
    found = {}
    for name, t in made.tensors.items():
        if name.startswith("rows."):
            found[name] = t
        elif t.shape[:2] == real.shape:
            found[name] = t[real]
        elif t.shape[0] == real.numel():
            found[name] = t[real.flatten()]
    return found


def garbage(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """Other tokens, and NaN at every stored boundary, in rows that are not real: nothing changes."""
    real = live_of(stop)
    tokens = torch.where(real, stop.inputs["tokens"], GARBAGE)
    clean = run_call(target, opened, stop, forced_by(stop))
    given = {n: spoiled(n, t, real) for n, t in forced_by(stop).items()}
    found = run_call(target, opened, replace(stop, inputs=stop.inputs | {"tokens": tokens}), given)
    yield from same("garbage", "a row that is not real was read", live(stop, found), live(stop, clean))


def spoiled(name: str, t: Tensor, real: Tensor) -> Tensor:
    """A stored tensor with NaN in rows that are not real; scores choose ids and stay."""
    if not t.is_floating_point() or t.shape[:2] != real.shape or name.endswith("index_score"):
        return t
    return torch.where(real.reshape(*real.shape, *(1,) * (t.ndim - 2)), t, torch.nan)


def rewound(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """Four rows of something else, then back: the call gives what it gave before."""
    start = stop.before
    room = int((start.capacity - start.length).min())
    if stop.op != "step" or opened.params.numerics.needs_start or room < 4 or start.slack < 4:
        return
    clean = run_call(target, opened, stop, forced_by(stop))
    other = torch.full((start.batch, 4), GARBAGE, dtype=torch.int32)
    beyond = target.step(target.ops, opened.params, start, other, torch.full((start.batch,), 4, dtype=torch.int32), {}).cache
    back = replace(stop, before=api.rewind(beyond, start.length))
    yield from same("rewind", "rows that were rewound were read", run_call(target, opened, back, forced_by(stop)).tensors, clean.tensors)


def reordered(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """The sequences of a batch in reverse: each row stays what it was."""
    batch = stop.before.batch
    if batch < 2 or stop.op != "step":
        return
    back = list(range(batch))[::-1]
    inputs = {n: t[back] for n, t in stop.inputs.items()}
    flipped = replace(stop, before=take(stop.before, back), inputs=inputs)
    clean = run_call(target, opened, stop, {})
    found = {n: in_order(t, batch, back) for n, t in run_call(target, opened, flipped, {}).tensors.items()}
    yield from same("permute", "a sequence depends on its place in the batch", found, clean.tensors)


def in_order(t: Tensor, batch: int, order: list[int]) -> Tensor:
    """Sequences put back; routing has the rows of all sequences one after the other."""
    return t[order] if t.shape[0] == batch else t.unflatten(0, (batch, -1))[order].flatten(0, 1)


def restored(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """The state saved and loaded: the call gives the same bytes."""
    with tempfile.TemporaryDirectory() as directory:
        save_cache(opened.params, stop.before, Path(directory))
        loaded = load_cache(opened.params, Path(directory))
    clean = run_call(target, opened, stop, forced_by(stop))
    yield from same(
        "restore", "a state that was saved is another", run_call(target, opened, replace(stop, before=loaded), forced_by(stop)).tensors, clean.tensors
    )


def chunked(target: Target, opened: Opened, stop: Stop) -> Iterator[Finding]:
    """A call of several rows in one and row by row: claimed bits are the same, else how far they are apart is told."""
    rows = stop.inputs.get("tokens", torch.zeros(1, 1)).shape[1]
    if stop.op != "step" or rows < 2 or stop.before.batch > 1 or opened.params.numerics.needs_start:
        return
    whole = target.step(target.ops, opened.params, stop.before, stop.inputs["tokens"], stop.inputs["valid"], {})
    state, parts = stop.before, []
    for r in range(rows):
        made = target.step(target.ops, opened.params, state, stop.inputs["tokens"][:, r : r + 1], torch.ones(1, dtype=torch.int32), {})
        state = made.cache
        parts.append(made.tensors["logits"])
    got, want = torch.cat(parts, 1), whole.tensors["logits"]
    if opened.params.numerics.regime == "faithful" and opened.params.numerics.regime in target.claims.bits:
        yield from same("schedule", "row by row gives other bytes", {"logits": got}, {"logits": want})
        return
    error = (got.double() - want.double()).norm() / want.double().norm()
    bad = not bool(torch.isfinite(got).all())
    yield Finding("schedule", "non-finite" if bad else "told", f"row by row: relative L2 {float(error):.3g}", (), {"relative_l2": float(error)})


Check = Callable[[Target, Opened, Stop], Iterator[Finding]]
# name: (what is needed, the check)
CHECKS: dict[str, tuple[tuple[str, ...], Check]] = {
    "repeat": ((), repeat),
    "untouched": ((), untouched),
    "poison": (("poison",), poison),
    "garbage": (("batch",), garbage),
    "rewind": (("rewind", "chunks"), rewound),
    "permute": (("batch",), reordered),
    "restore": ((), restored),
    "schedule": (("chunks",), chunked),
}


def applies(opened: Opened, stop: Stop, name: str) -> bool:
    """Whether a check says something about a call: so that none runs for nothing."""
    free = not opened.params.numerics.needs_start
    step, rows = stop.op == "step", stop.inputs["tokens"].shape[1] if "tokens" in stop.inputs else 0
    room = step and int((stop.before.capacity - stop.before.length).min()) >= 4
    return (
        {
            "garbage": step and free and not bool(live_of(stop).all()),
            "rewind": step and free and rows == 1 and room,
            "permute": step and free and stop.before.batch > 1,
            "schedule": step and free and stop.before.batch == 1 and 1 < rows <= 8,
            "restore": step and rows == 1 and bool((stop.before.length > 0).all()),
            "untouched": stop.op in ("step", "draft"),
        }.get(name, True)
        if name in ("garbage", "rewind", "permute", "schedule", "restore", "untouched")
        else stop.op in ("step", "draft")
    )
