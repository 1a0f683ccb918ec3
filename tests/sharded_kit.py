# SPDX-License-Identifier: Apache-2.0
"""Small models whose sizes divide, and one run of every kind of call on them, for the tests of sharding."""

from dataclasses import replace

import torch
from spec_kit import micro_config

import v41
from v41 import tree
from v41.backends.cpu import backend as cpu
from v41.backends.cpu.ranks import run_ranks
from v41.backends.record import recorder
from v41.sharding.mesh import grid
from v41.sharding.shard import shard_params

EXACT64 = v41.Numerics("exact", dtype="float64")
SQUARE = grid(2, 2)  # two attention groups of two: the smallest mesh with both axes
VOCAB = 200


def square_config():
    """Divides over 2 x 2 by every table; over pr71's multiple of 128 two ranks have nothing but padding, as have two of the shared expert."""
    return replace(micro_config(VOCAB), moe_intermediate_size=64, o_lora_rank=32)


def wide_config():
    """The same for attention groups of 8."""
    widths = {"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8, "o_groups": 8, "index_n_heads": 8}
    return replace(square_config(), n_routed_experts=8, dspark_n_routed_experts=8, **widths)


def big_config():
    """For 64 ranks, an expert each: one layer with every kind of state and one draft stage."""
    one = {"num_hidden_layers": 1, "compress_ratios": (2, 0), "kv_source_layer_ids": (0,), "index_source_layer_ids": (0,)}
    few = {"candidate_source_layer_id": -1, "engram_layer_ids": (0,), "dspark_target_layer_ids": (0,), "hc_sinkhorn_iters": 1}
    return replace(wide_config(), n_routed_experts=64, dspark_n_routed_experts=64, dspark_block_size=2, **one, **few)


def made(config, numerics=EXACT64):
    return v41.init_params(config, 0, numerics=numerics)


TOKENS = torch.tensor([[5, 17, 170, 199, 3, 44, 120, 61, 9, 130, 77], [88, 2, 13, 199, 150, 31, 31, 7, 64, 190, 5]])
COUNTS = torch.tensor([6, 3])


def every_call(params, ops):
    """Results by name of a prefill of unequal lengths, a chunk, a decode step, a draft and a speculative step."""
    found = {}

    def keep(call, out, taps):
        found.update({f"{call}.{n}": t for n, t in taps.items()})
        found.update({f"{call}.{n}": t for n, t in tree.paths(out)})

    cache = v41.init_cache(params, 2, 32)
    for call, rows, valid in (("prefill", TOKENS[:, :6], COUNTS), ("chunk", TOKENS[:, 6:9], None), ("decode", TOKENS[:, 9:10], None)):
        out, cache, taps = v41.record(params, cache, rows, valid=valid, ops=ops)
        keep(call, out, taps)
        token = None if call != "decode" else out.logits[:, -1].argmax(-1)
        drafted, cache, taps = v41.record_draft(params, cache, out.hidden, token, valid=valid, ops=ops)
        keep(f"{call}.draft", drafted if drafted is not None else (), taps)
    return found | speculative(params, cache, out.logits[:, -1], "greedy", ops)


def speculative(params, cache, logits, rule, ops):
    """First drafts and one step."""
    return one_step(params, cache, v41.init_spec(params, cache, logits, rule=rule, temperature=0.0 if rule == "greedy" else 1.1, ops=ops), ops)


def one_step(params, cache, state, ops):
    """A speculative step."""
    recording, taps = recorder(ops)
    emitted, state, cache = v41.spec_step(params, cache, state, ops=recording)
    trees = {"emitted": emitted, "state": state, "cache": cache}
    return {f"spec.{n}": t for n, t in taps.items()} | {f"spec.{k}.{n}": t for k, v in trees.items() for n, t in tree.paths(v)}


def short_call(params, ops, rule="greedy"):
    """A prefill and speculation from it, one sequence."""
    cache = v41.init_cache(params, 1, 32)
    out, cache = v41.step(params, cache, TOKENS[:1, :3], ops=ops)
    _, cache = v41.draft(params, cache, out.hidden, None, ops=ops)
    found = {"prefill.logits": out.logits, "prefill.hidden": out.hidden}
    return found | speculative(params, cache, out.logits[:, -1], rule, ops)


def prefilled_state(params):
    """A cache and the first state on it, which every rank has alike."""
    cache = v41.init_cache(params, 1, 32)
    out, cache = v41.step(params, cache, TOKENS[:1, :3], logits="last")
    _, cache = v41.draft(params, cache, out.hidden, None)
    return cache, v41.init_spec(params, cache, out.logits[:, -1])


def on_ranks(params, rules, mesh, call=every_call, change=lambda rank, params, ops: (params, ops), placed=None):
    """A run of the call on every rank. change: what a mutant does to a rank's parameters and backend; placed: other rules for the backend."""
    local = [shard_params(params, rules, mesh, r) for r in range(mesh.size)]
    return run_ranks(lambda r, ops: call(*change(r, local[r], ops)), mesh, placed or rules)


def first_difference(got, want, bound=1e-11):
    """Name of the first result that is not the wanted one (floats: within `bound` of the largest), None where all are."""
    for name, tensor in want.items():
        other = got.get(name)
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            return name
        if tensor.dtype.is_floating_point:
            finite = tensor.isfinite()
            size = float(tensor[finite].abs().max()) if finite.any() else 0.0
            if not torch.equal(tensor[~finite], other[~finite]) or not bool(((other - tensor)[finite].abs() <= bound * max(size, 1.0)).all()):
                return name
        elif not torch.equal(other, tensor):
            return name
    return None if got.keys() <= want.keys() else sorted(got.keys() - want.keys())[0]


def unsharded(params, call=every_call):
    return call(params, cpu)
