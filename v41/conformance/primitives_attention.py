# SPDX-License-Identifier: Apache-2.0
"""Cases of attention, index scores, selection, candidates and pooling."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from v41.conformance.primitives_linear import Arguments, Cases
from v41.golden.pack_numbers import Inputs
from v41.spec.ops.index import mask_rows

WINDOW, CHOSEN, DIM = 40, 70, 32  # list entries of a query, more than one run of 64 together


def attention(i: Inputs, lists: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], sink: tuple[float, ...] = (0.3, 30.0, -30.0), s: int = 5) -> Arguments:
    """Two sequences, heads with an ordinary, a large and a small sink; `lists` edits the two slot lists."""
    listed, chosen = lists(i.ids("listed", -1, 60, 2, s, WINDOW), i.ids("chosen", -1, 90, 2, s, CHOSEN))
    q, window, rows = (i.act(n, *shape) for n, shape in (("q", (2, s, 3, DIM)), ("window", (2, 60, DIM)), ("rows", (2, 90, DIM))))
    return (q, window, listed, rows, chosen, torch.tensor(sink), DIM**-0.5, i.numerics), {}


def as_they_are(listed: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return listed, chosen


def holes(listed: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """No slot at all, one slot, none in the window, none compressed."""
    listed[:, 0], chosen[:, 0] = -1, -1
    listed[:, 1], chosen[:, 1, 1:] = -1, -1
    listed[:, 2], chosen[:, 3] = -1, -1
    return listed, chosen


def unread(i: Inputs) -> Arguments:
    """Rows that no list names hold NaN."""
    (q, window, listed, rows, chosen, *rest), options = attention(i, lambda a, b: (a.clamp_max(49), b.clamp_max(79)))
    window[:, 50:], rows[:, 80:] = torch.nan, torch.nan
    return (q, window, listed, rows, chosen, *rest), options


def no_compressed(i: Inputs) -> Arguments:
    """A layer without compressed rows: an empty list."""
    (q, window, listed, rows, chosen, *rest), options = attention(i, as_they_are)
    return (q, window, listed, rows, chosen[..., :0], *rest), options


def loud(i: Inputs) -> Arguments:
    """Logits from -2000 to 2000: only the maximum keeps the exponentials finite."""
    (q, *rest), options = attention(i, as_they_are)
    return (i.as_act(q.double() * 300), *rest), options


def scores_of(s: int, keys: int) -> Callable[[Inputs], Arguments]:
    def build(i: Inputs) -> Arguments:
        iq, ik, iw = i.act("iq", 2, s, 4, 32), i.act("ik", 2, keys, 32), i.act("iw", 2, s, 4)
        iq[:, 0] = -ik[:, :1]  # the first key is against every head: exactly 0
        return (iq, ik, iw, i.numerics), {}

    return build


def masked(i: Inputs, values: int, rows: int) -> tuple[Tensor, Tensor]:
    """Scores of so many different values, masked, and the visible counts: none, one, some, all."""
    visible = torch.tensor([[0, 1, 9, 20, rows], [8, 16, 17, rows - 1, 2]], dtype=torch.int32)
    scores = i.as_act(i.ids("scores", -values, values, 2, 5, rows).double() / 8)
    return mask_rows(scores, visible), visible


def select(k: int, values: int, rows: int = 37) -> Callable[[Inputs], Arguments]:
    return lambda i: ((*masked(i, values, rows), k, i.numerics), {})


def blocks(count: int, size: int, values: int = 4, rows: int = 37) -> Callable[[Inputs], Arguments]:
    return lambda i: ((*masked(i, values, rows), count, size, i.numerics), {})


def weak_newest(i: Inputs) -> Arguments:
    """The newest visible row has the worst score: its block is kept all the same."""
    rows, visible = 40, torch.tensor([[40, 33, 7]], dtype=torch.int32)
    scores = i.as_act(torch.arange(rows, 0, -1, dtype=torch.float64).expand(1, 3, rows))
    return (mask_rows(scores, visible), visible, 2, 4, i.numerics), {}


def pooled(groups: int, ratio: int) -> Callable[[Inputs], Arguments]:
    def build(i: Inputs) -> Arguments:
        score = i.wide("score", 2, groups, ratio, 16, scale=5.0)
        score[0, :1] = 0
        return (i.wide("kv", 2, groups, ratio, 16), score, i.numerics.act), {}

    return build


def seen(i: Inputs) -> Arguments:
    """Every query sees every row: nothing may be left out."""
    return (i.act("keys", 2, 64, 16), torch.full((2, 3), 64, dtype=torch.int32)), {}


def case(lists: Any, **options: Any) -> Callable[[Inputs], Arguments]:
    return lambda i: attention(i, lists, **options)


ATTENTION: dict[str, Cases] = {
    "sparse_attn": {
        "random": case(as_they_are),
        "no_slots": case(holes),
        "one_row": case(as_they_are, s=1),
        "no_compressed_rows": no_compressed,
        "nan_in_rows_not_listed": unread,
        "large_logits": loud,
        "no_sink": case(as_they_are, sink=(-1e4, -1e4, -1e4)),
    },
    "index_scores": {"rows": scores_of(3, 11), "one_row": scores_of(1, 40), "one_key": scores_of(2, 1)},
    "seen_rows": {"all": seen},
    "select": {"few": select(8, 1000), "ties": select(8, 3), "all_equal": select(8, 1), "one": select(1, 3), "more_than_there_are": select(50, 3)},
    "candidate_blocks": {"ties": blocks(3, 4), "ragged": blocks(4, 8, 1000), "all": blocks(20, 4), "weak_newest": weak_newest},
    "softmax_pool": {"pairs": pooled(3, 2), "fours": pooled(2, 4), "no_group": pooled(0, 2)},
}
