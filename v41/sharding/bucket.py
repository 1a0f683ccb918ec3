# SPDX-License-Identifier: Apache-2.0
"""The static shape of a step: what it is for, and how many rows it has."""

import re
from dataclasses import dataclass

from v41.spec.config import Config


@dataclass(frozen=True)
class Bucket:
    """`decode6`: verification of a token and 5 drafts, choice, new drafts; `decode1`: a token, no drafts; `prefill4096`: as many prompt rows,
    choice after the last one. `decode6x4`: the same for 4 sequences."""

    kind: str
    rows: int
    batch: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}{self.rows}" + (f"x{self.batch}" if self.batch > 1 else "")

    @property
    def drafts(self) -> bool:
        """Whether a block of drafts is made."""
        return self.kind == "decode" and self.rows > 1

    @property
    def fills(self) -> bool:
        """Whether the rows go into the draft rings."""
        return self.drafts or self.kind == "prefill"

    @property
    def tokens(self) -> int:
        """Rows of all sequences."""
        return self.rows * self.batch

    @property
    def logits(self) -> int:
        """Rows that need logits."""
        return self.tokens if self.kind == "decode" else self.batch


def bucket_named(name: str) -> Bucket:
    """`decode6`, `prefill4096`, `decode6x4`: ValueError for any other form."""
    found = re.fullmatch(r"(decode|prefill)([1-9]\d*)(?:x([1-9]\d*))?", name)
    if not found:
        raise ValueError(f"bucket {name!r}: decode or prefill and a number of rows, `decode6` or `prefill4096`, and x4 for 4 sequences")
    return Bucket(found[1], int(found[2]), int(found[3] or 1))


def check_fits(config: Config, bucket: Bucket, capacity: int) -> None:
    """ValueError where a bucket or a capacity is not possible with this model."""
    if not bucket.rows <= capacity <= config.max_position_embeddings:
        raise ValueError(f"capacity {capacity}: between the {bucket.rows} rows of {bucket.name} and {config.max_position_embeddings}")


def check_drafts(config: Config, bucket: Bucket, draft: bool = True) -> None:
    """ValueError where a decode bucket has rows for more drafts than the model makes; draft: whether its parameters hold the draft stages."""
    most = config.dspark_block_size if draft and config.num_nextn_predict_layers else 0
    if bucket.kind == "decode" and bucket.rows - 1 > most:
        raise ValueError(f"bucket {bucket.name}: {bucket.rows - 1} drafts a step, the model makes {most}")
