# SPDX-License-Identifier: Apache-2.0
"""Golden outputs of every rank: what each brings to every collective, and how the parts make the whole (docs/sharding.md 8)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41 import api
from v41.backends.cpu.ranks import Meeting, run_ranks
from v41.checkpoint import write_file
from v41.golden import folder
from v41.golden.make import Run, check_steps, compute, prompt_tensor, write
from v41.params_io import tensor_digests, weights_digest
from v41.rank_params import Loaded, load_rank
from v41.sharding.mesh import Mesh
from v41.sharding.rules import Rules
from v41.sharding.shard import join_params
from v41.spec.backend import Backend
from v41.spec.numerics import Numerics

WHOLE, KIND = "whole", "v41 golden ranks"
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Brought:
    """What one rank brought to its collectives, by name in their order, and the collectives."""

    offers: Parts
    meetings: dict[str, Meeting]


@dataclass(frozen=True)
class Recorder:
    """Names the collectives of one rank: each by the tap that comes after it and its logical axis, `prefill.layers.0.attn_out.o_groups`.

    waiting: collectives that no tap has followed yet. calls: numbers of the steps and drafts made so far.
    """

    ops: Backend
    brought: Brought = field(default_factory=lambda: Brought({}, {}))
    waiting: list[tuple[Meeting, Tensor]] = field(default_factory=list)
    calls: dict[str, Iterator[int]] = field(default_factory=lambda: {"step": count(), "draft": count()})

    def name_waiting(self, call: str, tap: str) -> None:
        """Puts what waits under names of this tap; a name that comes again gets a number."""
        for meeting, offer in self.waiting:
            plain = f"{call}.{tap}.{meeting.axis.replace(' ', '+').replace('*', 'x')}"
            number = sum(n.partition("#")[0] == plain for n in self.brought.offers)
            name = f"{plain}#{number}" if number else plain
            self.brought.offers[name], self.brought.meetings[name] = offer, meeting
        self.waiting.clear()

    def call(self, kind: str, fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, ...]:
        """(what fn gives, its taps) of one call of the golden run."""
        number, taps = next(self.calls[kind]), Parts()
        call = ("prefill" if number == 0 else f"step{number - 1}") + (".draft" if kind == "draft" else "")

        def tap(name: str, tensor: Tensor) -> Tensor:
            self.name_waiting(call, name)
            taps[name] = torch.cat((taps[name], tensor), 1) if name in taps else tensor
            return tensor

        result = fn(*args, **options, ops=replace(self.ops, tap=tap))
        self.name_waiting(call, "result")
        return *result, taps

    def run(self) -> Run:
        """The calls of a golden run on this rank."""
        return Run(lambda *a, **o: self.call("step", api.step, *a, **o), lambda *a, **o: self.call("draft", api.draft, *a, **o))


def combine_rule(meeting: Meeting) -> dict[str, Any]:
    """How the parts of a collective make its result."""
    rule: dict[str, Any] = {"rule": "sum", "dtype": str(meeting.dtype).removeprefix("torch.")}
    if meeting.kind == "gather":
        rule = {"rule": "elect"} if meeting.axis.endswith("elect") else {"rule": "concat", "dim": -1}
    return rule | {"axis": meeting.axis, "mesh_axes": list(meeting.mesh_axes)}


def same_on_all(results: Sequence[dict[str, dict[str, Tensor]]]) -> int:
    """How many tensors every rank has, bit for bit the same; ValueError that names the first that differs."""
    for rank, other in enumerate(results[1:], 1):
        for part, tensors in results[0].items():
            for name, tensor in tensors.items():
                if folder.digest(other[part][name]) != folder.digest(tensor):
                    raise ValueError(f"{part}/{name}: ranks 0 and {rank} differ, but the result of a collective is the same on every rank")
    return sum(len(t) for t in results[0].values())


def compute_ranks(
    loaded: Sequence[Loaded], rules: Rules, mesh: Mesh, tokens: Tensor, lengths: Tensor, steps: int, taps: bool
) -> tuple[list[dict[str, Parts]], list[Brought]]:
    """(golden parts, what was brought) of every rank."""
    recorders: dict[int, Recorder] = {}

    def one(rank: int, ops: Backend) -> dict[str, Parts]:
        recorders[rank] = Recorder(ops)
        return compute(loaded[rank].params, tokens, lengths, steps, taps, run=recorders[rank].run())

    def watch(rank: int, meeting: Meeting, offer: Tensor) -> None:
        recorders[rank].waiting.append((meeting, offer))

    run = run_ranks(one, mesh, rules, watch=watch)
    return run.values, [recorders[r].brought for r in range(mesh.size)]


def make(
    checkpoint: Path,
    rules: Rules,
    mesh: Mesh,
    numerics: Numerics,
    prompts: Sequence[Sequence[int]],
    steps: int,
    out: Path,
    taps: bool,
    recipe: dict[str, Any] | None,
) -> dict[str, Any]:
    """Writes `whole`, a golden folder of what every rank has alike, and a folder a rank with what it brings to every collective.

    The manifest comes last: mesh, rules, bytes read, the combine rule of every tensor, digests.
    """
    tokens, lengths = prompt_tensor(prompts)
    check_steps(steps)
    prepare(out)
    loaded = [load_rank(checkpoint, rules, mesh, r, numerics=numerics) for r in range(mesh.size)]
    results, brought = compute_ranks(loaded, rules, mesh, tokens, lengths, steps, taps)
    alike = same_on_all(results)
    params = join_params([one.params for one in loaded], rules, mesh)
    weights = {"sha256": weights_digest(params), "recipe": recipe, "streamed": False, "read": {"whole": tensor_digests(params), "rows": {}}}
    folder.prepare(out / WHOLE)
    whole = write(params, tokens, lengths, {"steps": steps, "taps": taps}, results[0], weights, out / WHOLE)
    ranks = {}
    for rank, one in enumerate(brought):
        (out / rank_name(rank)).mkdir(exist_ok=True)
        write_file(out / rank_name(rank) / "brought.safetensors", one.offers)
        ranks[rank_name(rank)] = {"place": mesh.coordinate(rank), "bytes_held": loaded[rank].held, "bytes_read": loaded[rank].read}
        ranks[rank_name(rank)]["tensors"] = folder.describe(one.offers)
    manifest = {
        "kind": KIND,
        "schema": folder.SCHEMA,
        "mesh": [list(axis) for axis in mesh.axes],
        "rules": {"name": rules.name, "axes": {k: list(rules.of(k)) for k in sorted(rules.axes)}, "padding": dict(rules.padding)},
        "numerics": whole["numerics"],
        "alike": alike,
        "order": list(brought[0].offers),
        "combine": {name: combine_rule(meeting) for name, meeting in brought[0].meetings.items()},
        "ranks": ranks,
    }
    folder.write_json(out / folder.MANIFEST, manifest)
    return manifest | {"whole": whole}


def rank_name(rank: int) -> str:
    """The folder of a rank."""
    return f"rank{rank:02d}"


def prepare(out: Path) -> None:
    """Makes the folder; ValueError where it holds anything but an earlier one of this kind."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file")
    out.mkdir(parents=True, exist_ok=True)
    foreign = [f.name for f in sorted(out.iterdir()) if f.name not in (WHOLE, folder.MANIFEST) and not f.name.startswith("rank")]
    if foreign:
        raise ValueError(f"out: {out} holds {foreign[0]}, which no folder of ranks has; choose an empty folder")
    (out / folder.MANIFEST).unlink(missing_ok=True)
    for old in out.glob("rank*/brought.safetensors"):
        old.unlink()
