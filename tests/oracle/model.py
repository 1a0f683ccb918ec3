# SPDX-License-Identifier: Apache-2.0
"""The whole model in float64 for one sequence, position by position, with nothing rounded but the RoPE angles.

There are no caches: every row that was ever made is kept in a list. Weights are the exact values of their codes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from . import engram, files, formats, ops

Array = np.ndarray


@dataclass(frozen=True)
class Rounding:
    """What replaces a value where the released model rounds it. The default leaves all values alone."""

    bf16: Callable[[Array], Array] = ops.same
    a8: Callable[[Array], Array] = ops.same
    f4e: Callable[[Array], Array] = ops.same
    f4s: Callable[[Array], Array] = ops.same
    attend: Callable[..., Array] = ops.attend_list


EXACT = Rounding()
RELEASED = Rounding(formats.bf16, formats.a8, formats.f4e, formats.f4s, partial(ops.attend_in_runs, rnd=formats.bf16))


@dataclass(frozen=True)
class Model:
    """Config values under their published names, the stored tensors, and the Engram constants."""

    c: dict
    stored: dict[str, files.Stored]
    token_map: list[int]
    primes: list[list[list[int]]]
    r: Rounding = EXACT
    decoded: dict[str, Array] = field(default_factory=dict)

    def get(self, name: str) -> Array:
        """The values of a tensor as the reference uses it; a `.weight` with a `.scale` beside it is dequantized."""
        if name not in self.decoded:
            self.decoded[name] = self._decode(name)
        return self.decoded[name]

    def _decode(self, name: str) -> Array:
        tensor, scale = self.stored[name], self.stored.get(name.removesuffix(".weight") + ".scale")
        if scale is None:
            return tensor.values
        kinds = {"I8": files.packed_values, "F8_E4M3": files.row_values if name.endswith("engram.embed.weight") else files.tile_values}
        return kinds[tensor.dtype](tensor.codes, scale.codes)

    def norm(self, x: Array, name: str) -> Array:
        """RMSNorm with the weight of that name."""
        return self.r.bf16(ops.rms_norm(x, self.get(name + ".weight"), self.c["rms_norm_eps"]))

    def quantized(self, x: Array, name: str) -> Array:
        """A linear whose weight is FP8 or FP4 in the checkpoint."""
        return self.r.bf16(ops.linear(x, self.get(name + ".weight"), self.r.a8))

    def plain(self, x: Array, name: str) -> Array:
        """A linear whose weight is bfloat16 and whose input is not rounded."""
        return ops.linear(x, self.get(name + ".weight"))

    def angles(self, position: int, ratio: int) -> Array:
        """RoPE angles: layers that compress use the other base and YaRN, for everything in the layer."""
        key = "frequencies of compressed layers" if ratio else "frequencies of window layers"
        if key not in self.decoded:
            base, scaling = self.c["compress_rope_theta" if ratio else "rope_theta"], self.c.get("rope_scaling")
            names = ("original_max_position_embeddings", "factor", "beta_fast", "beta_slow")
            numbers = [scaling[n] for n in names] if ratio and scaling else [0, 1, 1, 1]
            self.decoded[key] = ops.rope_frequencies(self.c["qk_rope_head_dim"], base, *numbers)
        return ops.rope_angles(position, self.decoded[key])


def load(directory: Path, rounding: Rounding = EXACT, token_map: list[int] | None = None) -> Model:
    """Reads a checkpoint directory in the released layout; without a map, the map is made from tokenizer.json."""
    c = json.loads((Path(directory) / "config.json").read_text())["text_config"]
    primes: list = []
    if c["engram_layer_ids"]:
        token_map = token_map or engram.token_map(Path(directory) / "tokenizer.json")
        primes = engram.primes(len(c["engram_layer_ids"]), c["engram_vocab_size"], c["engram_max_ngram_size"], c["engram_n_heads"])
    return Model(c, files.read_all(directory), token_map or [], primes, rounding)


@dataclass
class History:
    """All rows of one sequence so far, by layer."""

    ids: list[int] = field(default_factory=list)  # compressed token ids
    window: dict[int, list[Array]] = field(default_factory=dict)
    pending: dict[int, list[Array]] = field(default_factory=dict)  # attention inputs of the unfinished group
    rows: dict[int, list[Array]] = field(default_factory=dict)  # compressed key-value rows
    keys: dict[int, list[Array]] = field(default_factory=dict)  # index keys
    slot: int | None = None  # the layer that last finished a group


def new_history(m: Model) -> History:
    """An empty sequence."""
    sources = m.c["kv_source_layer_ids"]
    h = History()
    h.window = {layer: [] for layer in range(m.c["num_hidden_layers"])}
    h.pending, h.rows, h.keys = ({s: [] for s in sources} for _ in range(3))
    return h


# Attention


def query(m: Model, x: Array, name: str, position: int, ratio: int) -> tuple[Array, Array]:
    """The query latent and the rotated queries [heads, head_dim]."""
    latent = m.norm(m.quantized(x, name + ".wq_a"), name + ".q_norm")
    q = m.quantized(latent, name + ".wq_b").reshape(m.c["num_attention_heads"], -1)
    return latent, m.r.bf16(ops.rotate(q, m.angles(position, ratio)))


def window_row(m: Model, x: Array, name: str, position: int, ratio: int) -> Array:
    """The shared key-value row of one token."""
    row = m.norm(m.quantized(x, name + ".wkv"), name + ".kv_norm")
    return m.r.a8(m.r.bf16(ops.rotate(row, m.angles(position, ratio))))


def attention_output(m: Model, o: Array, name: str, position: int, ratio: int) -> Array:
    """Turns the heads back at the query's position, then wo_a by group and wo_b."""
    o = m.r.bf16(ops.rotate(m.r.bf16(o), m.angles(position, ratio), -1.0))
    return m.quantized(m.r.bf16(ops.grouped_linear(o, m.get(name + ".wo_a.weight"))), name + ".wo_b")


