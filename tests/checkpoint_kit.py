# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that are small, or full-size and hollow, for the tests of reading, inspecting and streaming."""

import importlib.util
import json
import shutil
from copy import deepcopy
from pathlib import Path

import torch

import v41
from v41.checkpoint import Folder, open_folder, write_folder
from v41.released import vision_tensors

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "golden" / "tiny" / "checkpoint"
MICRO_SEED = 3
VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 2,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 16,
    "min_pixels": 16,
    "max_wh_ratio": None,
}


def small_json(draft: bool = False, vision: bool = False) -> dict:
    """A published config of one window layer with two experts: a folder of 45 tensors that loads in milliseconds."""
    config = deepcopy(json.loads((TINY / "config.json").read_text()))
    text = config["text_config"]
    for key in [k for k in text if k.startswith(("engram_", "dspark_", "candidate_"))] + ["num_nextn_predict_layers"]:
        del text[key]
    text |= {"vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "o_groups": 1,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    }
    text |= {"compress_ratios": [0], "kv_source_layer_ids": [], "index_source_layer_ids": [], "sliding_window": 8}
    if draft:
        text |= {"compress_ratios": [0, 0], "num_nextn_predict_layers": 1, "dspark_block_size": 2, "dspark_noise_token_id": 5}
        text |= {"dspark_target_layer_ids": [0], "dspark_markov_rank": 32, "dspark_n_routed_experts": 2, "dspark_num_experts_per_tok": 1}
    if vision:
        config |= {"image_token_id": 63, "vision_config": VISION}
    return config


def micro_json() -> dict:
    """Three narrow layers with every kind of state (window and Engram, ratio 2, ratio 1 with candidates) and a draft stage."""
    config = small_json(draft=True)
    text, tiny = config["text_config"], json.loads((TINY / "config.json").read_text())["text_config"]
    text |= {k: v for k, v in tiny.items() if k.startswith("engram_")}
    text |= {"vocab_size": 512, "num_hidden_layers": 3, "compress_ratios": [0, 2, 1, 0], "engram_layer_ids": [0], "n_routed_experts": 16}
    text |= {"engram_num_embeddings": text["engram_num_embeddings"][:1], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2]}
    text |= {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8, "candidate_source_layer_id": 2, "candidate_topk_blocks": 3}
    text |= {"candidate_block_size": 4, "dspark_target_layer_ids": [1, 2], "dspark_n_routed_experts": 4, "max_position_embeddings": 4096}
    return config


def micro_folder(path: Path) -> Path:
    """A folder of `micro_json` by the recipe."""
    make_folder(path, micro_json(), MICRO_SEED)
    shutil.copyfile(TINY / "tokenizer.json", path / "tokenizer.json")
    return path


def make_folder(path: Path, published: dict, seed: int = 3) -> Path:
    """A folder of a config by the recipe, with vision tensors of zeros where the config has that part."""
    config = v41.Config.from_dict(published)
    v41.save_params(v41.init_params(config, seed), path, shard_bytes=40_000)
    if config.vision:
        folder = open_folder(path)
        tensors = [(name, folder.read(name)) for name in folder.entries]
        tensors += [(name, torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in vision_tensors(config)]
        for file in path.glob("model-*"):
            file.unlink()
        write_folder(path, tensors, 40_000)
    return path


def rewrite(path: Path, change) -> Path:
    """The folder with its tensors {name: tensor} changed by change(tensors)."""
    folder = open_folder(path)
    tensors = {name: folder.read(name) for name in folder.entries}
    change(tensors)
    for file in path.glob("model-*"):
        file.unlink()
    write_folder(path, tensors.items(), 40_000)
    return path


def poke(path: Path, name: str, offset: int, value: int) -> str:
    """Writes one byte of a tensor's payload; gives the file."""
    return poke_open(open_folder(path), name, offset, bytes([value]))


def poke_open(folder: Folder, name: str, offset: int, values: bytes) -> str:
    """The same for a folder that is open, and for any number of bytes."""
    file = folder.path / folder.files[name]
    with open(file, "r+b") as opened:
        opened.seek(folder.entries[name].start + offset)
        opened.write(values)
    return str(file)


def script(name: str):
    """A module out of checkpoints/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "checkpoints" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
