# SPDX-License-Identifier: Apache-2.0
"""Calls that exist in NKI 0.6 and do not run here: gen4 instructions, random numbers, collectives."""

from v41.backends.neuron.sim.context import fail

GEN4 = ("nc_matmul_mx", "quantize_mx", "activate2", "exponential", "rand2")
OUTSIDE = ("rng", "dropout", "set_rng_seed", "rand_set_state", "rand_get_state", "sequence_bounds")
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_gather_v",
    "all_to_all_v",
    "collective_permute",
    "rank_id",
    "ReplicaGroup",
)


def refusal(rule, call, why):
    """A function that refuses whatever it is given."""

    def refuse(*ignored, **also_ignored):
        fail(rule, why, call)

    refuse.__name__ = call.rsplit(".", 1)[-1]
    return refuse


def gen4(name):
    """A gen4-only instruction."""
    return refusal("OP-GEN4", f"nisa.{name}", f"nisa.{name} needs gen4 (Trn3)")


def outside(name):
    """An instruction that no kernel of this project uses."""
    return refusal("OP-SUBSET", f"nisa.{name}", f"nisa.{name} is not simulated")
