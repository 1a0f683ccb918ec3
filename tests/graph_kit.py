# SPDX-License-Identifier: Apache-2.0
"""Small models, captures and comparisons for the tests of compiled steps."""

from dataclasses import replace

import torch
from sharded_kit import square_config
from torch import Tensor

import v41
from v41 import tree
from v41.backends.neuron import buckets
from v41.backends.neuron.capture import capture
from v41.backends.neuron.packed import packed
from v41.sharding.bucket import Bucket
from v41.sharding.mesh import grid
from v41.sharding.tables import TABLES
from v41.spec import model

EIGHT, SQUARE, ALONE = grid(4, 2), grid(2, 2), grid(1, 1)
LEAN, SINGLE = TABLES["lean"], TABLES["single"]


def small_config():
    """One layer with every kind of state, one draft stage, two drafts a block."""
    one = {"num_hidden_layers": 1, "compress_ratios": (2, 0), "kv_source_layer_ids": (0,), "index_source_layer_ids": (0,)}
    few = {"candidate_source_layer_id": -1, "engram_layer_ids": (0,), "dspark_target_layer_ids": (0,), "hc_sinkhorn_iters": 1}
    return replace(square_config(), n_routed_experts=4, dspark_n_routed_experts=4, dspark_block_size=2, **one, **few)


def without_memory(config, rules, mesh, bucket, capacity=32, regime="faithful", rank=0):
    """Arguments of a bucket's function, on the meta device."""
    return buckets.arguments(packed(buckets.local_params(config, v41.Numerics(regime), rules, mesh, rank)), bucket, capacity)


def bucket_graph(config, rules, mesh, bucket, function=None, **changes):
    """A bucket's graph."""
    return capture(function or buckets.function_of(bucket, rules, mesh), without_memory(config, rules, mesh, bucket, **changes))


def step_function(rules, mesh):
    """v41.step with all logits, as a function of trees."""

    def step(params, cache, rank, tokens, valid):
        out, cache = model.step(params, cache, tokens, valid, None, "all", buckets.rank_backend(rules, mesh, rank))
        return {"out": out, "cache": cache}

    return step


def rank_of(r):
    return torch.tensor(r, dtype=torch.int32)


def copied(node):
    """The tree with tensors of its own, none of which shares memory with another."""
    return tree.map(lambda t: t.clone(memory_format=torch.contiguous_format), node)


def first_unequal(got, want):
    """Path of the first tensor of two trees that differs in a bit; None where none does."""
    for (name, a), (other, b) in zip(tree.paths(got), tree.paths(want), strict=True):
        same = a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))
        if name != other or not same:
            return name
    return None


def raw(t: Tensor) -> Tensor:
    """Bits, so that NaNs compare."""
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) if t.numel() else t


DECODE = Bucket("decode", 6)
