# SPDX-License-Identifier: Apache-2.0
"""The config is read strictly, and every variation that it allows builds a model that takes a step."""

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import FAITHFUL, GOLDEN, RELEASED, TINY, published, released_config, same_bits, unchecked

import v41
from v41.spec.config import field_names
from v41.spec.model import Output

TEXT = released_config().to_dict()
# Keys without a say in what is computed: they may be missing or hold anything.
FREE = {"architectures", "transformers_version", "initializer_range", "use_cache"}
OPTIONAL = FREE | {"image_token_id", "vision_config"}


def node(config: dict, where: str) -> dict:
    for key in where.split("."):
        config = config[key] if key else config
    return config


def places() -> Iterator[tuple[str, str]]:
    """Every key of the published file: (where, key). The vision part is passed over as a whole."""
    for where in ("", "text_config", "text_config.rope_scaling", "quantization_config"):
        yield from ((where, key) for key in node(TEXT, where))


def edited(where: str, key: str, value: object = ...) -> dict:
    """The published file with a key removed, or set."""
    config = copy.deepcopy(TEXT)
    if value is ...:
        del node(config, where)[key]
    else:
        node(config, where)[key] = value
    return config


# Strictness


def test_the_published_files_are_read_and_given_back():
    files = [GOLDEN / "medium_config.json", TINY / "checkpoint" / "config.json"]
    for path in files:
        assert v41.Config.from_json(path).to_dict() == json.loads(path.read_text())
    c = released_config()
    assert (c.num_hidden_layers, c.num_nextn_predict_layers, c.n_routed_experts, len(c.compress_ratios)) == (40, 3, 384, 43)
    assert {*field_names()} <= {key for _, key in places()}  # no field from elsewhere


@pytest.mark.parametrize("where, key", [p for p in places() if p[1] not in OPTIONAL])
def test_a_missing_key_is_refused_by_name(where, key):
    nested = where.count(".") or where == "quantization_config"
    with pytest.raises(ValueError, match=where.split(".")[-1] if nested else key):
        v41.Config.from_dict(edited(where, key))


@pytest.mark.parametrize("where, key", [p for p in places() if p[1] not in OPTIONAL])
def test_a_value_of_another_type_is_refused_by_name(where, key):
    value = node(TEXT, where)[key]
    numbers = isinstance(value, float | int) and not isinstance(value, bool)
    wrong = ["x", [0.5], {"a": 1}, True] + ([-1, float("nan")] if numbers and key != "candidate_source_layer_id" else [])
    for other in wrong:
        if type(other) is type(value) and other == value:
            continue
        with pytest.raises(ValueError, match="config: "):
            v41.Config.from_dict(edited(where, key, other))


def test_keys_without_a_say_change_nothing():
    for key in FREE:
        where = "" if key in TEXT else "text_config"
        assert v41.Config.from_dict(edited(where, key)).layer_plan == released_config().layer_plan
    with pytest.raises(ValueError, match="vision_config is 3"):
        v41.Config.from_dict(edited("", "vision_config", 3))


@pytest.mark.parametrize("where", ["", "text_config", "text_config.rope_scaling", "quantization_config"])
def test_an_unknown_key_is_refused(where):
    with pytest.raises(ValueError, match="gate_temp"):
        v41.Config.from_dict(edited(where, "gate_temp", 1.0))


