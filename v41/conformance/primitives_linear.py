# SPDX-License-Identifier: Apache-2.0
"""Cases of products, norms, rotations, round trips and lookups."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from v41.golden.pack_numbers import Inputs
from v41.spec.config import Yarn
from v41.spec.ops.rope import frequencies

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Cases = dict[str, Callable[[Inputs], Arguments]]
YARN = Yarn(16.0, 32.0, 1.0, 65536)


def rows(n: int, width: int, scale: float = 1.0) -> Callable[[Inputs], Tensor]:
    """Unit rows; from the fourth on a row of zeros, a tiny and a large one."""

    def make(i: Inputs) -> Tensor:
        x = i.bell("x", n, 1, width) * scale
        if n > 3:
            x[1], x[2], x[3] = 0, x[2] * 1e-3, x[3] * 100
        return i.as_act(x)

    return make


def quantized(n: int, out: int, width: int) -> Callable[[Inputs], Arguments]:
    return lambda i: ((rows(n, width)(i), i.fp8("w", out, width), i.numerics), {})


def extreme(i: Inputs) -> Arguments:
    """Block maxima exactly at and one step above a scale step, below the floor, and beyond what one block may hold beside it."""
    x = i.bell("x", 6, 1, 64)
    x[0, 0, 0], x[1, 0, 0], x[2] = 448.0, 450.0, x[2] * 1e-6
    x[3, 0, 32:], x[4, 0, ::2], x[5, 0, 5] = x[3, 0, 32:] * 1e4, 0.0, 30000.0
    return (i.as_act(x), i.fp8("w", 70, 64), i.numerics), {}


def plain(n: int) -> Callable[[Inputs], Arguments]:
    return lambda i: ((rows(n, 96)(i), i.bf16("w", 37, 96, scale=0.1), i.numerics), {})


def wide(i: Inputs) -> Arguments:
    return (rows(5, 96)(i), i.f32("w", 24, 96, scale=0.1), i.numerics), {}


def grouped(n: int) -> Callable[[Inputs], Arguments]:
    return lambda i: ((i.act("x", 2, n, 8, 16), i.fp8("w", 4 * 8, 32), 4, i.numerics), {})


def norm(i: Inputs) -> Arguments:
    x = i.bell("x", 6, 1, 64)
    x[1], x[2], x[3] = x[1] * 1e-5, 0, x[3] * 1e5
    return (i.as_act(x), i.bf16("w", 64), 1e-20), {}


def turned(base: float, yarn: Yarn | None) -> Callable[[Inputs], Arguments]:
    """Positions from 0 to a million; the width has dims that are not turned."""

    def build(i: Inputs) -> Arguments:
        at = torch.tensor([[0, 1, 127, 128], [65535, 65536, 1000000, 5]], dtype=torch.int32)
        return (i.act("x", 2, 4, 3, 40), at, frequencies(32, base, yarn)), {}

    return build


def one_hot(i: Inputs) -> Arguments:
    """One dim of each row is 1: what goes where."""
    x = torch.zeros(1, 16, 16, dtype=torch.float64)
    x[0, torch.arange(16), torch.arange(16)] = 1
    return (i.as_act(x), torch.full((1, 16), 3, dtype=torch.int32), frequencies(16, 10000.0, None)), {}


def trip(scale: float) -> Callable[[Inputs], Arguments]:
    return lambda i: ((i.act("x", 5, 64, scale=scale), i.numerics), {})


def trip_edges(i: Inputs) -> Arguments:
    """Zeros of both signs, exact maxima, every tie of the small formats, rows in which one element outweighs the rest."""
    x = i.bell("x", 8, 64)
    x[0], x[1], x[2, ::2] = 0.0, -0.0, 448.0
    x[3], x[4, 5], x[5] = torch.linspace(-6, 6, 64, dtype=torch.float64), 1e6, x[5] * 1e-9
    x[6, :16], x[7] = 6.0, 240.0
    return (i.as_act(x), i.numerics), {}


def looked_up(i: Inputs) -> Arguments:
    ids = i.ids("ids", 0, 11, 2, 3)
    ids[0, 0], ids[1, 2] = -1, 11  # another rank's rows
    return (ids, i.bf16("table", 11, 32), i.numerics.act), {}


def written(poisoned: bool) -> Callable[[Inputs], Arguments]:
    """Row 5 is the sink; rows that go there are zeros. Poisoned: the buffer's other rows hold NaN, which stay where they are."""

    def build(i: Inputs) -> Arguments:
        at = torch.tensor([[4, 0, 5], [5, 5, 2]], dtype=torch.int32)
        x = torch.where((at < 5)[..., None], i.act("x", 2, 3, 16), 0)
        return (i.act("buffer", 2, 6, 16), at, x), {}

    return build


def recut(i: Inputs) -> Arguments:
    return (i.wide("x", 2, 3, 12), "head.vocab", "", 12), {}


def elected(i: Inputs) -> Arguments:
    return (i.wide("score", 3), i.ids("token", 0, 50, 3), i.act("row", 3, 8), "head.vocab"), {}


LINEAR: dict[str, Cases] = {
    "linear": {"rows": quantized(6, 70, 96), "one_row": quantized(1, 64, 64), "extremes": extreme, "long_sum": quantized(4, 32, 1024)},
    "partial_linear": {"rows": quantized(6, 70, 96), "one_row": quantized(1, 32, 64), "extremes": extreme},
    "plain_linear": {"rows": plain(6), "one_row": plain(1)},
    "wide_linear": {"rows": plain(6), "one_row": plain(1), "float32_weight": wide},
    "grouped_linear": {"rows": grouped(3), "one_row": grouped(1)},
    "rms_norm": {"tiny_zero_and_huge_rows": norm},
    "rope": {"plain": turned(10000.0, None), "yarn": turned(160000.0, YARN), "one_hot": one_hot},
    "rope_inverse": {"plain": turned(10000.0, None), "yarn": turned(160000.0, YARN), "one_hot": one_hot},
    "act_round": {"unit": trip(1.0), "tiny": trip(1e-6), "huge": trip(1e4), "edges": trip_edges},
    "index_round": {"unit": trip(1.0), "tiny": trip(1e-6), "huge": trip(1e4), "edges": trip_edges},
    "kv_round": {"unit": trip(1.0), "tiny": trip(1e-3), "huge": trip(1e3), "edges": trip_edges},
    "embedding": {"rows_of_others": looked_up},
    "write_rows": {"sink": written(False)},
    "tap": {"identity": lambda i: (("name", i.act("x", 2, 3)), {})},
    "all_reduce": {"identity": lambda i: ((i.act("x", 2, 3), "heads"), {})},
    "all_gather": {"identity": lambda i: ((i.act("x", 2, 3), "vocab", -1), {})},
    "sum_terms": {"three": lambda i: (((i.wide("a", 2, 8), i.wide("b", 2, 8), i.wide("c", 2, 8)), ("a", "b c", "d")), {})},
    "lookups": {"two": lambda i: (((i.act("a", 2, 3, 8), i.act("b", 2, 8)), ("vocab", "vocab")), {})},
    "first": {"zero": lambda i: (("experts", 8, torch.device("cpu")), {})},
    "recut": {"identity": recut},
    "choice_cut": {"whole": lambda i: (("head.vocab",), {})},
    "elect": {"alone": elected},
}
