# SPDX-License-Identifier: Apache-2.0
"""The Engram token map: which token ids share one row of the compressed vocabulary (docs/model.md 8)."""

from pathlib import Path
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"  # what partial UTF-8 decodes to
SPACE_MARK = "\ue000"  # private use: stands for a lone space while both ends are stripped


def open_tokenizer(path: str | Path) -> Any:
    """The raw tokenizer of a tokenizer.json; ValueError where there is none or it cannot be read."""
    from tokenizers import Tokenizer

    if not Path(path).is_file():
        raise ValueError(f"{path}: no such tokenizer file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the package raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer.json: {e}") from e


def token_map(tokenizer_path: str | Path) -> np.ndarray:
    """Compressed id of every token id, int64 [vocab], numbered in the order of first appearance.

    Tokens with one key share an id. Key: the text of the single token, special tokens kept, through NFKC, NFD, accents stripped, lower
    case, each run of space, tab, CR and LF to one space, both ends stripped (a lone space stays); the text itself where that leaves
    nothing; the raw token where its text has U+FFFD, that is, where it is part of a character.
    """
    from tokenizers import Regex, normalizers  # an import of 30 ms that only checkpoints with Engram need

    path = Path(tokenizer_path)
    tokenizer = open_tokenizer(path)
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    steps += [normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), SPACE_MARK), normalizers.Strip()]
    normalizer = normalizers.Sequence([*steps, normalizers.Replace(SPACE_MARK, " ")])
    numbers: dict[str, int] = {}
    compressed = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    for token in range(len(compressed)):
        raw = tokenizer.id_to_token(token)
        if raw is None:
            raise ValueError(f"{path}: {len(compressed)} tokens, but none has id {token}")
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = raw if REPLACEMENT in text else normalizer.normalize_str(text) or text
        compressed[token] = numbers.setdefault(key, len(numbers))
    return compressed


def checked_token_map(tokenizer_path: str | Path, vocab_size: int, compressed_size: int) -> np.ndarray:
    """As `token_map`; ValueError where the sizes are not vocab_size and engram_compressed_vocab_size of the config."""
    found = token_map(tokenizer_path)
    if len(found) != vocab_size:
        raise ValueError(f"{tokenizer_path}: {len(found)} tokens, the config has vocab_size {vocab_size}")
    size = int(found.max()) + 1
    if size != compressed_size:
        raise ValueError(f"{tokenizer_path}: {size} compressed ids, the config has engram_compressed_vocab_size {compressed_size}")
    return found
