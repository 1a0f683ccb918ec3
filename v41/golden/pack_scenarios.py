# SPDX-License-Identifier: Apache-2.0
"""The scenarios of a pack, as data: calls from a stated state that reach what prefills alone do not (docs/golden-pack.md 3)."""

from dataclasses import dataclass

from v41.recipe_words import key, words
from v41.spec.config import Config
from v41.spec.numerics import Numerics

FIRST_TOKEN = 3  # the ids below are beginning, end and padding


@dataclass(frozen=True)
class Step:
    """`rows` rows, of which valid[b] are real in sequence b; their tokens continue the stream. taps: whether every tap is stored."""

    valid: tuple[int, ...]
    rows: int
    taps: bool = True
    stream: int = 0


@dataclass(frozen=True)
class Draft:
    """The draft rings filled from the hidden rows of the step before, and a block drafted after its best token."""

    taps: bool = True


@dataclass(frozen=True)
class Verify:
    """The pending token and a block of drafts of which the first `accepted` are the model's own choice and the next is not, in one step."""

    accepted: int


@dataclass(frozen=True)
class Rewind:
    """The newest `back` positions are forgotten."""

    back: int


@dataclass(frozen=True)
class Take:
    """The sequences by index: permuted, dropped, repeated."""

    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Restore:
    """The whole state is given; the calls after it may start here."""


@dataclass(frozen=True)
class Ranks:
    """One row on four ranks: what each brings to every collective. The state stays as it was."""

    stream: int = 5


Call = Step | Draft | Verify | Rewind | Take | Restore | Ranks


@dataclass(frozen=True)
class Scenario:
    """Calls from the end of another scenario, or from nothing. free: not in numerics that follow the released calls only."""

    name: str
    start: str | None
    calls: tuple[Call, ...]
    free: bool = False
    batch: int = 1


def long_length(config: Config) -> int:
    """An odd number of positions that wraps the ring twice and is more than any query may select or any candidate block may hold."""
    ratio = max((p.ratio for p in config.layer_plan), default=0)
    least = max(2 * config.sliding_window, ratio * config.index_topk, config.candidate_topk_blocks * config.candidate_block_size)
    return (least + 8) | 1


def scenarios(config: Config, numerics: Numerics) -> tuple[Scenario, ...]:
    """Those that the model and the numerics have. One row: a decode step; each alternates between finishing a group of two and not."""
    one, bare = Step((1,), 1), Step((1,), 1, taps=False)
    window, drafts = config.sliding_window, config.num_nextn_predict_layers > 0
    fill: tuple[Call, ...] = (Draft(taps=False),) if drafts else ()
    long = long_length(config)
    verified: tuple[Call, ...] = tuple(c for n in (2, config.dspark_block_size, 0) for c in (Verify(n), *fill)) if drafts else ()
    found = (
        Scenario("prefill", None, (Step((8,), 8),)),
        Scenario("window", None, (Step((window - 1,), window - 1, taps=False), one, one)),
        Scenario("long", None, (Step((long,), long, taps=False), *fill)),
        Scenario("decode", "long", (one, *((Draft(),) if drafts else ()), one, one)),
        Scenario("chunks", "prefill", (bare, Step((3,), 3), Step((2,), 2, taps=False)), free=True),
        Scenario("once", "prefill", (Step((6,), 6, taps=False),), free=True),
        Scenario("rewind", "long", (Step((4,), 4, taps=False, stream=1), Rewind(3), Step((1,), 1, stream=2)), free=True),
        Scenario("padded", None, (Step((5, 9, 2), 9, taps=False), Step((2, 0, 1), 2, taps=False)), free=True, batch=3),
        Scenario("permute", "padded", (Take((2, 0, 0)), Step((2, 1, 2), 2, stream=3)), free=True, batch=3),
        Scenario("restore", "long", (Restore(), Step((1,), 1, stream=4))),
        Scenario("drafts", "long", (bare, *fill, *verified), free=True),
        Scenario("ranks", "long", (Ranks(),), free=True),
    )
    return tuple(s for s in found if (not s.free or not numerics.needs_start) and (s.name != "drafts" or drafts))


def token_at(config: Config, stream: int, sequence: int, position: int) -> int:
    """Token of a stream: an ordinary id, by the words of the weight recipe."""
    most = min(i for i in (config.vocab_size, config.dspark_noise_token_id, config.image_token_id) if i is not None and i > FIRST_TOKEN)
    word = int(words(key(stream * 64 + sequence, "golden pack tokens"), position, 1))
    return FIRST_TOKEN + word % (most - FIRST_TOKEN)