def compress(m: Model, h: History, layer: int, x: Array, position: int, ratio: int) -> bool:
    """Adds this token to its group; a finished group gives one key-value row and one index key. Says if it did."""
    name = f"layers.{layer}.attn"
    h.pending[layer].append(x)
    if (position + 1) % ratio:
        return False
    keys = np.array([m.plain(token, name + ".compressor.wkv") for token in h.pending[layer]])
    gates = np.array([m.plain(token, name + ".compressor.wgate") for token in h.pending[layer]]) if ratio > 1 else None
    h.pending[layer] = []
    latent = m.norm(m.r.bf16(ops.pool(keys, gates)), name + ".compressor.norm")
    angles = m.angles(position + 1 - ratio, ratio)
    key = m.norm(m.r.bf16(m.plain(latent, name + ".indexer.wk")), name + ".indexer.k_norm")
    h.keys[layer].append(m.r.f4e(m.r.bf16(ops.rotate(key, angles))))
    h.rows[layer].append(m.r.f4s(m.r.bf16(ops.rotate(latent, angles))))
    return True


def index(m: Model, layer: int, x: Array, latent: Array, keys: list[Array], position: int, ratio: int) -> Array:
    """Scores of the given index keys for the query of this token."""
    name, c = f"layers.{layer}.attn.indexer", m.c
    q = m.quantized(latent, name + ".wq_b").reshape(c["index_n_heads"], c["index_head_dim"])
    q = m.r.f4e(m.r.bf16(ops.rotate(q, m.angles(position, ratio))))
    factor = (c["index_head_dim"] * c["index_n_heads"]) ** -0.5
    weights = m.r.bf16(m.r.bf16(m.plain(x, name + ".weights_proj")) * factor)
    return ops.index_scores(q, np.array(keys), weights, m.r.bf16)


def choose(m: Model, h: History, layer: int, x: Array, latent: Array, position: int, handed: dict, source: int, out: dict) -> None:
    """Replaces handed["chosen"], and handed["candidates"] at the candidate source, with this layer's own."""
    c, ratio = m.c, m.c["compress_ratios"][layer]
    visible = (position + 1) // ratio
    handed["chosen"] = []
    if visible == 0:
        return
    scores = index(m, layer, x, latent, h.keys[source][:visible], position, ratio)
    if layer == c["candidate_source_layer_id"]:
        padded = np.append(scores, np.full(-visible % c["candidate_block_size"], -np.inf))
        handed["candidates"] = ops.candidate_rows(padded, visible, c["candidate_topk_blocks"], c["candidate_block_size"])
        out["candidates"] = handed["candidates"]
    elif "candidates" in handed:
        scores = np.where(handed["candidates"][:visible], scores, -np.inf)
    handed["chosen"] = ops.select(scores, c["index_topk"])
    out["index_score"], out["topk_idxs"] = scores, handed["chosen"]


