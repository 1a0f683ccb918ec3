# SPDX-License-Identifier: Apache-2.0
"""From the first tensor that differs, and how it differs, to what usually does that (docs/conformance.md 9)."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from v41.conformance.judge import Finding
from v41.conformance.walk import Opened, Stop


@dataclass(frozen=True)
class Symptom:
    """What a rule looks at. got and want are those of the first tensor that differs, None where it is missing or has another shape."""

    name: str
    status: str
    got: Tensor | None
    want: Tensor | None
    rope: int
    ratio: int
    finishes: bool  # the call finishes a group of the layer's ratio
    continues: bool  # the call starts behind other positions

    @property
    def tail(self) -> bool:
        """Only the last dims, those that are turned, differ."""
        return self.split() == (False, True)

    @property
    def head(self) -> bool:
        """Only the dims that are not turned differ."""
        return self.split() == (True, False)

    def split(self) -> tuple[bool, bool]:
        if self.got is None or self.want.shape[-1] <= self.rope:
            return True, True
        far = (self.got.double() - self.want.double()).abs()
        scale = float(self.want.double().abs().mean()) * 0.02
        return bool((far[..., : -self.rope] > scale).any()), bool((far[..., -self.rope :] > scale).any())

    @property
    def factor(self) -> float:
        """The best factor between the two where they are parallel, else 0."""
        if self.got is None or not self.want.is_floating_point():
            return 0.0
        a, b = (torch.where(torch.isfinite(self.want), t.double(), 0).flatten() for t in (self.got, self.want))
        cosine = float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300))
        return float(a @ b / (b @ b).clamp_min(1e-300)) if abs(cosine) > 0.9999 else 0.0

    @property
    def masks_differ(self) -> bool:
        """Other places are -inf."""
        return self.got is not None and bool((torch.isinf(self.got) != torch.isinf(self.want)).any())


Rule = tuple[str, Callable[[Symptom], bool], str]


def always(s: Symptom) -> bool:
    return True


# (tensor, when, cause), the first that fits counts.
RULES: tuple[Rule, ...] = (
    (r".*", lambda s: s.status == "missing", "the backend does not pass this tensor to its tap"),
    (r".*", lambda s: s.status == "shape", "another shape or dtype: rows, heads or columns dropped or padded, or a result rounded that stays wide"),
    (r".*attn_out", lambda s: s.status == "non-finite", "a list without any slot, or a maximum of -inf subtracted from itself; unread rows multiplied in"),
    (r".*(index_score|topk_idxs)", lambda s: s.status == "non-finite", "rows beyond the visible ones were scored and not masked by number"),
    (r".*ffn_out", lambda s: s.status == "non-finite", "codes of magnitude 256 to 448 read in a format that ends at 240, or no clamp before the exponential"),
    (r".*", lambda s: s.status == "non-finite", "a row that is not held was read, or a sum left its range"),
    (r"engram_hash_ids", lambda s: s.continues, "token history: lost at a chunk edge, after a rewind or with another sequence's ids; or the hash tables"),
    (r"engram_hash_ids", always, "hash tables of another layer or vocabulary, order of the columns, the id before the start, or look-back over an image"),
    (r".*engram_out", always, "the Engram's gate (sign, floor, its two norms), its rows' scales, or its value rounded early"),
    (r"layers\.0\.attn_in", always, "embedding, or the first collapse, which sees the first copy only"),
    (r".*attn_in", always, "a pre mix used in its own sublayer instead of the next one, a norm with another eps, or the wrong stream"),
    (
        r"rows\..*window",
        lambda s: s.tail,
        "rotation of window rows: pairs, base and YaRN by the layer's ratio, position; or the turned part left out of the round trip",
    ),
    (r"rows\..*window", lambda s: s.head, "the rotation turns the first dims instead of the last"),
    (r"rows\..*window", always, "the window row's norm or round trip (blocks of 32, power-of-two scale rounded up), or it went to another slot of the ring"),
    (r"rows\..*group_.*", always, "the tokens of an unfinished group are not carried over"),
    (r"rows\..*compressed", lambda s: s.tail, "position of a compressed row: it is its group's first token; or its rotation left out"),
    (r"rows\..*compressed", always, "pooling (a softmax over tokens in each channel, in fp32), or the fp4 round trip: groups of 16, e4m3 scale"),
    (r"rows\..*index_keys", always, "index keys come from the latent before its rotation and rounding; round trip in groups of 32 with a power-of-two scale"),
    (r".*index_score", lambda s: s.masks_differ, "which rows are scored: a group is seen by its own last token, later sources see candidate blocks only"),
    (
        r".*index_score",
        lambda s: s.continues and s.ratio > 1 and not s.finishes,
        "keys of another source: a step that finishes no group reads what the last one left",
    ),
    (r".*index_score", always, "index scores: ReLU before the head weights, round trips of queries and keys, rotation, their scale"),
    (r".*candidates", always, "candidate blocks: best row of each, the newest block always kept, chosen for each query"),
    (r".*topk_idxs", always, "the selection: ties go to the lower row, ascending order, -1 last, visible by row number, not masked at the candidate source"),
    (
        r".*attn_out",
        lambda s: s.status == "differs" and abs(s.factor) > 0 and abs(s.factor - 1) > 0.02,
        "attention output by a constant factor: summed twice over ranks",
    ),
    (
        r".*attn_out",
        always,
        "attention: sink (denominator only, its own head's), scale, list of slots, inverse rotation of the output, queries, wo_a by groups",
    ),
    (r".*route_weights", lambda s: abs(s.factor) > 0 and abs(s.factor - 1) > 0.02, "routing weights by a constant factor: scale, or normalization left out"),
    (
        r".*route_weights",
        always,
        "routing weights: scores without bias, their square root, normalized, in fp32; or the FFN's input (post and comb mixes, post's factor 2)",
    ),
    (r".*route_experts", always, "which experts: bias added for the choice only, router in fp32, lower expert first in a tie"),
    (
        r".*ffn_out",
        lambda s: abs(s.factor) > 0 and abs(s.factor - 1) > 0.02,
        "expert output by a constant factor: summed twice over ranks, or scale codes one too large",
    ),
    (r".*ffn_out", always, "experts: clamp (gate from above, up on both sides), routing weight before w2, nibble order, shared expert, gate and up exchanged"),
    (r".*h_out", always, "expanding the streams: comb is [source, destination], post"),
    (r".*pre_mix_out", always, "mixes: Sinkhorn steps and their eps, norm after the projection, fp32"),
    (r"mtp\.main_x", always, "the draft head's input: projection and norm of the taps"),
    (r"main_hidden", always, "taps: the mean over copies of the input of the target layers, behind their Engram"),
    (r"draft\.logits", always, "the Markov bias follows from the token before, position by position; the draft head's own norm"),
    (r"draft\.tokens", always, "draft choice: the best token, lower id in a tie"),
    (r"draft\.confidence", always, "the confidence reads the collapsed stream before its norm, and has no sigmoid"),
    (r"logits", always, "the head: the last FFN's pre mix collapses, then norm, fp32 product; or the vocabulary's padding"),
    (r"(accepted|next)", always, "acceptance: drafts while they are the best token; the token after them comes from the row behind the last accepted"),
    (r"repeat", always, "the order of a sum is not fixed, or a result depends on memory that nobody wrote"),
    (r"arguments|untouched", always, "a write outside the rows of the call: rows that are not real go to the sink"),
    (r"poison", always, "rows that are not held are read: beyond the length, beyond the visible groups, or the sink"),
    (r"garbage", always, "a row that is not real reaches a real one: routing, sums over the batch, or cache writes of padding"),
    (r"rewind", always, "rows of rewound positions are read: history, rings or groups not cut back"),
    (r"permute", always, "state is addressed by something else than the sequence's own row of the batch"),
    (r"restore", always, "state outside the cache"),
    (r"schedule", always, "a row depends on the rows beside it: partial groups, earlier compressed rows, or the shape of a product"),
    (r"alike", always, "ranks do not hold the same result: a collective is missing, or a share is rounded before its sum"),
)


def cause(symptom: Symptom) -> str:
    """The first rule's cause; empty where none knows the tensor."""
    for pattern, when, text in RULES:
        if re.fullmatch(pattern, symptom.name) and when(symptom):
            return text
    return ""


