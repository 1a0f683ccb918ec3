# SPDX-License-Identifier: Apache-2.0
"""Models of other shapes against the independent oracle: what passes on one configuration must hold on its relatives."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import model as oracle

import v41
from v41.tokenizer import token_map

ROOT = Path(__file__).parent.parent
ROWS = 45
NO_ENGRAM = {"engram_layer_ids": [], "engram_num_embeddings": []}
NO_DRAFT = {"num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1]}
NO_CANDIDATES = {"candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0}
VARIATIONS = {
    "no Engram, no draft": NO_ENGRAM | NO_DRAFT,
    "ratio 1 with a small window": NO_ENGRAM
    | NO_CANDIDATES
    | {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "sliding_window": 8,
        "index_topk": 8,
        "dspark_target_layer_ids": [1, 2, 3],
    },
    "ratios 4, 3 and 1": NO_ENGRAM
    | {
        "num_nextn_predict_layers": 0,
        "num_hidden_layers": 6,
        "compress_ratios": [0, 4, 4, 3, 3, 1],
        "kv_source_layer_ids": [1, 3, 5],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_topk_blocks": 4,
        "sliding_window": 8,
        "index_topk": 8,
    },
    "no YaRN, no candidates": NO_CANDIDATES | {"rope_scaling": None, "sliding_window": 16, "index_topk": 16},
    "sigmoid router": NO_ENGRAM | NO_DRAFT | {"scoring_func": "sigmoid"},
    "softmax router without normalization": NO_ENGRAM | NO_DRAFT | {"scoring_func": "softmax", "num_experts_per_tok": 3, "norm_topk_prob": False},
    "one expert a token": NO_ENGRAM | NO_DRAFT | {"num_experts_per_tok": 1},
}


def folder_of(name: str, path: Path) -> Path:
    """A checkpoint of the variation, by the recipe."""
    published = json.loads((ROOT / "v41" / "data" / "tiny_config.json").read_text())
    published["text_config"] = copy.deepcopy(published["text_config"]) | VARIATIONS[name]
    config = v41.Config.from_dict(published)
    shutil.copyfile(ROOT / "checkpoints" / "tiny" / "tokenizer.json", path / "tokenizer.json")
    known = torch.from_numpy(token_map(path / "tokenizer.json")) if config.engram_layer_ids else None
    v41.save_params(v41.init_params(config, 7, known), path, shard_bytes=5_000_000)
    return path


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_relative_equals_the_oracle_and_runs_as_released(name: str, tmp_path: Path) -> None:
    """`exact` float64 to 1e-12 (1,024 terms at 2^-53, ten layers); `released` runs prompts below and above every ratio, finite."""
    folder = folder_of(name, tmp_path)
    params = v41.load_params(folder, numerics=v41.Numerics("exact", dtype="float64"))
    tokens = torch.randint(0, 500, (2, ROWS), generator=torch.Generator().manual_seed(3))
    out, _ = v41.step(params, v41.init_cache(params, 2, ROWS), tokens)
    want = np.asarray(oracle.forward(str(folder), tokens[1].numpy())["logits"])
    assert np.linalg.norm(out.logits[1].numpy() - want) <= 1e-12 * np.linalg.norm(want)
    released = v41.load_params(folder, numerics=v41.Numerics("released"))
    for rows in (1, 2, 9):
        cache = v41.init_cache(released, 2, 16)
        out, cache = v41.step(released, cache, tokens[:, :rows])
        for k in range(rows, rows + 2):
            if released.draft is not None:
                _, cache = v41.draft(released, cache, out.hidden, out.logits[:, -1].argmax(-1))
            out, cache = v41.step(released, cache, tokens[:, k : k + 1])
            assert torch.isfinite(out.logits).all() and out.logits.shape == (2, 1, 512)
