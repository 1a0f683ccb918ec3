# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft block in float64, from the hidden rows of the target. See model.py."""

from pathlib import Path

import numpy as np

from . import ops
from .model import Model, attention_half, attention_output, load, query, rest_of_block, start, window_row

Array = np.ndarray


def main_input(m: Model, hidden: Array) -> Array:
    """What the draft blocks see of one position of the target: main_norm(main_proj(main_hidden))."""
    return m.norm(m.quantized(hidden, "mtp.0.main_proj"), "mtp.0.main_norm")


def draft_block(m: Model, stage: int, streams: list[Array], pres: list[Array], rings: Array, position: int) -> tuple[list, list]:
    """One draft block on all rows of the draft: each row sees the ring rows and every row of the block."""
    name, heads = f"mtp.{stage}", f"mtp.{stage}.attn"
    halves = [attention_half(m, name, h, pre) for h, pre in zip(streams, pres, strict=True)]
    places = [position + 1 + i for i in range(len(streams))]
    own = [window_row(m, x, heads, p, 0) for (x, _), p in zip(halves, places, strict=True)]
    rows = np.array(list(rings) + own)
    results = []
    for (x, mixes), h, place in zip(halves, streams, places, strict=True):
        q = query(m, x, heads, place, 0)[1]
        o = m.r.attend(q, rows, m.get(heads + ".attn_sink"), range(len(rows)), m.c["head_dim"] ** -0.5)
        y = attention_output(m, o, heads, place, 0)
        results.append(rest_of_block(m, name, h, mixes, y, m.c["dspark_num_experts_per_tok"], {}))
    return [h for h, _ in results], [pre for _, pre in results]


def draft(checkpoint: Path | Model, main_hidden: Array, position: int, token: int) -> dict:
    """Drafts the tokens of positions position + 2 .. position + 1 + block, where `token` is at position + 1.

    `main_hidden` [>= position + 1, taps * dim] are the target's hidden rows by position. Result: tokens [block],
    logits [block, vocab] with the Markov bias, confidence [block] (a logit), main_x of `position`.
    """
    m = checkpoint if isinstance(checkpoint, Model) else load(checkpoint)
    c, stages = m.c, m.c["num_nextn_predict_layers"]
    seen = ops.window_slots(position, c["sliding_window"])
    mains = {p: main_input(m, main_hidden[p]) for p in seen}
    begun = [start(m, t) for t in [token] + [c["dspark_noise_token_id"]] * (c["dspark_block_size"] - 1)]
    streams, pres = [h for h, _ in begun], [pre for _, pre in begun]
    for stage in range(stages):
        rings = np.array([window_row(m, mains[p], f"mtp.{stage}.attn", p, 0) for p in seen])
        streams, pres = draft_block(m, stage, streams, pres, rings, position)
    last, logits, confidence, tokens = f"mtp.{stages - 1}", [], [], []
    for h, pre in zip(streams, pres, strict=True):
        x = m.r.bf16(ops.collapse(h, pre))
        markov = m.get(last + ".markov_head.embed.weight")[token]
        row = m.plain(m.norm(x, last + ".norm"), "head") + m.plain(markov, last + ".markov_head.head")
        confidence.append(m.plain(np.concatenate([x, markov]), last + ".confidence_head.proj")[0])
        token = ops.greedy(row)
        logits.append(row)
        tokens.append(token)
    return {"tokens": tokens, "logits": np.array(logits), "confidence": np.array(confidence), "main_x": mains[position]}
