# SPDX-License-Identifier: Apache-2.0
"""Every parameter, declared once (docs/model.md 1 and 2). Names after `at` are the checkpoint's own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from v41.spec.config import Config
from v41.spec.numerics import Numerics
from v41.spec.table import Fp4, Fp8, Fp8Rows, ParamSpec, at, field_specs, holds_tensors, parts, static
from v41.spec.types import BF16, F32, I32, I64


@dataclass(frozen=True)
class IndexKeys:
    """Index keys from the compressed latent. Only kv sources have it."""

    wk: BF16[Tensor, "index_dim head_dim"] = at("wk.weight")
    k_norm: BF16[Tensor, "index_dim"] = at("k_norm.weight")


@dataclass(frozen=True)
class Indexer:
    """Scores every compressed row for every token. Only index sources have it."""

    wq_b: Annotated[Fp8, "index_heads*index_dim q_lora"] = at("wq_b")
    weights_proj: BF16[Tensor, "index_heads dim"] = at("weights_proj.weight")
    keys: IndexKeys | None = at("")


@dataclass(frozen=True)
class Compressor:
    """Pools each group of `ratio` tokens into one latent; no gate at ratio 1. Only kv sources have it."""

    wkv: BF16[Tensor, "head_dim dim"] = at("wkv.weight")
    wgate: BF16[Tensor, "head_dim dim"] | None = at("wgate.weight")
    norm: BF16[Tensor, "head_dim"] = at("norm.weight")


@dataclass(frozen=True)
class Attention:
    """One shared latent is key and value of all heads."""

    wq_a: Annotated[Fp8, "q_lora dim"] = at("wq_a")
    q_norm: BF16[Tensor, "q_lora"] = at("q_norm.weight")
    wq_b: Annotated[Fp8, "heads*head_dim q_lora"] = at("wq_b")
    wkv: Annotated[Fp8, "head_dim dim"] = at("wkv")
    kv_norm: BF16[Tensor, "head_dim"] = at("kv_norm.weight")
    attn_sink: F32[Tensor, "heads"] = at("attn_sink")
    wo_a: Annotated[Fp8, "o_groups*o_lora group_heads*head_dim"] = at("wo_a")
    wo_b: Annotated[Fp8, "dim o_groups*o_lora"] = at("wo_b")
    compressor: Compressor | None = at("compressor.")
    indexer: Indexer | None = at("indexer.")


@dataclass(frozen=True)
class Gate:
    """The router. `bias` moves the choice only; `bias_vl` replaces it at image positions."""

    weight: BF16[Tensor, "experts dim"] = at("weight")
    bias: F32[Tensor, "experts"] = at("bias")
    bias_vl: F32[Tensor, "experts"] = at("bias_vl")


@dataclass(frozen=True)
class Experts:
    """Routed experts, stacked: w1 gate, w3 up, w2 down."""

    w1: Annotated[Fp4, "experts moe_inter dim"] = at("{experts}.w1")
    w2: Annotated[Fp4, "experts dim moe_inter"] = at("{experts}.w2")
    w3: Annotated[Fp4, "experts moe_inter dim"] = at("{experts}.w3")


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token passes."""

    w1: Annotated[Fp8, "shared_inter dim"] = at("w1")
    w2: Annotated[Fp8, "dim shared_inter"] = at("w2")
    w3: Annotated[Fp8, "shared_inter dim"] = at("w3")


@dataclass(frozen=True)
class MoE:
    gate: Gate = at("gate.")
    experts: Experts = at("experts.")
    shared_experts: SharedExpert = at("shared_experts.")


@dataclass(frozen=True)
class Hyper:
    """Hyper-connection of one sublayer: projection, base and scales of its 24 mixes."""

    fn: Annotated[F32[Tensor, "mixes flat"], "mixes copies*dim"] = at("fn")
    base: F32[Tensor, "mixes"] = at("base")
    scale: F32[Tensor, "mix_scales"] = at("scale")


@dataclass(frozen=True)
class Engram:
    """n-gram memory before a layer: table, projection to keys and value, gate weights."""

    embed: Annotated[Fp8Rows, "engram_rows engram_dim"] = at("embed")
    wkv: Annotated[Fp8, "engram_parts*dim engram_columns*engram_dim"] = at("wkv")
    q_weight: BF16[Tensor, "copies dim"] = at("q_weight")
    k_weight: BF16[Tensor, "copies dim"] = at("k_weight")


@dataclass(frozen=True)
class Layer:
    """One layer of the backbone, or one stage of the draft head."""

    hc_attn: Hyper = at("hc_attn_")
    attn_norm: BF16[Tensor, "dim"] = at("attn_norm.weight")
    attn: Attention = at("attn.")
    hc_ffn: Hyper = at("hc_ffn_")
    ffn_norm: BF16[Tensor, "dim"] = at("ffn_norm.weight")
    ffn: MoE = at("ffn.")
    engram: Engram | None = at("engram.")