def attention(m: Model, h: History, layer: int, x: Array, position: int, handed: dict, stale: bool, out: dict) -> Array:
    """Window and chosen compressed rows. `stale`: index keys are those of the layer that last finished a group."""
    c, name, ratio = m.c, f"layers.{layer}.attn", m.c["compress_ratios"][layer]
    latent, q = query(m, x, name, position, ratio)
    h.window[layer].append(window_row(m, x, name, position, ratio))
    rows = [h.window[layer][p] for p in ops.window_slots(position, c["sliding_window"])]
    slots = [*range(len(rows))] + [-1] * (c["sliding_window"] - len(rows))
    if ratio:
        owner = max(s for s in c["kv_source_layer_ids"] if s <= layer)
        if layer == owner and compress(m, h, layer, x, position, ratio):
            h.slot = layer
        if layer in c["index_source_layer_ids"]:
            choose(m, h, layer, x, latent, position, handed, h.slot if stale else owner, out)
        slots += range(len(rows), len(rows) + len(handed["chosen"]))
        rows = rows + [h.rows[owner][j] for j in handed["chosen"]]
    o = m.r.attend(q, np.array(rows), m.get(name + ".attn_sink"), slots, c["head_dim"] ** -0.5)
    return attention_output(m, o, name, position, ratio)


# Blocks


def feed_forward(m: Model, x: Array, name: str, top: int, out: dict) -> Array:
    """Routed experts in increasing order, then the shared one."""
    c = m.c
    experts, weights = ops.route(
        x, m.get(name + ".gate.weight"), m.get(name + ".gate.bias"), top, c["scoring_func"], c["routed_scaling_factor"], c["norm_topk_prob"]
    )
    out["route_experts"], out["route_weights"] = experts, weights
    total = np.zeros_like(x)
    parts = [(f"{name}.experts.{e}", w) for e, w in sorted(zip(experts, weights, strict=True))] + [(name + ".shared_experts", 1.0)]
    for part, weight in parts:
        w1, w2, w3 = (m.get(f"{part}.w{i}.weight") for i in (1, 2, 3))
        total = total + ops.expert(x, w1, w2, w3, c["swiglu_limit"], weight, m.r.a8, m.r.bf16)
    return m.r.bf16(total)


def mix(m: Model, h: Array, name: str) -> tuple[Array, Array, Array]:
    """The three mixes of one sublayer."""
    c = m.c
    fn, scale, base = (m.get(f"{name}_{part}") for part in ("fn", "scale", "base"))
    return ops.mixes(h, fn, scale, base, c["hc_sinkhorn_iters"], c["hc_eps"], c["rms_norm_eps"])


def attention_half(m: Model, name: str, h: Array, pre: Array) -> tuple[Array, tuple]:
    """The attention input of a block and the mixes that its output will meet."""
    return m.norm(m.r.bf16(ops.collapse(h, pre)), name + ".attn_norm"), mix(m, h, name + ".hc_attn")


def rest_of_block(m: Model, name: str, h: Array, mixes: tuple, y: Array, top: int, out: dict) -> tuple[Array, Array]:
    """From the attention output to the stream after the block and the pre mix for the next one."""
    pre_a, post_a, comb_a = mixes
    h = m.r.bf16(ops.expand(y, h, post_a, comb_a))
    pre_f, post_f, comb_f = mix(m, h, name + ".hc_ffn")
    x = m.norm(m.r.bf16(ops.collapse(h, pre_a)), name + ".ffn_norm")
    f = feed_forward(m, x, name + ".ffn", top, out)
    h = m.r.bf16(ops.expand(f, h, post_f, comb_f))
    out.update(attn_out=y, ffn_out=f, h_out=h, pre_mix_out=pre_f)
    return h, pre_f


