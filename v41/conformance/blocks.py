# SPDX-License-Identifier: Apache-2.0
"""Cases of a pack: every call from its stored state, teacher-forced where its taps are stored."""

from dataclasses import replace

import torch
from torch import Tensor

from v41.conformance.judge import Finding, Stored, judge, told
from v41.conformance.order import computed_at
from v41.conformance.target import Target
from v41.conformance.walk import Opened, Stop
from v41.golden import pack_calls as calls
from v41.golden.pack_block import block_state, block_step
from v41.golden.pack_ranks import offers

Tensors = dict[str, Tensor]
BESIDE = "route_score"  # stored to tell margins; no tap gives it


def run_call(target: Target, opened: Opened, stop: Stop, given: Tensors) -> calls.Made:
    """One call of the target from the stored state."""
    params, i = opened.params, stop.inputs
    if stop.op == "draft":
        return target.draft(target.ops, params, stop.before, stop.hidden, i["valid"], i["token"], given)
    if stop.op == "block":
        boundary = block_state(params, opened.pack.manifest["run"]["block"], i)[1]
        return block_step(target.ops, params, stop.before, boundary, given)
    if stop.op == "ranks":
        return calls.Made(offers(params, stop.before, i["tokens"], i["valid"], target.ops).tensors, stop.before)
    made = target.step(target.ops, params, stop.before, i["tokens"], i["valid"], given)
    if stop.op == "verify":
        accepted, following = target.ops.accept_greedy(made.tensors["logits"], i["tokens"][:, 1:], i["valid"] - 1)
        made = replace(made, tensors=made.tensors | {"accepted": accepted, "next": following})
    return made


def forced_by(stop: Stop) -> Tensors:
    """What a teacher-forced call is given."""
    return {n: t for n, t in stop.stored.want.items() if not n.startswith(("rows.", "draft."))} if stop.taps else {}


def judged_names(stored: Stored) -> list[str]:
    """Expected tensors in the order in which they are computed."""
    return sorted((n for n in stored.want if not n.endswith(BESIDE)), key=computed_at)


def fit(stop: Stop, got: Tensors) -> Tensors:
    """The logits of the rows that are stored: a long call stores the newest only."""
    want = stop.stored.want.get("logits")
    if want is None or "logits" not in got or got["logits"].shape == want.shape:
        return got
    valid = stop.inputs["valid"]
    return got | {"logits": got["logits"][torch.arange(len(valid)), (valid - 1).long()][:, None]}


def judge_call(target: Target, opened: Opened, stop: Stop, got: Tensors) -> list[Finding]:
    """A finding on every stored tensor. Calls without taps run free: they are told, unless the backend claims the bits."""
    bits = opened.params.numerics.regime in target.claims.bits
    trips = target.claims.why_not(("round_trips",)) is None
    got = fit(stop, got)
    found = [judge(n, got.get(n), stop.stored, got, bits, trips) for n in judged_names(stop.stored)]
    return found if stop.taps or bits else [told(f) for f in found]


def teacher_forced(target: Target, opened: Opened, stop: Stop) -> list[Finding]:
    """The call, its findings."""
    return judge_call(target, opened, stop, run_call(target, opened, stop, forced_by(stop)).tensors)
