# SPDX-License-Identifier: Apache-2.0
"""Makes every value that crosses a public function a pytree for torch: parameters, caches, boundaries, states and results."""

from v41 import tree
from v41.spec import cache, draft, handed, model, params, slots, table, verify
from v41.spec.ops import choose

WEIGHTS = (table.Fp8, table.Fp8Rows, table.Fp4, table.Tiled, table.Folded)
PARTS = (params.IndexKeys, params.Indexer, params.Compressor, params.Attention, params.Gate, params.Experts, params.SharedExpert, params.MoE)
WHOLE = (params.Hyper, params.Engram, params.Layer, params.DraftIn, params.DraftOut, params.Draft, params.EngramMap, params.Params)
STATE = (cache.LayerCache, cache.Cache, slots.Call, handed.Handed, handed.Boundary, verify.SpecState)
RESULTS = (model.Output, draft.Drafted, verify.Emitted, choose.Sample)

tree.register(*WEIGHTS, *PARTS, *WHOLE, *STATE, *RESULTS)
