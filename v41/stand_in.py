# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for checkpoints that have none of their own: the right number of ids, and of compressed ids, without any text behind them."""

from typing import Any

LETTERS = 20  # case patterns of one word: 2^20


def stand_in_tokenizer(vocab: int, compressed: int) -> dict[str, Any]:
    """The contents of a tokenizer.json whose Engram token map is id modulo `compressed`.

    Token i is a word of LETTERS letters and the number i % compressed; the case of its letters counts i // compressed:
    the map ignores case.
    """
    if not 0 < compressed <= vocab or vocab > compressed << LETTERS:
        raise ValueError(f"stand-in tokenizer: {vocab} ids on {compressed} compressed ids; expected 1 to 2^{LETTERS} ids on each")
    turns = ["".join("X" if turn >> bit & 1 else "x" for bit in range(LETTERS)) for turn in range(-(-vocab // compressed))]
    words = {f"{turns[i // compressed]}{i % compressed}": i for i in range(vocab)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": next(iter(words))}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