def test_a_key_given_twice_and_a_file_that_is_none_are_refused(tmp_path):
    path = tmp_path / "config.json"
    for text, message in (('{"model_type": 1, "model_type": 2}', "given twice"), ("[1]", "holds a list"), ("{", "not JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            v41.Config.from_json(path)
    with pytest.raises(ValueError, match="cannot read"):
        v41.Config.from_json(tmp_path / "none.json")


def test_deepseek_v4_and_other_models_are_refused_with_the_reason():
    for other in ({"model_type": "deepseek_v4"}, {"compress_rope_theta": 160000, "compress_ratios": [0, 4]}):
        with pytest.raises(ValueError, match="DeepSeek-V4, another model: it has per-head q norms"):
            v41.Config.from_dict(other)
    for kind in ("deepseek_v3", "deepseek_v41_text", None, 41):
        with pytest.raises(ValueError, match="model_type is"):
            v41.Config.from_dict(TEXT | {"model_type": kind})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_source_layer_ids": [2, 8, 14]}, "layer 20 has ratio 1, its kv source 14 has 2"),
        ({"index_source_layer_ids": [0, 2, 8, 14, 20, 24, 28, 32, 36]}, "names layer 0, whose compress_ratios entry is 0"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "layer 2 compresses"),
        ({"candidate_source_layer_id": 21}, "is not one of index_source_layer_ids"),
        ({"candidate_source_layer_id": 14}, "would apply the candidates of layer 14"),
        ({"candidate_topk_blocks": 64}, "sure of 505 rows only, index_topk wants 512"),
        ({"engram_num_embeddings": [384006168]}, "differ in length"),
        ({"compress_ratios": [0] * 40}, "has 40 entries, not 43"),
        ({"dspark_target_layer_ids": [37, 38, 40]}, "names a layer that does not exist"),
        ({"dspark_target_layer_ids": []}, "is empty"),
        ({"o_groups": 7}, "does not divide by o_groups 7"),
        ({"num_experts_per_tok": 385}, "is above n_routed_experts"),
        ({"dspark_noise_token_id": 129280}, "is not below vocab_size"),
        ({"hidden_size": 5000}, "does not divide by 32"),
        ({"scoring_func": "relu"}, "is not one of"),
        ({"hidden_act": "gelu"}, "defined for 'silu'"),
        ({"index_source_layer_ids": [2, 8, 14, 20, 24, 28, 36, 32]}, "is not ascending"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        v41.Config.from_dict(TEXT | {"text_config": TEXT["text_config"] | changes})


# Variations

NO_ENGRAM = {k: None for k in TEXT["text_config"] if k.startswith("engram_")}
NO_DRAFT = {k: None for k in TEXT["text_config"] if k.startswith("dspark_")} | {"num_nextn_predict_layers": None}
NO_CANDIDATES = {k: None for k in TEXT["text_config"] if k.startswith("candidate_")}
VARIATIONS = {
    "everything": {},
    "no Engram": NO_ENGRAM,
    "Engram in layers 0 and 3": {"engram_layer_ids": [0, 3], "engram_num_embeddings": [138, 202]},
    "2-grams only": {"engram_max_ngram_size": 2, "engram_num_embeddings": [29 + 31]},
    "no draft head": NO_DRAFT | {"compress_ratios": [0, 2, 1, 1]},
    "two draft stages": {"num_nextn_predict_layers": 2, "compress_ratios": [0, 2, 1, 1, 0, 0]},
    "the backbone's number of draft experts": {"dspark_num_experts_per_tok": 0},
    "no candidates": NO_CANDIDATES,
    "candidate source -1": {"candidate_source_layer_id": -1},
    "no YaRN": {"rope_scaling": None},
    "groups of 3": {"compress_ratios": [0, 3, 1, 1, 0]},
    "groups of 4": {"compress_ratios": [4, 4, 1, 1, 0], "kv_source_layer_ids": [0, 2], "index_source_layer_ids": [0, 2, 3]},
    "ratio 1 with a window of 1": {"sliding_window": 1},
    "window only": NO_CANDIDATES | {"compress_ratios": [0] * 5, "kv_source_layer_ids": [], "index_source_layer_ids": []},
    "sigmoid scores": {"scoring_func": "sigmoid"},
    "softmax scores": {"scoring_func": "softmax", "norm_topk_prob": False},
    "no clamp": {"swiglu_limit": 0},
    "one expert per token": {"num_experts_per_tok": 1},
    "two copies": {"hc_mult": 2, "hc_sinkhorn_iters": 3},
    "other widths": {"head_dim": 64, "o_groups": 1, "o_lora_rank": 32, "index_n_heads": 3, "index_topk": 5, "vocab_size": 67},
}


# Their tensors have other shapes or other owners, so that their first step runs with shapes checked; the others repeat one of them.
CHECKED = {"everything", "Engram in layers 0 and 3", "groups of 3", "window only", "two copies", "other widths"}
IDS = torch.randint(3, 60, (2, 23), generator=torch.Generator().manual_seed(1))


@cache
def first_step(name: str) -> tuple[v41.Params, Output, v41.Cache]:
    """(parameters, output, cache) of a variation after one call."""
    with unchecked():
        params = v41.init_params(v41.Config.from_dict(published(**VARIATIONS[name])), 5)
    with nullcontext() if name in CHECKED else unchecked():
        return params, *v41.step(params, v41.init_cache(params, batch=2, capacity=32), IDS)


@pytest.mark.parametrize("name", VARIATIONS)
def test_a_variation_takes_steps_that_do_not_depend_on_their_cuts(name):
    params, whole, after = first_step(name)
    config = params.config
    assert whole.logits.shape == (2, 23, config.vocab_size) and torch.isfinite(whole.logits).all() and whole.logits.std() > 0
    with unchecked():
        logits, cache = [], v41.init_cache(params, batch=2, capacity=32)
        for part in IDS.split([14, 9], 1):
            out, cache = v41.step(params, cache, part)
            logits.append(out.logits)
        assert same_bits(torch.cat(logits, 1), whole.logits)
        if config.num_nextn_predict_layers:
            drafted, _ = v41.draft(params, after, whole.hidden, IDS[:, -1])
            assert drafted.tokens.shape == (2, 3) and torch.isfinite(drafted.logits).all() and torch.isfinite(drafted.confidence).all()
        else:
            assert whole.hidden is None and params.draft is None
        released = replace(params, numerics=RELEASED)
        started, _ = v41.step(released, v41.init_cache(released, batch=2, capacity=32), IDS[:, :9])
        assert torch.isfinite(started.logits).all() and started.logits.shape == (2, 1, config.vocab_size)


def test_variations_are_different_models():
    """Those with the same parameters as the full one give other logits, so that none is the full one by mistake."""
    names = ["everything", "candidate source -1", "no YaRN", "ratio 1 with a window of 1", "sigmoid scores", "softmax scores"]
    names.append("one expert per token")
    seen = [first_step(name)[1].logits for name in names]
    for i, logits in enumerate(seen):
        assert all(not torch.equal(logits, other) for other in seen[:i]), names[i]


def test_a_vision_part_is_passed_over_and_an_image_token_refused():
    config = v41.Config.from_dict(published() | {"vision_config": {"model_type": "deepseek_v41_vision"}, "image_token_id": 7})
    assert config.vision and config.image_token_id == 7
    params = v41.init_params(config, 5, numerics=FAITHFUL)
    cache = v41.init_cache(params, batch=1, capacity=8)
    assert torch.isfinite(v41.step(params, cache, torch.tensor([[3, 4]]))[0].logits).all()
    with pytest.raises(ValueError, match="tokens: 7 at sequence 0, row 1 is the image token"):
        v41.step(params, cache, torch.tensor([[3, 7]]))