# The tensor of a layer that a primitive makes, so that its usual mistakes are named with it.
OF_PRIMITIVE = {
    **{"sparse_attn": "attn_out", "rope_inverse": "attn_out", "grouped_linear": "attn_out", "partial_linear": "attn_out"},
    **{"rope": "rows.window", "act_round": "rows.window", "kv_round": "rows.compressed", "softmax_pool": "rows.compressed", "index_round": "rows.index_keys"},
    **{"index_scores": "index_score", "select": "topk_idxs", "candidate_blocks": "candidates", "gate": "route_weights", "experts": "ffn_out"},
    **{"shared_expert": "ffn_out", "hc_mixes": "pre_mix_out", "hc_pre": "attn_in", "rms_norm": "attn_in", "hc_post": "h_out"},
    **{"engram_hash": "engram_hash_ids", "engram_rows": "engram_out", "engram_gate": "engram_out", "accept_greedy": "accepted"},
    **{"write_rows": "untouched", "choose": "draft.tokens", "wide_linear": "logits"},
}


def cause_of(stop: Stop | None, finding: Finding, opened: Opened | None) -> str:
    """What usually makes this tensor differ first, in this way."""
    primitive = finding.name.partition(".")[0]
    if stop is None and primitive in OF_PRIMITIVE:
        finding = replace(finding, name=OF_PRIMITIVE[primitive])
    return cause(symptom_of(stop, finding, opened))


def symptom_of(stop: Stop | None, finding: Finding, opened: Opened | None) -> Symptom:
    """What the rules look at."""
    layer = re.match(r"(?:rows\.)?layers\.(\d+)\.", finding.name)
    config = opened.params.config if opened else None
    ratio = config.layer_plan[int(layer[1])].ratio if layer and config else 0
    length, rows = (int(stop.before.length[0]), stop.inputs["tokens"].shape[1]) if stop and "tokens" in stop.inputs else (0, 0)
    finishes = bool(ratio) and (length + rows) // ratio > length // ratio
    got, want = finding.pair or (None, None)
    return Symptom(finding.name, finding.status, got, want, config.qk_rope_head_dim if config else 0, ratio, finishes, length > 0)
