# SPDX-License-Identifier: Apache-2.0
"""The names of nki.isa (NKI 0.6) that the simulator runs or refuses."""

from v41.backends.neuron.sim.cores import core_barrier, sendrecv
from v41.backends.neuron.sim.dma import dma_compute, dma_copy, dma_transpose
from v41.backends.neuron.sim.enums import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from v41.backends.neuron.sim.errors import SimError as NkiValidationError
from v41.backends.neuron.sim.index import (
    affine_select,
    iota,
    local_gather,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_n_gather,
    nonzero_with_count,
    topk,
)
from v41.backends.neuron.sim.pe import nc_matmul, nc_transpose
from v41.backends.neuron.sim.reduce import (
    bn_aggr,
    bn_stats,
    range_select,
    select_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
)
from v41.backends.neuron.sim.refused import gen4, outside
from v41.backends.neuron.sim.registers import (
    VirtualRegister,
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from v41.backends.neuron.sim.scalar import activation, activation_reduce
from v41.backends.neuron.sim.vector import memset, tensor_copy, tensor_scalar, tensor_tensor
from v41.backends.neuron.sim.vector2 import (
    nc_stream_shuffle,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy_predicated,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_tensor_scan,
)

tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown

nc_matmul_mx = gen4("nc_matmul_mx")
quantize_mx = gen4("quantize_mx")
activate2 = gen4("activate2")
exponential = gen4("exponential")
rand2 = gen4("rand2")
rng = outside("rng")
dropout = outside("dropout")
set_rng_seed = outside("set_rng_seed")
rand_set_state = outside("rand_set_state")
rand_get_state = outside("rand_get_state")
sequence_bounds = outside("sequence_bounds")


def get_nc_version():
    """Always gen3: the simulator is a Trainium2."""
    return nc_version.gen3


def get_nc_sub_version():
    """First silicon revision."""
    return 0


__all__ = [
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_sub_version",
    "get_nc_version",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
]