@dataclass(frozen=True)
class DraftIn:
    """From the backbone's taps to the input of every draft stage; stands in the first stage."""

    main_proj: Annotated[Fp8, "dim taps*dim"] = at("main_proj")
    main_norm: BF16[Tensor, "dim"] = at("main_norm.weight")


@dataclass(frozen=True)
class DraftOut:
    """Norm, Markov bias and confidence; stands in the last stage."""

    norm: BF16[Tensor, "dim"] = at("norm.weight")
    markov_embed: BF16[Tensor, "vocab markov"] = at("markov_head.embed.weight")
    markov_head: BF16[Tensor, "vocab markov"] = at("markov_head.head.weight")
    confidence: BF16[Tensor, "one confidence_in"] = at("confidence_head.proj.weight")


@dataclass(frozen=True)
class Draft:
    """The DSpark draft head."""

    inp: DraftIn
    stages: tuple[Layer, ...]
    out: DraftOut


@dataclass(frozen=True)
class EngramMap:
    """What the Engram hash needs beside the config (docs/model.md 8): derived, not stored in a checkpoint."""

    token_map: I32[Tensor, "vocab"]
    multipliers: I64[Tensor, "tables lookback"]
    primes: I64[Tensor, "tables sizes engram_heads"]
    offsets: I64[Tensor, "tables columns"]


@dataclass(frozen=True)
class Params:
    """The whole text model."""

    embed: BF16[Tensor, "vocab dim"]
    layers: tuple[Layer, ...]
    norm: BF16[Tensor, "dim"]
    head: BF16[Tensor, "vocab dim"]
    draft: Draft | None
    engram_map: EngramMap | None
    config: Config = static()
    numerics: Numerics = static()


TOP = {"embed": "embed.weight", "norm": "norm.weight", "head": "head.weight"}
Leaf = Callable[[ParamSpec], Any]


def build(cls: type, leaf: Leaf, sizes: Mapping[str, int], prefix: str, absent: frozenset[str]) -> Any:
    """An instance of a part with leaf(spec) at every tensor; the fields named in `absent` become None."""
    values: dict[str, Any] = {}
    for name, kind, suffix in parts(cls):
        if name in absent:
            values[name] = None
        elif holds_tensors(kind):
            tensors = [leaf(s) for s in field_specs(kind, prefix + suffix, sizes)]
            values[name] = tensors[0] if len(tensors) == 1 else kind.__origin__(*tensors)
        else:
            values[name] = build(kind, leaf, sizes, prefix + suffix, absent)
    return cls(**values)


def layer_absent(config: Config, layer: int) -> frozenset[str]:
    """The parts that a backbone layer has not, from the plan."""
    p = config.layer_plan[layer]
    lacks = {"compressor": not p.owns_kv, "wgate": p.ratio == 1, "indexer": not p.owns_index, "keys": not p.owns_kv, "engram": p.engram is None}
    return frozenset(n for n, lacking in lacks.items() if lacking)


def layer_sizes(config: Config, layer: int) -> dict[str, int]:
    table = config.layer_plan[layer].engram
    return config.sizes if table is None else config.sizes | {"engram_rows": config.engram_num_embeddings[table]}


def build_layer(config: Config, layer: int, leaf: Leaf) -> Layer:
    """One backbone layer with leaf(spec) at every tensor."""
    return build(Layer, leaf, layer_sizes(config, layer), f"layers.{layer}.", layer_absent(config, layer))


def build_draft(config: Config, leaf: Leaf) -> Draft | None:
    """The draft head, or None where the model has none."""
    stages = config.num_nextn_predict_layers
    if not stages:
        return None
    sizes = config.sizes | {"experts": config.dspark_n_routed_experts}
    absent = frozenset({"compressor", "indexer", "engram"})
    return Draft(
        inp=build(DraftIn, leaf, sizes, "mtp.0.", absent),
        stages=tuple(build(Layer, leaf, sizes, f"mtp.{j}.", absent) for j in range(stages)),
        out=build(DraftOut, leaf, sizes, f"mtp.{stages - 1}.", absent),
    )


def build_params(config: Config, numerics: Numerics, leaf: Leaf, engram_map: EngramMap | None, draft: bool = True) -> Params:
    """Params with leaf(spec) at every tensor of the table, called in the order of the fields."""

    def top(field: str) -> Any:
        return leaf(field_specs(Params.__annotations__[field], TOP[field], config.sizes)[0])

    embed = top("embed")
    layers = tuple(build_layer(config, i, leaf) for i in range(config.num_hidden_layers))
    norm, head = top("norm"), top("head")
    return Params(embed, layers, norm, head, build_draft(config, leaf) if draft else None, engram_map, config, numerics)


def param_specs(config: Config, draft: bool = True) -> Iterator[ParamSpec]:
    """The table of a model: every tensor's name, dtype, logical axes and shape."""
    found: list[ParamSpec] = []

    def leaf(spec: ParamSpec) -> Tensor:
        found.append(spec)
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    build_params(config, Numerics(), leaf, None, draft)
    yield from found
