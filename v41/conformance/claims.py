# SPDX-License-Identifier: Apache-2.0
"""What a backend says of itself: what it lacks, with reasons, and how equal it means to be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

# Capabilities that a case may need. Families take a name behind the colon: `regime:faithful`, `primitive:gate`.
FLAGS = ("step", "draft", "batch", "chunks", "rewind", "ranks", "taps", "poison", "round_trips")
FAMILIES = ("regime", "primitive")


@dataclass(frozen=True)
class Claims:
    """lacks: capability (or a pattern of them) to the reason, which every skip prints. bits: regimes that are claimed bit for bit."""

    lacks: Mapping[str, str] = field(default_factory=dict)
    bits: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, reason in self.lacks.items():
            if name.partition(":")[0] not in FLAGS + FAMILIES:
                raise ValueError(f"lacks: {name!r} is no capability; there are {', '.join(FLAGS)}, {', '.join(f + ':NAME' for f in FAMILIES)}")
            if not reason.strip():
                raise ValueError(f"lacks: {name!r} has no reason")

    def why_not(self, needs: tuple[str, ...]) -> str | None:
        """The reason why a case with these needs is skipped, None where it is run."""
        for need in needs:
            for pattern, reason in self.lacks.items():
                if fnmatchcase(need, pattern):
                    return f"{need}: {reason}"
        return None
