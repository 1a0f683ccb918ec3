# SPDX-License-Identifier: Apache-2.0
"""What layers hand to later layers, as values: never shared state."""

from dataclasses import dataclass

from torch import Tensor

from v41.spec.slots import Call
from v41.spec.table import static
from v41.spec.types import I32, Act, Wide


@dataclass(frozen=True)
class Handed:
    """From the last kv source, index source and candidate source below; None above the first of each."""

    compressed: Act[Tensor, "b t head_dim"] | None
    index_keys: Act[Tensor, "b n index_dim"] | None
    topk_idxs: I32[Tensor, "b s k"] | None
    candidates: I32[Tensor, "b s blocks"] | None


@dataclass(frozen=True)
class Boundary:
    """All that crosses a cut between two layers. `layer` is the next one to run."""

    stream: Act[Tensor, "b s copies dim"]
    pre: Wide[Tensor, "b s copies"]
    call: Call
    handed: Handed
    engram_hash_ids: tuple[I32[Tensor, "b s columns"], ...]
    taps: tuple[Act[Tensor, "b s dim"], ...]
    layer: int = static()
    memory: tuple[Act[Tensor, "b s flat"], ...] = ()  # what the Engram layers add, where it was read ahead