def add_engram(m: Model, h: History, layer: int, stream: Array, position: int) -> tuple[Array, list[int]]:
    """The stream with this layer's table rows added, and the row numbers."""
    c, name = m.c, f"layers.{layer}.engram"
    factors = engram.multipliers(layer, c["engram_compressed_vocab_size"], c["engram_max_ngram_size"])
    pad = m.token_map[c["engram_pad_token_id"]]
    numbers = engram.hash_rows(h.ids, position, factors, m.primes[c["engram_layer_ids"].index(layer)], pad)
    rows = m.get(name + ".embed.weight")[numbers].reshape(-1)
    out = engram.add(stream, m.quantized(rows, name + ".wkv"), m.get(name + ".q_weight"), m.get(name + ".k_weight"), c["rms_norm_eps"])
    return m.r.bf16(out), numbers


def start(m: Model, token: int) -> tuple[Array, Array]:
    """Equal copies of the embedding, and the one-hot pre mix of the first sublayer."""
    copies = m.c["hc_mult"]
    return np.repeat(m.get("embed.weight")[token][None], copies, 0), np.eye(copies)[0]


def position_forward(m: Model, h: History, token: int, position: int, stale: bool) -> dict:
    """One position through all layers. Keys of the result: logits, main_hidden, engram_hash_ids, layers."""
    c = m.c
    h.ids += [m.token_map[token]] if m.token_map else []
    stream, pre = start(m, token)
    handed, layers, taps, hashes = {}, [], [], []
    for layer in range(c["num_hidden_layers"]):
        out: dict = {}
        if layer in c["engram_layer_ids"]:
            stream, numbers = add_engram(m, h, layer, stream, position)
            out["engram_out"] = stream
            hashes.append(numbers)
        if layer in c["dspark_target_layer_ids"]:
            taps.append(m.r.bf16(stream.mean(0)))
        x, mixes = attention_half(m, f"layers.{layer}", stream, pre)
        out["attn_in"] = x
        y = attention(m, h, layer, x, position, handed, stale, out)
        stream, pre = rest_of_block(m, f"layers.{layer}", stream, mixes, y, c["num_experts_per_tok"], out)
        layers.append(out)
    logits = m.plain(m.norm(m.r.bf16(ops.collapse(stream, pre)), "norm"), "head")
    return {"logits": logits, "main_hidden": np.concatenate(taps) if taps else None, "engram_hash_ids": hashes, "layers": layers}


def extend(m: Model, h: History, tokens: list[int], stale: bool = False) -> dict:
    """Appends tokens to a sequence; see `forward`. The history grows, everything else is left alone."""
    first = len(h.window[0])
    steps = [position_forward(m, h, int(token), first + row, stale) for row, token in enumerate(tokens)]
    names = [set().union(*(s["layers"][layer] for s in steps)) for layer in range(m.c["num_hidden_layers"])]
    return {
        "logits": np.array([s["logits"] for s in steps]),
        "main_hidden": None if steps[0]["main_hidden"] is None else np.array([s["main_hidden"] for s in steps]),
        "engram_hash_ids": [s["engram_hash_ids"] for s in steps],
        "layers": [{name: [s["layers"][layer].get(name) for s in steps] for name in keys} for layer, keys in enumerate(names)],
    }


def forward(checkpoint: Path | Model, tokens: list[int]) -> dict:
    """All positions of one sequence, with the owner's index keys.

    Result: logits [n, vocab], main_hidden [n, taps * dim], engram_hash_ids [n, engram layers, columns], and layers: for
    each layer a dict of lists over positions (attn_in, attn_out, ffn_out, h_out, pre_mix_out, route_experts,
    route_weights, and where they exist engram_out, index_score, topk_idxs, candidates). topk_idxs are compressed rows in
    ascending order and as many as there are; candidates are whole blocks, so the mask may reach beyond the visible rows.

    What `extend(..., stale=True)` adds to a history is what the released decode computes, whose index sources score
    against the keys of the layer that last finished a group.
    """
    m = checkpoint if isinstance(checkpoint, Model) else load(checkpoint)
    return extend(m, new_history(m), tokens)
