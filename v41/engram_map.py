# SPDX-License-Identifier: Apache-2.0
"""What the Engram hash needs beside the config: primes, offsets, multipliers, token map (docs/model.md 8)."""

from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from v41.spec.config import Config
from v41.spec.params import EngramMap
from v41.tokenizer import checked_token_map

SEED_STEP = 10007  # the generator of layer l is seeded with 10007 * l


def is_prime(n: int) -> bool:
    """By trial division: n is about 16 million."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def primes(config: Config) -> list[list[list[int]]]:
    """primes[table][n-gram size - 2][head]: each search starts above engram_vocab_size - 1 and takes the next prime not used before."""
    used: set[int] = set()
    tables = []
    for _ in config.engram_layer_ids:
        tables.append([_next_primes(config, used) for _ in range(config.engram_max_ngram_size - 1)])
    return tables


def _next_primes(config: Config, used: set[int]) -> list[int]:
    found, n = [], config.engram_vocab_size - 1
    for _ in range(config.engram_n_heads):
        n += 1
        while n in used or not is_prime(n):
            n += 1
        used.add(n)
        found.append(n)
    return found


def multipliers(config: Config, layer: int) -> np.ndarray:
    """One odd multiplier per look-back, int64, from numpy's PCG64; products with compressed ids stay below 2^63."""
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    drawn = np.random.default_rng(SEED_STEP * layer).integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
    return drawn * 2 + 1


def engram_map(config: Config, token_map: Tensor) -> EngramMap:
    """The map of a config with its token map [vocab].

    Raises ValueError when the primes do not add up to the rows of the tables, or the token map does not fit the config.
    """
    if tuple(token_map.shape) != (config.vocab_size,):
        raise ValueError(f"token_map: shape {tuple(token_map.shape)}, not ({config.vocab_size},)")
    low, high = int(token_map.min()), int(token_map.max())
    if low < 0 or high >= config.engram_compressed_vocab_size:
        raise ValueError(f"token_map: ids {low}..{high} leave 0..{config.engram_compressed_vocab_size - 1} (engram_compressed_vocab_size)")
    tables = primes(config)
    for layer, table, rows in zip(config.engram_layer_ids, tables, config.engram_num_embeddings, strict=True):
        total = sum(map(sum, table))
        if total != rows:
            raise ValueError(f"config: the primes of Engram layer {layer} add up to {total}, engram_num_embeddings says {rows}")
    columns = [[p for size in table for p in size] for table in tables]
    return EngramMap(
        token_map=token_map.to(torch.int32),
        multipliers=torch.from_numpy(np.stack([multipliers(config, layer) for layer in config.engram_layer_ids])),
        primes=torch.tensor(tables, dtype=torch.int64),
        offsets=torch.tensor([[0, *accumulate(c)][:-1] for c in columns], dtype=torch.int64),
    )


def default_token_map(config: Config) -> Tensor:
    """For models without a tokenizer: id modulo engram_compressed_vocab_size, the pad id kept."""
    ids = torch.arange(config.vocab_size, dtype=torch.int32) % config.engram_compressed_vocab_size
    pad = config.engram_pad_token_id
    if pad < config.engram_compressed_vocab_size:
        ids[pad] = pad
    return ids


def map_from_tokenizer(config: Config, path: Path) -> EngramMap:
    """The map of a checkpoint with its own tokenizer.json."""
    found = checked_token_map(path, config.vocab_size, config.engram_compressed_vocab_size)
    return engram_map(config, torch.from_numpy(found))
