# SPDX-License-Identifier: Apache-2.0
"""Strict reading of a published config.json: keys, types and fixed values (docs/model.md 1). What must agree with what: config_check."""

import json
from pathlib import Path
from typing import Any

# Keys with one legal value: the model is defined for nothing else.
FIXED = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}
QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
IGNORED = ("initializer_range", "use_cache")
INTS = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank "
    "o_groups max_position_embeddings n_routed_experts num_experts_per_tok sliding_window index_n_heads index_head_dim index_topk "
    "hc_mult hc_sinkhorn_iters"
).split()
FLOATS = "swiglu_limit rms_norm_eps rope_theta routed_scaling_factor compress_rope_theta hc_eps".split()
LISTS = "compress_ratios kv_source_layer_ids index_source_layer_ids".split()
# Parts that a model may lack: the key that says so, and the values of its keys where they are left out.
PARTS: dict[str, dict[str, Any]] = {
    "candidate_source_layer_id": {"candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0},
    "engram_layer_ids": {
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "engram_max_ngram_size": 1,
        "engram_vocab_size": 0,
        "engram_n_heads": 0,
        "engram_head_dim": 0,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 0,
    },
    "num_nextn_predict_layers": {
        "num_nextn_predict_layers": 0,
        "dspark_block_size": 0,
        "dspark_noise_token_id": 0,
        "dspark_target_layer_ids": [],
        "dspark_markov_rank": 0,
        "dspark_n_routed_experts": 0,
        "dspark_num_experts_per_tok": 0,
    },
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOP_KEYS = {"architectures", "model_type", "dtype", "transformers_version", *TOKENS, "image_token_id", "quantization_config", "text_config", "vision_config"}
YARN_KEYS = {"rope_type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings"}


def read(path: Path) -> dict[str, Any]:
    """The parsed file; ValueError when it is missing, no JSON, no object or has a key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        twice = sorted({k for k in keys if keys.count(k) > 1})
        if twice:
            raise ValueError(f"{path.name}: keys given twice: {twice}")
        return dict(pairs)

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as e:
        raise ValueError(f"config: cannot read {path}: {e.strerror}") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"config: {path} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"config: {path} holds a {type(value).__name__}, not an object")
    return value


def parse(published: dict[str, Any]) -> dict[str, Any]:
    """Field values from the published nesting. ValueError names every unknown, missing or wrong key."""
    _check_top(published)
    text = published["text_config"]
    known = {*FIXED, *IGNORED, *INTS, *FLOATS, *LISTS, "rope_scaling", "scoring_func", "norm_topk_prob", *(k for p in PARTS.values() for k in p)}
    _no_unknown("text_config", text, known)
    for key, want in FIXED.items():
        if text.get(key) != want or isinstance(text.get(key), bool) != isinstance(want, bool):
            raise ValueError(f"config: text_config.{key} is {text.get(key)!r}; this model is defined for {want!r}")
    values: dict[str, Any] = {k: _integer(text, k) for k in INTS} | {k: _number(text, k) for k in FLOATS} | {k: _integers(text, k) for k in LISTS}
    values |= {k: v for part in PARTS for k, v in _part(text, part).items()}
    values["rope_scaling"] = _yarn(text)
    for key, kind in (("scoring_func", str), ("norm_topk_prob", bool)):
        values[key] = _need(text, key)
        if type(values[key]) is not kind:
            raise ValueError(f"config: {key} is {values[key]!r}, not a {kind.__name__}")
    values |= {k: _integer(published, k) for k in TOKENS}
    values["image_token_id"] = None if published.get("image_token_id") is None else _integer(published, "image_token_id")
    values["vision"] = published.get("vision_config") is not None
    if not isinstance(published.get("vision_config"), dict | None):
        raise ValueError(f"config: vision_config is {published['vision_config']!r}, not an object or null")
    return values


def _check_top(published: dict[str, Any]) -> None:
    kind = published.get("model_type")
    if kind == "deepseek_v4" or (kind is None and "compress_rope_theta" in published):
        raise ValueError(
            "config: model_type 'deepseek_v4' is DeepSeek-V4, another model: it has per-head q norms, a compressor bias, hash-routed layers and "
            "128-wide scale blocks, which V4.1 has not; its weights would load and compute nonsense"
        )
    if kind != "deepseek_v41":
        raise ValueError(f"config: model_type is {kind!r}, not 'deepseek_v41'")
    _no_unknown("top level", published, TOP_KEYS)
    if not isinstance(published.get("text_config"), dict):
        raise ValueError("config: text_config is missing; the flat inference config is not read")
    if published.get("dtype") != "bfloat16":
        raise ValueError(f"config: dtype is {published.get('dtype')!r}; unquantized tensors are stored as 'bfloat16'")
    if published.get("quantization_config") != QUANTIZATION:
        raise ValueError(f"config: quantization_config is {published.get('quantization_config')!r}; this model is defined for {QUANTIZATION!r}")


def _no_unknown(where: str, got: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(got) - known)
    if unknown:
        raise ValueError(f"config: unknown keys at {where}: {unknown}")


def _need(text: dict[str, Any], key: str) -> Any:
    if key not in text:
        raise ValueError(f"config: {key} is missing; there is no default")
    return text[key]


def _integer(text: dict[str, Any], key: str) -> int:
    value = _need(text, key)
    if type(value) is not int or (value < 0 and key != "candidate_source_layer_id"):
        raise ValueError(f"config: {key} is {value!r}, not a non-negative integer")
    return value


def _number(text: dict[str, Any], key: str) -> float:
    value = _need(text, key)
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"config: {key} is {value!r}, not a non-negative number")
    return float(value)


def _integers(text: dict[str, Any], key: str) -> tuple[int, ...]:
    value = _need(text, key)
    if not isinstance(value, list) or any(type(v) is not int or v < 0 for v in value):
        raise ValueError(f"config: {key} is {value!r}, not a list of non-negative integers")
    return tuple(value)


def _part(text: dict[str, Any], part: str) -> dict[str, Any]:
    """The keys of a part that a model may lack; with the part present none may be left out, and without it none may stay behind."""
    left = [k for k in PARTS[part] if k in text]
    if left and part not in text:
        raise ValueError(f"config: {part} is missing, but there are {left}; a model without this part has none of them, or says so")
    absent = text.get(part, PARTS[part][part]) in (PARTS[part][part], None)
    full = PARTS[part] | {k: v for k, v in text.items() if k in PARTS[part] and v is not None} if absent else text
    return {k: (_integers if isinstance(default, list) else _integer)(full, k) for k, default in PARTS[part].items()}


def _yarn(text: dict[str, Any]) -> dict[str, Any] | None:
    scaling = _need(text, "rope_scaling")
    if scaling is None:
        return None
    if not isinstance(scaling, dict) or set(scaling) != YARN_KEYS or scaling["rope_type"] != "yarn":
        raise ValueError(f"config: rope_scaling is {scaling!r}; it is null or has rope_type 'yarn' and the keys {sorted(YARN_KEYS)}")
    return {k: _number(scaling, k) for k in YARN_KEYS - {"rope_type", "original_max_position_embeddings"}} | {
        "original_max_position_embeddings": _integer(scaling, "original_max_position_embeddings")
    }
