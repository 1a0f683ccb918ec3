# SPDX-License-Identifier: Apache-2.0
"""`v41.compile`: a step of fixed shapes as one compiled graph (docs/neuron-graph.md 5)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from v41 import api, checks, spec_api
from v41.sharding.bucket import Bucket, bucket_named, check_drafts, check_fits
from v41.sharding.check import check
from v41.sharding.mesh import MESHES, Mesh
from v41.sharding.rules import Rules
from v41.sharding.tables import rules_named
from v41.spec.cache import SLACK, Cache
from v41.spec.ops.accept import RULES
from v41.spec.params import Params
from v41.spec.verify import SpecState

if TYPE_CHECKING:
    from v41.backends.neuron.compile import Compiled


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step of one rank; see `v41.compile`."""

    params: Params
    compiled: "Compiled"

    def __call__(self, cache: Cache, given: SpecState | Tensor, valid: Tensor | None = None) -> Any:
        """decode: (cache, state) -> (Emitted, SpecState, Cache). prefill: (cache, tokens [, valid]) -> (best next token [batch], Cache).

        The cache is changed in place and given back. Raises ValueError before anything is written, for what the step of the spec refuses and for
        shapes that are not the bucket's; values are read for that where they lie on the CPU, and not on a device.
        """
        if checks.kind("cache", cache, Cache).length.device.type == "cpu":
            if isinstance(given, SpecState):
                spec_api.check_state(self.params, cache, given)
            else:
                valid, _ = api._checked(self.params, cache, given, valid)
        return self.compiled(cache, given, valid)


def compile(
    params: Params,
    *,
    rules: Rules | str = "single",
    mesh: Mesh = MESHES[1],
    bucket: Bucket | str = "decode6",
    capacity: int = 8192,
    backend: str = "cpu",
    rank: int = 0,
    rule: str = "greedy",
    slack: int = SLACK,
) -> CompiledStep:
    """One step as one graph, for calls of a fixed shape: `decode6` verifies a token and 5 drafts and drafts anew, `decode1` takes a token,
    `prefill4096` rows of a prompt and fills the draft rings; `decode6x4` is for 4 sequences.

    params are those of the rank (`shard_params`) where the mesh has several; caches must have this batch, capacity and slack.
    backend: "cpu" (bit for bit the spec), "neuron-sim" (the device's kernels in the simulator), "neuron" (not run on a device).
    Raises ValueError for rules, mesh, bucket or capacity that do not fit, a regime whose shapes follow positions, a backend that is not there.
    """
    from v41.backends.neuron.compile import BACKENDS, check_share, compiled  # defines torch operators, which takes seconds: not at `import v41`

    checks.kind("params", params, Params)
    rules = rules_named(rules) if isinstance(rules, str) else checks.kind("rules", rules, Rules)
    bucket = bucket_named(bucket) if isinstance(bucket, str) else checks.kind("bucket", bucket, Bucket)
    for name, value, known in (("backend", backend, BACKENDS), ("rule", rule, RULES)):
        if value not in known:
            raise ValueError(f"{name}: {value!r} is not one of {known}")
    for name, number in (("capacity", capacity), ("rank", rank), ("slack", slack)):
        if checks.kind(name, number, int) < 0:
            raise ValueError(f"{name}: {number} is below 0")
    check(params.config, rules, checks.kind("mesh", mesh, Mesh))
    check_fits(params.config, bucket, capacity)
    mesh.coordinate(rank)
    check_share(params, rules, mesh, rank)
    spec_api.refuse_regime(params)
    check_drafts(params.config, bucket, params.draft is not None)
    return CompiledStep(params, compiled(params, rules, mesh, bucket, capacity, backend, rank, rule, slack))
