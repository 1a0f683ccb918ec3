# SPDX-License-Identifier: Apache-2.0
"""A small model and its packs, made once for the tests of packs and of the conformance run."""

import tempfile
from functools import cache
from pathlib import Path

from helpers import ROOT, published

import v41
from v41.conformance.walk import Opened, Stop, every_stop, open_with_params
from v41.golden.pack import make_pack

SEED = 3
# Ratios 0, 2, 1, 1; an Engram where a tap is; few mixes, since each call repeats them in float64 twice.
SHAPE = {"vocab_size": 200, "dspark_noise_token_id": 190, "engram_layer_ids": [2], "hc_mult": 2, "hc_sinkhorn_iters": 4, "num_nextn_predict_layers": 2}
SHAPE |= {
    "compress_ratios": [0, 2, 1, 1, 0, 0],
    "num_attention_heads": 4,
    "o_groups": 4,
    "index_n_heads": 4,
    "o_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "max_position_embeddings": 4096,
}
SCENARIOS = ("prefill", "decode", "chunks", "permute", "ranks")
MADE = tempfile.TemporaryDirectory()


def config(layers: int = 4) -> v41.Config:
    """One layer: with a window only, for graphs that take long to make."""
    one = {"num_hidden_layers": 1, "compress_ratios": [0, 0], "kv_source_layer_ids": [], "index_source_layer_ids": [], "num_nextn_predict_layers": 0}
    one |= {"candidate_source_layer_id": -1, "engram_layer_ids": [], "engram_num_embeddings": [], "dspark_target_layer_ids": [], "hc_sinkhorn_iters": 2}
    return v41.Config.from_dict(published(**SHAPE | (one if layers == 1 else {})))


def params(regime: str = "faithful", dtype: str | None = None, layers: int = 4) -> v41.Params:
    return v41.init_params(config(layers), SEED, numerics=v41.Numerics(regime, dtype=dtype))


@cache
def folder(regime: str = "faithful", dtype: str | None = None, names: tuple[str, ...] = SCENARIOS, layers: int = 4) -> Path:
    """A pack on disk; nobody changes it."""
    out = Path(MADE.name) / f"{regime}-{dtype}-{len(names)}-{layers}"
    make_pack(params(regime, dtype, layers), {"seed": SEED}, out, names)
    return out


@cache
def opened(regime: str = "faithful", dtype: str | None = None, names: tuple[str, ...] = SCENARIOS, layers: int = 4) -> Opened:
    return open_with_params(folder(regime, dtype, names, layers), None)


@cache
def committed(name: str) -> Opened:
    """A pack of the repository."""
    return open_with_params(ROOT / "tests" / "packs" / name, None)


def stop(name: str, of: Opened | None = None) -> Stop:
    """One call by name, `decode.c0`."""
    return next(s for s in every_stop(of or opened()) if s.name == name)
