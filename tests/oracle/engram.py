# SPDX-License-Identifier: Apache-2.0
"""Engram: the compressed vocabulary, the hash constants, the hash and the gate. Hashing uses Python integers."""

import json
import math
import re
import unicodedata
from pathlib import Path

import numpy as np

from .ops import sigmoid

Array = np.ndarray


def is_prime(n: int) -> bool:
    """Trial division."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def primes(layers: int, vocab: int, max_ngram: int, heads: int) -> list[list[list[int]]]:
    """[layer][n-gram size - 2][head]: the search starts after vocab - 1 for every size and never takes a prime twice."""
    used, table = set(), []
    for _ in range(layers):
        table.append([])
        for _ in range(max_ngram - 1):
            candidate, row = vocab - 1, []
            while len(row) < heads:
                candidate += 1
                if candidate not in used and is_prime(candidate):
                    used.add(candidate)
                    row.append(candidate)
            table[-1].append(row)
    return table


def offsets(layer_primes: list[list[int]]) -> list[int]:
    """First table row of each column: the sum of the primes of the columns before it."""
    flat = [p for row in layer_primes for p in row]
    return [sum(flat[:column]) for column in range(len(flat))]


def multipliers(layer_id: int, compressed_vocab: int, max_ngram: int) -> list[int]:
    """Odd multipliers of one layer, one per look-back: 2 * (draw below ((2**63 - 1) // vocab) // 2) + 1."""
    bound = ((2**63 - 1) // compressed_vocab) // 2
    drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, max_ngram, dtype=np.int64)
    return [2 * int(n) + 1 for n in drawn]


def hash_rows(ids: list[int | None], position: int, factors: list[int], layer_primes: list[list[int]], pad: int) -> list[int]:
    """Table rows of one position of a sequence of compressed ids (None: dead): n-gram size major, heads inside.

    Looking back, everything before the start and everything from a dead token on counts as `pad`.
    """
    products, stopped = [], False
    for back, factor in enumerate(factors):
        stopped = stopped or position - back < 0 or ids[position - back] is None
        products.append((pad if stopped else ids[position - back]) * factor)
    first, rows, mixed = offsets(layer_primes), [], products[0]
    for size, row in enumerate(layer_primes):
        mixed ^= products[size + 1]
        rows += [mixed % prime for prime in row]
    return [first[column] + row for column, row in enumerate(rows)]


def gates(h: Array, keys: Array, q_weight: Array, k_weight: Array, eps: float) -> Array:
    """One gate per copy: sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)) with stream and key normalized per copy."""
    found = []
    for copy, key, qw, kw in zip(h, keys, q_weight, k_weight, strict=True):
        norms = math.sqrt((copy * copy).mean() + eps) * math.sqrt((key * key).mean() + eps)
        dot = float((copy * qw * kw * key).sum()) / norms / math.sqrt(len(copy))
        found.append(sigmoid(np.float64(math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot))))
    return np.array(found)


def add(h: Array, projected: Array, q_weight: Array, k_weight: Array, eps: float, dead: bool = False) -> Array:
    """h_c + gate_c * v, where projected is the keys of the copies and then v; a dead position keeps its stream."""
    copies, dim = h.shape
    parts = projected.reshape(copies + 1, dim)
    gate = np.zeros(copies) if dead else gates(h, parts[:copies], q_weight, k_weight, eps)
    return h + gate[:, None] * parts[copies]


def byte_letters() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def normalized(text: str) -> str:
    """NFKC, NFD, accents removed, lower case, runs of blanks to one space, ends stripped unless it is a single space."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
    text = re.sub("[ \t\r\n]+", " ", text)
    return " " if text == " " else text.strip()


def token_map(tokenizer: Path) -> list[int]:
    """Compressed id of each token id, in order of first appearance of the normalized text of the single token."""
    content = json.loads(Path(tokenizer).read_text(encoding="utf-8"))
    raw = {i: token for token, i in content["model"]["vocab"].items()} | {t["id"]: t["content"] for t in content["added_tokens"]}
    special, letters = {t["id"] for t in content["added_tokens"]}, byte_letters()
    ids, mapped = {}, []
    for i in range(len(raw)):
        text = raw[i] if i in special else bytes(letters[c] for c in raw[i]).decode("utf-8", "replace")
        key = raw[i] if "\ufffd" in text else (normalized(text) or text)
        mapped.append(ids.setdefault(key, len(ids)))
    return mapped
