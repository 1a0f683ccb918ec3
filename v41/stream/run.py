# SPDX-License-Identifier: Apache-2.0
"""A streamed run: the calls of a golden run, cut into units that each read what they touch and then leave a record."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from v41 import api
from v41.backends.record import recorder
from v41.checkpoint import open_folder
from v41.golden.make import Run
from v41.params_io import check_folder, folder_map
from v41.spec import model
from v41.spec.backend import Backend
from v41.spec.cache import Cache
from v41.spec.config import Config
from v41.spec.draft import Drafted
from v41.spec.handed import Boundary
from v41.spec.model import Output
from v41.spec.numerics import Numerics
from v41.spec.params import EngramMap, Params
from v41.stream.lazy import Lazy, reading, real_draft, real_layer, skeleton
from v41.stream.records import Records
from v41.stream.source import Log, Source, folder_source
from v41.stream.units import Named, boundary_of, cache_of, changed, taps_of, with_taps


@dataclass(frozen=True)
class Job:
    """What a streamed run stands on: parameters without weights, where the weights come from, where records go, what was read so far."""

    params: Params
    lazy: Lazy
    source: Source
    records: Records | None = None
    log: Log = field(default_factory=Log)
    on_unit: Callable[[str], None] = lambda unit: None
    ops: Backend = field(default_factory=lambda: api.available_backends()["cpu"])

    def unit(self, name: str, compute: Callable[[Source], Named]) -> Named:
        """The tensors of a unit, from its record, or computed and recorded."""
        held = None if self.records is None else self.records.load(name)
        if held is None:
            source = replace(self.source, log=Log())
            held = compute(source), source.log
            if self.records is not None:
                self.records.save(name, *held)
        self.log.add(held[1])
        self.on_unit(name)
        return held[0]

    def recording(self, source: Source, *lazies: Lazy) -> tuple[Backend, Named]:
        return recorder(reading(self.ops, source, self.lazy, *lazies))


def job_over(config: Config, source: Source, numerics: Numerics, known: EngramMap | None, draft: bool = True) -> Job:
    """A job over any source of tensors: `recipe_source` needs no file."""
    params, lazy = skeleton(config, numerics, known, draft)
    return Job(params, lazy, source)


def prepare_run(directory: str | Path, numerics: Numerics, draft: bool = True, token_map: Tensor | None = None) -> Job:
    """A job over a folder in the released layout, checked as `load_params` checks it, from headers alone."""
    directory = Path(directory)
    config, found = Config.from_json(directory / "config.json"), open_folder(directory)
    check_folder(found, config, draft)
    return job_over(config, folder_source(found), numerics, folder_map(config, directory, token_map), draft)


def call_name(call: int) -> str:
    return f"call{call:05d}"


def run_layer(job: Job, call: int, cache: Cache, boundary: Boundary) -> tuple[Boundary, Cache, Named]:
    """One layer: its dense tensors, then what its primitives read."""
    number = boundary.layer

    def compute(source: Source) -> Named:
        layer, lazy = real_layer(job.params.config, number, source)
        ops, taps = job.recording(source, lazy)
        layers = (*job.params.layers[:number], layer, *job.params.layers[number + 1 :])
        after, new = api.layers(replace(job.params, layers=layers), cache, boundary, number, number + 1, ops=ops)
        return with_taps(changed(boundary, after, new.layers[number]), taps)

    values = job.unit(f"{call_name(call)}.layer{number:03d}", compute)
    after = boundary_of(boundary, values)
    return after, cache_of(cache, after, values), taps_of(values)


def run_embed(job: Job, cache: Cache, tokens: Tensor, valid: Tensor | None) -> tuple[Boundary, Cache, Named]:
    """The boundary before layer 0: cheap, so it has no record."""
    ops, taps = job.recording(replace(job.source, log=job.log))
    boundary, cache = api.embed(job.params, cache, tokens, valid=valid, ops=ops)
    return boundary, cache, taps


def run_head(job: Job, call: int, boundary: Boundary, logits: str | None) -> tuple[Output, Named]:
    """Logits and the input of the draft head."""

    def compute(source: Source) -> Named:
        ops, taps = job.recording(source)
        found = api.head(replace(job.params, norm=source.read("norm.weight")), boundary, logits=logits, ops=ops)
        hidden = model.hidden(boundary, ops)
        return with_taps({n: t.contiguous() for n, t in (("logits", found), ("hidden", hidden)) if t is not None}, taps)

    values = job.unit(f"{call_name(call)}.head", compute)
    return Output(values.get("logits"), values.get("hidden")), taps_of(values)


def run_draft(job: Job, call: int, cache: Cache, hidden: Tensor, token: Tensor | None, valid: Tensor | None) -> tuple[Drafted | None, Cache, Named]:
    """One call of the draft head: its rings, and with a token its block."""

    def compute(source: Source) -> Named:
        draft, lazy = real_draft(job.params.config, source)
        ops, taps = job.recording(source, lazy)
        drafted, new = api.draft(replace(job.params, draft=draft), cache, hidden, token, valid=valid, ops=ops)
        values = {"length": new.draft_length} | {f"ring.{j}": ring for j, ring in enumerate(new.draft)}
        if drafted is not None:
            values |= {"tokens": drafted.tokens, "logits": drafted.logits, "confidence": drafted.confidence}
        return with_taps({n: t.contiguous() for n, t in values.items()}, taps)

    values = job.unit(f"{call_name(call)}.draft", compute)
    rings = tuple(values[f"ring.{j}"] for j in range(len(cache.draft)))
    drafted = Drafted(values["tokens"], values["logits"], values["confidence"]) if "tokens" in values else None
    return drafted, replace(cache, draft=rings, draft_length=values["length"]), taps_of(values)


def streamed(job: Job) -> Run:
    """The two calls of a golden run, numbered as they come: the prefill is call 0."""
    calls, drafts = count(), count()

    def record(params: Params, cache: Cache, tokens: Tensor, *, valid: Any = None, logits: str | None = None) -> tuple[Output, Cache, Named]:
        call = next(calls)
        boundary, cache, taps = run_embed(job, cache, tokens, valid)
        while boundary.layer < params.config.num_hidden_layers:
            boundary, cache, seen = run_layer(job, call, cache, boundary)
            taps |= seen
        out, seen = run_head(job, call, boundary, logits)
        return out, cache, taps | seen

    def record_draft(params: Params, cache: Cache, hidden: Tensor, token: Tensor | None, *, valid: Any = None) -> tuple[Drafted | None, Cache, Named]:
        return run_draft(job, next(drafts), cache, hidden, token, valid)

    return Run(record, record_draft)
