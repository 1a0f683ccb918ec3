# SPDX-License-Identifier: Apache-2.0
"""`v41 graph`: one step of one rank captured and read, beside what the planner says of it (docs/neuron-graph.md 9). Nothing runs on a device."""

import resource
import time
from dataclasses import dataclass
from typing import Any

import torch

from v41.backends.neuron import graph_read as read
from v41.backends.neuron.buckets import arguments, function_of, local_params
from v41.backends.neuron.capture import Captured, CaptureError, capture
from v41.backends.neuron.graph_lint import Finding, lint
from v41.backends.neuron.instructions import LIMIT, Counted, count
from v41.backends.neuron.ops import WRITE, kernel_of
from v41.backends.neuron.options import source_digest
from v41.backends.neuron.packed import packed
from v41.backends.neuron.resident import resident
from v41.sharding.bucket import Bucket, check_drafts
from v41.sharding.check import check
from v41.sharding.placement import Placement
from v41.sharding.planner import Plan, plan
from v41.spec.config import Config
from v41.spec.numerics import Numerics


@dataclass(frozen=True)
class Graphed:
    """A graph with everything that was read from it."""

    plan: Plan
    numerics: Numerics
    captured: Captured
    hashes: dict[int, str]
    findings: list[Finding]
    counted: Counted
    seconds: float

    @property
    def meetings(self) -> read.Meetings:
        """Collectives of the graph."""
        return read.collectives(self.captured, self.plan.placement.mesh)

    @property
    def planned(self) -> read.Meetings:
        """Collectives of the planner."""
        return read.planned(self.plan.collectives, self.plan.placement.mesh)

    @property
    def refused(self) -> list[Finding]:
        """What stops a compilation."""
        return [f for f in self.findings if f.severity == "refused"]

    @property
    def wrong(self) -> list[str]:
        """Why this graph is no graph for the device; empty where nothing is known against it."""
        found = [f"{f.code} {f.node}: {f.text}" for f in self.refused]
        if len(set(self.hashes.values())) > 1:
            found.append(f"ranks {', '.join(map(str, self.hashes))} have different graphs")
        for key in sorted({*self.meetings, *self.planned}):
            if self.meetings[key] != self.planned[key]:
                kind, axis, ranks, size = key
                found.append(f"{kind} over {axis} ({ranks} ranks, {size} bytes): {self.meetings[key]} in the graph, {self.planned[key]} planned")
        if self.counted.total > LIMIT:
            found.append(f"{self.counted.total} instructions, above {LIMIT}")
        return found


def graphed(
    config: Config,
    placement: Placement,
    bucket: Bucket,
    capacity: int,
    numerics: Numerics,
    ranks: tuple[int, ...],
    weights: str = "checkpoint",
    profile: int = 0,
) -> Graphed:
    """The graph of a bucket. ranks: those whose graph is captured on its own, to compare hashes; profile: see `instructions.count`.

    weights: `checkpoint`, as stored, or `prepared`, as the kernels read them (v41/backends/neuron/resident.py).

    CaptureError where the step reads a value; ValueError where rules, mesh, bucket or capacity do not fit.
    """
    found = plan(config, placement, bucket, capacity)
    check(config, placement.rules, placement.mesh)
    check_drafts(config, bucket)
    if numerics.needs_start:
        raise ValueError(f"regime {numerics.regime!r} with index_keys {numerics.index_keys!r}: the shapes of a step follow its position, there is no one graph")
    begun, captured, hashes = time.monotonic(), None, {}
    for rank in ranks:
        params = local_params(config, numerics, placement.rules, placement.mesh, rank)
        params = resident(params, placement.resident.experts) if weights == "prepared" else params
        made = capture(function_of(bucket, placement.rules, placement.mesh), arguments(packed(params), bucket, capacity))
        captured = captured or made
        hashes[rank] = read.graph_hash(made)
    assert captured is not None
    seconds = time.monotonic() - begun
    known = numerics.device or (numerics.regime, numerics.dtype) == ("exact", "float32")  # what the kernels compute
    return Graphed(found, numerics, captured, hashes, lint(captured), count(captured, profile if known else 0), seconds)


def primitives(captured: Captured) -> dict[str, dict[str, Any]]:
    """Primitive -> nodes, and whether a kernel of that name exists."""
    return {n: {"nodes": c, "kernel": kernel_of("write_rows" if n == WRITE else n) is not None} for n, c in read.kernels(captured).items()}


def as_dict(g: Graphed) -> dict[str, Any]:
    """The report as JSON values."""
    planned, c = g.plan.as_dict(), g.captured
    copies = [f for f in g.findings if f.code == "copy"]
    return {
        "rules": planned["rules"],
        "ranks": planned["ranks"],
        "mesh": planned["mesh"],
        "bucket": planned["bucket"],
        "capacity": planned["capacity"],
        "numerics": g.numerics.describe(),
        "graphs": 1,
        "graph_hash": next(iter(g.hashes.values())),
        "graph_hash_by_rank": {str(r): h for r, h in g.hashes.items()},
        "nodes": read.nodes(c),
        "primitives": primitives(c),
        "without_kernel": [n for n, p in primitives(c).items() if not p["kernel"]],
        "kernel_sources": source_digest(),
        "collectives": read.as_list(g.meetings),
        "collectives_match_plan": g.meetings == g.planned,
        "refused_ops": [f._asdict() for f in g.refused],
        "doubtful_ops": [f._asdict() for f in g.findings if f.severity != "refused"],
        "int64_tensors": read.count_dtype(c, torch.int64),
        "host_reads": sum(f.code == "host read" for f in g.findings),
        "copies": len(copies),
        "caches": {how: sum(h == how for h in c.donated.values()) for how in ("write_rows", "copy", "kept")} | {"not_donated": len(c.fresh)},
        "instructions": g.counted.as_dict(),
        "alive_bytes": read.alive_bytes(c),
        "argument_bytes": read.given_bytes(c),
        "bytes_per_rank": planned["bytes_per_rank"],
        "flops": planned["flops"],
        "hbm_bytes": planned["hbm_bytes"],
        "step_seconds": planned["step_seconds"],
        "capture": {"seconds": round(g.seconds, 1), "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)},
        "wrong": g.wrong,
        "measured_on_a_device": False,
    }


def failed(error: CaptureError) -> dict[str, Any]:
    """The report of a step that is no graph."""
    finding = Finding("refused", "host read", "", str(error))
    unknown = dict.fromkeys(("int64_tensors", "collectives", "bytes_per_rank", "step_seconds"))  # there is no graph to read them from
    told = {"graphs": 0, "graph_hash": "", "host_reads": 1, "refused_ops": [finding._asdict()]}
    return {**told, **unknown, "wrong": [str(error)], "measured_on_a_device": False}


SAME = ("capture", "kernel_sources")  # may differ between two reports of one graph


def differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(path, left, right) of every value in which two reports differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [k for k in dict.fromkeys([*a, *b]) if path or k not in SAME]
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{path}.{k}".lstrip("."))]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]")]
    return [] if a == b else [(path, a, b)]
